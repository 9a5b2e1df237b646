"""Dry runs: an executor on meta tensors, over a transport that moves nothing, with a kernel that is none.

What remains is the work of the host and the memory that a rank asks for. The tree of commit 45b0107 runs this
file too (see bench.worker), so it imports only what both have.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.masks.grid import TokenGrid
from weft.masks.spec import mask_from_spec
from weft.plan.choose import build
from weft.run.execute import Executor
from weft.simulate.clusters import cluster

HEADS, DIM, GRID = 40, 128, (21, 45, 80)
"""Wan2.1-14B, 81 frames of 1280×720: 75,600 tokens."""
SPECS = {"dense": "dense", "sta": "sta:dense=0.1"}
SCALE = 0.1


@cache
def mask_of(kind: str) -> BlockMask:
    return mask_from_spec(SPECS[kind], heads=HEADS, grid=TokenGrid(*GRID))


def schedule_of(name: str, ranks: int, nodes: str = "", mask: BlockMask | None = None) -> Schedule:
    """Return a strategy's schedule; `nodes` is a cluster, such as 4x8xh100, for those that span machines."""
    mask = mask_of("dense") if mask is None else mask
    tokens, heads = mask.q_len, mask.heads
    layout = Layout.even(tokens, ranks)
    problem = Problem(
        batch=1, heads=heads, kv_heads=heads, head_dim=DIM, q=layout, kv=layout, dtype="bfloat16"
    )
    return build(name, problem, mask, cluster(nodes) if nodes else None)


class DryTransit:
    """Messages that have always arrived."""

    def wait_for(self, peer: int) -> None:
        pass

    def wait_sent(self, peer: int) -> None:
        pass

    def finish(self) -> None:
        pass


class Transport:
    """A process group's interface. `calls` counts point-to-point operations; an all_to_all is one."""

    transport = "dry"

    def __init__(self, rank: int, size: int, *, collective: bool) -> None:
        self.rank, self.size, self.bytes_sent, self.calls = rank, size, 0, 0
        self._collective, self._transit = collective, DryTransit()

    def begin(self, device: torch.device) -> None:
        pass

    def warm_up(self, device: torch.device) -> None:
        pass

    def collective(self, device: torch.device) -> bool:
        del device
        return self._collective

    def post(self, sends: list[Any], receives: list[Any], label: str, tag: int) -> DryTransit:
        del label, tag
        self.calls += len(sends) + len(receives)
        return self._transit

    def all_to_all(self, sends: list[Any], receives: list[Any], label: str) -> DryTransit:
        del sends, receives, label
        self.calls += 1
        return self._transit

    def all_gather_ints(self, numbers: list[int]) -> list[list[int]]:
        return [numbers] * self.size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("gather_"):  # its name in older trees
            return self.all_gather_ints
        raise AttributeError(name)


class DryKernel:
    """An attention kernel's interface. `returns` is True while it allocates the gradients that it returns."""

    name = "dry"

    def __init__(self) -> None:
        self.returns = False
        self.largest = 0
        """Bytes of the gradients that one call returned."""

    def attend(  # noqa: PLR0913 - as kernels are called
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: object,
        scale: float,
        into: tuple[Tensor, ...] | None = None,
        **options: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the sums; `options` are those of older trees."""
        del k, v, tiles, scale, options
        if into is not None:
            return into[0], into[1]
        return _sum_like(q), _sum_like(q[..., 0])

    def attend_backward(  # noqa: PLR0913 - as kernels are called
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: object, tiles: object, scale: float
    ) -> tuple[Tensor, ...]:
        del grad, done, tiles, scale
        self.returns = True
        grads = tuple(_sum_like(x) for x in (q, k, v))
        self.returns = False
        self.largest = max(self.largest, sum(x.nbytes for x in grads))
        return grads


def _sum_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


class DryRun:
    """One rank's executor, with the caller's tensors."""

    def __init__(self, schedule: Schedule, rank: int, *, collective: bool = True) -> None:
        """`collective` as in a process group, which runs an exchange of all ranks as one all_to_all."""
        problem: Any = schedule.problem
        self.transport, self.kernel = Transport(rank, problem.ranks, collective=collective), DryKernel()
        # Until its programs were bound to the device of a call, an executor was told its device.
        options = {"device": "meta"} if "device" in inspect.signature(Executor).parameters else {}
        self.executor: Any = Executor(schedule, self.transport, self.kernel, **options)  # type: ignore[arg-type]
        shape = (1, problem.heads, problem.q.rows(rank), problem.head_dim)
        self.q, self.k, self.v = (
            torch.empty(shape, dtype=getattr(torch, problem.dtype), device="meta") for _ in range(3)
        )

    def forward(self, *, keep: bool = False) -> tuple[Tensor, list[Tensor]]:
        return self.executor.forward(self.q, self.k, self.v, SCALE, keep=keep)

    def held(self, direction: str) -> Held:
        """Track a first run: forward, saving (a forward that saves for its backward) or backward."""
        own = [self.q, self.k, self.v]
        if direction != "backward":
            with Storages(self.kernel, own) as storages:
                _result = self.forward(keep=direction == "saving")
            return storages.held()
        out, saved = self.forward(keep=True)
        grad = torch.empty_like(out)
        # An arena of its own: one that both directions share is as large as the larger of them needs.
        self.executor.arena = type(self.executor.arena)()
        if not getattr(self.executor, "reads_output", True):
            out = None  # autograd does not save it then
        tensors = [x for x in (grad, out) if x is not None]
        with Storages(self.kernel, [*own, *tensors, *saved]) as storages:
            _result = self.executor.backward(grad, (self.q, self.k, self.v), out, saved, SCALE)
        return storages.held()


class Held(NamedTuple):
    """Bytes of the storages that were alive at the peak of a run."""

    num_bytes: int
    """Kernel scratch apart: as much as the largest call of a kernel returns."""
    stale: int
    """Of them, what earlier calls of kernels returned."""
    sizes: list[tuple[int, int]]
    """(bytes, count), the largest sums first."""


class Storages(TorchDispatchMode):
    """Follow all storages that are alive, from the given tensors on."""

    def __init__(self, kernel: DryKernel, tensors: list[Tensor]) -> None:
        super().__init__()
        self._kernel = kernel
        self._alive: dict[int, tuple[StorageWeakRef, int, bool]] = {}
        self._moments: list[tuple[int, int, Counter[int]]] = []
        """Bytes alive after each allocation: all others, what kernels returned, and the sizes of both."""
        for tensor in tensors:
            self._see(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # A weak reference holds the address, so that no later storage can be taken for this one.
        if storage._cdata in self._alive:
            return
        self._alive = {at: entry for at, entry in self._alive.items() if not entry[0].expired()}
        self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), self._kernel.returns
        entries = self._alive.values()
        others, returned = (sum(size for _, size, by in entries if by is which) for which in (False, True))
        self._moments.append((others, returned, Counter(size for _, size, _ in entries)))

    def held(self) -> Held:
        scratch = self._kernel.largest
        others, returned, sizes = max(self._moments, key=lambda each: each[0] + max(0, each[1] - scratch))
        stale = max(0, returned - scratch)
        return Held(others + stale, stale, sorted(sizes.items(), key=lambda item: -item[0] * item[1]))


@contextmanager
def fused_launches() -> Iterator[list[str]]:
    """Bind copies as on a GPU, and list their launches in place of making them; a no-op in an older tree."""
    launched: list[str] = []
    if find_spec("weft.run.fused") is None:
        yield launched
        return
    bind, fused = (import_module(f"weft.run.{name}") for name in ("bind", "fused"))
    with (
        patch.object(bind, "copier_of", fused.FusedCopier),
        patch.object(fused, "launch", lambda *_: launched.append("copy_boxes")),
    ):
        yield launched


class Launches(TorchDispatchMode):
    """Count tensor operations that launch a kernel on a GPU: neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [func._schema.name] * launches_of(func, args)
        return func(*args, **(kwargs or {}))


def launches_of(func: Any, args: tuple[Any, ...]) -> int:
    """Return how many kernels an operation launches; a `_foreach_` one is counted as its tensors."""
    name = func._schema.name.partition("::")[2]
    views = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
    if views or "empty" in name or name == "_unsafe_view":
        return 0
    return len(args[0]) if name.startswith("_foreach_") else 1
