"""Classifier-free guidance on two halves of the ranks: one predicts with the prompt, the other without it.

    guidance = Guidance.of(transformer, mesh, "auto")           # one for each transformer of a pipeline
    output = guidance(region.run, args, kwargs)                 # instead of region.run(mesh, args, kwargs)

Pipelines guide in one of two forms, which is detected:

batched      One call with a batch of two halves. Each half of the ranks takes one; any even batch will do.
sequential   Two calls a step that differ in the conditioning. After one step the second call is predicted:
             it is computed beside the first, and its output held until it is called. A call that comes out
             different is computed as it is, by all ranks.

Half of the ranks on half of the work compute as much as before and send less: of M bytes, each of N ranks
sends M/N·(N-2)/N in an attention instead of M/N·(N-1)/N, nothing if N is 2, and once a call the output. So
it pays whenever N is even; its price is memory in sequential guidance, where each rank has twice the tokens
of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, repeat
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import PyTree, TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from weft.core.errors import InputError
from weft.diffusers.module_state import ModuleState
from weft.hooks.digest import version_of
from weft.hooks.module_tree import forward_parameters
from weft.hooks.wrap import Args, Kwargs
from weft.run.groups import split
from weft.run.switch import all_gather
from weft.run.world import MeshLike, world_of

RunOnMesh = Callable[[MeshLike, Args, Kwargs], PyTree]
"""(mesh, args, kwargs) -> the output, full on every rank of the mesh."""

MODES = ("auto", "on", "off")
UNBATCHED = frozenset(
    ("image_rotary_emb", "rotary_emb", "freqs_cis", "img_ids", "txt_ids", "control_hidden_states_scale")
)
"""Arguments without a batch, whatever their first size happens to be."""
BATCH_LISTS = frozenset({"img_shapes"})
"""Arguments that are lists with an item for each of the batch."""
PLAIN_TYPES = (type(None), bool, int, float, str, torch.dtype, torch.device)
MAX_FAULTS = 3  # wrong predictions until prediction is disabled: each costs one call


@dataclass(frozen=True)
class Halves:
    """The two halves of the ranks, as one rank has them.

    half   the ranks of its branch, that is 0 or 1; neighbors, so on one machine if possible.
    pair   the rank with the same place in the other half, after or before it: branch 0 comes first.
    """

    branch: int
    half: MeshLike
    pair: MeshLike

    @staticmethod
    def of(group: dist.ProcessGroup) -> Halves:
        """Return the halves of an even number of ranks; all of its ranks make them, once for a group."""
        if group not in _halves:
            size = group.size() // 2
            # Create the groups in the same order on every rank; otherwise two ranks wait for each other.
            half = split(group, [range(size), range(size, 2 * size)])
            pair = split(group, [(place, place + size) for place in range(size)])
            _halves[group] = Halves(group.rank() // size, half, pair)
        return _halves[group]


_halves: WeakKeyDictionary[dist.ProcessGroup, Halves] = WeakKeyDictionary()


class Guidance:
    """Runs the calls of one model on halves of the ranks where possible, else on all of them.

    All ranks decide alike: a decision depends on which arguments are the same objects or have the same values
    as earlier ones on this rank, and on the `ModuleState`. All ranks run the same program on the same numbers
    (see `weft.hooks.rng`), and an output that some of them computed is sent to the others bit by bit. They
    communicate about it once: whether the states of all of them stay.
    """

    batched = True
    """Whether a batch may be split: not if its samples share a mask that depends on all of them."""

    def __init__(self, module: nn.Module, mesh: MeshLike, halves: Halves | None) -> None:
        self.module, self.mesh, self.halves = module, mesh, halves
        self._state = ModuleState(module)
        self.forget()

    @staticmethod
    def of(module: nn.Module, mesh: MeshLike, mode: str = "auto") -> Guidance:
        """auto: split over two halves if the number of ranks is even; on: split or raise; off: never."""
        if mode not in MODES:
            raise InputError(f"cfg must be one of {', '.join(MODES)}, got {mode!r}.")
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
        """Drop what is known of a pipeline's calls, and the tensors that are held for it."""
        self._last: ModelCall | None = None
        self._pattern: tuple[ModelCall, ModelCall, list[int]] | None = None
        self._computed: tuple[ModelCall, PyTree] | None = None
        """A call that is predicted, and its output."""
        self._faults = 0

    def __call__(self, run: RunOnMesh, args: Args, kwargs: Kwargs) -> PyTree:
        halves = self.halves
        if halves is None:
            return run(self.mesh, args, kwargs)
        training = torch.is_grad_enabled() or self.module.training  # dropout is that of the whole batch
        if training:
            self._state.forget()
        state = None if training or not _is_plain((args, kwargs)) else self._state.number()
        if state is None:
            self.forget()
            return run(self.mesh, args, kwargs)
        half = _half_of_batch(self.module, halves.branch, args, kwargs) if self.batched else None
        if half is None:
            return self._sequential(halves, run, ModelCall.of(args, kwargs, state))
        self.forget()
        output = run(halves.half, *half)
        rows = _latents(self.module, *half).shape[:1]
        if any(isinstance(x, Tensor) and x.shape[:1] != rows for x in tree_leaves(output)):
            raise self._error("a tensor whose first dim is not the batch")
        return tree_map(
            lambda a, b: torch.cat([a, b]) if isinstance(a, Tensor) else a, *self._exchange(halves, output)
        )

    def _sequential(self, halves: Halves, run: RunOnMesh, call: ModelCall) -> PyTree:
        last, self._last = self._last, call
        computed, self._computed = self._computed, None
        if computed is not None:
            if computed[0].differences(call) == []:
                return computed[1]
            self._pattern, self._faults = None, self._faults + 1
        prediction = self._predict(call)
        if prediction is None:
            if last is not None and self._faults < MAX_FAULTS:
                self._learn(last, call)
            return run(self.mesh, *call.arguments)
        own = (call, prediction)[halves.branch]
        first, second = self._exchange(halves, run(halves.half, *own.arguments))
        self._computed = prediction, second
        return first

    def _learn(self, last: ModelCall, call: ModelCall) -> None:
        """Note two calls on the same latents that differ in something else: they are the calls of a step."""
        changed = last.differences(call, any_state=True)
        latents = _latents(self.module, *call.arguments)
        if changed and isinstance(latents, Tensor) and all(call.leaves[at] is not latents for at in changed):
            # Arguments are the same on all ranks; a hook that stores what it gets may be on one only.
            is_same = int(last.state == call.state)
            if all(own for (own,) in world_of(self.mesh, 60.0).comm.all_gather_ints([is_same])):
                self._pattern = last, call, changed
            else:
                self._faults += 1

    def _predict(self, call: ModelCall) -> ModelCall | None:
        """Return the next call, if this is the first call of a step."""
        if self._pattern is None:
            return None
        first, second, changed = self._pattern
        if first.differences(call, changed) != []:
            return None
        leaves = [second.leaves[at] if at in changed else leaf for at, leaf in enumerate(call.leaves)]
        return ModelCall(leaves, call.spec, call.state)

    def _exchange(self, halves: Halves, output: PyTree) -> tuple[PyTree, PyTree]:
        """Return the outputs of both branches."""
        leaves, spec = tree_flatten(output)
        pairs: list[PyTree] = []
        for x in leaves:
            if isinstance(x, Tensor):
                pairs.append(all_gather(x, mesh=halves.pair, stage="guidance"))
            elif isinstance(x, PLAIN_TYPES):
                pairs.append((x, x))
            else:
                raise self._error(f"a {type(x).__name__}, which cannot be exchanged")
        first, second = ([pair[at] for pair in pairs] for at in (0, 1))
        return tree_unflatten(first, spec), tree_unflatten(second, spec)

    def _error(self, output: str) -> InputError:
        return InputError(f"{type(self.module).__name__} returns {output}.", hint="Use cfg='off'.")


class ModelCall:
    """The arguments of a call, and what shows later whether they are unchanged."""

    def __init__(self, leaves: list[PyTree], spec: TreeSpec, state: int) -> None:
        self.leaves, self.spec, self.state = leaves, spec, state
        self._marks = [_mark(leaf) for leaf in leaves]

    @staticmethod
    def of(args: Args, kwargs: Kwargs, state: int) -> ModelCall:
        # The two calls of a pipeline may name their arguments in different orders.
        return ModelCall(*tree_flatten((args, dict(sorted(kwargs.items())))), state)

    @property
    def arguments(self) -> tuple[Args, Kwargs]:
        return tree_unflatten(self.leaves, self.spec)

    def differences(
        self, later: ModelCall, among: Iterable[int] | None = None, *, any_state: bool = False
    ) -> list[int] | None:
        """Return the leaves, of some or all, in which a later call differs; None if it differs in more."""
        if self.spec != later.spec or not (any_state or self.state == later.state):
            return None
        places = list(range(len(self.leaves)) if among is None else among)
        same = _read([_is_same(self.leaves[at], self._marks[at], later.leaves[at]) for at in places])
        return [at for at, is_same in zip(places, same, strict=True) if not is_same]


def _mark(leaf: PyTree) -> Tensor | int | None:
    """Return what shows that a tensor was written; those of inference mode do not count it."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else version_of(leaf)


def _is_same(before: PyTree, mark: Tensor | int | None, now: PyTree) -> bool | Tensor:
    """Return whether a leaf is unchanged; a tensor of one bool where that depends on its values."""
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
    on_device: dict[int, Tensor] = {at: claim for at, claim in enumerate(claims) if isinstance(claim, Tensor)}
    values: dict[int, bool] = {}
    for device in {claim.device for claim in on_device.values()}:
        here = {at: claim for at, claim in on_device.items() if claim.device == device}
        values |= zip(here, torch.stack([*here.values()]).tolist(), strict=True)
    return [values.get(at, claim is True) for at, claim in enumerate(claims)]


def _is_plain(arguments: PyTree) -> bool:
    """Return whether arguments are but values: other objects may be caches."""
    return all(isinstance(leaf, (Tensor, *PLAIN_TYPES)) for leaf in tree_leaves(arguments))


def _latents(module: nn.Module, args: Args, kwargs: Kwargs) -> PyTree:
    first = kwargs.get(next(iter(forward_parameters(module)), ""))
    return args[0] if args else kwargs.get("hidden_states", first)


def _half_of_batch(module: nn.Module, branch: int, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Return a branch's half of all arguments with a batch; None if the batch is unknown, or odd."""
    latents = _latents(module, args, kwargs)
    batch = latents.shape[0] if isinstance(latents, Tensor) and latents.dim() > 1 else 0
    if not batch or batch % 2:
        return None
    half = slice(branch * batch // 2, (branch + 1) * batch // 2)
    values: list[PyTree] = []
    for name, value in (
        *zip(chain(forward_parameters(module), repeat("")), args, strict=False),
        *kwargs.items(),
    ):
        tensors = [
            x for x in tree_leaves(value) if isinstance(x, Tensor) and x.dim() and name not in UNBATCHED
        ]
        if any(x.shape[0] not in (1, batch) for x in tensors):
            return None
        if name in BATCH_LISTS and isinstance(value, list) and len(value) == batch:
            value = value[half]
        elif tensors:
            value = tree_map(
                lambda x: x[half] if isinstance(x, Tensor) and x.dim() and x.shape[0] == batch else x, value
            )
        values.append(value)
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
