"""DropoutMode: dropout in and between the stages of `weft.stages`, with the random numbers of one process.

A tensor there is a shard of one that has all of the sharded dims. Their positions are inferred from its
sizes: of [6, 5, 8] for a batch of 2, 3 of the frames and 5 patches, the first dim is batch × frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from weft.core.errors import InputError
from weft.hooks.input_check import is_recomputing
from weft.hooks.rng import DROPOUT_FUNCTIONS, RANDOM_FUNCTIONS, broadcast_rng, memory_order
from weft.hooks.wrap import Args, Forward, FunctionMode, Kwargs, run_function
from weft.plan.stage_layouts import State
from weft.switching.activation import ShardedActivation
from weft.switching.declare import DimGroups

WORD_BITS = 62
"""Of a number that ranks gather."""
RNNS = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
HINT = "Use nn.Dropout on a tensor with the dims of the stage, or set its p to 0."


class DropoutMode(FunctionMode):
    """Draw dropout for the whole tensor, apply this rank's shard; reject other random numbers of a shard.

    groups       the dims as the running stage has them, or as they are between stages.
    is_probing   while the model is probed, dropout does nothing and other random numbers are allowed.
    """

    functions = RANDOM_FUNCTIONS | DROPOUT_FUNCTIONS | {F.scaled_dot_product_attention}

    def __init__(self, activation: ShardedActivation) -> None:
        super().__init__()
        self.activation, self.is_probing = activation, False
        self.groups: DimGroups = tuple((dim,) for dim in activation.dims)
        self._calls = 0
        self._agreed: dict[tuple[int, State, tuple[int, ...]], DimGroups] = {}
        """Keys contain the index of a dropout within its forward, which is the same on all ranks."""
        self._dims_of: dict[tuple[tuple[int, ...], DimGroups, State, tuple[int, ...]], DimGroups] = {}
        """Keys contain the shape of this rank's tensor; used for recomputation."""

    @contextmanager
    def forward_of(self, model: nn.Module) -> Iterator[None]:
        """Run a forward; in training, with the generators of the first rank."""
        worlds = [world for world in self.activation.worlds if world.comm.size > 1]
        training = [module for module in model.modules() if module.training] if worlds else []
        if any(isinstance(module, nn.Dropout) and module.p for module in training):
            for world in worlds:
                broadcast_rng(world)
        self._calls, self.groups = 0, tuple((dim,) for dim in self.activation.dims)
        if not training:
            yield
            return
        with self:
            yield

    def call(self, func: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        if self.is_probing and func in DROPOUT_FUNCTIONS:
            return args[0] if args else kwargs["input"]
        if self.is_probing or self.activation.placement == self.activation.replicated:
            return run_function(func, args, kwargs)
        if func in DROPOUT_FUNCTIONS:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and _dropout_p(*args, **kwargs):
            raise self._error("scaled_dot_product_attention with dropout", args[0])
        if func in RNNS and any(isinstance(each, float) and each for each in args) and True in args[5:]:
            raise self._error(f"{func.__name__} with dropout", args[0])
        out = run_function(func, args, kwargs)
        if func in RANDOM_FUNCTIONS - RNNS and isinstance(out, Tensor) and self._is_shard(out):
            raise self._error(func.__name__, out)
        return out

    def _error(self, function: str, x: Tensor) -> InputError:
        return InputError(
            f"{function} draws random numbers for the shard {list(x.shape)} of a tensor.", hint=HINT
        )

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: FBT001, FBT002
        if not training or not p:
            return F.dropout(x, p, training, inplace)
        dims = self._dims(x)
        memory = memory_order(x)
        own = x.permute(memory)
        local, sharded = self.activation.local_sizes(), self.activation.spans()
        shape: list[int] = []
        slices: list[slice] = []
        sizes: list[int] = []
        for at in memory:
            for dim in dims[at] or ("",):  # "": not a dim of the activation
                shape.append(local.get(dim, x.shape[at]))
                sizes.append(self.activation.sizes[dim] if dim in sharded else shape[-1])
                slices.append(slice(*sharded[dim]) if dim in sharded else slice(None))
        whole = x.new_zeros(sizes)
        whole[tuple(slices)] = own.reshape(shape)
        out = F.dropout(whole, p, training=True)[tuple(slices)].reshape(own.shape)
        out = out.permute([memory.index(at) for at in range(x.dim())])
        return x.copy_(out) if inplace else out

    def _is_shard(self, x: Tensor) -> bool:
        """Return whether a tensor may have all dims but the channels: then its rows are tokens."""
        return any(_count(dims) >= len(self.activation.dims) - 1 for dims in self._candidates(x).values())

    def _candidates(self, x: Tensor) -> dict[int, DimGroups]:
        """Return the dims that a tensor may have, by number, with () for a dim that is none of them."""
        sizes, sharded = self.activation.local_sizes(), self.activation.spans()
        order = [dim for dims in self.groups for dim in dims]
        candidates = _groupings(tuple(x.shape), tuple((dim, sizes[dim]) for dim in order))
        return {at: dims for at, dims in candidates.items() if set(sharded) <= set(sum(dims, ()))}

    def _dims(self, x: Tensor) -> DimGroups:
        """Return the dims of a tensor; the ranks infer them together, at the first dropout of these sizes.

        A rank that has one row of a dim cannot infer its position; those that have two can.
        """
        placement, sizes = self.activation.placement, tuple(self.activation.sizes.values())
        own = (tuple(x.shape), self.groups, placement, sizes)
        if is_recomputing():
            return self._dims_of[own]
        self._calls += 1
        call = (self._calls, placement, sizes)
        if call not in self._agreed:
            self._agreed[call] = self._agree(x)
        self._dims_of[own] = self._agreed[call]
        return self._agreed[call]

    def _agree(self, x: Tensor) -> DimGroups:
        candidates, sizes = self._candidates(x), self.activation.local_sizes()
        sharded = list(self.activation.spans())
        length = -(-((x.dim() + 1) ** len(sizes)) // WORD_BITS)
        bits = sum(1 << at for at in candidates)
        for world in self.activation.worlds:
            words = [bits >> (WORD_BITS * at) & ((1 << WORD_BITS) - 1) for at in range(length)]
            for other in world.comm.all_gather_ints(words):
                bits &= sum(word << (WORD_BITS * at) for at, word in enumerate(other))
        common = [dims for at, dims in candidates.items() if bits >> at & 1]
        plain = [dims for dims in common if self._is_plain(dims)]
        most = max(map(_count, common), default=0)
        # Prefer dims with the batch first; if that is ambiguous, those with channels last.
        first, last = self.activation.dims[0], self.activation.dims[-1]
        likely = [dims for dims in common if _count(dims) == most and (*sum(dims, ()), first)[0] == first]
        for some in (plain, likely, [dims for dims in likely if (last, *sum(dims, ()))[-1] == last]):
            # Dims with the same numbers of elements before, between and behind sharded ones are equivalent.
            effects = {_effect(dims, x.shape, sizes, sharded): dims for dims in some}
            if len(effects) == 1:
                return next(iter(effects.values()))
        raise InputError(
            f"Dropout of a tensor of shape {list(x.shape)}: weft cannot locate "
            f"{' and '.join(sharded)} in it.",
            hint=HINT,
        )

    def _is_plain(self, candidate: DimGroups) -> bool:
        """Return whether the dims are the stage's own, perhaps with other channels."""
        if len(candidate) != len(self.groups):
            return False
        differences = sum(dims != own for dims, own in zip(candidate, self.groups, strict=True))
        return differences <= candidate.count(()) <= 1


def _dropout_p(*args: PyTree, dropout_p: float = 0.0, **_: PyTree) -> float:
    return args[4] if len(args) > 4 else dropout_p


def _count(dims: DimGroups) -> int:
    return sum(map(len, dims))


@lru_cache(256)
def _groupings(shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]) -> dict[int, DimGroups]:
    """Return all groupings of some of these dims, in this order, that have a shape, by number."""
    groupings: dict[int, DimGroups] = {}
    for number, places in enumerate(product(range(-1, len(shape)), repeat=len(sizes))):
        sums = {
            at: prod(size for (_, size), place in zip(sizes, places, strict=True) if place == at)
            for at in {*places} - {-1}
        }
        if all(shape[at] == size for at, size in sums.items()):
            groupings[number] = tuple(
                tuple(name for (name, _), place in zip(sizes, places, strict=True) if place == at)
                for at in range(len(shape))
            )
    return groupings


def _effect(
    candidate: DimGroups, shape: Sequence[int], sizes: dict[str, int], sharded: list[str]
) -> tuple[int | str, ...]:
    """Return the sharded dims in order, with the number of elements before, between and behind them."""
    names, elements = list[str](), [1]
    for size, dims in zip(shape, candidate, strict=True):
        for dim in dims:
            if dim in sharded:
                names.append(dim)
                elements.append(1)
            else:
                elements[-1] *= sizes[dim]
        if not dims:
            elements[-1] *= size
    return *names, *elements
