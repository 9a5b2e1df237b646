"""The shared values: topology, mesh, layout, mask, problem, partition, schedule, errors."""
