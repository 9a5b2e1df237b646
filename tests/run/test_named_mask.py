"""What `weft.attention` takes beside tensors [B, H, S, D] and masks as values: masks by name, and BSHD."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.run.dense import dense, error
from tests.threads import ThreadComm, run_threads
from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.run.world import World

COPIES = ("clone", "copy_", "_to_copy", "contiguous", "index_select", "cat", "new_empty_strided")
PLANS = ("auto", "ulysses", "ring", "zigzag", "gather+balanced")


def whole(kv_heads: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k and v of all ranks as [B, S, H, D]."""
    random = torch.Generator().manual_seed(1)
    return [torch.randn(2, 37, heads, 5, generator=random, dtype=dtype) for heads in (6, kv_heads, kv_heads)]


class Copies(TorchDispatchMode):
    """Records what is copied, whatever its layout: the operation and the number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in COPIES:
            self.seen.append((name, out.numel()))
        return out


def both_ways(
    comm: ThreadComm, plan: str, layout: str, **options: Any
) -> tuple[list[Tensor], list[tuple[str, int]]]:
    """The output and the gradients of a rank as [B, S, H, D], and the copies that were made."""
    world = World(comm)
    x = whole(dtype=options.pop("dtype", torch.float64))
    mine = list(Layout.even(x[0].shape[1], comm.size).held(comm.rank))
    shards = [each[:, mine].contiguous() for each in x]
    if layout == "bhsd":
        shards = [each.transpose(1, 2).contiguous() for each in shards]
    inputs = [each.requires_grad_() for each in shards]
    options = {"tokens": x[0].shape[1], "mesh": world, "plan": plan, "scale": 0.3} | options
    with Copies() as copies:
        out = weft.attention(*inputs, layout=layout, **options)
        slope = torch.linspace(-1, 1, out.numel(), dtype=out.dtype)
        slope = slope.view(out.shape if layout == "bshd" else out.transpose(1, 2).shape)
        grads = torch.autograd.grad(out, inputs, slope if layout == "bshd" else slope.transpose(1, 2))
    results = [out.detach(), *grads]
    return [x if layout == "bshd" else x.transpose(1, 2) for x in results], copies.seen


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bshd_is_exact_forward_and_backward(ranks: int, plan: str) -> None:
    x = [each.requires_grad_() for each in whole()]
    q, k, v = (each.transpose(1, 2) for each in x)
    expected = dense(q, k, v, 0.3).transpose(1, 2)
    layout = Layout.even(37, ranks)
    answers = run_threads(ranks, lambda comm: both_ways(comm, plan, "bshd"))
    slopes = []
    for rank, ((out, *_), _) in enumerate(answers):
        mine = list(layout.held(rank))
        assert out.shape == (2, len(mine), 6, 5)
        assert error(out, expected[:, mine]) < 1e-12
        slopes.append(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
    truth = torch.autograd.grad(expected, x, torch.cat(slopes, 1))
    for rank, ((_, *grads), _) in enumerate(answers):
        mine = list(layout.held(rank))
        assert all(error(found, each[:, mine]) < 1e-12 for found, each in zip(grads, truth, strict=True))


@pytest.mark.parametrize("backend", ["cpu", "exact"])
@pytest.mark.parametrize(("ranks", "plan"), [(1, "auto"), (2, "ulysses"), (2, "ring"), (3, "gather")])
def test_bshd_copies_no_more_than_bhsd(ranks: int, plan: str, backend: str) -> None:
    def copies(layout: str) -> list[list[tuple[str, int]]]:
        options = {"backend": backend, "dtype": torch.float32}
        return [seen for _, seen in run_threads(ranks, lambda comm: both_ways(comm, plan, layout, **options))]

    assert copies("bshd") == copies("bhsd")


def test_on_one_rank_q_k_and_v_are_read_where_they_lie() -> None:
    q, k, v = whole(kv_heads=6, dtype=torch.float32)
    weft.attention(q, k, v, layout="bshd", backend="cpu")
    with Copies() as copies:
        weft.attention(q, k, v, layout="bshd", backend="cpu")
    assert not copies.seen


def test_bshd_in_a_compiled_graph() -> None:
    q, k, v = whole(kv_heads=6)
    torch.compiler.reset()
    fn = torch.compile(
        lambda q, k, v: weft.attention(q, k, v, layout="bshd", mask="sta:window=1x3x3", grid=(1, 37, 1)),
        backend="aot_eager",
        fullgraph=True,
    )
    mask = weft.mask("sta:window=1x3x3", grid=(1, 37, 1), heads=6)
    assert error(fn(q, k, v), weft.attention(q, k, v, mask=mask, layout="bshd")) < 1e-12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"layout": "sbhd"},
            "layout='sbhd' is unknown. Use bhsd for",
        ),
        (
            {"layout": "bshd", "q": torch.zeros(3, 4, 5)},
            r"shape \[3, 4, 5\]. Expected \[batch, local tokens",
        ),
        ({"tokens": 12}, 'q have 2 tokens; .* expects 12. Pass layout="bshd" for tensors'),
        (
            {"mask": "sta"},
            r"mask='sta' needs the grid .*Pass grid=\(t, h, w\) too, or mask=weft",
        ),
        ({"mask": "stta", "grid": (3, 4, 1)}, "There is no mask 'stta'. Did you mean 'sta'"),
        ({"mask": "sta:windw=3", "grid": (3, 4, 1)}, "no option 'windw'. Did you mean 'window'"),
        ({"mask": "sta", "grid": (3, 4)}, r"grid=\(3, 4\) must be \(t, h, w\), three integers"),
        ({"grid": (3, 4, 1)}, r"grid=\(3, 4, 1\) is for a mask by name; mask is None"),
        ({"mask": "sta", "grid": weft.TokenGrid(2, 4, 1, prefix=4), "prefix": 3}, "are not those of grid="),
        ({"mask": "sta", "grid": (3, 5, 1), "layout": "bshd"}, "expects 15"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(options: dict[str, Any], words: str) -> None:
    x = torch.zeros(1, 12, 2, 4)
    q = options.pop("q", x)
    with pytest.raises(InputError, match=words):
        weft.attention(q, x, x, **options)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mask_by_name_is_that_of_weft_mask(ranks: int) -> None:
    grid = weft.TokenGrid(3, 16, 8, prefix=5)
    q, k, v = torch.randn(3, 1, 4, grid.tokens, 8, dtype=torch.float64).unbind()
    mask = weft.mask("sta:window=1x3x3", heads=4, grid=grid)
    assert 0 < mask.density < 1
    layout = Layout.even(grid.tokens, ranks, prefix=5)

    def job(comm: ThreadComm) -> bool:
        world = World(comm)
        rows = list(layout.held(comm.rank))
        inputs = [x[:, :, rows] for x in (q, k, v)]
        options: dict[str, Any] = {"mesh": world, "tokens": layout}
        expected = weft.attention(*inputs, mask=mask, **options)
        by_size = weft.attention(*inputs, mask="sta:window=1x3x3", grid=(3, 16, 8), prefix=5, mesh=world)
        by_grid = weft.attention(*inputs, mask="sta:window=1x3x3", grid=grid, **options)
        return torch.equal(by_size, expected) and torch.equal(by_grid, expected)

    assert all(run_threads(ranks, job))
