"""A transformer on N ranks against one: its weights widened and narrowed, its arguments shared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.worlds import world
from weft.generate import rank_parity
from weft.generate.rank_parity import ParityResult, TransformerCall


class Mixed(nn.Module):
    """Most of it in 16 bits, a part kept in float32, as Diffusers keeps embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor, *, times: int) -> tuple[Tensor]:
        return (times * self.narrow(self.wide(x.float()).to(self.narrow.weight.dtype)),)


def test_weights_are_widened_for_one_call_and_are_what_they_were() -> None:
    model, x = Mixed(), torch.randn(2, 4).bfloat16()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exact = rank_parity._in_float32(model, TransformerCall((x,), {"times": 2}))
    assert exact.dtype == torch.float32
    after = model.state_dict()
    assert {name: x.dtype for name, x in after.items()} == {name: x.dtype for name, x in before.items()}
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.allclose(exact, model(x, times=2)[0].float(), atol=0.05)
    assert not torch.equal(exact, model(x, times=2)[0].float())


def compared(error: float, alone: float | None, dtype: str = "bfloat16") -> ParityResult:
    words: Any = {"model": "M", "attention": "self", "plans": (), "sent": 0}
    return ParityResult(dtype=dtype, error=error, alone_error=alone, **words)


def test_what_may_differ_depends_on_what_it_is_compared_with() -> None:
    assert compared(0.0, None, "float32").tolerance == 2e-5
    assert compared(0.0, None).tolerance == compared(0.0, 0.3).tolerance == 2**-4
    assert compared(0.0, 0.01).tolerance == pytest.approx(0.02 + 2**-8)


def test_an_infinite_error_is_larger_than_any_tolerance() -> None:
    nan = torch.tensor([1.0, torch.nan])
    assert (
        rank_parity._error(nan, torch.ones(2)) == rank_parity._error(torch.ones(2) / 0, torch.ones(2)) == 1e30
    )


def test_float32_is_left_out_where_it_does_not_fit() -> None:
    model = Mixed()
    with patch("torch.cuda.mem_get_info", lambda _: (1 << 30, 80 << 30)):
        assert not rank_parity._fits(model, torch.device("cuda", 0))
    with patch("torch.cuda.mem_get_info", lambda _: (2 << 30, 80 << 30)):
        assert rank_parity._fits(model, torch.device("cuda", 0))
    with patch.object(os, "sysconf", lambda _: 1):
        assert not rank_parity._fits(model, torch.device("cpu"))


def shared(rank: int) -> TransformerCall:
    torch.manual_seed(1)
    own = TransformerCall(
        (torch.randn(2, 3).bfloat16(), None), {"t": torch.tensor(7), "sizes": [1, (2, 0.5)], "b": True}
    )
    return rank_parity.broadcast_call(own if rank == 0 else None)


def test_arguments_of_rank_0_reach_all_ranks() -> None:
    first, second = world(2).run(shared, per_rank=[(0,), (1,)])
    assert torch.equal(first.args[0], second.args[0]) and second.args[0].dtype == torch.bfloat16
    assert second.args[1] is None
    assert second.kwargs["t"].shape == () and second.kwargs["t"] == 7
    assert second.kwargs["sizes"] == [1, (2, 0.5)] and second.kwargs["b"] is True


def test_one_model_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> nn.Module:
        assert not rank_parity._loaded
        return Mixed()

    monkeypatch.setattr(rank_parity.pretrained, "load_transformer", load)
    monkeypatch.setattr(rank_parity, "_loaded", {(Path("old"), "transformer"): None})
    rank_parity.run_alone(Path("new"), "transformer", TransformerCall((torch.ones(1, 4),), {"times": 1}))
    assert list(rank_parity._loaded) == [(Path("new"), "transformer")]
