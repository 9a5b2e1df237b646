"""Check links and kernel speeds: the steps of `weft calibrate`, one by one."""

from __future__ import annotations

from collections.abc import Iterator

from weft.doctor.suite import Check, CheckContext
from weft.run.measure.calibrate import SYMMETRIC, Calibration

TOPOLOGY = "topology"


def checks(ctx: CheckContext) -> Iterator[Check]:
    """Yield one check for each step, and the TOML of the Topology of all of them.

    A process that replaces one that died repeats the steps that succeeded, whose results the topology needs.
    The last step that was begun is the one that the process died in.
    """
    calibration = Calibration(
        ctx.device, 0, ctx.dtype, "auto", ctx.machines, quick=ctx.is_rehearsal or ctx.ranks > 8
    )
    steps = calibration.steps()
    begun = [name for name in steps if name in ctx.finished]
    for name, step in steps.items():
        if name == SYMMETRIC and ctx.begins(TOPOLOGY):  # it may hang; this keeps the results so far
            yield _topology(calibration)
        if name in begun[:-1]:
            step()
        elif ctx.begins(name):
            numbers = step()
            if name == "dense" and not ctx.is_rehearsal:
                numbers["torch_tflops"] = calibration.speeds.torch_flops() / 1e12
            if numbers:
                yield Check(name=name, status="measured", numbers=numbers)
            else:
                yield Check(name=name, status="skipped", note="not all ranks have it")
    if ctx.begins(TOPOLOGY):
        yield _topology(calibration)


def _topology(calibration: Calibration) -> Check:
    return Check(name=TOPOLOGY, status="measured", data=calibration.topology().to_toml())
