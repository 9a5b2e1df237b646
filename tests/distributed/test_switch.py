"""Switches and staged models in worlds of processes, in float32, and what they send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import weft
from bench.stdit import STDiT
from tests.diffusers.toys import DIMS, TURNS, AxialForecast, Video, check, normal, seeded, step
from tests.distributed.jobs import Worlds
from tests.worlds import SIZES
from weft.core.indices import split_evenly
from weft.core.layout import Layout
from weft.core.problem import Switch
from weft.run.measure.trace import read_trace
from weft.run.spawn.pool import RankFailure
from weft.run.world import world_of
from weft.schedule.measure import measure
from weft.schedule.reverse import reverse
from weft.schedule.switch import switch

GRID = {"batch": 2, "time": 5, "space": 7, "channel": 3}
Answer = tuple[Tensor, list[Tensor]]


def part(x: Tensor, name: str) -> Tensor:
    start, stop = split_evenly(GRID[name], dist.get_world_size())[dist.get_rank()]
    return x.narrow(list(GRID).index(name), start, stop - start)


def there_and_back(dtype: torch.dtype) -> tuple[bool, list[int]]:
    """Whether a switch, two asynchronous ones and a gather are right, and the bytes of each step."""
    x, slope = (normal(*GRID.values(), seed=s, dtype=dtype) for s in (1, 2))
    mine = part(x, "time").clone().requires_grad_()
    comm = world_of(None, 60.0).comm
    sent = [comm.bytes_sent]

    def done() -> None:
        sent.append(comm.bytes_sent)

    pending = weft.switch(mine, "time", "space", dims=GRID, async_op=True)
    another = weft.switch(3 * mine, "time", "space", dims=GRID, async_op=True)
    done()
    now = weft.switch(-2 * mine, "time", "space", dims=GRID)
    done()
    out = pending.wait()
    everything = weft.gather(out, "space", dims=GRID)
    done()
    (grad,) = torch.autograd.grad(everything, mine, slope)
    done()
    right = [
        torch.equal(out, part(x, "space")),
        torch.equal(now, -2 * out),
        torch.equal(another.wait(), 3 * out),
        torch.equal(everything, x),
        torch.allclose(
            grad, dist.get_world_size() * part(slope, "time"), rtol=1e-2 if dtype.itemsize == 2 else 1e-6
        ),
    ]
    return all(right), [b - a for a, b in zip(sent, sent[1:], strict=False)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("size", SIZES)
def test_a_switch_of_processes_is_right_and_sends_what_its_schedule_says(
    worlds: Worlds, size: int, dtype: str
) -> None:
    time, space = (Layout.even(GRID[name], size) for name in ("time", "space"))
    one = switch(Switch.of(time, space, width=6, dtype=dtype))
    two = switch(Switch.of(space, width=30, dtype=dtype))
    ahead, again, back = measure(one), measure(two), [measure(reverse(s)) for s in (one, two)]
    for rank, (right, sent) in enumerate(worlds(size).run(there_and_back, getattr(torch, dtype))):
        assert right
        step_back = sum(report.sent(rank) for report in back)
        assert sent == [2 * ahead.sent(rank), ahead.sent(rank), again.sent(rank), step_back]


def trained(kind: str, shape: tuple[int, ...], sharded: bool, mesh: Any = None) -> Answer:
    """One step of a model of float32, and of the same one again, so that nothing of the first is left."""
    dtype = torch.float32
    makes: dict[str, Any] = {
        "video": lambda: Video(),
        "stdit": lambda: STDiT(2, width=8, heads=2, text=5),
        "stdit 3 axes": lambda: STDiT(2, width=8, heads=2, axes="time height width"),
        "weather": lambda: AxialForecast(3, width=6, heads=2),
    }
    model = seeded(makes[kind](), dtype=dtype)
    inputs = [normal(*shape, dtype=dtype)]
    if "stdit" in kind:
        inputs.append(normal(shape[0], seed=2, dtype=dtype) * 100)
    if kind == "stdit":
        inputs.append(normal(shape[0], 4, 5, seed=3, dtype=dtype))
    if sharded:
        if kind == "video":
            weft.stages(model, TURNS, dims=DIMS, mesh=mesh)
        else:
            model.shard(mesh)  # pyright: ignore
    step(model, *inputs)
    return step(model, *inputs)


CASES = {
    "primes": ("video", (2, 7, 11, 6)),
    "one image": ("video", (2, 1, 7, 6)),
    "few frames": ("video", (1, 2, 3, 6)),
    "stdit": ("stdit", (2, 2, 5, 4, 6)),
    "stdit 3 axes": ("stdit 3 axes", (1, 2, 5, 6, 14)),
    "weather": ("weather", (2, 5, 7, 3, 3)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", SIZES)
def test_a_model_on_ranks_equals_one_process(worlds: Worlds, size: int, case: str) -> None:
    kind, shape = CASES[case]
    check(trained(kind, shape, False), worlds(size).run(trained, kind, shape, True), 5e-6)


def sent_by(kind: str, shape: tuple[int, ...], depth: int) -> int:
    makes = {
        "video": lambda: STDiT(2, width=8, heads=2, depth=depth, patch=1),
        "video 3 axes": lambda: STDiT(2, width=8, heads=2, depth=depth, patch=1, axes="time height width"),
    }
    model = makes[kind]()
    model.shard()
    comm = world_of(None, 60.0).comm
    before = comm.bytes_sent
    with torch.no_grad():
        model(normal(*shape, dtype=torch.float32), torch.zeros(shape[0]))
    return comm.bytes_sent - before


@pytest.mark.parametrize(("kind", "layers", "switches"), [("video", 1, 2), ("video 3 axes", 2, 3)])
@pytest.mark.parametrize("size", SIZES)
def test_a_layer_sends_what_the_limit_is(
    worlds: Worlds, size: int, kind: str, layers: int, switches: int
) -> None:
    """K/(K-1) switches of M/N · (N-1)/N a layer, counted at the transport."""
    shape = (2, 2, size, size, size)
    few, many = (worlds(size).run(sent_by, kind, shape, n * layers) for n in (1, 2))
    M = 2 * size**3 * 8 * 4
    assert {b - a for a, b in zip(few, many, strict=True)} == {switches * M * (size - 1) // size**2}


def on_a_mesh(axes: dict[str, int], use: str | None) -> Answer:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return trained("weather", (2, 3, 4, 5, 3), True, mesh if use is None else mesh[use])


@pytest.mark.parametrize(("axes", "use"), [({"a": 2, "b": 2}, None), ({"dp": 2, "sp": 2}, "sp")])
def test_meshes_of_two_axes(worlds: Worlds, axes: dict[str, int], use: str | None) -> None:
    """Both axes shard a dim each, or one is for replicas."""
    expected = trained("weather", (2, 3, 4, 5, 3), False)
    check(expected, worlds(4).run(on_a_mesh, axes, use), 5e-6)


def traced(directory: Path) -> list[int]:
    x = part(normal(*GRID.values(), dtype=torch.float32), "time").requires_grad_()
    comm = world_of(None, 60.0).comm
    before = comm.bytes_sent
    with weft.trace(directory):
        out = weft.switch(x, "time", "space", dims=GRID, stage="blocks.0")
        weft.switch(x, "time", "space", dims=GRID, async_op=True).wait()
        out.sum().backward()
    return [comm.bytes_sent - before]


@pytest.mark.parametrize("size", [2, 3])
def test_a_switch_is_traced_like_any_schedule(worlds: Worlds, tmp_path: Path, size: int) -> None:
    sent = worlds(size).run(traced, tmp_path)
    found = read_trace(tmp_path)
    assert found.traffic.sum(axis=1).tolist() == [bytes_ for (bytes_,) in sent]
    names = {span.name for span in found.spans if span.kind == "send" and span.rank == 0}
    assert "send time → space → 1" in names
    assert "send time → space backward → 1" in names
    time, space = (Layout.even(GRID[name], size) for name in ("time", "space"))
    told = measure(switch(Switch.of(time, space, width=6))).matrix()
    for call in (0, 1):
        assert (read_trace(tmp_path, call).traffic == told).all()
    assert (read_trace(tmp_path, 2).traffic == told.T).all()


def differs() -> None:
    x = part(normal(*GRID.values()), "time")
    x = x[:1] if dist.get_rank() == 1 else x
    weft.switch(x, "time", "space", dims={**GRID, "batch": None}, stage="blocks.7")


def test_ranks_that_differ_raise_and_name_the_stage(worlds: Worlds) -> None:
    with pytest.raises(RankFailure, match="switches at blocks.7") as caught:
        worlds(2).run(differs)
    assert len(caught.value.failures) == 2
