"""Random numbers as in one process, on every rank: of its seed, of its generators, of its dropout."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.utils._pytree import PyTree, tree_leaves

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.hooks.digest import facts, words_of
from weft.hooks.wrap import Args, Forward, FunctionMode, Kwargs, run_function
from weft.run.agree import agree
from weft.run.world import World

RNG_LOCK = Lock()
"""Held while states of generators are read or set. torch locks a generator meanwhile and keeps the GIL; if
Python let another thread run in between, that one would wait for torch's lock for ever."""

DROPOUT_FUNCTIONS = frozenset({F.dropout, torch.dropout})
"""What `sharded_dropout` stands for inside a sharded region; both take (x, p, training)."""

_METHODS = (
    "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ random_ uniform_"
)
_FUNCTIONS = (
    "alpha_dropout alpha_dropout_ bernoulli binomial dropout_ feature_alpha_dropout feature_alpha_dropout_ "
    "feature_dropout feature_dropout_ gru lstm multinomial native_dropout normal poisson rand rand_like "
    "randint randint_like randn randn_like randperm rnn_relu rnn_tanh rrelu rrelu_"
)
_LAYERS = (
    "alpha_dropout dropout1d dropout2d dropout3d feature_alpha_dropout fractional_max_pool2d "
    "fractional_max_pool3d gumbel_softmax rrelu rrelu_"
)
RANDOM_FUNCTIONS = frozenset(
    getattr(home, name)
    for home, names in ((Tensor, _METHODS), (torch, _FUNCTIONS), (F, _LAYERS))
    for name in names.split()
)
"""Functions that draw other numbers for a rank's tokens than one process draws for them."""


def broadcast_rng(world: World, args: Args = (), kwargs: Kwargs | None = None) -> None:
    """Set the generators of all ranks, torch's and those among the arguments of a call, to rank 0's state.

    What is drawn from then on, in the same order on every rank, is what rank 0 alone would draw. The other
    arguments, such as latents that a rank drew before, must be the same on all ranks; else it raises.
    """
    if world.comm.size == 1:
        return
    generators = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Generator)]
    with RNG_LOCK:
        states = [torch.get_rng_state(), *(generator.get_state() for generator in generators)]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    sizes = [state.numel() for state in states]
    agree(world.comm, {"generators": str(sizes), **facts(args, kwargs or {})}, what="pipelines")
    words = words_of(torch.cat(states)).tolist()
    first = torch.tensor(world.comm.all_gather_ints(words)[0], dtype=torch.int64)
    # Copies: torch 2.13 crashes when a generator is given a view.
    torch_state, *others = (state.clone() for state in first.view(torch.uint8)[: sum(sizes)].split(sizes))
    with RNG_LOCK:
        torch.set_rng_state(torch_state)
        for generator, state in zip(generators, others, strict=False):
            generator.set_state(state)
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(others[-1])


def sharded_dropout(x: Tensor, p: float, training: bool, *, dim: int, layout: Layout, rank: int) -> Tensor:  # noqa: FBT001
    """Return this rank's shard of `F.dropout` of the full tensor, of which x is the shard along one dim.

    Every rank draws for the full tensor: its numbers do not come in the order of any shard.
    """
    if not training or not p:
        return F.dropout(x, p, training)
    index = torch.from_numpy(layout.order(rank)).to(x.device)
    if x.shape[dim] != len(index):
        raise InputError(
            f"Dropout on rank {rank} must have {len(index)} rows, its shard of {layout}, got {x.shape[dim]}."
        )
    shape = list(x.shape)
    shape[dim] = layout.size
    full = torch.empty_permuted(shape, memory_order(x), dtype=x.dtype, device=x.device).zero_()
    return F.dropout(full.index_copy_(dim, index, x), p, training).index_select(dim, index)


def memory_order(x: Tensor) -> list[int]:
    """Return the dims in the order of memory: random numbers go to elements in that order."""
    return sorted(range(x.dim()), key=lambda at: -x.stride(at))


class RandomGuard(FunctionMode):
    """Raise `error()`, unless that is None, when a function draws random numbers."""

    functions = RANDOM_FUNCTIONS | DROPOUT_FUNCTIONS

    def __init__(self, error: Callable[[], InputError | None]) -> None:
        super().__init__()
        self._error = error

    def call(self, func: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        draws = func not in DROPOUT_FUNCTIONS or _drops(*args, **kwargs)
        # Call `_error` for these functions only: torch.compile would guard on all that it reads.
        if draws and (error := self._error()) is not None:
            raise error
        return run_function(func, args, kwargs)


def _drops(_: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:  # noqa: FBT001, FBT002, ARG001
    return bool(p) and training
