"""Mutations: what mixes tokens, or goes by their places or number in a shard, is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import weft
from tests.diffusers.mutants import CHANGES, PLACES, TINY, WIDTH, Apply, Tiny, layer, put, rotated
from tests.diffusers.toys import DIMS, TURNS, Video, check, normal, on_ranks, seeded, step
from weft.core.errors import InputError
from weft.diffusers import token_probe
from weft.diffusers.adapter import Shard
from weft.run.spawn.pool import Pool

TOKENS = 12
EVERY = [(name, place) for name in CHANGES for place in PLACES]
SOME = [(name, PLACES[(number + number // len(PLACES)) % len(PLACES)]) for number, name in enumerate(CHANGES)]
"""Each change, and each place with several."""


def inputs(dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> tuple[Tensor, ...]:
    return tuple(normal(2, *shape, dtype=dtype) for shape in ((tokens, WIDTH), (5, WIDTH), (WIDTH,)))


def run(
    mutate: Callable[[Any], Any],
    ranks: int = 2,
    dtype: torch.dtype = torch.float64,
    tokens: int = TOKENS,
    adapter: Any = TINY,
    **given: Any,
) -> list[Any]:
    def job(world: Any) -> Any:
        model = seeded(Tiny(), dtype=dtype)
        mutate(model)
        weft.parallelize(model, mesh=world, adapter=adapter, cfg="off")
        return step(model, *inputs(dtype, tokens), *given.values())

    return on_ranks(ranks, job)


def message(mutate: Callable[[Any], Any], **how: Any) -> str:
    with pytest.raises(InputError) as caught:
        run(mutate, **how)
    return str(caught.value)


def refused(name: str, place: str, ranks: int = 2) -> None:
    blamed: list[str] = []
    text = message(lambda model: blamed.append(put(model, CHANGES[name], place)), ranks=ranks)
    assert text.startswith(f"{blamed[0]} "), text
    assert "computes a token from" in text


@pytest.mark.parametrize(("name", "place"), SOME)
def test_what_mixes_tokens_is_refused_by_name(name: str, place: str) -> None:
    refused(name, place)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("name", "place"), EVERY)
def test_every_change_in_every_place_is_refused(name: str, place: str, ranks: int) -> None:
    refused(name, place, ranks)


def test_attention_beside_attention_is_refused() -> None:
    """In a declared site: heads by its own softmax, queries turned by local places, a scale by number."""
    for part, change in {"heads": None, "queries": rotated, "scale": lambda x: x.shape[1] ** -0.5}.items():
        text = message(lambda model, part=part, how=change: model.blocks[1].attn.places.update({part: how}))
        assert text.startswith("blocks.1.attn (Attention) computes a token from"), text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_mixing_and_hides_none(dtype: torch.dtype) -> None:
    run(lambda _: None, dtype=dtype)
    message(lambda model: model.blocks[0].attn.places.update(heads=None), dtype=dtype)
    message(lambda model: put(model, CHANGES["pooled gate"], "a module"), dtype=dtype)


def test_mixing_behind_a_closed_gate_is_refused_before_it_opens() -> None:
    def mutate(model: Any) -> None:
        with torch.no_grad():
            model.blocks[1].gate.zero_()
        put(model, CHANGES["roll"], "a module")

    assert message(mutate).startswith("blocks.1.mlp.1 ")


def test_batch_norm_is_refused_while_it_takes_statistics() -> None:
    def mutate(model: Any) -> None:
        put(model, layer(norm := nn.BatchNorm1d(WIDTH)), "a module")
        model.blocks[1].norms = norm.train(training)

    training = True
    assert "other tokens" in message(mutate)
    training = False
    run(mutate)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_computes_tokens_one_by_one_runs(ranks: int) -> None:
    """Also inputs that are cut, and shards of one token."""
    shift = normal(2, TOKENS, WIDTH, seed=5)
    expected = step(seeded(Tiny()), *inputs(), shift)
    check(expected, run(lambda _: None, ranks, shift=shift), 1e-10)
    few = step(seeded(Tiny()), *inputs(tokens=ranks))
    check(few, run(lambda _: None, ranks, tokens=ranks), 1e-10)
    text = message(lambda model: put(model, CHANGES["mean"], "in a block"), ranks=ranks, tokens=ranks)
    assert text.startswith("blocks.1 (Block) computes a token from other tokens")


def watched() -> bool:
    """Whether a hook has seen this rank's tokens once, and no random number was drawn."""
    model: Any = seeded(Tiny())
    shapes: list[tuple[int, ...]] = []
    model.blocks[0].register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape)))
    weft.parallelize(model, adapter=TINY, cfg="off")
    state = torch.get_rng_state()
    model(*inputs())
    return shapes == [(2, TOKENS // 2, WIDTH)] and torch.equal(state, torch.get_rng_state())


def test_hooks_and_generators_of_others_are_left_alone(worlds: Callable[[int], Pool]) -> None:
    assert worlds(2).run(watched) == [True, True]


def test_a_shift_that_is_not_cut_is_told_by_place() -> None:
    """A rank's rows of a whole tensor, by its own count."""
    table = normal(64, WIDTH)
    text = message(lambda model: put(model, lambda x: x + table[: x.shape[1]], "between blocks"))
    assert text.startswith("Tiny computes a token from its place among this rank's tokens")
    assert "positions are made for the whole and split" in text


def test_a_probe_costs_what_few_tokens_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 ranks with 1,024 tokens each, counted in FLOPs; and it runs in the first call alone."""
    runs: list[int] = []
    real = token_probe.ProbeTokens.attend
    few = token_probe.ProbeTokens
    monkeypatch.setattr(few, "attend", lambda self, *a: runs.append(a[1].shape[2]) or real(self, *a))

    def job(world: Any) -> list[int]:
        model = seeded(Tiny(), dtype=torch.float32)
        weft.parallelize(model, mesh=world, adapter=TINY, cfg="off")
        counts = []
        with torch.no_grad():
            for _ in range(2):
                with FlopCounterMode(display=False) as counter:
                    model(*inputs(torch.float32, 2048))
                counts.append(counter.get_total_flops())
        return counts

    for first, second in on_ranks(2, job):
        assert 0 <= first - second <= 0.05 * second, (first, second)
    assert sorted(set(runs)) == [7, 18]
    assert len(runs) == 2 * 2 * 2  # ranks, runs, attentions


def one_sided(*, few: bool) -> str:
    """The error of a rank, of which only rank 1 mixes tokens; perhaps only if they are as many as it has."""
    model = seeded(Tiny())

    def change(x: Tensor) -> Tensor:
        if not few and x.shape[1] not in (4, 5):
            raise ValueError("another number of tokens")
        return x.roll(1, 1) if dist.get_rank() == 1 else x

    put(model, change, "a module")
    weft.parallelize(model, adapter=TINY, cfg="off")
    with pytest.raises(InputError) as caught:
        model(*inputs(tokens=9))
    return str(caught.value)


@pytest.mark.parametrize("few", [True, False])
def test_ranks_raise_together(few: bool, worlds: Callable[[int], Pool]) -> None:
    first, second = worlds(2).run(partial(one_sided, few=few))
    assert second.startswith("blocks.1.mlp.1 (Apply) computes a token from other tokens")
    assert "as another rank found" in first


def test_a_model_that_cannot_run_on_few_tokens_runs() -> None:
    def fixed(x: Tensor) -> Tensor:
        assert x.shape[1] == TOKENS // 2 * (1 + x.shape[1] // TOKENS)
        return x * 2

    alone = seeded(Tiny())
    put(alone, fixed, "in a block")
    check(step(alone, *inputs()), run(lambda model: put(model, fixed, "in a block")), 1e-10)


class Frames(Video):
    """With code and modules between stages, on tensors of channels first or last."""

    def __init__(self, change: Any, place: str, *, first: bool) -> None:
        super().__init__()
        self.change, self.place, self.first = change, place, first
        self.extra = Apply(self._changed)

    def _changed(self, x: Tensor) -> Tensor:
        return self.change(x.movedim(-1, 1)).movedim(1, -1) if self.first else self.change(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer_ in self.blocks:
            x = layer_["spatial"](x)  # pyright: ignore
            x = self.extra(x) if self.place == "module" else self._changed(x)
            x = layer_["temporal"](x)  # pyright: ignore
        return self.head(x)


WEIGHT = normal(6, 6, 3, 1)


STAGED: dict[str, tuple[Any, bool]] = {
    "convolution": (lambda x: x + F.conv2d(x, WEIGHT, padding=(1, 0)), True),
    "group norm": (lambda x: F.group_norm(x, 2), True),
    "layer norm": (lambda x: F.layer_norm(x, x.shape[1:]), False),
    "mean": (lambda x: x - x.mean(1, keepdim=True), False),
    "roll": (lambda x: x.roll(1, 2), True),
    "places": (lambda x: x + torch.arange(x.shape[1])[:, None, None], False),
    "places, channels first": (lambda x: x + torch.arange(x.shape[2])[:, None] * 0.1, True),
    "number": (lambda x: x / x.shape[1], False),
    "reversed": (lambda x: x.flip(1).cumsum(1).flip(1), False),
    "flip": (lambda x: x + x.flip(1), False),
}


@pytest.mark.parametrize("place", ["module", "code"])
@pytest.mark.parametrize("name", STAGED)
def test_between_stages_rows_of_a_sharded_dim_stay_by_themselves(name: str, place: str) -> None:
    change, first = STAGED[name]

    def job(world: Any) -> str:
        model = seeded(Frames(change, place, first=first))
        weft.stages(model, TURNS, dims=DIMS, mesh=world)
        with pytest.raises(InputError) as caught:
            model(normal(2, 4, 6, 6))
        return str(caught.value)

    for text in on_ranks(2, job):
        assert text.startswith("extra (Apply) " if place == "module" else "Frames "), text
        assert "time" in text


def test_places_within_a_stage_are_refused() -> None:
    def job(world: Any) -> str:
        model: Any = seeded(Video())
        block = model.blocks[1]["spatial"]
        inner = block.forward
        block.forward = lambda x: inner(x + torch.arange(x.shape[1])[:, None, None])
        weft.stages(model, TURNS, dims=DIMS, mesh=world)
        with pytest.raises(InputError) as caught:
            model(normal(2, 4, 6, 6))
        return str(caught.value)

    for text in on_ranks(2, job):
        assert text.startswith("blocks.1.spatial (AxialBlock) computes a row from its place among"), text


def test_what_is_whole_in_a_stage_may_have_places() -> None:
    """The other dim, and channels first."""
    change: Any = lambda x: x + torch.arange(x.shape[3])[:, None] * 0.1 + x.mean(3, keepdim=True)  # noqa: E731

    def job(world: Any) -> Any:
        model = seeded(Frames(lambda x: change(x.unsqueeze(-1)).squeeze(-1), "code", first=True))
        if world is not None:
            weft.stages(model, TURNS, dims=DIMS, mesh=world)
        return step(model, normal(2, 4, 6, 6))

    check(job(None), on_ranks(2, job), 1e-10)


def needs_gradients(x: Tensor) -> Tensor:
    """As code that a probe cannot run."""
    if not torch.is_grad_enabled():
        raise ValueError("no gradients here")
    return x * 1


def test_a_model_that_cannot_be_probed_is_refused() -> None:
    text = message(lambda model: put(model, needs_gradients, "in a block"))
    assert text.startswith("Tiny could not be probed for modules that mix tokens: no gradients here")

    def job(world: Any) -> None:
        model = seeded(Frames(needs_gradients, "code", first=False))
        weft.stages(model, TURNS, dims=DIMS, mesh=world)
        for _ in range(2):
            with pytest.raises(InputError, match=r"Frames could not be probed .* no gradients here"):
                model(normal(2, 4, 6, 6))

    on_ranks(2, job)


def test_a_forward_that_fails_raises_its_own_error() -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda model: put(model, lambda _: 1 // 0, "in a block"))


def test_streams_may_be_declared_otherwise() -> None:
    """The text cut too, though nothing attends over it: its keys are not whole any more."""
    cut = replace(TINY, inputs={"": {**TINY.inputs[""], "text": Shard("text", 1)}})
    text = message(lambda _: None, adapter=cut)
    assert "blocks.0.cross (Attention) computes a token from" in text
