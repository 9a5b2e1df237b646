"""Links and kernel speeds, as the planner reads them: the steps of `weft calibrate`, one by one."""

from __future__ import annotations

from collections.abc import Iterator

from weft.doctor.part import Check, Site
from weft.run.calibrate import SYMMETRIC, Calibration

TOPOLOGY = "topology"


def checks(site: Site) -> Iterator[Check]:
    """Yield one check for each step, and what all of them make: the TOML of a Topology.

    A process that comes after one that died takes the steps again that went well then, or their results would
    be missing from the topology. The last step that was begun is the one that it died in.
    """
    calibration = Calibration(
        site.device, 0, site.dtype, "auto", site.machines, quick=site.is_rehearsal or site.ranks > 8
    )
    steps = calibration.steps()
    begun = [name for name in steps if name in site.finished]
    for name, step in steps.items():
        if name == SYMMETRIC and site.begins(TOPOLOGY):  # it may hang, and what is known by then is kept
            yield _topology(calibration)
        if name in begun[:-1]:
            step()
        elif site.begins(name):
            numbers = step()
            if name == "dense" and not site.is_rehearsal:
                numbers["torch_tflops"] = calibration.speeds.torch_flops() / 1e12
            if numbers:
                yield Check(name=name, status="measured", numbers=numbers)
            else:
                yield Check(name=name, status="skipped", note="not all ranks have it")
    if site.begins(TOPOLOGY):
        yield _topology(calibration)


def _topology(calibration: Calibration) -> Check:
    return Check(name=TOPOLOGY, status="measured", data=calibration.topology().to_toml())
