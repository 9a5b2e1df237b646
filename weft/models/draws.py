"""Draws: dropout in and between the stages of `weft.stages`, with the numbers of one process.

A tensor there is a part of one that has all of the sharded dims. Where these lie in it is read off its
sizes: of [6, 5, 8] for a batch of 2, 3 of the frames and 5 patches, the first dim is batch × frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from weft.core.errors import InputError
from weft.core.indices import split_evenly
from weft.models.attend import passed_on
from weft.models.randomness import DROPOUT, RANDOM, share_numbers
from weft.models.same import is_recomputing
from weft.models.sites import Groups
from weft.models.stream import Stream
from weft.plan.stages import WHOLE

WORD = 62
"""Bits of a number that ranks gather."""
RNNS = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
HINT = "Use nn.Dropout on a tensor with the dims of the stage, or set its p to 0."


class Draws(TorchFunctionMode):
    """Draw for the whole tensor, and keep this rank's part; refuse what else draws for a part.

    groups   the dims as the running stage has them, or as they are between stages.
    """

    def __init__(self, stream: Stream, is_probing: Callable[[], bool]) -> None:
        super().__init__()
        self.stream, self._is_probing, self.is_active = stream, is_probing, False
        self.groups: Groups = tuple((dim,) for dim in stream.dims)
        self._calls = 0
        self._agreed: dict[Any, Groups] = {}
        """By the place of a dropout among those of a forward, which is the same on all ranks."""
        self._made_of: dict[Any, Groups] = {}
        """By the shape of a tensor of this rank's, for what is computed again."""

    def __enter__(self) -> Any:
        self.is_active = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.is_active = False
        super().__exit__(*error)

    def begin(self, model: nn.Module) -> ExitStack:
        """A forward: in training, dropout begins with the generators of the first rank."""
        stack, worlds = ExitStack(), [world for world in self.stream.worlds if world.comm.size > 1]
        parts = [part for part in model.modules() if part.training] if worlds else []
        if any(isinstance(part, nn.Dropout) and part.p for part in parts):
            for world in worlds:
                share_numbers(world)
        self._calls, self.groups = 0, tuple((dim,) for dim in self.stream.dims)
        if parts:
            stack.enter_context(self)
        return stack

    def hooks(self, module: nn.Module) -> list[RemovableHandle]:
        """A module that is checkpointed computes again outside of the model's forward, laid out as it was."""
        stack, layout = ExitStack(), self.stream.whole

        def enter(*_: Any) -> None:
            nonlocal layout
            if not is_recomputing():
                layout = self.stream.layout
            elif not self.is_active and any(part.training for part in module.modules()):
                self.stream.layout = layout
                stack.enter_context(self)

        return [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(lambda *_: stack.close(), always_call=True),
        ]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_probing() and func in DROPOUT:
            return args[0] if args else kwargs["input"]
        if self._is_probing() or self.stream.layout == self.stream.whole:
            return passed_on(func, args, kwargs)
        if func in DROPOUT:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and _dropout_p(*args, **kwargs):
            raise self._refusal("scaled_dot_product_attention with dropout", args[0])
        if func in RNNS and any(isinstance(each, float) and each for each in args) and True in args[5:]:
            raise self._refusal(f"{func.__name__} with dropout", args[0])
        out = passed_on(func, args, kwargs)
        if func in RANDOM - RNNS and isinstance(out, Tensor) and self._is_part(out):
            raise self._refusal(func.__name__, out)
        return out

    def _refusal(self, what: str, x: Tensor) -> InputError:
        return InputError(f"{what} draws numbers of which this rank has a part, {list(x.shape)}.", hint=HINT)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: FBT001, FBT002
        if not training or not p:
            return F.dropout(x, p, training, inplace)
        way = self._way(x)
        # Numbers go to elements in the order of memory, which is that of x.
        memory = sorted(range(x.dim()), key=lambda at: -x.stride(at))
        own = x.permute(memory)
        local, sharded = self.stream.local(self.stream.layout), self._sharded()
        shape: list[int] = []
        parts: list[tuple[int, int, int, int]] = []
        for at in memory:
            for dim in way[at]:
                if dim in sharded:
                    parts.append((len(shape), *sharded[dim]))
                shape.append(local[dim])
            if not way[at]:
                shape.append(x.shape[at])
        sizes = list(shape)
        for at, _, _, size in parts:
            sizes[at] = size
        whole = x.new_zeros(sizes)
        _narrowed(whole, parts).copy_(own.reshape(shape))
        out = _narrowed(F.dropout(whole, p, training=True), parts).reshape(own.shape)
        out = out.permute([memory.index(at) for at in range(x.dim())])
        return x.copy_(out) if inplace else out

    def _sharded(self) -> dict[str, tuple[int, int, int]]:
        """By dim, (first, rows, of how many)."""
        found: dict[str, tuple[int, int, int]] = {}
        for dim, world in zip(self.stream.layout, self.stream.worlds, strict=True):
            if dim != WHOLE:
                size = self.stream.sizes[dim]
                first, end = split_evenly(size, world.comm.size)[world.comm.rank]
                found[dim] = first, end - first, size
        return found

    def _is_part(self, x: Tensor) -> bool:
        """Whether a tensor may have all dims of the stream but the channels: then its rows are tokens."""
        return any(_count(way) >= len(self.stream.dims) - 1 for way in self._ways(x).values())

    def _ways(self, x: Tensor) -> dict[int, Groups]:
        """What a tensor may be made of, by number, with () for a dim that is none of the stream's."""
        sizes, sharded = self.stream.local(self.stream.layout), self._sharded()
        order = [dim for dims in self.groups for dim in dims]
        ways = _ways(tuple(x.shape), tuple((dim, sizes[dim]) for dim in order))
        return {at: way for at, way in ways.items() if set(sharded) <= {dim for dims in way for dim in dims}}

    def _way(self, x: Tensor) -> Groups:
        """What a tensor is made of; the ranks find it out together, when they first drop of these sizes.

        A rank that has one row of a dim cannot see where that lies; those that have two can.
        """
        layout, sizes = self.stream.layout, tuple(self.stream.sizes.values())
        own = (tuple(x.shape), self.groups, layout, sizes)
        if is_recomputing():
            return self._made_of[own]
        self._calls += 1
        call = (self._calls, layout, sizes)
        if call not in self._agreed:
            self._agreed[call] = self._agree(x)
        self._made_of[own] = self._agreed[call]
        return self._agreed[call]

    def _agree(self, x: Tensor) -> Groups:
        ways, sizes, sharded = self._ways(x), self.stream.local(self.stream.layout), self._sharded()
        length = -(-((x.dim() + 1) ** len(sizes)) // WORD)
        bits = sum(1 << at for at in ways)
        for world in self.stream.worlds:
            words = [bits >> (WORD * at) & ((1 << WORD) - 1) for at in range(length)]
            for other in world.comm.gather_numbers(words):
                bits &= sum(word << (WORD * at) for at, word in enumerate(other))
        common = [way for at, way in ways.items() if bits >> at & 1]
        plain = [way for way in common if self._is_plain(way)]
        most = max(map(_count, common), default=0)
        # The batch comes first, in whatever order the others are; channels come last, if that settles it.
        first, last = self.stream.dims[0], self.stream.dims[-1]
        likely = [way for way in common if _count(way) == most and (*sum(way, ()), first)[0] == first]
        for some in (plain, likely, [way for way in likely if (last, *sum(way, ()))[-1] == last]):
            # Ways with the same numbers of elements before, between and behind sharded dims are the same.
            effects = {_effect(way, x.shape, sizes, list(sharded)): way for way in some}
            if len(effects) == 1:
                return next(iter(effects.values()))
        raise InputError(
            f"Dropout of a tensor of shape {list(x.shape)}: weft cannot tell where "
            f"{' and '.join(sharded)} lie in it.",
            hint=HINT,
        )

    def _is_plain(self, way: Groups) -> bool:
        """Whether it is the stage's own, which may have other channels."""
        if len(way) != len(self.groups):
            return False
        return sum(dims != own for dims, own in zip(way, self.groups, strict=True)) <= way.count(()) <= 1


def _dropout_p(*args: Any, dropout_p: float = 0.0, **_: Any) -> float:
    return args[4] if len(args) > 4 else dropout_p


def _count(way: Groups) -> int:
    return sum(map(len, way))


def _narrowed(x: Tensor, parts: Sequence[tuple[int, int, int, int]]) -> Tensor:
    for at, first, rows, _ in parts:
        x = x.narrow(at, first, rows)
    return x


@lru_cache(256)
def _ways(shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]) -> dict[int, Groups]:
    """Ways to make a shape of some of these dims, several in one in this order, by number."""
    found: dict[int, Groups] = {}
    for number, places in enumerate(product(range(-1, len(shape)), repeat=len(sizes))):
        sums = {
            at: prod(size for (_, size), place in zip(sizes, places, strict=True) if place == at)
            for at in {*places} - {-1}
        }
        if all(shape[at] == size for at, size in sums.items()):
            found[number] = tuple(
                tuple(name for (name, _), place in zip(sizes, places, strict=True) if place == at)
                for at in range(len(shape))
            )
    return found


def _effect(way: Groups, shape: Sequence[int], sizes: dict[str, int], sharded: list[str]) -> tuple[Any, ...]:
    """Sharded dims in order, with the number of elements before, between and behind them."""
    found: list[Any] = [1]
    for size, dims in zip(shape, way, strict=True):
        for dim in dims:
            if dim in sharded:
                found += [dim, 1]
            else:
                found[-1] *= sizes[dim]
        if not dims:
            found[-1] *= size
    return tuple(found)
