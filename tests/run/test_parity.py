"""The parity test of GPU backends, with stand-ins that are wrong in the ways that real kernels were."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.threads import ThreadComm, run_threads
from weft.core.errors import AgreementError, InputError
from weft.run import attention
from weft.run.agree import abort
from weft.run.kernels import parity
from weft.run.kernels.choice import GpuPlatform, decide
from weft.run.kernels.parity_sample import ParitySample, compare_with_reference
from weft.run.kernels.reference import ReferenceKernel
from weft.run.kernels.rules import KernelSpec

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WORKS = [
    KernelSpec(sparse, backward, head_dim, dtype, block if sparse else 0, 128 if sparse else 0, group)
    for sparse, backward, head_dim, dtype, block, group in (
        (False, False, 64, "bfloat16", 0, 1),
        (False, True, 128, "float16", 0, 2),
        (True, False, 128, "bfloat16", 128, 1),
        (True, False, 64, "float16", 64, 3),
        (True, True, 64, "bfloat16", 64, 1),
        (True, True, 128, "bfloat16", 128, 2),
    )
]
SPARSE_BACKWARD = WORKS[4]
Grads = tuple[Tensor, Tensor, Tensor]


class Right:
    """As good as a GPU kernel: the reference, its results rounded to the dtype of the operands."""

    name, grouped = "right", True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        out, lse = ReferenceKernel().attend(q, k, v, *rest, **options)
        return out.to(q.dtype), lse

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        heads, group = k.shape[1], q.shape[1] // k.shape[1]
        wide = (x.repeat_interleave(group, 1) for x in (k, v))
        dq, dk, dv = ReferenceKernel().attend_backward(grad, q, *wide, *rest)
        dk, dv = (x.unflatten(1, (heads, group)).sum(2) for x in (dk, dv))
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


class WrongBackward(Right):
    """flash-attention #2623: the block-sparse backward of one head dim, wrong by a factor."""

    def attend_backward(self, grad: Tensor, q: Tensor, *rest: Any) -> Grads:
        dq, dk, dv = super().attend_backward(grad, q, *rest)
        return (dq * 150, dk, dv) if q.shape[3] == 64 else (dq, dk, dv)


class Raises(Right):
    def attend(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel image is available\nand much more")


class Blind(Right):
    """Reads beyond the ragged end, where zeros are."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tiles: Any, *rest: Any, **options: Any) -> Any:
        missing = -k.shape[2] % tiles.block_k
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (k, v))
        tiles = replace(tiles, kv_len=k.shape[2], _made={})
        return super().attend(q, k, v, tiles, *rest, **options)


def spoiled(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Right:
    """A kernel whose forward is changed."""

    class Spoiled(Right):
        def attend(self, *operands: Any, **options: Any) -> Any:
            return change(*super().attend(*operands, **options))

    return Spoiled()


@pytest.mark.parametrize("work", WORKS, ids=str)
def test_a_right_kernel_passes(work: KernelSpec) -> None:
    assert compare_with_reference(Right(), work, CPU) == ""


def test_a_sample_has_what_kernels_fail_at() -> None:
    sample = ParitySample.of(WORKS[2])
    active, tiles = sample.tiles.active, sample.tiles
    assert active is not None
    assert not active.any(2).all()
    assert not active.any(1).all()
    assert any(row.tolist() == [False, False, False, True] for head in active for row in head)
    assert tiles.q_len % tiles.block_q
    assert tiles.kv_len % tiles.block_k


def test_a_backward_that_is_wrong_for_one_head_dim_fails_for_it() -> None:
    assert "its dq is off by" in compare_with_reference(WrongBackward(), SPARSE_BACKWARD, CPU)
    assert compare_with_reference(WrongBackward(), replace(SPARSE_BACKWARD, head_dim=128), CPU) == ""
    assert compare_with_reference(WrongBackward(), replace(SPARSE_BACKWARD, backward=False), CPU) == ""


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (
            spoiled(lambda out, lse: (out.masked_fill(lse[..., None] == -torch.inf, torch.nan), lse)),
            "not finite",
        ),
        (spoiled(lambda out, lse: (out, lse.nan_to_num(neginf=-1e9))), "not -inf in exactly the rows"),
        (spoiled(lambda out, lse: (out, lse * 1.4427)), "log-sum-exp is off by"),
        (spoiled(lambda out, lse: (out.roll(1, 2), lse)), "its output is off by"),
        (spoiled(lambda out, lse: (out[:, :, :-1], lse)), "its output has shape"),
        (Blind(), "is off by"),
    ],
    ids=["NaN in empty rows", "no -inf", "base 2", "rows moved", "a row short", "beyond the end"],
)
def test_a_wrong_forward_fails(kernel: Right, why: str) -> None:
    assert why in compare_with_reference(kernel, WORKS[2], CPU)


# The judge: all ranks, one outcome.


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A GPU that is a CPU: kernels by the names of backends, and a disk of its own."""
    kernels: dict[str, Any] = {}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(parity, "_known", {})
    monkeypatch.setattr(parity, "make", lambda name: kernels[name])
    monkeypatch.setattr(
        parity, "compare_with_reference", lambda kernel, work, _: compare_with_reference(kernel, work, CPU)
    )
    monkeypatch.setattr(parity, "platform_of", lambda _: GpuPlatform("sm_90"))
    monkeypatch.setattr(parity, "version", lambda name: f"{name} 1")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield kernels


def kept(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((tmp_path / "weft" / "parity").glob("*.json"))]


def alone(work: KernelSpec, *names: str) -> list[str]:
    """What one rank is told of backends."""
    (answers,) = run_threads(1, lambda comm: [parity.parity_check(comm, CUDA)(name, work) for name in names])
    return answers


def test_an_outcome_is_kept_on_disk_and_recalled(machine: dict[str, Any], tmp_path: Path) -> None:
    machine.update(fa4=WrongBackward(), flash=Right())
    answers = alone(SPARSE_BACKWARD, "fa4", "flash")
    assert "its parity test failed on 1 of 1 ranks (0): its dq is off by" in answers[0]
    assert answers[1] == ""
    assert {each["facts"]["backend"]: bool(each["why"]) for each in kept(tmp_path)} == {
        "fa4": True,
        "flash": False,
    }
    parity._known.clear()
    machine.clear()  # a kernel that is asked for again is missing
    assert alone(SPARSE_BACKWARD, "fa4", "flash") == answers


@pytest.mark.parametrize("changed", ["driver", "package", "device", "torch"])
def test_what_is_newer_is_tried_again(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    machine["fa4"] = WrongBackward()
    assert alone(SPARSE_BACKWARD, "fa4") != [""]
    parity._known.clear()
    machine["fa4"] = Right()
    if changed == "driver":
        monkeypatch.setattr(parity, "_driver", lambda: "newer")
    elif changed == "package":
        monkeypatch.setattr(parity, "version", lambda name: f"{name} 2")
    elif changed == "device":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    else:
        monkeypatch.setattr(torch, "__version__", "3.0")
    assert alone(SPARSE_BACKWARD, "fa4") == [""]


def test_a_file_that_is_damaged_is_not_believed(machine: dict[str, Any], tmp_path: Path) -> None:
    machine["flash"] = Right()
    assert alone(WORKS[0], "flash") == [""]
    (path,) = (tmp_path / "weft" / "parity").glob("*.json")
    path.write_text('{"why": "any"}')
    parity._known.clear()
    assert alone(WORKS[0], "flash") == [""]
    assert kept(tmp_path)[0]["why"] == ""


def test_a_kernel_that_raises_is_refused_and_tried_again_by_the_next_process(
    machine: dict[str, Any], tmp_path: Path
) -> None:
    machine["fa4"] = Raises()
    (why,) = alone(WORKS[0], "fa4")
    assert why.endswith("it raised RuntimeError: no kernel image is available")
    assert kept(tmp_path) == []


def test_the_next_candidate_is_taken(machine: dict[str, Any]) -> None:
    machine.update(fa4=WrongBackward(), triton=Right())
    here = GpuPlatform("sm_90", frozenset({"fa4", "triton"}))
    work = replace(SPARSE_BACKWARD, block_q=128)

    def choose(comm: ThreadComm) -> tuple[str, dict[str, str]]:
        choice = decide(work, here, parity.parity_check(comm, CUDA))
        return choice.backend, choice.passed

    ((backend, passed),) = run_threads(1, choose)
    assert backend == "triton"
    assert "its dq is off by" in passed["fa4"]


def test_a_call_without_messages_is_judged_by_its_rank_alone(machine: dict[str, Any]) -> None:
    machine.update(fa4=WrongBackward(), flash=Right())
    refusal = parity.parity_check(None, CUDA)
    assert refusal("fa4", SPARSE_BACKWARD).startswith("its dq is off by")
    assert refusal("flash", SPARSE_BACKWARD) == ""


def test_a_rank_that_fails_alone_makes_all_refuse(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def job(comm: ThreadComm) -> list[str]:
        def trial(backend: str, work: KernelSpec, device: torch.device) -> str:
            asked.append(comm.rank)
            return "its dv is off." if comm.rank == 2 and backend == "fa4" else ""

        refusal = parity.parity_check(comm, CUDA, trial)
        again = parity.parity_check(comm, CUDA, trial)
        return [refusal("fa4", WORKS[0]), refusal("flash", WORKS[0]), again("fa4", WORKS[0])]

    with caplog.at_level(logging.WARNING):
        answers = run_threads(4, job)
    expected = "its parity test failed on 1 of 4 ranks (2): its dv is off."
    assert answers == [[expected, "", expected]] * 4
    assert sorted(asked) == [rank for rank in range(4) for _ in range(2)]
    (record,) = caplog.records
    assert record.getMessage() == f"backend fa4 is not used for the {WORKS[0]}: {expected}"


def test_ranks_that_try_different_backends_do_not_wait_for_each_other() -> None:
    def job(comm: ThreadComm) -> None:
        parity.parity_check(comm, CUDA, lambda *_: "")("fa4" if comm.rank else "flash", WORKS[0])

    with pytest.raises(AgreementError, match="different parity tests: rank 0 has backend flash"):
        run_threads(3, job)


def test_a_rank_that_cannot_take_part_ends_the_test_of_all() -> None:
    def job(comm: ThreadComm) -> str:
        if comm.rank == 1:
            abort(comm, InputError("q has no heads."))
            return "refused"
        with pytest.raises(AgreementError, match="Rank 1 cannot take part: q has no heads"):
            parity.parity_check(comm, CUDA, lambda *_: "")("fa4", WORKS[0])
        return "raised"

    assert run_threads(3, job) == ["raised", "refused", "raised"]


def test_a_call_does_not_meet_again_after_a_failed_parity_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks have heard of it in the same meeting, and left."""

    def fail(*_: Any, **__: Any) -> None:
        raise AgreementError("Rank 1 cannot take part.")

    def met(*_: Any) -> None:
        raise AssertionError("a second meeting")

    monkeypatch.setattr(attention, "choose_kernel", fail)
    monkeypatch.setattr(attention, "_abort", met)
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(AgreementError, match="Rank 1 cannot"):
        attention.attention(x, x, x, tokens=4)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_is_tried_elsewhere(device: str) -> None:
    def never(*_: Any) -> str:
        raise AssertionError

    def job(comm: ThreadComm) -> list[str]:
        elsewhere = parity.parity_check(comm, torch.device(device), never)("fa4", WORKS[0])
        return [elsewhere, parity.parity_check(comm, CUDA, never)("exact", WORKS[0])]

    assert run_threads(1, job) == [["", ""]]


def test_nothing_is_tried_with_fake_tensors() -> None:
    def job(comm: ThreadComm) -> str:
        with FakeTensorMode():  # a mode belongs to its thread
            return parity.parity_check(comm, CUDA, lambda *_: "tried")("fa4", WORKS[0])

    assert run_threads(1, job) == [""]


def test_nothing_is_tried_while_a_graph_is_captured(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine["flash"] = Right()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InputError, match="Make the call once before the capture"):
        alone(WORKS[0], "flash")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert alone(WORKS[0], "flash") == [""]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert alone(WORKS[0], "flash") == [""]
