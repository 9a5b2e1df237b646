"""Compare what the ranks of one sequence give a model: tokens of different inputs would be put together.

    with comparison(world, model, args, kwargs):
        output = …

Shapes, dtypes, plain values and the training state are compared in every forward, the values of tensors in
the first of its shapes, the second, fourth, eighth, … Values are digested on their device. Only hosts wait:
on CPUs before anything is computed; on GPUs a warm forward waits for shapes when all its work is queued, and
a digest is compared by the first forward that finds it copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.errors import AgreementError
from weft.models.randomness import WORD, fact, leaves_of
from weft.run import streams
from weft.run.agree import Rows, differences, gather_facts, start_inputs
from weft.run.world import World

CHUNK_WORDS = 1 << 22
"""Digested at once: a large input needs no copy of its size."""
MAX_SHAPES = 1024
GOLDEN, MIX = -7046029254386353131, -4417276706812531889
"""Odd numbers with bits all over, as in splitmix64."""
HINT = (
    "Give all ranks of a sequence the same inputs and noise: draw them on one rank and broadcast them, or "
    "seed all ranks alike. Only ranks of a data dim may differ; then pass mesh=, the dim of the sequence."
)


class Comparison:
    """Of the inputs of one model, over the ranks that its tokens are split over.

    name     what errors call the model.
    order    the names of its parameters.
    always   compare the values of all tensors in every forward.
    """

    def __init__(self, name: str, order: Sequence[str], *, always: bool = False) -> None:
        self.name, self.order, self.always = name, order, always
        self._forwards = 0
        self._runs: dict[str, int] = {}
        """Forwards that were compared, by the names of arguments and the shapes of tensors."""
        self._digests: dict[int, Digests] = {}
        """Of values that are not compared yet, by the number of their forward."""
        self._received: dict[int, dict[int, int]] = {}
        """The values of ranks, as one number, by forward and rank."""

    def __deepcopy__(self, memo: Any) -> Comparison:
        return Comparison(self.name, self.order, always=self.always)

    @contextmanager
    def __call__(
        self, world: World, model: nn.Module, args: Any, kwargs: Any, *, values: bool = True
    ) -> Iterator[None]:
        """Compare the arguments of a forward; `values` tells whether those of tensors may have changed."""
        if world.comm.size == 1 or is_recomputing():
            yield
            return
        leaves = leaves_of(args, kwargs, self.order)
        tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
        device = next((x.device for x in tensors.values() if not x.is_cpu), torch.device("cpu"))
        if streams.is_capturing(device):  # a graph that is replayed compares nothing
            yield
            return
        facts = {name: _shape(leaf) if name in tensors else fact(leaf) for name, leaf in leaves.items()}
        facts |= _state(model, device) | {"scale, mask or plan before": f"{world.arena.history:x}"}
        runs = self._count(str([(name, facts[name] if name in tensors else "") for name in leaves]))
        self._forwards += 1
        if self.always or (values and not runs & (runs - 1)):
            self._digests[self._forwards] = Digests(tensors)
        finish = self._start(world, facts)
        is_waited_for = is_host(device) or runs == 1  # in a cold forward the hosts agree anyway
        if is_waited_for:
            finish()
        yield
        if not is_waited_for:
            finish()

    def _count(self, shapes: str) -> int:
        if len(self._runs) >= MAX_SHAPES:
            self._runs.clear()
        runs = self._runs[shapes] = self._runs.get(shapes, 0) + 1
        return runs

    def _start(self, world: World, facts: dict[str, str]) -> Callable[[], None]:
        """Begin to tell the others; the result raises if they have something else."""
        ready = next((at for at in self._digests if at not in self._received_of(world)), 0)
        if ready and not self._digests[ready].is_ready():
            ready = 0
        values = _number(self._digests[ready].facts()) if ready else 0
        rows = start_inputs(world.comm, _number(facts), ready, values)
        return lambda: self._finish(world, facts, rows())

    def _received_of(self, world: World) -> set[int]:
        """The forwards of which this rank has told its values already."""
        return {at for at, received in self._received.items() if world.comm.rank in received}

    def _finish(self, world: World, facts: dict[str, str], rows: Rows) -> None:
        if len({row[1] for row in rows}) > 1:
            self._raise(world, facts, "")
        for rank, (_, _, forward, values) in enumerate(rows):
            if forward:
                self._received.setdefault(forward, {})[rank] = values
        for forward in [at for at, received in self._received.items() if len(received) == world.comm.size]:
            received, digests = self._received.pop(forward), self._digests.pop(forward)
            if len({*received.values()}) > 1:
                late = self._forwards - forward
                self._raise(world, digests.facts(), f" {late} forwards ago" if late else "")

    def _raise(self, world: World, facts: dict[str, str], when: str) -> None:
        self._digests, self._received = {}, {}
        everyone = gather_facts(world.comm, facts)
        names = dict.fromkeys(name for theirs in everyone for name in theirs)
        found = [
            f"{name} differs on ranks {list(odd)} ({', '.join(sorted({*odd.values()}))}; the others {usual})"
            for name, (usual, odd) in differences(everyone, names).items()
        ]
        raise AgreementError(
            f"Ranks of one sequence gave {self.name} different inputs{when}: {'; '.join(found)}.", hint=HINT
        )


class Digests:
    """The digests of some tensors, on their way from the devices to the host."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._copies: list[tuple[list[str], Tensor, streams.Event]] = []
        plain = {name: x for name, x in tensors.items() if _has_values(x)}
        for device in dict.fromkeys(x.device for x in plain.values()):
            names = [name for name, x in plain.items() if x.device == device]
            with torch.no_grad():
                numbers = torch.stack([digest(plain[name]) for name in names])
            copy = numbers.to("cpu", non_blocking=True)
            self._copies.append((names, copy, streams.record(device)))

    def is_ready(self) -> bool:
        return all(event.query() for *_, event in self._copies)

    def facts(self) -> dict[str, str]:
        return {
            name: f"values {number & 0xFFFFFFFFFFFFFFFF:016x}"
            for names, copy, _ in self._copies
            for name, number in zip(names, copy.tolist(), strict=True)
        }


def digest(x: Tensor) -> Tensor:
    """Return an int64, on the device of x, that depends on each bit of x and on its place."""
    # One number that was expanded is contiguous, whatever its stride, and cannot be viewed; a copy can.
    plain = x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    data = plain.flatten().view(torch.uint8)
    words = F.pad(data, (0, -data.numel() % WORD)).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(words), CHUNK_WORDS):
        part = words[start : start + CHUNK_WORDS]
        mixed = torch.arange(start + 1, start + 1 + len(part), device=x.device).mul_(GOLDEN).add_(part)
        # Sums of products alone would not see values that are exchanged where their bits end in zeros.
        mixed ^= mixed >> 32
        mixed *= MIX
        mixed ^= mixed >> 29
        total += mixed.sum()
    return total


def is_host(device: torch.device) -> bool:
    """Whether work on a device is done when its call returns."""
    return device.type == "cpu"


def is_recomputing() -> bool:
    """Whether a forward runs once more for its gradients, because a checkpoint kept nothing of it."""
    return torch._C._current_graph_task_id() != -1


def _has_values(x: Tensor) -> bool:
    """Whether a tensor can be read: not fake ones, other subclasses, and those of a torch.func transform."""
    is_plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_meta
    return is_plain and torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore


def _shape(x: Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype)[6:]}{' with gradient' if x.requires_grad else ''}"


def _state(model: nn.Module, device: torch.device) -> dict[str, str]:
    """What decides how a forward is computed, besides its arguments."""
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else "off"
    return {
        "model.training": str(model.training),
        "torch.is_grad_enabled()": str(torch.is_grad_enabled()),
        "autocast": str(autocast),
    }


def _number(facts: dict[str, str]) -> int:
    """63 bits that stand for facts."""
    return int.from_bytes(blake2b(repr(sorted(facts.items())).encode(), digest_size=8).digest(), "big") >> 1
