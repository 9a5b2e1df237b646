"""Call: what one attention call asks for, checked at the door and turned into a schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from weft.core.backends import check_backend
from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import AnyMask, BlockMask
from weft.core.problem import ITEM_BYTES, Problem
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.plan.choose import Plan, build
from weft.plan.place import Planned
from weft.run.gpus import topology_for
from weft.run.kernels.rules import Work
from weft.schedule.verify import verify

_layout_of = lru_cache(1024)(Layout)

Counts = tuple[tuple[int, ...], ...]
"""By rank: rows of q, rows of k."""


@dataclass(frozen=True)
class Options:
    """What the caller asked for besides tensors and ranks; see `weft.attention`."""

    mask: BlockMask | None
    plan: str | Plan | Planned | Schedule
    tokens: int | Layout | None
    kv_tokens: int | Layout | None
    prefix: int
    suffix: int
    backend: str
    topology: Topology | None
    scale: float | None

    def checked(self) -> Options:
        """The options with layouts in place of their constants, if they keep the rules."""
        tokens, kv_tokens = (
            _layout_of(*each) if isinstance(each, tuple) else each for each in (self.tokens, self.kv_tokens)
        )
        scale = float(self.scale) if isinstance(self.scale, int) else self.scale
        options = replace(self, tokens=tokens, kv_tokens=kv_tokens, scale=scale)
        options.check()
        return options

    def check(self) -> None:
        """The rules that hold whatever the tensors are."""
        if self.scale is not None and not (isinstance(self.scale, float) and math.isfinite(self.scale)):
            raise InputError(
                f"scale={self.scale!r} is not a finite number.", hint="Leave it out for 1/√head_dim."
            )
        check_backend(self.backend)
        if self.mask is not None and not isinstance(self.mask, BlockMask):
            raise InputError(
                f"mask is a {type(self.mask).__name__}.",
                hint="Make a weft.BlockMask, as with BlockMask.from_tiles.",
            )
        if not (self.topology is None or isinstance(self.topology, Topology)):
            raise InputError(
                f"topology is a {type(self.topology).__name__}.",
                hint="Give a weft.Topology, as from Topology.from_toml.",
            )
        if not isinstance(self.plan, str | Plan | Planned | Schedule):
            raise InputError(f"plan={self.plan!r}.", hint="Give a strategy's name, a Plan or a Schedule.")
        for name in ("prefix", "suffix"):
            count = getattr(self, name)
            if not isinstance(count, int) or count < 0:
                raise InputError(
                    f"{name}={count!r}.", hint="Give how many tokens every rank holds, 0 or more."
                )
        for name in ("tokens", "kv_tokens"):
            given = getattr(self, name)
            if not (given is None or isinstance(given, Layout) or (isinstance(given, int) and given > 0)):
                raise InputError(
                    f"{name}={given!r}.", hint="Give the whole sequence's length, or its Layout."
                )


@dataclass(frozen=True)
class Tensors:
    """Shapes, dtypes and devices of this rank's q, k, v."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]

    def check(self) -> None:
        """The rules that one rank can see by itself."""
        for name, shape in (("q", self.q), ("k", self.k), ("v", self.v)):
            if len(shape) != 4:
                raise InputError(
                    f"{name} has shape {list(shape)}.",
                    hint="Expected [batch, heads, local tokens, head_dim].",
                )
        if self.k != self.v:
            raise InputError(f"k has shape {list(self.k)}, v {list(self.v)}.", hint="They must be the same.")
        if (self.q[0], self.q[3]) != (self.k[0], self.k[3]):
            raise InputError(
                f"q {list(self.q)} and k {list(self.k)} differ in batch or head_dim.",
                hint="They must be the same.",
            )
        if len(set(self.dtypes)) > 1:
            raise InputError(
                f"q, k, v have dtypes {[str(d) for d in self.dtypes]}.", hint="Cast them to one."
            )
        if self.dtype not in ITEM_BYTES:
            raise InputError(f"q, k, v are {self.dtype}.", hint=f"Use one of {', '.join(ITEM_BYTES)}.")
        if len(set(self.devices)) > 1:
            raise InputError(
                f"q, k, v are on {[str(d) for d in self.devices]}.", hint="Move them to one device."
            )

    @property
    def dtype(self) -> str:
        return str(self.dtypes[0]).removeprefix("torch.")


class Call(NamedTuple):
    """What one call asks for: equal calls share an executor."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    """Shapes of this rank's tensors."""
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]
    mask: BlockMask | None
    plan: str | Plan | Planned | Schedule
    tokens: Any
    kv_tokens: Any
    prefix: int
    suffix: int
    backend: str
    topology: Topology | None
    scale: float | None

    @property
    def tensors(self) -> Tensors:
        return Tensors(tuple(self.q), tuple(self.k), tuple(self.v), self.dtypes, self.devices)

    @property
    def options(self) -> Options:
        return Options(*self[5:])

    @property
    def serves_any_mask(self) -> bool:
        """Whether the plan is one for any mask of its grid: then the mask may change from call to call."""
        plan = self.plan
        return isinstance(plan, Plan | Planned | Schedule) and isinstance(schedule_of(plan).mask, AnyMask)

    @property
    def tells_tokens(self) -> bool:
        """Whether the options alone say how long the whole sequence is."""
        return self.tokens is not None or self.mask is not None or not isinstance(self.plan, str)


def schedule_for(
    tensors: Tensors, options: Options, *, rank: int, ranks: int, counts: Counts | None, axes: str | None
) -> Schedule:
    """Check the call and build its schedule; every rank gets the same one, or somebody raises."""
    if not isinstance(options.plan, str):
        return _given_schedule(tensors, options, rank, ranks)
    q, kv = _layouts(options, ranks, counts)
    batch, heads, q_rows, head_dim = tensors.q
    _check_rows("q", q_rows, q, rank)
    _check_rows("k and v", tensors.k[2], kv, rank)
    problem = Problem(
        batch=batch, heads=heads, kv_heads=tensors.k[1], head_dim=head_dim, q=q, kv=kv, dtype=tensors.dtype
    )
    mask = BlockMask.dense(heads, q.size, kv.size) if options.mask is None else options.mask
    name = axes if axes and options.plan == "auto" else options.plan
    topology = topology_for(options.topology, ranks, tensors.devices[0], options.backend)
    return build(name, problem, mask, topology)


def work_of(schedule: Schedule, scale: float | None = None) -> Work:
    """Return what the backend of a call has to compute; the same on all ranks."""
    problem, mask = schedule.attention
    return Work(
        sparse=not mask.is_dense,
        backward=False,
        head_dim=problem.head_dim,
        dtype=problem.dtype,
        block_q=mask.block_q,
        block_k=mask.block_k,
        group=problem.heads // problem.kv_heads,
        positive=scale is None or scale > 0,
    )


def facts(schedule: Schedule, tensors: Tensors, options: Options, kernel: str) -> dict[str, str]:
    """What every rank must say alike before anything moves; the schedule's digest stands for the rest."""
    problem, mask = schedule.attention
    return {
        "batch": str(problem.batch),
        "heads": f"{problem.heads}/{problem.kv_heads}",
        "head_dim": str(problem.head_dim),
        "dtype": problem.dtype,
        "device": tensors.devices[0].type,
        "tokens": f"{problem.q.size}×{problem.kv.size}",
        "mask": mask.digest,
        "scale": repr(options.scale),
        "kernel": kernel,
        "strategy": f"{schedule.name} on {schedule.mesh}",
        "plan": schedule.digest,
    }


def schedule_of(plan: Plan | Planned | Schedule) -> Schedule:
    return plan if isinstance(plan, Schedule) else plan.schedule


def check_mask(schedule: Schedule, mask: BlockMask | None) -> None:
    """The rules for the mask of a schedule that serves any."""
    own = schedule.attention[1]
    if mask is None or mask.grid != own.grid:
        heads, q_len, kv_len, *blocks = own.grid
        raise InputError(
            f"The plan serves masks of {heads} heads, {q_len} × {kv_len} tokens in blocks of {blocks[0]} × "
            f"{blocks[1]}; mask is {mask}.",
            hint="Give a mask on that grid with each call.",
        )


def _given_schedule(tensors: Tensors, options: Options, rank: int, ranks: int) -> Schedule:
    plan = options.plan
    assert not isinstance(plan, str)
    schedule = schedule_of(plan)
    problem, mask = schedule.attention
    if problem.ranks != ranks:
        raise InputError(f"The plan is for {problem.ranks} ranks, this world has {ranks}.")
    batch, heads, q_rows, head_dim = tensors.q
    have = (batch, heads, tensors.k[1], head_dim, tensors.dtype)
    want = (problem.batch, problem.heads, problem.kv_heads, problem.head_dim, problem.dtype)
    if have != want:
        raise InputError(
            f"The plan is for (batch, heads, kv heads, head_dim, dtype) {want}, the tensors have {have}."
        )
    _check_rows("q", q_rows, problem.q, rank)
    _check_rows("k and v", tensors.k[2], problem.kv, rank)
    if options.mask is not None and options.mask != mask:
        raise InputError("The plan was made for another mask.", hint="Leave mask out, or plan again.")
    if not isinstance(plan, Planned):  # weft's own, just built: right by construction
        verify(schedule)
    return schedule


def _layouts(options: Options, ranks: int, counts: Counts | None) -> tuple[Layout, Layout]:
    """Home layouts of the query and key/value tokens, from what the caller or all ranks together said."""
    q, kv = options.tokens, options.kv_tokens
    if options.mask is not None:
        q = options.mask.q_len if q is None else q
        kv = options.mask.kv_len if kv is None else kv
    if counts is not None:
        q = _from_counts([row[0] for row in counts], options)
        if kv is None:
            same = all(row[0] == row[1] for row in counts)
            kv = q if same else _from_counts([row[1] for row in counts], options)
    q_layout = _layout(q, ranks, options)
    if options.kv_tokens is None and (kv is None or (isinstance(kv, int) and kv == q_layout.size)):
        return q_layout, q_layout
    return q_layout, _layout(kv, ranks, options)


def _layout(tokens: Any, ranks: int, options: Options) -> Layout:
    if isinstance(tokens, Layout):
        if tokens.ranks != ranks:
            raise InputError(f"The layout is for {tokens.ranks} ranks, this world has {ranks}.")
        return tokens
    return Layout.even(tokens, ranks, prefix=options.prefix, suffix=options.suffix)


def _from_counts(rows: list[int], options: Options) -> Layout:
    own = [count - options.prefix - options.suffix for count in rows]
    if min(own) < 0:
        raise InputError(
            f"prefix={options.prefix} and suffix={options.suffix} are more than rank {own.index(min(own))}'s "
            f"{min(rows)} rows.",
            hint="The replicated tokens are part of every rank's q, k and v.",
        )
    return Layout.uneven(own, prefix=options.prefix, suffix=options.suffix)


def _check_rows(name: str, rows: int, layout: Layout, rank: int) -> None:
    if rows != layout.rows(rank):
        raise InputError(
            f"Rank {rank}'s {name} have {rows} tokens; {layout} expects {layout.rows(rank)}.",
            hint="Cut the sequence as the layout says, or pass the Layout you cut it by as tokens=.",
        )
