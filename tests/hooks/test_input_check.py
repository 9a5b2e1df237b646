"""Ranks of one sequence that are given different inputs: found and named, and never where they are equal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

diffusers: Any = pytest.importorskip("diffusers")

import weft  # noqa: E402
from tests.diffusers.toys import DIMS, TURNS, Video, normal, on_ranks, seeded  # noqa: E402
from tests.diffusers.zoo import ZOO  # noqa: E402
from tests.distributed.jobs import Worlds  # noqa: E402
from tests.run.hot_path import fake_cuda  # noqa: E402
from weft.core.errors import AgreementError  # noqa: E402
from weft.hooks import input_check  # noqa: E402
from weft.hooks.digest import digest  # noqa: E402
from weft.hooks.input_check import Comparison, Digests  # noqa: E402
from weft.run.world import World, world_of  # noqa: E402

Change = Callable[[dict[str, Any]], None]


def noisy(given: dict[str, Any]) -> None:
    given["hidden_states"].add_(1e-3)


def longer(given: dict[str, Any]) -> None:
    given["encoder_hidden_states"] = given["encoder_hidden_states"].repeat(1, 2, 1)


def doubled(given: dict[str, Any]) -> None:
    given["hidden_states"] = given["hidden_states"].double()


def scaled(given: dict[str, Any]) -> None:
    given["attention_kwargs"] = {"scale": 0.5}


CHANGES: dict[str, tuple[Change, str]] = {
    "values": (noisy, "hidden_states differs on ranks [1] (values "),
    "length": (longer, "encoder_hidden_states differs on ranks [1] ([2, 14, "),
    "dtype": (doubled, "hidden_states differs on ranks [1] ([2, "),
    "plain value": (scaled, "attention_kwargs['scale'] differs on ranks [1] (0.5; the others None)"),
}


def outcome(model: nn.Module, given: dict[str, Any]) -> str:
    """What a forward raises."""
    try:
        with torch.no_grad():
            model(**given)
    except AgreementError as error:
        return str(error)
    return ""


def calls(
    name: str,
    odd: dict[int, Change],
    count: int,
    mesh: Any = None,
    dtype: Any = torch.float32,
    **options: Any,
) -> list[str]:
    """What each forward raises, of which rank 1 is given something else in some."""
    model = weft.parallelize(ZOO[name].make(dtype), mesh=mesh, **options)
    rank, found = world_of(mesh, 60.0).comm.rank, []
    for at in range(1, count + 1):
        given = ZOO[name].inputs(dtype=dtype)
        if rank == 1 and at in odd:
            odd[at](given)
        found.append(outcome(model, given))
    return found


@pytest.mark.parametrize(
    ("ranks", "name", "cfg", "change"),
    [
        (2, "wan", "auto", "values"),
        (3, "flux", "auto", "values"),
        (2, "flux", "off", "length"),
        (3, "wan", "auto", "plain value"),
        (2, "wan", "on", "dtype"),
    ],
)
def test_a_rank_with_other_inputs_is_named(
    worlds: Worlds, ranks: int, name: str, cfg: str, change: str
) -> None:
    odd, message = CHANGES[change]
    for found in worlds(ranks).run(partial(calls, cfg=cfg), name, {1: odd}, 2):
        assert message in found[0]
        assert "Give all ranks of a sequence the same inputs and noise" in found[0]
        assert found[1] == ""  # the same again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_compared_ever_more_rarely_or_always(dtype: torch.dtype) -> None:
    def job(check: str) -> Callable[[World], list[bool]]:
        odd = dict.fromkeys(range(3, 9), noisy if dtype == torch.float32 else lambda x: x["timestep"].add_(8))
        return lambda world: [*map(bool, calls("wan", odd, 8, world, dtype, check=check))]

    assert on_ranks(2, job("none")) == [[at in (4, 8) for at in range(1, 9)]] * 2
    assert on_ranks(2, job("always")) == [[at >= 3 for at in range(1, 9)]] * 2


def test_equal_inputs_that_are_not_numbers_or_not_contiguous_raise_nothing() -> None:
    def job(world: World) -> str:
        given = ZOO["wan"].inputs()
        given["hidden_states"] = given["hidden_states"].transpose(-1, -2).contiguous().transpose(-1, -2)
        if world.comm.rank:
            given["hidden_states"] = given["hidden_states"].contiguous()
        given["hidden_states"][0] = float("nan")
        return outcome(weft.parallelize(ZOO["wan"].make(), mesh=world), given)

    assert on_ranks(2, job) == ["", ""]


@pytest.mark.parametrize("state", ["model.training", "torch.is_grad_enabled()"])
def test_the_state_of_training_is_compared(state: str) -> None:
    def job(world: World) -> str:
        model = weft.parallelize(ZOO["wan"].make(), mesh=world)
        model.train(state == "model.training" and world.comm.rank == 1)
        grad = torch.set_grad_enabled(state != "model.training" and world.comm.rank == 1)
        with grad, pytest.raises(AgreementError) as caught:
            model(**ZOO["wan"].inputs())
        return str(caught.value)

    for message in on_ranks(2, job):
        assert f"{state} differs on ranks [1] (True; the others False)" in message


def data_by_sequence(odd: bool) -> tuple[list[str], int]:  # noqa: FBT001
    """The outcome of ranks whose data dims have other inputs, and of a rank of one that differs in itself."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    data, sequence = mesh.get_coordinate() or (0, 0)
    model = weft.parallelize(ZOO["wan"].make(), mesh=mesh["sequence"])
    given = ZOO["wan"].inputs()
    given["hidden_states"].add_(data + odd * (data and sequence))
    return [outcome(model, given)], data


def test_ranks_of_the_data_dim_may_differ(worlds: Worlds) -> None:
    assert [found for found, _ in worlds(4).run(data_by_sequence, False)] == [[""]] * 4
    for (found,), data in worlds(4).run(data_by_sequence, True):
        assert ("hidden_states differs on ranks [1]" in found) == (data == 1)


@pytest.mark.parametrize("whole", [False, True])
def test_a_forward_that_is_computed_again_is_not_compared_again(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    start = input_check.start_inputs
    monkeypatch.setattr(input_check, "start_inputs", lambda *args: (started.append(1), start(*args))[1])

    def job(world: World) -> None:
        model = weft.parallelize(ZOO["wan"].make().train(), mesh=world)
        given = ZOO["wan"].inputs()
        if not whole:
            model.enable_gradient_checkpointing()
        for _ in range(2):
            out = checkpoint(model, **given, use_reentrant=False) if whole else model(**given)
            out[0].sum().backward()

    on_ranks(2, job)
    assert len(started) == 4


def sharded(world: World, **options: Any) -> nn.Module:
    model = seeded(Video())
    weft.stages(model, TURNS, dims=DIMS, mesh=world, **options)
    return model


@pytest.mark.parametrize("ranks", [2, 3])
def test_stages_compare_their_inputs_too(ranks: int) -> None:
    def job(world: World) -> list[str]:
        model, always = sharded(world), sharded(world, check="always")
        found = []
        for at in range(1, 6):
            x = normal(1, 4, 6, 6)
            x[0, 0, 0, 0] += at >= 3 and world.comm.rank == 1
            found += [outcome(model, {"x": x}), outcome(always, {"x": x})]
        return found

    for found in on_ranks(ranks, job):
        assert [*map(bool, found[::2])] == [False, False, False, True, False]
        assert [*map(bool, found[1::2])] == [False, False, True, True, True]
        assert "Ranks of one sequence gave Video different inputs: x differs on ranks [1] (values" in found[6]


class Event:
    """Of a device that is behind its host."""

    def __init__(self) -> None:
        self.queries = 0

    def query(self) -> bool:
        self.queries += 1
        return self.queries > 2


def test_digests_of_a_device_are_compared_when_they_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_check, "is_host", lambda _: False)
    monkeypatch.setattr(input_check.streams, "record", lambda _: Event())

    def job(world: World) -> list[tuple[bool, str]]:
        comparison, found = Comparison("a model", ["x", "scale"]), []
        for at in range(1, 6):
            x = torch.ones(3) * (2 if at == world.comm.rank == 1 else 1)
            is_run, message = False, ""
            try:
                with comparison(world, nn.Identity(), (x,), {"scale": at == 5 and world.comm.rank}):
                    is_run = True
            except AgreementError as error:
                message = str(error)
            found.append((is_run, message))
        return found

    for found in on_ranks(2, job):
        assert [is_run for is_run, _ in found] == [True] * 5
        assert [bool(message) for _, message in found] == [False, False, True, False, True]
        assert "gave a model different inputs 2 forwards ago: x differs on ranks [1] (values" in found[2][1]
        assert "different inputs: scale differs on ranks [1] (1; the others 0)" in found[4][1]


def test_a_digest_reads_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_check, "_has_values", lambda _: True)
    with fake_cuda() as seen:
        tensors = {name: torch.empty(3, 5, dtype=torch.bfloat16, device="cuda") for name in "ab"}
        seen.clear()
        Digests(tensors)
        assert not seen.reads
        assert [copy.split("(")[0] for copy in seen.copies] == ["to"]


DTYPES = (
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float32,
)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.complex64])
def test_a_digest_depends_on_bits_and_their_order_alone(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0] * 500).to(dtype).reshape(7, 500)
    assert int(digest(x)) == int(digest(x.clone()))
    assert int(digest(x.T)) == int(digest(x.T.contiguous())) != int(digest(x))
    assert len({int(digest(x.view(-1)[at:])) for at in range(4)}) == 4  # storage that is not aligned
    swapped = x.clone().view(-1)
    swapped[[0, 512 + 1]] = swapped[[512 + 1, 0]]
    assert (int(digest(swapped)) == int(digest(x))) == bool((swapped == x.view(-1)).all())


def test_digests_of_chunks_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(1000)
    whole = int(digest(x))
    monkeypatch.setattr("weft.hooks.digest.CHUNK_WORDS", 64)
    assert int(digest(x)) == whole
    zeros: list[Tensor] = [torch.zeros(4), -torch.zeros(4), torch.zeros(5), torch.full((4,), float("nan"))]
    assert len({int(digest(each)) for each in zeros}) == 4
    assert int(digest(torch.zeros(0))) == 0
