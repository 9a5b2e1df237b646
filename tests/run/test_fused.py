"""Fused copies in Triton's interpreter, bit for bit those of torch: every Copy and Cast of random programs.

The interpreter must be chosen before triton is imported, so one process runs every check of this file and
reports what failed; each check is a test here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.dry import Launches, Transport, fused_launches
from tests.cases import random_case
from tests.run.dense import Truth
from tests.run.twins import CPU, Twin
from tests.threads import ThreadComm, run_threads
from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem, Switch
from weft.core.schedule import Schedule
from weft.plan.choose import build
from weft.program.lower import lower
from weft.program.slots import Slot
from weft.program.steps import Copy, Target
from weft.run import bind, fused
from weft.run.arena import Arena
from weft.run.copies import ATTENTION, Copier, SegmentMoves
from weft.run.execute import Executor
from weft.run.fused import FusedCopier, PreparedLaunch
from weft.run.kernels import choose
from weft.run.switch_runner import SwitchRunner
from weft.schedule.reverse import reverse
from weft.schedule.switch import switch

ROOT = Path(__file__).parents[2]
STRATEGIES = [("ulysses", 3, 72), ("usp:2x2", 4, 64), ("ring+balanced", 3, 128), ("ulysses+balanced", 3, 24)]
SAVES = (frozenset[str](), frozenset({"q", "kv"}))


def check_both(schedule: Schedule, rng: np.random.Generator, hows: list[int]) -> int:
    """Check a rank's programs of both directions, over a random kind of transport."""
    count, ranks = 0, schedule.problem.ranks
    rank = int(rng.integers(ranks))
    near = frozenset(range(ranks)) - {rank} if rng.integers(4) == 0 else frozenset[int]()
    collective = not near and bool(rng.integers(2))
    for direction, save in ((schedule, SAVES[int(rng.integers(2))]), (reverse(schedule), SAVES[0])):
        program = lower(direction, rank, Target(near=near, collective=collective, save=save))
        count += Twin(program, direction, rng, hows).check()
    return count


def random_programs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = ("bfloat16", "float16", "float32", "float64")[seed % 4]
    count = 0
    while count < 8:
        case = random_case(rng, 60, max_ranks=6, dtype=dtype)
        count += check_both(case.schedule, rng, [int(rng.integers(4)) for _ in range(3)])


def strategy(name: str, ranks: int, head_dim: int) -> None:
    """Real head dims, 16-bit, grouped keys; blocks that a balanced plan scatters."""
    rng = np.random.default_rng(head_dim)
    tokens = Layout.even(8 * 16 + 5, ranks)
    problem = Problem(batch=2, heads=6, kv_heads=3, head_dim=head_dim, q=tokens, kv=tokens, dtype="bfloat16")
    tiles = rng.random((6, 9, 9)) < 0.4
    schedule = build(
        name, problem, BlockMask.from_tiles(tiles, q_len=tokens.size, kv_len=tokens.size, block_q=16)
    )
    assert check_both(schedule, rng, [1, 0, 2]) > 0


def switch_of(shape: tuple[int, ...], dims: tuple[int, int | None], ranks: int, dtype: str) -> Switch:
    before = Layout.even(shape[dims[0]], ranks, dim="a")
    after = Layout.replicated(1, ranks, dim="whole")
    if dims[1] is not None:
        after = Layout.even(shape[dims[1]], ranks, dim="b")
    return Switch(before=before, after=after, shape=shape, dims=dims, dtype=dtype)


def switches() -> None:
    rng = np.random.default_rng(0)
    for dims in ((1, 2), (2, 1), (0, 3), (3, 0), (2, None), (1, 3)):
        shape = tuple(int(n) for n in rng.integers(2, 9, 4))
        for dtype in ("bfloat16", "float32"):
            check_both(switch(switch_of(shape, dims, 3, dtype)), rng, [0])


def rows_that_add_to_the_same_place_add_in_order() -> None:
    rng = np.random.default_rng(5)
    tokens = Layout.even(24, 3, prefix=6)  # every rank has the prefix, so its gradients meet
    problem = Problem(batch=1, heads=3, kv_heads=3, head_dim=8, q=tokens, kv=tokens, dtype="bfloat16")
    schedule = reverse(build("ulysses", problem, BlockMask.dense(3, 24)))
    adds = 0
    for rank in range(3):
        program = lower(schedule, rank)
        adds += sum(isinstance(step, Copy) and step.add and len(step.segments) > 1 for step in program.steps)
        Twin(program, schedule, rng, [0]).check()
    assert adds > 0, "no sum of several parts was tried"


def whole_executor(name: str, ranks: int) -> None:
    """Forward and backward of all ranks, bit for bit those with torch's copies."""
    tokens = Layout.even(50, ranks, prefix=3)
    problem = Problem(batch=2, heads=4, kv_heads=2, head_dim=16, q=tokens, kv=tokens, dtype="bfloat16")
    truth = Truth.of(problem, BlockMask.dense(4, 50))
    schedule = build(name, problem, truth.mask)
    lock, original = Lock(), fused.launch

    def launch(*given: Any) -> None:
        with lock:  # the interpreter is for one thread
            launches.append(name)
            original(*given)

    def job(comm: ThreadComm) -> list[Tensor]:
        executor = Executor(schedule, comm, choose("exact"))
        inputs, found = truth.inputs(comm.rank), list[Tensor]()
        for _ in range(2):
            out, saved = executor.forward(*inputs, truth.scale, keep=True)
            found += [out, *executor.backward(truth.slope(comm.rank), inputs, out, saved, truth.scale)]
        return found

    launches: list[str] = []
    expected = run_threads(ranks, job)
    assert not launches
    with patch.object(bind, "copier_of", FusedCopier), patch.object(fused, "launch", launch):
        found = run_threads(ranks, job)
    assert launches
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def the_sample_is_right_on_this_device() -> None:
    assert fused._is_right(CPU)


def checks(seeds: int = 4) -> dict[str, Callable[[], None]]:
    plain = [switches, rows_that_add_to_the_same_place_add_in_order, the_sample_is_right_on_this_device]
    found: dict[str, Callable[[], None]] = {check.__name__: check for check in plain}
    for name, ranks, head_dim in STRATEGIES:
        found[f"{name} on {ranks}, head dim {head_dim}"] = lambda a=name, b=ranks, c=head_dim: strategy(
            a, b, c
        )
    for name, ranks in (("ulysses", 3), ("usp:2x2", 4)):
        found[f"whole executor, {name}"] = lambda a=name, b=ranks: whole_executor(a, b)
    for seed in range(seeds):
        found[f"random programs {seed}"] = lambda seed=seed: random_programs(seed)
    return found


def _round_to_bfloat16() -> None:
    """Make the interpreter round where it truncates: GPUs round."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source.name, target.name) == ("fp32", "bf16"):
            return torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy()
        return convert(x, source, target, mode)

    interpreter._convert_float = rounded


def main() -> None:
    """Every check, in the interpreter: the traceback of each that failed, as JSON."""
    _round_to_bfloat16()
    failed: dict[str, str] = {}
    for name, check in checks(int(sys.argv[1])).items():
        try:
            check()
        except Exception:
            failed[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(failed))


def failures(seeds: int, timeout: float) -> dict[str, str]:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.run.test_fused", str(seeds)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def failed() -> dict[str, str]:
    return failures(4, 240)


@pytest.mark.parametrize("name", checks())
def test_in_the_interpreter(failed: dict[str, str], name: str) -> None:
    assert name not in failed, failed[name]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("dims", "launches"), [((1, 2), 3), ((2, 1), 3), ((0, 1), 1), ((1, None), 2)])
def test_a_switch_packs_once_and_unpacks_once(dims: tuple[int, int | None], launches: int) -> None:
    shape, ranks = (2, 17, 45, 16), 8
    schedule = switch(switch_of(shape, dims, ranks, "bfloat16"))
    arena, transport = Arena(), Transport(1, ranks, collective=True)
    redistribution = SwitchRunner(schedule, transport, arena, name="a switch")  # type: ignore[arg-type]
    own = [schedule.problem.before.rows(1) if at == dims[0] else n for at, n in enumerate(shape)]  # type: ignore[union-attr]
    with fused_launches() as launched:
        x = torch.empty(own, dtype=torch.bfloat16, device="meta")
        redistribution.run(x)
        launched.clear()
        with Launches() as others:
            redistribution.run(x)
    assert len(launched) == launches and not others.names


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_a_table_is_made_once_for_strides_and_not_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[PreparedLaunch] = []
    monkeypatch.setattr(fused, "launch", lambda table, _: tables.append(table))
    source, target = (Slot(name, "input", 0, shape=(1, 1, 2, 3, 24)) for name in ("source", "target"))
    copy = FusedCopier(ATTENTION, CPU, {}, SegmentMoves()).cast(source, target)
    x, y = torch.zeros(1, 2, 3, 24), torch.zeros(1, 2, 3, 24)
    copy({source: (x,), target: (y,)})
    monkeypatch.setattr(fused, "is_capturing", lambda _: True)
    copy({source: (y,), target: (x,)})
    assert tables[0] is tables[1]
    with pytest.raises(InputError, match="captured"):
        copy({source: (x.mT.contiguous().mT,), target: (y,)})
    monkeypatch.setattr(fused, "is_capturing", lambda _: False)
    copy({source: (x.mT.contiguous().mT,), target: (y,)})
    assert tables[2] is not tables[0]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_a_kernel_that_does_not_run_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fused._is_right.cache_clear()
    monkeypatch.setattr(fused, "launch", lambda *_: None)  # it computes nothing
    assert not fused._is_right(CPU) and "result is wrong" in caplog.text

    def fail(*_: object) -> None:
        raise RuntimeError("no C compiler")

    fused._is_right.cache_clear()
    monkeypatch.setattr(fused, "launch", fail)
    assert not fused._is_right(CPU) and "no C compiler" in caplog.text
    fused._is_right.cache_clear()
    assert isinstance(bind.copier_of(ATTENTION, CPU, {}, SegmentMoves()), Copier)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_many_random_programs_in_the_interpreter() -> None:
    assert not failures(80, 1700)


if __name__ == "__main__":
    main()
