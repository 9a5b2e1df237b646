"""Classifier-free guidance on two halves of the ranks: one predicts with the prompt, the other without it.

    guidance = Guidance.of(transformer, mesh, "auto")           # one for each transformer of a pipeline
    output = guidance(region.run, args, kwargs)                 # instead of region.run(mesh, args, kwargs)

Pipelines guide in two ways, and are not asked which:

batched      One call with a batch of two halves. Each half of the ranks takes one; any even batch will do.
sequential   Two calls a step that differ in the conditioning. One step shows what the second call will
             be; from then on it is computed beside the first, and its answer kept until it is asked for.
             A call that comes out different is computed as it is, by all ranks.

Half of the ranks on half of the work compute as much as before and send less: of M bytes, each of N ranks
sends M/N·(N-2)/N in an attention instead of M/N·(N-1)/N, nothing if N is 2, and once a call the output. So
it pays whenever N is even; what it costs is memory in sequential guidance, where each rank has twice the
tokens of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import PyTree, TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from weft.core.errors import InputError
from weft.models.adapter import parameters
from weft.models.settings import Settings
from weft.run.groups import split
from weft.run.switch import everyone
from weft.run.world import world_of

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Forward = Callable[[Any, Args, Kwargs], Any]
"""(mesh, args, kwargs) -> the output, whole on every rank of the mesh."""

MODES = ("auto", "on", "off")
WHOLE = frozenset(
    ("image_rotary_emb", "rotary_emb", "freqs_cis", "img_ids", "txt_ids", "control_hidden_states_scale")
)
"""Arguments without a batch, whatever their first size happens to be."""
LISTS = frozenset({"img_shapes"})
"""Arguments that are lists with an item for each of the batch."""
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
FAULTS = 3  # wrong guesses before guessing ends: each has cost as much as a call


@dataclass(frozen=True)
class Halves:
    """Where a rank is when there are two of everything.

    half   the ranks of its branch, that is 0 or 1; neighbours, so on one machine if they can be.
    pair   the rank with the same place in the other half, after or before it: branch 0 comes first.
    """

    branch: int
    half: Any
    pair: Any

    @staticmethod
    def of(group: dist.ProcessGroup) -> Halves:
        """Made once for each group of an even number of ranks, by all of its ranks together."""
        if group not in _halves:
            size = group.size() // 2
            # Create the groups in the same order on every rank; otherwise two ranks wait for each other.
            half = split(group, [range(size), range(size, 2 * size)])
            pair = split(group, [(place, place + size) for place in range(size)])
            _halves[group] = Halves(group.rank() // size, half, pair)
        return _halves[group]


_halves: WeakKeyDictionary[dist.ProcessGroup, Halves] = WeakKeyDictionary()


class Guidance:
    """Runs the calls of one model on halves of the ranks where it can, else on all of them.

    All ranks decide alike: a decision depends on which arguments are the same objects or have the same
    values as earlier ones on this rank, and on the model's `Settings`. All ranks run the same program on the
    same numbers (see `randomness`), and every answer that was computed by some of them is given to the
    others bit by bit. They ask each other once, whether the settings of all of them stay.
    """

    batched = True
    """Whether a batch may be taken apart: not if its samples share a mask that depends on all of them."""

    def __init__(self, module: nn.Module, mesh: Any, halves: Halves | None) -> None:
        self.module, self.mesh, self.halves = module, mesh, halves
        self._settings = Settings(module)
        self.forget()

    @staticmethod
    def of(module: nn.Module, mesh: Any, mode: str = "auto") -> Guidance:
        """auto: if the number of ranks is even; on: or else it raises; off: never."""
        if mode not in MODES:
            raise InputError(f"cfg={mode!r} is none of {', '.join(MODES)}.")
        comm = world_of(mesh, 60.0).comm
        if mode == "on" and comm.size % 2 and comm.size > 1:
            raise InputError(
                f"cfg='on' needs two halves of the ranks, of which there are {comm.size}.",
                hint=f"Start {comm.size - 1} or {comm.size + 1} ranks, or use cfg='auto'.",
            )
        group = getattr(comm, "group", None)
        if mode == "off" or comm.size % 2 or group is None:
            return Guidance(module, mesh, None)
        return Guidance(module, mesh, Halves.of(group))

    def forget(self) -> None:
        """Drop what was learned of a pipeline's calls, and the tensors that are kept for it."""
        self._last: _Call | None = None
        self._pattern: tuple[_Call, _Call, list[int]] | None = None
        self._kept: tuple[_Call, Any] | None = None
        self._faults = 0

    def __call__(self, run: Forward, args: Args, kwargs: Kwargs) -> Any:
        halves = self.halves
        if halves is None:
            return run(self.mesh, args, kwargs)
        training = torch.is_grad_enabled() or self.module.training  # dropout is that of the whole batch
        if training:
            self._settings.forget()
        settings = None if training or _may_be_cached((args, kwargs)) else self._settings.number()
        if settings is None:
            self.forget()
            return run(self.mesh, args, kwargs)
        mine = _half_of_batch(self.module, halves.branch, args, kwargs) if self.batched else None
        if mine is None:
            return self._in_turn(halves, run, _Call.of(args, kwargs, settings))
        self.forget()
        output = run(halves.half, *mine)
        rows = _latents(self.module, *mine).shape[:1]
        if any(isinstance(x, Tensor) and x.shape[:1] != rows for x in tree_leaves(output)):
            raise self._refusal("a tensor whose first dim is not the batch")
        return tree_map(
            lambda a, b: torch.cat([a, b]) if isinstance(a, Tensor) else a, *self._exchange(halves, output)
        )

    def _in_turn(self, halves: Halves, run: Forward, call: _Call) -> Any:
        last, self._last = self._last, call
        kept, self._kept = self._kept, None
        if kept is not None:
            if kept[0].differences(call) == []:
                return kept[1]
            self._pattern, self._faults = None, self._faults + 1
        guess = self._guess(call)
        if guess is None:
            if last is not None and self._faults < FAULTS:
                self._learn(last, call)
            return run(self.mesh, *call.arguments)
        first, second = self._exchange(halves, run(halves.half, *(call, guess)[halves.branch].arguments))
        self._kept = guess, second
        return first

    def _learn(self, last: _Call, call: _Call) -> None:
        """Two calls on the same latents that differ in something else are the two calls of a step."""
        changed = last.differences(call, settings=False)
        latents = _latents(self.module, *call.arguments)
        if changed and isinstance(latents, Tensor) and all(call.leaves[at] is not latents for at in changed):
            # Arguments are the same on all ranks; a hook that writes down what it sees may be on one only.
            is_same = int(last.settings == call.settings)
            if all(own for (own,) in world_of(self.mesh, 60.0).comm.gather_numbers([is_same])):
                self._pattern = last, call, changed
            else:
                self._faults += 1

    def _guess(self, call: _Call) -> _Call | None:
        """What will be asked next, if this is the first call of a step."""
        if self._pattern is None:
            return None
        first, second, changed = self._pattern
        if first.differences(call, changed) != []:
            return None
        leaves = [second.leaves[at] if at in changed else leaf for at, leaf in enumerate(call.leaves)]
        return _Call(leaves, call.spec, call.settings)

    def _exchange(self, halves: Halves, output: Any) -> tuple[PyTree, PyTree]:
        """The outputs of both branches."""
        leaves, spec = tree_flatten(output)
        both: list[Any] = []
        for x in leaves:
            if isinstance(x, Tensor):
                both.append(everyone(x, mesh=halves.pair, stage="guidance"))
            elif isinstance(x, PLAIN):
                both.append((x, x))
            else:
                raise self._refusal(f"a {type(x).__name__}, which cannot be exchanged")
        first, second = ([pair[at] for pair in both] for at in (0, 1))
        return tree_unflatten(first, spec), tree_unflatten(second, spec)

    def _refusal(self, what: str) -> InputError:
        return InputError(f"{type(self.module).__name__} returns {what}.", hint="Use cfg='off'.")


class _Call:
    """The arguments of a call, and what is needed to see later that they are still what they were."""

    def __init__(self, leaves: list[Any], spec: TreeSpec, settings: int) -> None:
        self.leaves, self.spec, self.settings = leaves, spec, settings
        self._marks = [_mark(leaf) for leaf in leaves]

    @staticmethod
    def of(args: Args, kwargs: Kwargs, settings: int) -> _Call:
        # Whoever wrote the two calls may have named their arguments in another order.
        return _Call(*tree_flatten((args, dict(sorted(kwargs.items())))), settings)

    @property
    def arguments(self) -> tuple[Args, Kwargs]:
        return tree_unflatten(self.leaves, self.spec)

    def differences(
        self, later: _Call, among: Iterable[int] | None = None, *, settings: bool = True
    ) -> list[int] | None:
        """The leaves, of some or all, in which a later call differs; None if it differs in more."""
        if self.spec != later.spec or (settings and self.settings != later.settings):
            return None
        places = list(range(len(self.leaves)) if among is None else among)
        same = _read([_is_same(self.leaves[at], self._marks[at], later.leaves[at]) for at in places])
        return [at for at, is_same in zip(places, same, strict=True) if not is_same]


def _mark(leaf: Any) -> Any:
    """By which a tensor that was written is recognised; those of inference mode do not count it."""
    if not isinstance(leaf, Tensor):
        return None
    return leaf.clone() if leaf.is_inference() else leaf._version


def _is_same(before: Any, mark: Any, now: Any) -> bool | Tensor:
    """Whether a leaf is what it was; a tensor of one bool where only its values tell."""
    if not isinstance(before, Tensor) or not isinstance(now, Tensor):
        return type(before) is type(now) and before == now
    if (before.shape, before.dtype, before.device) != (now.shape, now.dtype, now.device):
        return False
    if isinstance(mark, Tensor):
        is_unwritten = (before == mark).all()
        return is_unwritten if before is now else is_unwritten & (before == now).all()
    if before._version != mark:
        return False
    # Views of the same memory, as of an expanded timestep, are other objects with the same values.
    return before is now or before.is_set_to(now) or (before == now).all()


def _read(claims: list[bool | Tensor]) -> list[bool]:
    """Read the claims of a device all at once: a GPU is waited for once a call, if at all."""
    asked: dict[int, Tensor] = {at: claim for at, claim in enumerate(claims) if isinstance(claim, Tensor)}
    found: dict[int, bool] = {}
    for device in {claim.device for claim in asked.values()}:
        here = {at: claim for at, claim in asked.items() if claim.device == device}
        found |= zip(here, torch.stack([*here.values()]).tolist(), strict=True)
    return [found.get(at, claim is True) for at, claim in enumerate(claims)]


def _may_be_cached(arguments: Any) -> bool:
    """Whether a call has arguments of which nobody knows that they are but values."""
    return not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in tree_leaves(arguments))


def _latents(module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    first = kwargs.get(next(iter(parameters(module)), ""))
    return args[0] if args else kwargs.get("hidden_states", first)


def _half_of_batch(module: nn.Module, branch: int, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """A branch's half of all that has a batch; None if that cannot be told, or is odd."""
    latents = _latents(module, args, kwargs)
    batch = latents.shape[0] if isinstance(latents, Tensor) and latents.dim() > 1 else 0
    if not batch or batch % 2:
        return None
    part = slice(branch * batch // 2, (branch + 1) * batch // 2)
    values: list[Any] = []
    for name, value in (*zip(chain(parameters(module), repeat("")), args, strict=False), *kwargs.items()):
        tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.dim() and name not in WHOLE]
        if any(x.shape[0] not in (1, batch) for x in tensors):
            return None
        if name in LISTS and isinstance(value, list) and len(value) == batch:
            value = value[part]
        elif tensors:
            value = tree_map(
                lambda x: x[part] if isinstance(x, Tensor) and x.dim() and x.shape[0] == batch else x, value
            )
        values.append(value)
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
