"""What `bench.pipeline` asks of a case, and weft's half of the table in docs/diffusers-compared.md."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from bench import pipeline as bench  # noqa: E402
from bench.pipeline_peers import ALONE, ONE_RANK, REST, RING, SPARSE, ULYSSES, WEFT, PeerModel, masked  # noqa: E402
from bench.rows import Row  # noqa: E402
from tests.diffusers.toys import check, on_ranks  # noqa: E402
from tests.diffusers.toys import normal as drawn  # noqa: E402
from tests.diffusers.zoo import ZOO  # noqa: E402
from weft import parallelize  # noqa: E402
from weft.core.errors import InputError  # noqa: E402
from weft.diffusers.adapters import adapter_of  # noqa: E402
from weft.masks.grid import TokenGrid  # noqa: E402

SMALL = PeerModel("Wan", TokenGrid(4, 8, 8), 3, 1, (4, 4, 4), (1, 1, 1))
HALF = PeerModel("Flux", TokenGrid(1, 16, 8, prefix=64), 3, 1, (1, 8, 8), (1, 1, 1))


def verdicts(what: str, model: PeerModel = SMALL, **times: float) -> list[Row]:
    names = {"one": ALONE, "rest": REST, "rank": ONE_RANK, "ring": RING, "sparse": SPARSE}
    names |= {"ulysses": ULYSSES, "weft": WEFT}
    wall = {names[name]: [time] * 3 for name, time in times.items()}
    return bench.judge(bench.PipelineCase(model, what, tuple(wall), 1.0), wall)


@pytest.mark.parametrize(
    ("weft", "ulysses", "ring", "holds"),
    [
        (50.0, 51.0, 60.0, [True, True]),
        (50.0, 48.9, 60.0, [False, True]),  # the fastest counts
        (50.0, 60.0, 48.9, [False, True]),
        (54.2, 60.0, 60.0, [True, False]),  # 1.845 of one process
    ],
)
def test_dense_is_held_against_the_fastest_peer_and_one_process(
    weft: float, ulysses: float, ring: float, holds: list[bool]
) -> None:
    found = verdicts(bench.FORWARD, one=100, rest=40, weft=weft, ulysses=ulysses, ring=ring, sparse=30)
    assert [row.holds for row in found[:2]] == holds
    assert found[0].peer == min(ulysses, ring)
    assert found[0].limit == 50.0


def test_sparse_is_shown_beside_its_bound() -> None:
    found = verdicts(bench.FORWARD, one=100, rest=40, weft=50, ulysses=50, sparse=30)[2]
    assert SMALL.mask.density == 1 / 4
    assert found.limit == (40 + 60 / 4) / 2


def test_training_is_held_against_diffusers() -> None:
    assert verdicts(bench.BOTH, weft=100, ulysses=111, ring=90)[0].holds
    assert not verdicts(bench.BOTH, weft=100, ulysses=109, ring=300)[0].holds


def test_overhead_has_an_upper_bound() -> None:
    assert verdicts(bench.ONE, one=100, rank=101.9)[0].holds
    assert not verdicts(bench.ONE, one=100, rank=102.1)[0].holds


def test_who_was_not_timed_holds_nothing() -> None:
    found = verdicts(bench.FORWARD, one=100, rest=40, ulysses=50)
    assert not any(row.holds for row in found)
    assert all(row.measured is None for row in found)


@pytest.mark.parametrize("model", [SMALL, HALF], ids=["Wan", "Flux"])
def test_masked_is_attention_under_the_mask(model: PeerModel) -> None:
    """Of tokens in raster order, from a mask whose tokens are in the order of voxels."""
    at = model.grid.voxels(model.tile).order
    q, k, v = (drawn(1, 3, model.grid.tokens, 8, seed=seed, dtype=torch.float32) for seed in range(3))
    found = masked(torch.nn.Identity(), model).attention(q, k, v)  # pyright: ignore
    scores = (q @ k.mT / 8**0.5)[0][:, at][:, :, at]
    tiles = torch.as_tensor(model.mask.tiles)
    for row in (0, 70, model.grid.tokens - 1):
        seen = tiles[:, row // 64].repeat_interleave(64, 1)
        weights = scores[:, row].masked_fill(~seen, -torch.inf).softmax(-1)
        assert torch.allclose(found[0, :, at[row]], (weights[:, None] @ v[0][:, at])[:, 0], atol=1e-5)


# The table: by the first cell of a row, the model, its sizes, and how it is parallelized.

EVEN: dict[str, Any] = {"batch": 1, "text": 6, "grid": (2, 4, 4)}
TABLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Ulysses": ("wan", EVEN, {"plan": "ulysses"}),
    "3 heads": ("wan", EVEN, {"plan": "ulysses"}),
    "3 heads, backward": ("wan", EVEN, {"plan": "ulysses"}),
    "odd length": ("wan", {**EVEN, "grid": (1, 5, 7)}, {}),
    "odd text": ("flux", {**EVEN, "text": 7}, {}),
    "ring": ("wan", EVEN, {"plan": "ring"}),
    "ring, backward": ("wan", EVEN, {"plan": "ring"}),
    "no `_cp_plan`": ("sd3", EVEN, {}),
}
REFUSED, SPARSE_ROW = "an attention that no plan names", "sparse"


def rows() -> list[str]:
    lines = (Path(__file__).parents[2] / "docs/diffusers-compared.md").read_text().splitlines()
    cells = [line.split("|")[1].strip() for line in lines if line.startswith("|")]
    return [cell.partition(" (")[0] for cell in cells[2:]]


def test_every_row_of_the_table_is_kept_true() -> None:
    assert rows() == [*TABLE, SPARSE_ROW, REFUSED]


def step(model: Any, given: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    out = model(**given)[0]
    wanted = drawn(*out.shape, dtype=out.dtype)
    grads = torch.autograd.grad(out, list(model.parameters()), wanted, allow_unused=True)
    return out.detach(), [grad for grad in grads if grad is not None]


@pytest.mark.parametrize("row", TABLE)
def test_weft_gives_what_one_process_gives(row: str) -> None:
    name, sizes, options = TABLE[row]
    make = lambda: ZOO[name].make(torch.float32)  # noqa: E731
    given = ZOO[name].inputs(**sizes, dtype=torch.float32)
    found = on_ranks(2, lambda world: step(parallelize(make(), mesh=world, **options), given))
    check(step(make(), given), found, 2e-5)


def test_weft_runs_sparse_attention() -> None:
    module, given = SMALL.build()
    options = f"{SMALL.sparse},block=64,dense_steps=0,recall=0"

    @torch.no_grad()
    def job(world: Any) -> torch.Tensor:
        return parallelize(deepcopy(module), mesh=world, sparse=options)(**given, return_dict=False)[0]

    with torch.no_grad():
        dense, expected = (one(**given, return_dict=False)[0] for one in (module, masked(module, SMALL)))
    assert (dense - expected).abs().max() > 1e-3
    for found in on_ranks(2, job):
        assert (found - expected).abs().max() <= 2e-5


def test_weft_refuses_an_attention_that_the_adapter_does_not_name() -> None:
    model = ZOO["pixart"].make()
    blind = replace(adapter_of(model), attention={"transformer_blocks.0.attn1": "video"})
    with pytest.raises(InputError, match=r"transformer_blocks\.1\.attn1 is an attention"):
        on_ranks(2, lambda world: parallelize(ZOO["pixart"].make(), mesh=world, adapter=blind))
