"""What the parts ask of a GPU, with stand-ins for its streams, graphs and memory: nothing here ran on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.doctor.contexts import OnDevice, context_of, one_thread
from tests.run.hot_path import fake_cuda
from weft.doctor import check_graph, check_kernels, check_streams, check_wan
from weft.doctor.known_attention import KnownAttention
from weft.doctor.suite import CheckContext
from weft.masks.grid import TokenGrid

GPU = torch.device("cuda", 0)


pytestmark = pytest.mark.usefixtures(one_thread.__name__)


class FakeCuda:
    """Streams and graphs of torch.cuda, which do nothing but be recorded; work runs at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.current, self.graph = "default", None
        monkeypatch.setattr("weft.doctor.known_attention.GPU_BACKEND", "auto")
        for suite in (check_streams, check_graph):
            monkeypatch.setattr(suite, "side", lambda _, purpose: purpose)
            monkeypatch.setattr(suite, "on", self.on)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: self.events.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self))
        monkeypatch.setattr(torch.cuda, "graph", self.capture)
        monkeypatch.setattr(KnownAttention, "attend", self._recorded(KnownAttention.attend))
        both = KnownAttention.attend_and_differentiate
        monkeypatch.setattr(KnownAttention, "attend_and_differentiate", self._recorded(both))

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def capture(self, graph: FakeGraph, stream: str) -> Iterator[None]:
        self.events.append(f"capture on {stream}")
        self.graph = graph
        yield
        self.graph = None
        assert graph.out is not None
        graph.out.fill_(float("nan"))  # a capture computes nothing

    def _recorded(self, call: Any) -> Any:
        def recorded(operands: KnownAttention, plan: str) -> Any:
            if not self.events or not self.events[-1].startswith("capture"):
                self.events.append(f"{plan} on {self.current}")
            out = call(operands, plan)
            if self.graph is not None:
                self.graph.out, self.graph.call = out, lambda: call(operands, plan)
            return out

        return recorded


class FakeGraph:
    """Do again what was captured, into the tensor that the capture returned."""

    out: Tensor | None = None

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.call: Any = None

    def replay(self) -> None:
        self.cuda.events.append("replay")
        assert self.out is not None
        self.out.copy_(self.call())


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_attentions_take_turns_on_two_streams(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_streams, "ROUNDS", 2)
    monkeypatch.setattr(check_streams, "PAIRS", (("ulysses", "ring"),))
    (check,) = check_streams.checks(context_of(OnDevice, dtype="bfloat16"))
    assert check.status == "ok" and check.note == "2 times, forward and backward"
    both = ["ulysses on doctor 1", "ring on doctor 2"]
    assert cuda.events == ["synchronize", *both, *both, "synchronize"]


def test_a_graph_is_captured_after_warm_up_and_replayed_with_other_inputs(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_graph, "PLANS", ("ring",))
    (check,) = check_graph.checks(context_of(OnDevice, dtype="bfloat16"))
    assert check.status == "ok" and check.note == "replayed with 2 other inputs"
    replays = ["replay", "synchronize"] * 2
    begins = ["synchronize", *["ring on doctor 1"] * 3, "synchronize"]
    assert cuda.events == [*begins, "capture on doctor 1", *replays]


def test_a_graph_that_ignores_its_inputs_is_wrong(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_graph, "PLANS", ("ring",))
    monkeypatch.setattr(FakeGraph, "replay", lambda self: self.out.zero_())
    (check,) = check_graph.checks(context_of(OnDevice, dtype="bfloat16"))
    assert check.status == "wrong"


class OnFakeGpu(CheckContext):
    """Both sides of a comparison are on the device, and float64 where it matters."""

    def error(self, found: Tensor, expected: Tensor) -> float:
        assert found.shape == expected.shape and found.device == expected.device == GPU
        assert found.dtype == expected.dtype == torch.float64
        return 0.0


@pytest.mark.parametrize("backend", ["flash", "gather", "exact", "triton"])
def test_kernels_are_tried_on_the_device_alone(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors, whose values nobody knows: devices, dtypes and shapes hold, and no kernel raises."""
    monkeypatch.setattr(check_kernels, "speeds", lambda *_: {})
    plain = check_kernels.pairs_first
    monkeypatch.setattr(check_kernels, "pairs_first", lambda every, **_: plain(every, is_short=True))
    with fake_cuda() as seen:
        ctx = context_of(OnFakeGpu, device=GPU, dtype="bfloat16", rank=2, ranks=3)
        checks = [check for check in check_kernels.checks(backend, ctx) if check.status != "skipped"]
    assert len(checks) > 5 and {check.status for check in checks} == {"ok"}
    assert not seen.mixed


def test_memory_of_wan_is_what_torch_held_beside_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors: no work on both devices at once, and the order in which torch is asked."""
    events: list[str] = []
    answers = {"memory_allocated": 1000, "max_memory_allocated": 5000}
    names = ("synchronize", "reset_peak_memory_stats", *answers)
    small = check_wan.AttentionSizes(TokenGrid(4, 8, 12), heads=2, head_dim=64, block=64, tile=(4, 4, 4))

    def seconds(call: Any, device: torch.device) -> float:
        call()
        events.append(f"timed on {device.type}")
        return 0.25

    def prove(proof: Any, qkv: Any, out: Tensor, *_: Any) -> None:
        proof.errors["head 0"], proof.allowed = 1e-3, 2e-2
        assert out.shape == qkv[0].shape and out.dtype == torch.bfloat16 and out.device.type == "cuda"

    monkeypatch.setattr(check_wan, "WAN", small)
    monkeypatch.setattr(check_wan, "median_seconds", seconds)
    monkeypatch.setattr(check_wan, "_prove", prove)
    monkeypatch.setattr(
        check_wan, "_drawn", lambda shape, _: [torch.empty(shape, dtype=torch.bfloat16, device="cuda")] * 3
    )
    monkeypatch.setattr("weft.run.attention.is_plain", lambda *_: True)  # run what fake tensors would skip
    with fake_cuda() as seen:
        for name in names:
            answer = partial(lambda name, *_: events.append(name) or answers.get(name), name)
            monkeypatch.setattr(torch.cuda, name, answer)
        found = list(check_wan.checks(context_of(device=GPU, dtype="bfloat16")))
    assert [check.status for check in found] == ["measured"] * 4 and not seen.mixed
    assert {check.numbers["bytes"] for check in found} == {4000}
    assert {check.numbers["seconds"] for check in found} == {0.25}
    # By the table's entry of the GPU that torch names.
    assert all(0 < check.numbers["predicted_seconds"] < 1e-2 for check in found)
    before = ["synchronize", "reset_peak_memory_stats", "memory_allocated"]
    assert events == [*before, "synchronize", "max_memory_allocated", "timed on cuda"] * 4
