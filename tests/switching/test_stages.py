"""`weft.stages` with threads as ranks, against the same model in one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from bench.stdit import AxialBlock, STDiT
from tests.diffusers.toys import DIMS, TURNS, AxialForecast, Video, check, normal, on_ranks, seeded, step
from tests.threads import ThreadComm, _Board, run_threads
from weft.core.errors import InputError, WeftError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.plan.choose import build
from weft.run.derivatives import Derived
from weft.run.execute import Executor
from weft.run.kernels import choose
from weft.run.world import World
from weft.switching.stages import Mixes

# (ranks, batch, T, S): primes, one image, more ranks than frames, more than tokens of a frame.
SHAPES = [(2, 1, 5, 7), (3, 2, 7, 11), (4, 2, 3, 13), (3, 2, 1, 5), (5, 1, 2, 3), (1, 1, 3, 4)]


@pytest.mark.parametrize(("ranks", "B", "T", "S"), SHAPES)
def test_outputs_and_gradients_are_those_of_one_process(ranks: int, B: int, T: int, S: int) -> None:
    x = normal(B, T, S, 6)

    def job(world: World | None) -> tuple[Tensor, list[Tensor]]:
        model = seeded(Video())
        if world is not None:
            weft.stages(model, TURNS, dims=DIMS, mesh=world)
        return step(model, x)

    check(job(None), on_ranks(ranks, job), 1e-10)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "time space": (
        lambda: STDiT(2, width=8, heads=2),
        lambda: (normal(2, 2, 5, 4, 6), torch.tensor([3.0, 500.0], dtype=torch.float64)),
    ),
    "time space, text": (
        lambda: STDiT(2, width=8, heads=2, text=5),
        lambda: (normal(2, 2, 3, 4, 6), torch.tensor([3.0, 5.0], dtype=torch.float64), normal(2, 7, 5)),
    ),
    "time height width": (
        lambda: STDiT(2, width=8, heads=2, depth=3, axes="time height width"),
        lambda: (normal(1, 2, 5, 6, 14), torch.tensor([70.0], dtype=torch.float64)),
    ),
    "one image": (
        lambda: STDiT(2, width=8, heads=2),
        lambda: (normal(2, 2, 1, 4, 6), torch.tensor([3.0, 500.0], dtype=torch.float64)),
    ),
    "weather": (lambda: AxialForecast(3, width=9, heads=3, depth=3), lambda: (normal(2, 5, 7, 3, 3),)),
}


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 3) for name in MODELS), ("time height width", 4), ("time space", 2)]
)
def test_the_models_of_weft_are_sharded_exactly(name: str, ranks: int) -> None:
    make, inputs = MODELS[name]

    def job(world: World | None) -> tuple[Tensor, list[Tensor]]:
        model: Any = seeded(make())
        if world is not None:
            model.shard(world)
        return step(model, *inputs())

    check(job(None), on_ranks(ranks, job), 1e-10)


class Axes(nn.Module):
    """[B, d1, …, dK, C] through blocks along each dim in turn."""

    def __init__(self, dims: int, depth: int, width: int = 4) -> None:
        super().__init__()
        blocks = [
            nn.ModuleDict({f"d{i}": AxialBlock(width, 1, i) for i in range(1, dims + 1)})
            for _ in range(depth)
        ]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            for block in layer.values():  # pyright: ignore
                x = block(x)
        return x


def sent(dims: int, depth: int, ranks: int, *, backward: bool = False) -> set[int]:
    """Bytes that each rank hands to the transport in one forward, or forward and backward."""
    names = [f"d{i}" for i in range(1, dims + 1)]
    x = normal(2, *(ranks,) * dims, 4)

    def job(world: World) -> int:
        model = seeded(Axes(dims, depth))
        weft.stages(model, {f"blocks.*.{n}": n for n in names}, dims=f"b {' '.join(names)} c", mesh=world)
        with torch.set_grad_enabled(backward):
            out = model(x)
            if backward:
                out.sum().backward()
        return world.comm.bytes_sent

    return set(on_ranks(ranks, job))


@pytest.mark.parametrize(
    ("dims", "layers", "switches", "ranks"),
    [(2, 1, 2, 2), (2, 1, 2, 3), (2, 1, 2, 4), (3, 2, 3, 2), (3, 2, 3, 3), (3, 2, 3, 4), (4, 3, 4, 2)],
)
def test_a_layer_sends_what_the_limit_is(dims: int, layers: int, switches: int, ranks: int) -> None:
    """K/(K-1) · M/N · (N-1)/N: so many more bytes for so many more layers, both ways."""
    M = 2 * ranks**dims * 4 * 8
    one = M * (ranks - 1) // ranks**2
    [less], [more] = sent(dims, layers, ranks), sent(dims, 2 * layers, ranks)
    assert more - less == switches * one
    # The first layout is free, and in the end comes a gather.
    assert less == (switches - 1) * one + M * (ranks - 1) // ranks
    [both] = sent(dims, layers, ranks, backward=True)
    assert both == 2 * less


def test_a_checkpointed_stage_is_switched_again_for_its_gradients() -> None:
    class Kept(Video):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in self.blocks:
                for name in ("spatial", "temporal"):
                    x = checkpoint(layer[name], x, use_reentrant=False)  # pyright: ignore
            return self.head(x)

    x = normal(2, 5, 7, 6)

    def job(world: World | None) -> tuple[Tensor, list[Tensor]]:
        model = seeded(Kept())
        if world is not None:
            weft.stages(model, TURNS, dims=DIMS, mesh=world)
        step(model, x)
        return step(model, x)

    check(job(None), on_ranks(3, job), 1e-10)


def test_inputs_of_all_sizes_may_follow_each_other() -> None:
    def job(world: World | None) -> list[Tensor]:
        model = seeded(Video())
        handle = None if world is None else weft.stages(model, TURNS, dims=DIMS, mesh=world)
        outs, plans = [], []
        for B, T, S in [(1, 5, 7), (2, 1, 9), (1, 5, 7), (3, 2, 2)]:
            outs.append(model(normal(B, T, S, 6)).detach())
            plans.append(handle and handle.route)
        if handle is not None:
            assert plans[0] == plans[2]
            assert plans[0].layouts != plans[1].layouts  # pyright: ignore - one frame is not dealt
            handle.remove()
            before = world.comm.bytes_sent  # pyright: ignore
            outs.append(model(normal(1, 5, 7, 6)).detach())
            assert world.comm.bytes_sent == before  # pyright: ignore
        return outs

    expected = job(None)
    for outs in on_ranks(2, job):
        for found, wanted in zip(outs, [*expected, expected[0]], strict=True):
            assert torch.allclose(found, wanted, atol=1e-12)


def test_images_are_dealt_by_the_batch_where_it_may_be_sharded() -> None:
    x = normal(4, 1, 7, 6)

    def job(world: World | None) -> tuple[Tensor, list[Tensor]]:
        model = seeded(Video())
        handle = None
        if world is not None:
            handle = weft.stages(model, TURNS, dims=DIMS, mesh=world, shard="batch time space")
        found = step(model, x)
        if handle is not None:
            assert {*handle.route.layouts} == {("batch",)}  # pyright: ignore
        return found

    check(job(None), on_ranks(3, job), 1e-10)


def test_an_output_may_stay_sharded() -> None:
    x = normal(1, 5, 7, 6)
    whole = seeded(Video())(x)

    def job(world: World) -> Tensor:
        model = seeded(Video())
        weft.stages(model, TURNS, dims=DIMS, mesh=world, exit="space")
        return model(x)

    assert torch.allclose(torch.cat(on_ranks(3, job), 2), whole, atol=1e-12)


def on_mesh(sizes: tuple[int, ...], job: Callable[[list[World]], Any]) -> list[Any]:
    """Ranks on several axes: each has a world for each axis."""
    ranks = torch.arange(int(torch.tensor(sizes).prod())).view(sizes)
    comms: list[list[ThreadComm]] = [[] for _ in range(ranks.numel())]
    for axis in range(len(sizes)):
        for group in ranks.movedim(axis, -1).reshape(-1, sizes[axis]).tolist():
            board = _Board(len(group), 20.0)
            for at, rank in enumerate(group):
                comms[rank].append(ThreadComm(board, at))
    return run_threads(ranks.numel(), lambda comm: job([World(c) for c in comms[comm.rank]]))


@pytest.mark.parametrize(
    ("mesh", "grid"), [((2, 2), (3, 4, 5)), ((2, 3), (4, 3, 5)), ((3, 2), (2, 3, 2)), ((2, 2), (1, 3, 5))]
)
def test_two_dims_are_sharded_at_once_over_a_mesh(mesh: tuple[int, int], grid: tuple[int, ...]) -> None:
    x = normal(2, *grid, 6)

    def job(worlds: Any) -> tuple[Tensor, list[Tensor]]:
        model = seeded(Axes(3, 2, 6))
        if worlds is not None:
            weft.stages(
                model, {f"blocks.*.d{i}": f"d{i}" for i in (1, 2, 3)}, dims="b d1 d2 d3 c", mesh=worlds
            )
        return step(model, x)

    check(job(None), on_mesh(mesh, job), 1e-10)


def test_several_replicas_take_the_mean_of_everything() -> None:
    """Data parallel × sequence parallel: DDP's mean over all ranks is the gradient of the mean loss."""
    batches = [normal(1, 3, 5, 6, seed=s) for s in (1, 2)]

    def loss(model: nn.Module, x: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))

    def job(worlds: list[World]) -> list[Tensor]:
        model = seeded(Video())
        weft.stages(model, TURNS, dims=DIMS, mesh=worlds[1])
        return loss(model, batches[worlds[0].comm.rank])

    alone = seeded(Video())
    expected = [sum(g) / 2 for g in zip(*(loss(alone, x) for x in batches), strict=True)]
    for by_rank, wanted in zip(zip(*on_mesh((2, 3), job), strict=True), expected, strict=True):
        assert torch.allclose(torch.stack(by_rank).mean(0), wanted, atol=1e-10)  # pyright: ignore


def test_dims_may_be_folded_into_one() -> None:
    """A stage's input may have its dims in another order, some of them in one."""

    class Alternating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spatial, self.temporal = AxialBlock(6, 2, 1), AxialBlock(6, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            B = x.shape[0]
            x = self.spatial(x.flatten(0, 1)).unflatten(0, (B, -1))
            return self.temporal(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (B, -1)).transpose(1, 2)

    x = normal(2, 5, 7, 6)

    def job(world: World | None) -> tuple[Tensor, list[Tensor]]:
        model = seeded(Alternating())
        if world is not None:
            declared = {
                "spatial": Mixes("space", dims="(batch time) space channel"),
                "temporal": Mixes("time", dims="(batch space) time channel"),
            }
            handle = weft.stages(model, declared, dims=DIMS, mesh=world)
            handle.sizes["time"] = 5
        return step(model, x)

    check(job(None), on_ranks(3, job), 1e-10)


class Global(nn.Module):
    """Attends over all tokens; with a world, over those of all its ranks."""

    def __init__(self, world: World | None = None) -> None:
        super().__init__()
        self.world, self.qkv = world, nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).flatten(1, 2).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        if self.world is None:
            out = nn.functional.scaled_dot_product_attention(q, k, v)
        else:  # dense attention does not mind in which order tokens come
            every = Layout.uneven([row[0] for row in self.world.comm.all_gather_ints([q.shape[2]])])
            problem = Problem(batch=2, heads=2, kv_heads=2, head_dim=3, q=every, kv=every, dtype="float64")
            schedule = build("ulysses", problem, BlockMask.dense(2, every.size))
            executor = Executor(schedule, self.world.comm, choose("reference"))
            out = Derived(executor, 3**-0.5, keep=True)(q, k, v)
        return x + out.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("inside", [False, True])
def test_a_stage_that_mixes_all_dims_is_gathered_or_attends_over_ranks(inside: bool) -> None:
    class Between(Video):
        def __init__(self, world: World | None) -> None:
            super().__init__(depth=1)
            self.everything, self.last = Global(world), Video(depth=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.everything(super().forward(x)))

    x = normal(2, 5, 7, 6)
    middle: Any = {"everything": Mixes("time space", inside=inside)}
    loops = [TURNS, middle, {f"last.{name}": dims for name, dims in TURNS.items()}]

    def job(world: World | None) -> tuple[Tensor, list[Tensor]]:
        model = seeded(Between(world if inside else None))
        if world is not None:
            handle = weft.stages(model, loops, dims=DIMS, mesh=world)
        found = step(model, x)
        if world is not None:
            assert ("whole" in handle.route.layouts[2]) != inside  # pyright: ignore
        return found

    check(job(None), on_ranks(3, job), 1e-10)


class Spoiled(Video):
    """A model with one more module, `extra`, in its last layer."""

    def __init__(self, extra: nn.Module) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, layer in enumerate(self.blocks):
            x = layer["spatial"](x)  # pyright: ignore
            if number == 1:
                x = self.extra(x)
            x = layer["temporal"](x)  # pyright: ignore
        return self.head(x)


class Longer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x[:, :, :1]], 2)


class Centred(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(self.dim, keepdim=True)


def refused(make: Callable[[], nn.Module], said: str, **changes: Any) -> None:
    def job(world: World) -> str:
        with pytest.raises(WeftError) as caught:
            weft.stages(
                model := seeded(make()), **{"declared": TURNS, "dims": DIMS, "mesh": world, **changes}
            )  # pyright: ignore
            model(normal(2, 4, 6, 6))
        assert isinstance(caught.value, InputError)
        return str(caught.value)

    for message in on_ranks(2, job, timeout=3.0):
        assert said in message, message


def test_a_stage_that_mixes_more_than_it_is_said_to_is_found_out() -> None:
    refused(
        Video,
        "Stage blocks.0.spatial mixes space, which is sharded",
        declared={**TURNS, "blocks.*.spatial": ""},
    )
    refused(
        Video,
        'Declare that it does: {"blocks.0.temporal": "space time"}',
        declared={"blocks.*.spatial": "space", "blocks.*.temporal": "space"},
    )


def test_a_module_between_stages_that_mixes_what_is_sharded_is_found_out() -> None:
    refused(lambda: Spoiled(Centred(1)), "extra (Centred) mixes time, which is sharded")
    refused(lambda: Spoiled(AxialBlock(6, 2, 1)), "extra (AxialBlock) mixes time, which is sharded")


def test_a_module_that_mixes_what_is_not_sharded_is_fine() -> None:
    x = normal(2, 4, 6, 6)

    def job(world: World | None) -> tuple[Tensor, list[Tensor]]:
        model = seeded(Spoiled(Centred(2)))
        if world is not None:
            weft.stages(model, TURNS, dims=DIMS, mesh=world)
        return step(model, x)

    check(job(None), on_ranks(2, job), 1e-10)


def test_mixing_behind_a_gate_is_found_out_when_the_gate_opens() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gate * x.mean(2, keepdim=True)

    def job(world: World) -> list[bool]:
        model = nn.Sequential(seeded(Gated()))
        with torch.no_grad():
            model[0].gate.zero_()
        weft.stages(model, {"0": "time"}, dims=DIMS, mesh=world)
        found = []
        for number in range(8):
            if number == 2:
                with torch.no_grad():
                    model[0].gate.fill_(0.5)
            try:
                model(normal(1, 4, 6, 6))
            except InputError as error:
                assert "Stage 0 mixes space" in str(error)
                return [*found, True]
            found.append(False)
        return found

    assert on_ranks(2, job) == [[False, False, False, True]] * 2


def test_a_module_that_changes_shapes_is_found_out() -> None:
    refused(lambda: Spoiled(Longer()), "Stage blocks.1.temporal has a tensor of shape")
    refused(
        lambda: Spoiled(Longer()),
        "Stage extra turns a tensor of shape",
        declared=[
            {"blocks.0.spatial": "space", "blocks.0.temporal": "time"},
            {"blocks.1.spatial": "space"},
            {"extra": ""},
        ],
    )


def test_stages_that_run_in_another_order_are_found_out() -> None:
    refused(
        Video,
        "Stage blocks.0.temporal ran where the declaration expects blocks.1.spatial",
        declared=[{"blocks.*.spatial": "space"}, {"blocks.*.temporal": "time"}],
    )


def test_names_that_do_not_exist_are_refused() -> None:
    model = Video()
    for declared, dims, said in (
        ({"blocks.*.spatail": "space"}, DIMS, "Did you mean blocks.0.spatial"),
        ({"blocks.*.spatial": "spice"}, DIMS, "Stage blocks.0.spatial is declared to mix 'spice'"),
        ({"blocks.*.spatial": Mixes("space", dims="batch space channel")}, DIMS, "each of batch, time"),
        ({"blocks.*": "space", "blocks.*.spatial": "space"}, DIMS, "is inside stage blocks.0"),
        ([TURNS, TURNS], DIMS, "declared twice"),
        ({}, DIMS, "0 stages"),
        (TURNS, "batch time time channel", "declared to mix 'space'"),
    ):
        with pytest.raises(InputError, match=said):
            weft.stages(model, declared, dims=dims)  # pyright: ignore
    with pytest.raises(InputError, match="no dim 'spacetime'"):
        weft.stages(model, TURNS, dims=DIMS, shard="spacetime")
    with pytest.raises(InputError, match="no dim 'spacetime'"):
        weft.stages(model, TURNS, dims=DIMS, exit="spacetime")


def test_ranks_with_inputs_of_different_sizes_all_raise() -> None:
    def job(world: World) -> str:
        model = seeded(Video())
        weft.stages(model, TURNS, dims=DIMS, mesh=world)
        with pytest.raises(WeftError) as caught:
            model(normal(2 + world.comm.rank, 4, 6, 6))
        return str(caught.value)

    for message in on_ranks(2, job, timeout=5.0):
        assert "x differs on ranks [1] ([3, 4, 6, 6] float64; the others [2, 4, 6, 6] float64)" in message
