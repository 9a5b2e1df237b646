"""The words everyone uses: topology, mesh, layout, mask, problem, partition, schedule, errors."""
