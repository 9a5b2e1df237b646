"""The random numbers of one process, on every rank: of its seed, of its generators, of its dropout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from itertools import islice, zip_longest
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.run.agree import agree
from weft.run.world import World

WORD = 8  # bytes of the numbers that ranks gather
SHOWN = 60  # characters of a text in an error

STATES = Lock()
"""Held while states of generators are read or set. torch locks a generator meanwhile and keeps the GIL; if
Python let another thread run in between, that one would wait for torch's lock for ever."""

DROPOUT = frozenset({F.dropout, torch.dropout})
"""What `dropout` stands for inside a sharded region; both take (x, p, training)."""

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
RANDOM = frozenset(
    getattr(home, name)
    for home, names in ((Tensor, _METHODS), (torch, _FUNCTIONS), (F, _LAYERS))
    for name in names.split()
)
"""Functions that would draw, for a rank's tokens, other numbers than one process draws for them."""


def share_numbers(world: World, arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})) -> None:
    """Give all ranks the state of rank 0's generators: torch's, and those among the (args, kwargs) of a call.

    What is drawn from then on, in the same order on every rank, is what rank 0 alone would draw. The other
    arguments, such as latents that a rank drew before, must be the same on all ranks; else it raises.
    """
    if world.comm.size == 1:
        return
    generators = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Generator)]
    with STATES:
        states = [torch.get_rng_state(), *(generator.get_state() for generator in generators)]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    sizes = [state.numel() for state in states]
    agree(world.comm, {"generators": str(sizes), **facts(*arguments)}, what="pipelines")
    data = torch.cat(states)
    words = F.pad(data, (0, -data.numel() % WORD)).view(torch.int64).tolist()
    first = torch.tensor(world.comm.gather_numbers(words)[0], dtype=torch.int64)
    # Copies: torch 2.13 crashes when a generator is given a view.
    torch_state, *others = (state.clone() for state in first.view(torch.uint8)[: data.numel()].split(sizes))
    with STATES:
        torch.set_rng_state(torch_state)
        for generator, state in zip(generators, others, strict=False):
            generator.set_state(state)
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(others[-1])


def dropout(x: Tensor, p: float, training: bool, *, dim: int, layout: Layout, rank: int) -> Tensor:  # noqa: FBT001
    """`F.dropout` of the whole tensor, of which x is what a rank has of one dim.

    The whole is drawn for, on every rank: its numbers do not come in the order of any shard.
    """
    if not training or not p:
        return F.dropout(x, p, training)
    index = torch.from_numpy(layout.order(rank)).to(x.device)
    if x.shape[dim] != len(index):
        raise InputError(
            f"Dropout of {x.shape[dim]} rows on rank {rank}, which has {len(index)} of {layout}."
        )
    shape = list(x.shape)
    shape[dim] = layout.size
    # Numbers go to elements in the order of memory, which is that of x.
    order = sorted(range(x.dim()), key=lambda at: -x.stride(at))
    whole = torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device).zero_()
    return F.dropout(whole.index_copy_(dim, index, x), p, training).index_select(dim, index)


def facts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """Arguments by name, as far as they can be compared."""
    return {name: fact(leaf) for name, leaf in leaves_of(args, kwargs).items()}


def leaves_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Iterable[str] = ()) -> dict[str, Any]:
    """What arguments consist of, by name; ranks may have devices of their own, which are left out."""
    ordered = zip_longest(islice(names, len(args)), args)
    named = {name or f"argument {at}": value for at, (name, value) in enumerate(ordered)}
    leaves = tree_flatten_with_path({**named, **kwargs})[0]
    found = {f"{path[0].key}{keystr(path[1:])}": leaf for path, leaf in leaves}  # pyright: ignore
    return {where: leaf for where, leaf in found.items() if "device" not in where}


def fact(leaf: Any) -> str:
    """Describe an argument by its values, if they can be read."""
    if isinstance(leaf, Tensor):
        data = leaf.detach().cpu().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
        return f"{list(leaf.shape)} {_digest(data.numpy().tobytes())}"
    if hasattr(leaf, "tobytes"):  # arrays and images
        return _digest(leaf.tobytes())
    if isinstance(leaf, bool | int | float | str | None):
        text = repr(leaf)
        return text if len(text) < SHOWN else f"{text[:SHOWN]}… {_digest(text.encode())}"
    return type(leaf).__name__


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()
