"""The kernel parts: every combination on the CPU, stand-ins for GPU backends, and kernels that are wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.doctor.contexts import OnDevice, context_of, one_thread
from tests.run.cuda_contracts import CudaOps
from tests.run.hot_path import fake_cuda
from tests.run.package_contracts import CudnnBlockSparse, FlashAttention4
from weft.doctor import check_kernels, kernel_speed
from weft.doctor.check_kernels import KINDS, Combination, matrix, pairs_first
from weft.doctor.suite import Check
from weft.doctor.suites import BACKEND_SECONDS
from weft.run.kernels import AttentionKernel, Sums
from weft.run.kernels.choice import GpuPlatform
from weft.run.kernels.cudnn_sparse import CudnnSparse
from weft.run.kernels.exact import Exact
from weft.run.kernels.fa4 import Fa4
from weft.run.kernels.rules import HALF, KernelSpec
from weft.run.kernels.sdpa import Cudnn, Flash, GatheredFlash
from weft.run.kernels.tiles import Tiles

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

TOKENS = 1024
"""Of the attention that is timed here."""
STAND_INS: dict[str, Callable[[str], AttentionKernel]] = {
    "flash": lambda arch: Flash(CudaOps(arch)),
    "cudnn": lambda arch: Cudnn(CudaOps(arch)),
    "gather": lambda arch: GatheredFlash(CudaOps(arch)),
    "exact": lambda arch: Exact(CudaOps(arch)),
    "fa4": lambda arch: Fa4(FlashAttention4(arch), arch),
    "cudnn_sparse": lambda arch: CudnnSparse(CudnnBlockSparse(arch), arch),
}


def tried(kernel: AttentionKernel, arch: str = "sm_90", **fields: Any) -> list[Check]:
    return list(
        matrix(kernel.name, kernel, GpuPlatform(arch, frozenset({kernel.name})), context_of(**fields))
    )


def judged(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks if check.status in ("ok", "wrong")}


def test_exact_holds_on_the_cpu_and_every_rank_has_its_share() -> None:
    shares = [
        judged(list(check_kernels.checks("exact", context_of(rank=rank, ranks=3)))) for rank in range(3)
    ]
    assert {check.status for share in shares for check in share.values()} == {"ok"}
    names = [name for share in shares for name in share]
    assert len(names) == len(set(names)) and all(shares)
    words = [name.split(" · ") for name in names]
    assert {word[2] for word in words} == {kind for kind in KINDS if "grouped" not in kind}
    assert {word[0] for word in words} == {"bfloat16", "float16", "float32"}


def test_what_is_made_wrong_is_wrong() -> None:
    checks = judged(tried(Exact(), is_made_wrong=True, ranks=4))
    assert {check.status for check in checks.values()} == {"wrong"}


@pytest.mark.parametrize("backend", [name for name in BACKEND_SECONDS if name != "exact"])
def test_backends_of_gpus_say_why_they_are_skipped_on_cpus(backend: str) -> None:
    (check,) = check_kernels.checks(backend, context_of())
    assert (check.status, check.note) == ("skipped", "it computes on a GPU, not on cpu.")


@pytest.mark.parametrize(
    ("backend", "arch", "shares"),
    [
        ("flash", "sm_90", 8),
        ("cudnn", "sm_90", 8),
        ("gather", "sm_80", 8),
        ("exact", "sm_90", 8),
        ("fa4", "sm_90", 8),
        ("fa4", "sm_100", 8),
        ("cudnn_sparse", "sm_90", 2),
        ("cudnn_sparse", "sm_100", 2),
    ],
)
def test_contracts_of_gpu_backends_hold(
    backend: str, arch: str, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of the pairs on stand-ins that check what CUDA checks and round to 16 bits."""
    timed: list[KernelSpec] = []
    monkeypatch.setattr(check_kernels, "speeds", lambda _, work, __: timed.append(work) or {"tflops": 1.0})
    plain = check_kernels.pairs_first
    monkeypatch.setattr(check_kernels, "pairs_first", lambda every, **_: plain(every, is_short=True))
    found = judged(tried(STAND_INS[backend](arch), arch, kind=OnDevice, rank=shares // 2, ranks=shares))
    assert not {name: check for name, check in found.items() if check.status == "wrong"}
    # Rounding leaves room: a kernel with sums in another order must not be called wrong.
    assert max(check.numbers["error"] / check.numbers["allowed"] for check in found.values()) < 0.7
    assert len([name for name, check in found.items() if "tflops" in check.numbers]) == len(timed)


@pytest.mark.soak
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("backend", STAND_INS)
def test_contracts_of_gpu_backends_hold_for_all_combinations(
    backend: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_kernels, "speeds", lambda *_: {})
    checks = tried(STAND_INS[backend](arch), arch, kind=OnDevice, deadline=time.monotonic() + 600)
    assert not [check for check in checks if check.status == "wrong"]


class Mutant(Exact):
    """Exact with one mistake."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake

    def attend_alone(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Sums:
        if self.mistake == "scale":
            scale *= 1.05
        if self.mistake == "drops the ragged end" and k.shape[2] % 64:
            v = v.clone()
            v[:, :, -(k.shape[2] % 64) :] = 0
        out, lse = super().attend_alone(q, k, v, tiles, scale)
        if self.mistake == "lse":
            lse = lse + 0.05
        if self.mistake == "empty rows":
            lse = lse.nan_to_num(neginf=-1e30)
        return out, lse

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = super().attend_backward(grad, q, k, v, done, tiles, scale)
        return dq, dk * 1.05 if self.mistake == "dk" else dk, dv


@pytest.mark.parametrize(
    ("mistake", "kinds"),
    [
        ("scale", None),
        ("lse", None),
        ("dk", None),
        ("drops the ragged end", {"ragged", "ragged sparse"}),
        ("empty rows", {"empty rows"}),
    ],
)
def test_mistakes_of_kernels_are_found_and_named(mistake: str, kinds: set[str] | None) -> None:
    found = judged(tried(Mutant(mistake), rank=1, ranks=2))
    wrong = [name.split(" · ") for name, check in found.items() if check.status == "wrong"]
    direction = "backward" if mistake == "dk" else "forward"
    expected = [name.split(" · ") for name in found if name.endswith(direction)]
    assert wrong == [words for words in expected if kinds is None or words[2] in kinds] and wrong
    note = {"dk": "its dk is wrong.", "lse": "its lse is wrong.", "empty rows": "its lse is wrong."}
    assert mistake not in note or all(
        check.note == note[mistake] for check in found.values() if check.status == "wrong"
    )


def test_every_pair_of_choices_comes_early() -> None:
    every = [Combination(*each) for each in product(KINDS, HALF, check_kernels.HEAD_DIMS, (False, True))]
    order = pairs_first(every)
    assert sorted(map(str, order)) == sorted(map(str, every))
    assert all(each.is_timed for each in order[:8]) and not any(each.is_timed for each in order[8:])
    fields = [(each.kind, each.dtype, each.head_dim, each.is_backward) for each in order[:95]]
    seen = {pair for each in fields for pair in combinations(enumerate(each), 2)}
    assert seen == {
        pair for each in every for pair in combinations(enumerate(vars(each).values()), 2)
    }  # 324 combinations in all


def test_what_is_not_served_is_said_once_for_each_reason() -> None:
    checks = [check for check in tried(STAND_INS["cudnn"]("sm_90"), kind=OnDevice, deadline=0.0)]
    assert {check.status for check in checks} == {"skipped"}
    notes = [check.note for check in checks]
    assert len(set(notes)) == len(notes) < 8 and "it computes dense tiles." in notes
    assert "its head dims end at 128, not 256." in notes
    assert checks[-1].name == "not reached, rank 0" and " combinations of this rank were not " in notes[-1]


def test_what_an_attempt_before_has_done_is_not_done_again() -> None:
    announced: list[str] = []
    names = list(judged(tried(Exact(), ranks=6)))
    again = tried(Exact(), ranks=6, finished=frozenset(names[:-1]), announce=announced.append)
    assert announced == names[-1:] == list(judged(again))


class Raising(Exact):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def attend_alone(self, *_: Any) -> Any:
        raise self.error


def test_what_a_package_raises_is_wrong_and_what_ends_the_context_is_raised() -> None:
    checks = judged(tried(Raising(ValueError("no tile\nfits")), ranks=6))
    assert {check.note for check in checks.values() if check.status == "wrong"} == {
        "it raised ValueError: no tile"
    }
    with pytest.raises(torch.AcceleratorError):
        tried(Raising(torch.AcceleratorError("CUDA error: an illegal memory access")))


def test_a_package_that_is_missing_names_the_extra() -> None:
    with fake_cuda():
        (check,) = check_kernels.checks("fa4", context_of(device=torch.device("cuda", 0)))
    assert check.note == "it needs flash-attn-4, which is not installed (the extra 'fa4' of weft)."


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every call of a kernel takes 1 ms, every call of torch 2 ms."""
    calls: list[Any] = []

    def seconds(call: Callable[[], object], device: torch.device, *_: Any) -> list[float]:
        calls.append((call(), device.type))
        return [1e-3 * len(calls)]

    monkeypatch.setattr(kernel_speed, "device_seconds", seconds)
    monkeypatch.setattr(
        torch, "randn", lambda shape, *, device, dtype, **_: torch.empty(shape, device=device, dtype=dtype)
    )
    monkeypatch.setattr(torch, "Generator", lambda *_: torch.default_generator)
    monkeypatch.setattr(kernel_speed, "TOKENS", TOKENS)
    yield calls


@pytest.mark.parametrize("sparse", [False, True])
def test_speed_counts_active_tiles_and_stays_on_the_device(sparse: bool, clock: list[Any]) -> None:  # noqa: FBT001
    block = kernel_speed.BLOCK if sparse else 0
    with fake_cuda() as seen:
        work = KernelSpec(sparse, False, 64, block_q=block, block_k=block)
        speeds = kernel_speed.speeds(GatheredFlash() if sparse else Flash(), work, torch.device("cuda", 0))
    assert not seen.mixed and [kind for _, kind in clock] == ["cuda", "cuda"]
    flops = 4 * 16 * TOKENS**2 * 64
    assert speeds["torch_tflops"] == pytest.approx(flops / 2e-3 / 1e12)
    assert speeds["tflops"] == pytest.approx((0.25 if sparse else 1.0) * flops / 1e-3 / 1e12, rel=0.1)


@pytest.mark.parametrize("backward", [False, True])
def test_speed_is_taken_of_both_directions(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    monkeypatch.setattr(kernel_speed, "TOKENS", 128)
    speeds = kernel_speed.speeds(Exact(), KernelSpec(False, backward, 64, "float32"), torch.device("cpu"))
    assert sorted(speeds) == ["tflops", "torch_tflops"] and min(speeds.values()) > 0


@pytest.mark.soak
def test_triton_is_tried_where_it_is_interpreted() -> None:
    program = (
        "from tests.doctor.contexts import context_of; from weft.doctor import check_kernels; import time\n"
        "for check in check_kernels.checks('triton', context_of(deadline=time.monotonic() + 500)):\n"
        "    print(check.status, check.name, check.note, dict(check.numbers))"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("ok")]) > 15
    assert not [line for line in lines if line.startswith("wrong")]
