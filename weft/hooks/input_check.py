"""Compare the inputs that the ranks of one sequence pass to a model: all must pass the same ones.

    with comparison(world, model, args, kwargs):
        output = …

Shapes, dtypes, plain values and the training state are compared in every forward; the values of tensors in
the 1st, 2nd, 4th, 8th, … forward of their shapes. Values are digested on their device. Only hosts wait:
on CPUs before anything is computed; on GPUs a warm forward waits for shapes when all its work is queued, and
a digest is compared by the first forward that finds it copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from weft.core.errors import AgreementError
from weft.hooks.digest import digest, digest_of_facts, fact, hexadecimal, leaves_of
from weft.hooks.wrap import Args, Kwargs
from weft.run import streams
from weft.run.agree import Rows, differences, gather_facts, start_inputs
from weft.run.world import World

MAX_SHAPES = 1024
HINT = (
    "Give all ranks of a sequence the same inputs and noise: draw them on one rank and broadcast them, or "
    "seed all ranks alike. Only ranks of a data dim may differ; then pass mesh=, the dim of the sequence."
)


class Comparison:
    """Compares the inputs of one model over the ranks that its tokens are split over.

    name     the model's name in errors.
    order    the names of its parameters.
    always   compare the values of all tensors in every forward.
    """

    def __init__(self, name: str, order: Sequence[str], *, always: bool = False) -> None:
        self.name, self.order, self.always = name, order, always
        self._forwards = 0
        self._runs: dict[str, int] = {}
        """Number of forwards, by the names of arguments and the shapes of tensors."""
        self._digests: dict[int, Digests] = {}
        """Of values that are not compared yet, by the number of their forward."""
        self._received: dict[int, dict[int, int]] = {}
        """The values of ranks, as one number, by forward and rank."""

    @contextmanager
    def __call__(
        self, world: World, model: nn.Module, args: Args, kwargs: Kwargs, *, values: bool = True
    ) -> Iterator[None]:
        """Compare the arguments of a forward; with `values` false, skip the values of tensors."""
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
        facts |= _modes(model, device) | {"scale, mask or plan before": f"{world.arena.history:x}"}
        runs = self._count(str([(name, facts[name] if name in tensors else "") for name in leaves]))
        self._forwards += 1
        if self.always or (values and not runs & (runs - 1)):
            self._digests[self._forwards] = Digests(tensors)
        finish = self._start(world, facts)
        is_waited_for = is_host(device) or runs == 1  # in a cold forward the hosts synchronize anyway
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
        """Start to exchange facts; the function that is returned raises if those of another rank differ."""
        sent = {at for at, received in self._received.items() if world.comm.rank in received}
        ready = next((at for at in self._digests if at not in sent), 0)
        if ready and not self._digests[ready].is_ready():
            ready = 0
        values = digest_of_facts(self._digests[ready].facts()) if ready else 0
        rows = start_inputs(world.comm, digest_of_facts(facts), ready, values)
        return lambda: self._finish(world, facts, rows())

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
        by_rank = gather_facts(world.comm, facts)
        names = dict.fromkeys(name for theirs in by_rank for name in theirs)
        lines = [
            f"{name} differs on ranks {list(odd)} ({', '.join(sorted({*odd.values()}))}; the others {usual})"
            for name, (usual, odd) in differences(by_rank, names).items()
        ]
        raise AgreementError(
            f"Ranks of one sequence gave {self.name} different inputs{when}: {'; '.join(lines)}.", hint=HINT
        )


class Digests:
    """The digests of some tensors, copied from their devices to the host."""

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
            name: f"values {hexadecimal(number)}"
            for names, copy, _ in self._copies
            for name, number in zip(names, copy.tolist(), strict=True)
        }


def is_host(device: torch.device) -> bool:
    """Return whether work on a device is done when its call returns."""
    return device.type == "cpu"


def is_recomputing() -> bool:
    """Return whether a checkpointed forward runs again for its gradients."""
    return torch._C._current_graph_task_id() != -1


def _has_values(x: Tensor) -> bool:
    """Return whether a tensor can be read: not fake ones, subclasses, and those of a torch.func transform."""
    is_plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_meta
    return is_plain and torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore


def _shape(x: Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype)[6:]}{' with gradient' if x.requires_grad else ''}"


def _modes(model: nn.Module, device: torch.device) -> dict[str, str]:
    """Return what decides how a forward is computed, besides its arguments."""
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else "off"
    return {
        "model.training": str(model.training),
        "torch.is_grad_enabled()": str(torch.is_grad_enabled()),
        "autocast": str(autocast),
    }
