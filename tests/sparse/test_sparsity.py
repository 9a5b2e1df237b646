"""Masks of pipelines: the same on every number of ranks, asked for when they should be, and accounted for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.diffusers.toys import check, normal, on_ranks
from tests.threads import run_threads
from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.diffusers.adapters import adapter_of
from weft.diffusers.region import ShardedRegion
from weft.diffusers.sampled_check import SampledCheck
from weft.masks.grid import TokenGrid
from weft.masks.spec import mask_from_spec
from weft.plan.choose import build
from weft.run.execute import Executor
from weft.run.kernels import choose
from weft.run.kernels.keep import Keep
from weft.run.kernels.proxies import Proxies, pool
from weft.run.kernels.select import top_k
from weft.run.world import LocalComm, World
from weft.sparse.context import AttentionContext
from weft.sparse.mask_cache import RECALL_INTERVAL, MaskCache, sparse_attention
from weft.sparse.methods import ProfiledMask, StaticMask, TopKMask, parse_method
from weft.sparse.pooling import recall, sample_positions

GRID = TokenGrid(3, 5, 7, prefix=9, suffix=2)
HEADS, KV_HEADS, BLOCK, TILE = 3, 1, 16, (2, 2, 4)
ALONE = World(LocalComm())
RANKS = range(1, 6)  # more than there are heads


def layouts(ranks: int, grid: TokenGrid = GRID) -> list[Layout]:
    """Even; text on every rank; and as a pipeline cuts: text and video each for itself."""
    text, video = Layout.even(grid.prefix, ranks), Layout.even(grid.video + grid.suffix, ranks)
    runs = [
        (*mine, *((start + grid.prefix, stop + grid.prefix) for start, stop in rest))
        for mine, rest in zip(text.shards, video.shards, strict=True)
    ]
    whole = Layout.even(grid.tokens, ranks, prefix=grid.prefix, suffix=grid.suffix)
    return [Layout.even(grid.tokens, ranks), whole, Layout(grid.tokens, tuple(runs))]


def here(world: World, layout: Layout, *, layer: int = 0, step: int = 0, **more: Any) -> AttentionContext:
    given = {"layers": 4, "steps": None, "grid": GRID, "heads": HEADS} | more
    return AttentionContext(layer=layer, step=step, layout=layout, world=world, **given)


def part(x: Tensor, where: AttentionContext) -> Tensor:
    return x[:, :, torch.from_numpy(where.layout.order(where.world.comm.rank))]


def queries_and_keys(batch: int = 2) -> tuple[Tensor, Tensor]:
    q = normal(batch, HEADS, GRID.tokens, 6, seed=3, dtype=torch.float32)
    return q, normal(batch, KV_HEADS, GRID.tokens, 6, seed=4, dtype=torch.float32)


def tokens_of(mask: BlockMask) -> Tensor:
    """[heads, queries, keys] as booleans."""
    tiles = mask.tiles.repeat(mask.block_q, axis=1).repeat(mask.block_k, axis=2)
    return torch.from_numpy(tiles[:, : mask.q_len, : mask.kv_len])


def weights(q: Tensor, k: Tensor, scale: float) -> Tensor:
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (q.double() @ keys.mT * scale).softmax(-1)


@pytest.mark.parametrize("grid", [GRID, replace(GRID, suffix=0)])  # the second's last block is ragged video
def test_topk_is_that_of_one_process_on_all_ranks(grid: TokenGrid) -> None:
    q, k = (x[:, :, : grid.tokens] for x in queries_and_keys())
    order = torch.from_numpy(grid.voxels(TILE).order)
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    means = Proxies(*(pool(x[:, :, order].double(), BLOCK) for x in (q, keys)))
    keep = Keep.of_tokens([(0, 9), (grid.tokens - grid.suffix, grid.tokens)], block_q=BLOCK)
    expected = grid.mask(top_k(means, 0.4, keep=keep).numpy(), BLOCK)
    text = grid.text(BLOCK)
    assert expected.tiles[:, text].all()
    assert expected.tiles[:, :, text].all()
    assert 0.4 < expected.density < 1
    for ranks in RANKS:
        for layout in layouts(ranks, grid):

            def job(world: World, layout: Layout = layout) -> Any:
                where = here(world, layout, grid=grid)
                sparsity = MaskCache(f"topk:0.4,block={BLOCK},tile=2x2x4,dense_steps=0")
                return sparsity.mask(where, part(q, where), part(k, where))

            assert on_ranks(ranks, job) == [expected] * ranks


def test_a_block_mask_is_that_of_all_layers_and_fits_or_raises() -> None:
    mask = mask_from_spec("random:density=0.4", heads=HEADS, grid=GRID, block=BLOCK)
    sparsity = sparse_attention(mask)
    where = here(ALONE, Layout.even(GRID.tokens, 1), layer=2)
    assert sparsity.mask(where, *queries_and_keys()) == mask
    assert not getattr(sparsity, "changes", True), "plans are made for the mask itself"
    other = mask_from_spec("random", heads=HEADS, grid=(3, 5, 6), block=BLOCK)
    with pytest.raises(InputError, match="does not fit blocks.0.attn, which has 3 heads and 116 tokens"):
        sparse_attention(other).mask(replace(where, name="blocks.0.attn"), *queries_and_keys())


def test_topk_of_everything_is_dense() -> None:
    where = here(ALONE, Layout.even(GRID.tokens, 1))
    sparsity = MaskCache("topk:1.0,dense_steps=0")
    assert sparsity.mask(where, *queries_and_keys()) is None
    assert sparsity.summary().dense_calls == 1
    assert "all 1 attentions were dense" in str(sparsity.summary())


@pytest.mark.parametrize("scale", [None, 0.8])
def test_recall_is_that_of_dense_attention(scale: float | None) -> None:
    q, k = queries_and_keys()
    places = sample_positions(GRID.prefix, GRID.video, 13, seed=2)
    assert len(places) == 13
    assert GRID.prefix <= places.min() < places.max() < GRID.prefix + GRID.video
    masks = [
        mask_from_spec(spec, heads=HEADS, grid=GRID, block=BLOCK) for spec in ("radial", "random:cv=0.5")
    ]
    full = weights(q, k, scale or 6**-0.5)[:, :, places]
    wanted = torch.stack([(full * tokens_of(mask)[:, places]).sum(-1).mean(0) for mask in masks]).numpy()
    for ranks in RANKS:
        for layout in layouts(ranks):

            def job(world: World, layout: Layout = layout) -> Any:
                where = here(world, layout)
                mine = part(q, where), part(k, where)
                return recall(*mine, layout, world, masks=masks, places=places, scale=scale)

            found = on_ranks(ranks, job)
            np.testing.assert_allclose(found[0], wanted, rtol=1e-5)
            assert all(np.array_equal(found[0], other) for other in found)


def test_ranks_without_tokens_take_part() -> None:
    q, k = queries_and_keys(1)
    layout = Layout.uneven([0, GRID.tokens, 0])

    def job(world: World) -> Any:
        where = here(world, layout)
        sparsity = MaskCache(f"topk:0.3,block={BLOCK},dense_steps=0,tile=2x2x4")
        return sparsity.mask(where, part(q, where), part(k, where)), sparsity.summary()

    found = on_ranks(3, job)
    assert found[0] == found[1] == found[2]
    assert 0 < found[0][1].recall < 1


def test_svg_finds_out_which_heads_are_temporal() -> None:
    grid = TokenGrid(6, 4, 8, prefix=5)
    frame, place = np.divmod(np.arange(grid.video), grid.frame)
    near = np.abs(np.subtract.outer(np.arange(8), np.arange(8))) < 1
    kinds = {"spatial": near[frame], "temporal": np.eye(grid.frame)[place]}
    heads = ["temporal", "spatial", "spatial", "temporal", "spatial"]
    q = torch.zeros(1, 5, grid.tokens, grid.frame)
    for head, kind in enumerate(heads):
        q[0, head, 5:, : kinds[kind].shape[1]] = torch.from_numpy(kinds[kind] * 8.0)
    q += normal(*q.shape, dtype=torch.float32) * 0.1
    spatial, temporal = (
        mask_from_spec(f"svg:density=0.3,spatial={share}", heads=1, grid=grid, block=8).patterns[0]
        for share in (1, 0)
    )

    def job(world: World) -> Any:
        where = here(world, Layout.even(grid.tokens, world.comm.size), grid=grid, heads=5)
        sparsity = MaskCache("svg:density=0.3,block=8,dense_steps=0,dense_layers=0")
        masks = [sparsity.mask(replace(where, step=step), part(q, where), part(q, where)) for step in (0, 1)]
        assert masks[0] is masks[1]  # heads did not change their kind
        return masks[0]

    for ranks in (1, 2, 5):
        for mask in on_ranks(ranks, job):
            for head, kind in enumerate(heads):
                expected = spatial if kind == "spatial" else temporal
                assert np.array_equal(mask.tiles[head], expected), (head, kind)


@pytest.mark.parametrize(
    "spec", ["sta:window=1x3x3,tile=2x2x4,dense_steps=0", "topk:0.3,tile=2x2x4,dense_steps=0"]
)
def test_masks_in_voxel_order_serve_tokens_in_raster_order(spec: str) -> None:
    """What attention is told of tokens undoes the order: outputs are those of a mask over raster places."""
    ranks = 3
    layout = Layout.even(GRID.tokens, ranks)
    q = normal(1, HEADS, GRID.tokens, 6, seed=5)
    k, v = (normal(1, HEADS, GRID.tokens, 6, seed=seed) for seed in (6, 7))

    def job(world: World) -> Any:
        where = here(world, layout)
        mine = [part(x, where) for x in (q, k, v)]
        sparsity = MaskCache(f"{spec},block={BLOCK}")
        return (sparsity.mask(where, *mine[:2]), sparsity.tokens(where)), mine

    found = on_ranks(ranks, job)
    mask, home = found[0][0]
    assert all((mask, home) == other for other, _ in found)
    problem = Problem(batch=1, heads=HEADS, kv_heads=HEADS, head_dim=6, q=home, kv=home, dtype="float64")
    schedule = build("ring", problem, mask)
    out = run_threads(
        ranks,
        lambda comm: Executor(schedule, comm, choose("reference")).forward(
            *found[comm.rank][1], 6**-0.5, keep=False
        )[0],
    )
    place = GRID.voxels(TILE).inverse
    raster = tokens_of(mask)[:, place][:, :, place]
    scores = (q @ k.mT * 6**-0.5).masked_fill(~raster, -torch.inf)
    assert not raster.all()
    torch.testing.assert_close(torch.cat(out, dim=2), scores.softmax(-1) @ v, rtol=1e-9, atol=1e-9)
    cube = np.array(np.unravel_index(np.arange(GRID.video), GRID.extent)) // np.array(TILE)[:, None]
    alike = torch.from_numpy((cube[:, :, None] == cube[:, None]).all(0))
    video = raster[:, GRID.prefix : -GRID.suffix, GRID.prefix : -GRID.suffix]
    if spec.startswith("sta"):  # the window is of cubes, wherever their tokens lie
        assert video[:, alike].all()


class Counted:
    """A producer that tells how often it was asked, and makes another mask in every step."""

    def __init__(self, *, every: int = 1) -> None:
        self.asked: list[tuple[int, int]] = []
        self.every = every

    def mask(self, where: AttentionContext, *_: Tensor) -> BlockMask:
        self.asked.append((where.layer, where.step))
        assert not torch.is_grad_enabled()
        tiles = np.tri(8, dtype=bool)[None].repeat(where.heads, axis=0)
        tiles[0, 0, 1 + where.step // self.every] = True
        return BlockMask.from_tiles(tiles, q_len=GRID.tokens, kv_len=GRID.tokens, block_q=BLOCK)


def ask(
    sparsity: MaskCache, *, steps: int, layers: int = 2, ranks: int = 1, **more: Any
) -> list[BlockMask | None]:
    """Ask as a model does, with a layout of many ranks; nothing is sent without recall."""
    q = k = torch.zeros(1, HEADS, GRID.tokens, 6)
    layout = Layout.even(GRID.tokens, ranks)
    places = [
        here(ALONE, layout, layer=n, step=t, layers=layers, **more)
        for t in range(steps)
        for n in range(layers)
    ]
    return [sparsity.mask(where, q, k) for where in places]


def quiet(producer: Any, **rules: Any) -> MaskCache:
    sparsity = MaskCache(producer)
    sparsity.schedule = replace(sparsity.schedule, recall=0, **rules)
    return sparsity


def test_a_mask_is_kept_until_it_is_refreshed() -> None:
    producer = Counted()
    sparsity = quiet(producer, refresh=3)
    masks = ask(sparsity, steps=7)
    assert producer.asked == [(n, t) for t in (0, 3, 6) for n in (0, 1)]
    assert all(masks[i] is masks[6 * (i // 6) + i % 2] for i in range(14))
    assert sparsity.summary().masks == 3
    assert sparsity.summary().renewals == 4


def test_the_same_step_again_gets_the_same_answer_and_another_run_is_asked_for() -> None:
    producer = Counted()
    sparsity = quiet(producer, refresh=4)
    q = k = torch.zeros(1, HEADS, GRID.tokens, 6)
    where = here(ALONE, Layout.even(GRID.tokens, 1))
    steps = [0, 0, 2, 2, 1, 0]
    masks = [sparsity.mask(replace(where, step=step), q, k) for step in steps]
    assert producer.asked == [(0, 0), (0, 1), (0, 0)]
    assert masks[0] is masks[1] is masks[2] is masks[3]
    sparsity.mask(replace(where, branch=1), q, k)  # guidance's other half has a mask of its own
    assert len(producer.asked) == 4
    sparsity.reset()
    sparsity.mask(where, q, k)
    assert len(producer.asked) == 5
    assert sparsity.summary().renewals == 0


def test_an_equal_mask_is_the_old_one() -> None:
    found = ask(quiet(Counted(every=2)), steps=4, layers=1)
    assert found[0] is found[1]
    assert found[2] is found[3]
    assert found[1] != found[2]


@pytest.mark.parametrize(
    ("spec", "steps", "layers", "dense"),
    [
        ("radial", 50, 4, (12, 1, 0)),
        ("radial", 4, 4, (1, 1, 0)),
        ("sta", None, 4, (15, 0, 0)),
        ("svg", 40, 40, (12, 1, 0)),
        ("topk:0.2", 10, 4, (2, 0, 0)),
        ("sta:dense_steps=3,dense_layers=0.5,dense_last=1", 40, 6, (3, 3, 1)),
        ("random", 50, 4, (0, 0, 0)),
    ],
)
def test_first_steps_and_layers_are_dense(
    spec: str, steps: int | None, layers: int, dense: tuple[int, int, int]
) -> None:
    rules = parse_method(spec)[1]
    where = here(ALONE, Layout.even(GRID.tokens, 1), layers=layers, steps=steps)
    found = [
        (step, layer)
        for step in range(steps or 50)
        for layer in range(layers)
        if not rules.is_dense(replace(where, step=step, layer=layer))
    ]
    first, low, high = dense
    assert found == [(t, n) for t in range(first, steps or 50) for n in range(low, layers - high)]


def test_the_summary_counts() -> None:
    spec = f"random:density=0.2+0.5+0.8,block={BLOCK},dense_steps=2,dense_last=1"
    q, k = queries_and_keys()
    layers, steps = 5, 6

    def job(world: World) -> Any:
        layout = Layout.even(GRID.tokens, world.comm.size)
        sparsity = MaskCache(spec)
        for step in range(steps):
            for layer in range(layers):
                where = here(world, layout, layer=layer, step=step, layers=layers)
                sparsity.mask(where, part(q, where), part(k, where))
        return sparsity.summary()

    one, two, *others = on_ranks(3, job)
    assert one == two == others[0]
    mask = mask_from_spec("random:density=0.2+0.5+0.8", heads=HEADS, grid=GRID, block=BLOCK)
    assert (one.sparse_calls, one.dense_calls) == (16, 14)
    assert (one.masks, one.renewals) == (1, 0)
    assert one.density == pytest.approx(mask.density)
    full = weights(q, k, 6**-0.5)
    # Layer and step of the calls that are measured.
    judged = [(0, 2), (RECALL_INTERVAL % 4, 2 + RECALL_INTERVAL // 4)]
    shares = []
    for layer, step in judged:
        places = sample_positions(GRID.prefix, GRID.video, 32, layer + step)
        shares.append(float((full[:, :, places] * tokens_of(mask)[:, places]).sum(-1).mean()))
    assert one.recall == pytest.approx(np.mean(shares), rel=1e-5)
    assert one.least_recall == pytest.approx(min(shares), rel=1e-5)
    assert "16 sparse and 14 dense" in str(one)
    assert f"{one.recall:.1%}" in str(one)


def test_recall_can_be_switched_off() -> None:
    sparsity = MaskCache(f"random:recall=0,block={BLOCK}")
    ask(sparsity, steps=1)
    assert sparsity.summary().recall is None
    assert "not measured" in str(sparsity.summary())


def test_specs_are_read() -> None:
    producer, rules = parse_method("topk:0.25, refresh=7, block=32, dense_steps=0.5")
    assert isinstance(producer, TopKMask)
    assert (producer.share, producer.block, rules.refresh, rules.dense_steps) == (0.25, 32, 7, 0.5)
    assert isinstance(parse_method("svg")[0], ProfiledMask)
    assert isinstance(parse_method("svg:spatial=0.5")[0], StaticMask)
    tiled = parse_method("sta:tile=2x4x8,window=3x3x3+1x6x10,dense_steps=0")[0]
    raster = parse_method("radial")[0]
    assert (tiled.tile, raster.tile) == ((2, 4, 8), None)  # pyright: ignore
    assert tiled.spec == "sta:tile=2x4x8,window=3x3x3+1x6x10"  # pyright: ignore


@pytest.mark.parametrize(
    "spec",
    [
        "stta", "topk", "topk:1.5", "topk:0", "topk:0.2,window=3", "topk:0.2,tile=4", "sta:windw=3x3x3",
        "sta:refresh=0", "sta:refresh=1.5", "svg:dense_steps=-1", "svg:dense_steps=2.5", "radial:block=0",
        "radial:dense_steps=nan", "topk:0.2,0.3", "sta:tile=2x2", "topk:nan",
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(spec: str) -> None:
    with pytest.raises(InputError):
        MaskCache(spec)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="mask"):
        sparse_attention(3)
    q = k = torch.zeros(1, HEADS, 7, 6)
    with pytest.raises(InputError, match="116 tokens, but the attention has 7"):
        MaskCache("random").mask(here(ALONE, Layout.even(7, 1)), q, k)

    class Wrong:
        def mask(self, where: AttentionContext, *_: Tensor) -> BlockMask:
            return mask_from_spec("random", heads=2, grid=where.grid, block=16)

    with pytest.raises(InputError, match="Wrong made a mask"):
        ask(MaskCache(Wrong()), steps=1)  # pyright: ignore


SPECS = {
    "wan": "sta:tile=2x2x2,window=1x1x1,block=8,dense_steps=0",
    "hunyuan": "topk:0.3,tile=2x2x2,block=8,dense_steps=0",  # samples have texts of different lengths
    "cogvideox": "svg:block=8,dense_steps=0,dense_layers=0",
    "flux": "random:density=0.4,cv=0.5,block=4,dense_layers=1",
}


@pytest.mark.parametrize("name", SPECS)
def test_a_sparse_transformer_is_that_of_one_process(name: str) -> None:
    """Output and gradients, with blocks that are computed again; each attention checked by sampled rows."""
    zoo = pytest.importorskip("tests.diffusers.zoo").ZOO[name]

    def job(world: World, spec: str = SPECS[name]) -> Any:
        model = zoo.make()
        model.enable_gradient_checkpointing()
        model.train()
        sparsity = MaskCache(spec)
        region = ShardedRegion(model, adapter_of(model), sparsity=sparsity, sampled_check=SampledCheck())
        out = region.run(world, (), zoo.inputs(grid=(3, 5, 7)))[0]
        loss = (out * normal(*out.shape, seed=7)).sum()
        weights = list(model.parameters())
        grads = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        return (out.detach(), list(grads)), sparsity.summary()

    ((alone, summary),) = on_ranks(1, job)
    dense = on_ranks(1, lambda world: job(world, "dense"))[0][0][0]
    assert summary.sparse_calls
    assert (dense - alone[0]).abs().max() > 1e-6
    found = on_ranks(3, job)
    check(alone, [each for each, _ in found], 5e-6)  # norms have their gradients in float32
    for (out, _), _ in found:
        assert (out - alone[0]).abs().max() < 1e-12
    for _, other in found:
        assert (other.density, other.dense_calls) == (summary.density, summary.dense_calls)
        assert other.recall == pytest.approx(summary.recall)
