"""How weft is on a model: what is copied, put back, taken out or called alone, with threads as ranks."""

from __future__ import annotations

import copy
import pickle
from inspect import signature
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import weft
from tests.diffusers.toys import check, normal, on_ranks, step
from tests.video.test_transformer import inputs, model
from weft.core.errors import InputError
from weft.hooks.module_tree import module_at, modules
from weft.hooks.wrap import ForwardWrapper, is_wrapped, unwrap_module, wrap_module
from weft.run.world import World


class Doubled(ForwardWrapper):
    def around(self, forward: Any, args: Any, kwargs: Any) -> Any:
        return 2 * forward(*args, **kwargs)


def test_a_wrapped_module_is_of_its_class_and_is_put_back_as_it_was() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    kind, before = nn.Linear, dict(vars(layer))
    plain = layer(x)
    wrap_module(layer, Doubled())
    assert isinstance(layer, kind) and type(layer).__name__ == "Linear"
    assert signature(layer.forward) == signature(nn.Linear(2, 2).forward)
    assert torch.equal(layer(x), 2 * plain)
    held = layer.forward
    unwrap_module(layer)
    assert type(layer) is kind and vars(layer) == before
    assert torch.equal(held(x), plain), "who holds the method has the plain one"


@pytest.mark.parametrize("again", [False, True])
def test_a_forward_that_was_on_the_module_stays_inside_and_may_be_taken_off(again: bool) -> None:
    """As accelerate does it: it notes the old forward, and puts it back."""
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    plain, site = layer(x), Doubled()
    own: Any = layer
    if again:
        own._old_forward, calls = layer.forward, []

        def theirs(module: Any, y: Any) -> Any:
            calls.append(1)
            return module._old_forward(y)

        own.forward = MethodType(theirs, layer)
    else:
        own.forward = MethodType(kept := layer.forward.__func__, layer)
        assert kept is nn.Linear.forward
    wrap_module(layer, site)
    assert is_wrapped(layer, site)
    assert torch.equal(layer(x), 2 * plain), "once, not twice"
    if again:
        own.forward = own._old_forward
        assert is_wrapped(layer, site)
        assert torch.equal(layer(x), 2 * plain)
        assert calls == [1]
    own.forward = MethodType(nn.Linear.forward, layer)
    assert not is_wrapped(layer, site)
    wrap_module(layer, site)
    assert torch.equal(layer(x), 2 * plain)
    unwrap_module(layer)
    assert torch.equal(layer(x), plain)


@pytest.mark.filterwarnings("ignore")
def test_names_do_not_depend_on_what_wraps_a_module() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(2, 2)

    inner = nn.Sequential(nn.Linear(2, 2), Adapted())
    compiled: Any = torch.compile(nn.Linear(2, 2))
    whole = nn.Sequential(checkpoint_wrapper(inner), compiled)
    names = modules(whole)
    assert list(names) == ["", "0", "0.0", "0.1", "1"]
    assert names["0"] is inner and isinstance(names["0.1"], Adapted) and type(names["1"]) is nn.Linear
    assert all(module_at(whole, name) is module for name, module in names.items() if name)
    assert module_at(whole, "0.2") is None


def test_a_copy_is_parallelized_and_may_be_made_by_one_rank_alone() -> None:
    def job(world: World) -> Any:
        own = weft.parallelize(model(), mesh=world)
        first = step(own, *inputs())
        if world.comm.rank == 0:
            copy.deepcopy(own)
        other = copy.deepcopy(copy.deepcopy(own))
        with torch.no_grad():
            for weight in own.parameters():
                weight.zero_()
        second = step(other, *inputs())
        assert (other._weft, copy.copy(own)._weft) != (own._weft, own._weft)
        assert len(other._weft.regions) == 1
        weft.restore(other)
        assert type(other) is type(model()) and own._weft.regions
        return first, second

    expected = step(model(), *inputs())
    for answers in zip(*on_ranks(2, job), strict=True):
        check(expected, list(answers), 1e-10)


def test_a_part_that_is_copied_alone_is_plain_and_nothing_else_is_pickled() -> None:
    def job(world: World) -> None:
        own = weft.parallelize(model(), mesh=world)
        attention = pickle.loads(pickle.dumps(copy.deepcopy(own.blocks[0].attn)))
        assert type(attention) is type(model().blocks[0].attn)
        for part in (own, own.blocks[0].attn, own.blocks):
            with pytest.raises(InputError, match="is parallelized: a file .*state_dict"):
                pickle.dumps(part)
        assert own.state_dict().keys() == model().state_dict().keys()

    on_ranks(2, job)


def test_blocks_taken_out_or_called_alone() -> None:
    def shorter(own: Any) -> Any:
        own.blocks = own.blocks[1:]
        return own

    def job(world: World) -> Any:
        own = weft.parallelize(model(), mesh=world)
        own(*inputs())
        plain = model().blocks[0]
        given = normal(1, 9, 36), normal(1, 6, 36, seed=2), normal(9, 6, seed=3), normal(9, 6, seed=4)
        torch.testing.assert_close(own.blocks[0](*given), plain(*given))
        return step(shorter(own), *inputs())

    check(step(shorter(model()), *inputs()), on_ranks(2, job), 1e-10)


def test_two_sizes_in_one_backward_under_any_checkpoint() -> None:
    def job(world: World | None) -> Any:
        own = model()
        for at, block in enumerate(own.blocks):
            if at:
                own.blocks[at] = checkpoint_wrapper(block)
            else:
                own.blocks[at].forward = lambda *args, run=block.forward: checkpoint(
                    run, *args, use_reentrant=False
                )
        if world is not None:
            weft.parallelize(own, mesh=world)
        video, time, words = inputs()
        outs = [own(video[:, : 2 * frames], time, words) for frames in (1, 2, 1)]
        loss: Any = sum((out * (at + 1)).square().sum() for at, out in enumerate(outs))
        return outs[1].detach(), list(torch.autograd.grad(loss, list(own.parameters())))

    check(job(None), on_ranks(3, job), 1e-9)
