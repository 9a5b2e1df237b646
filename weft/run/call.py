"""AttentionCall: the arguments of one `weft.attention` call, validated and turned into a schedule."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.core.backends import check_backend
from weft.core.errors import InputError
from weft.core.indices import Indices
from weft.core.layout import Layout
from weft.core.mask import AnyMask, BlockMask
from weft.core.mesh import Mesh
from weft.core.partition import Partition, WorkItem
from weft.core.problem import ITEM_BYTES, Problem
from weft.core.schedule import Schedule
from weft.schedule.usp import usp

if TYPE_CHECKING:
    from weft.core.topology import Topology
    from weft.plan.choose import Plan
    from weft.plan.place import Planned

Counts = tuple[tuple[int, ...], ...]
"""By rank: rows of q, rows of k."""


class AttentionCall(NamedTuple):
    """The arguments of one call, but for the values of its tensors: equal calls share an executor."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    """Shapes of this rank's tensors."""
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]
    mask: BlockMask | None
    plan: str | Plan | Planned | Schedule
    tokens: int | Layout | None
    kv_tokens: int | Layout | None
    prefix: int
    suffix: int
    backend: str
    topology: Topology | None
    scale: float | None

    @property
    def dtype(self) -> str:
        return str(self.dtypes[0]).removeprefix("torch.")

    @property
    def serves_any_mask(self) -> bool:
        """Whether the plan is one for any mask of its grid: then the mask may change from call to call."""
        schedule = getattr(self.plan, "schedule", self.plan)
        return isinstance(schedule, Schedule) and isinstance(schedule.mask, AnyMask)

    def check_tensors(self) -> None:
        """Raise unless shapes, dtypes and devices of this rank's tensors fit each other."""
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
                f"q, k, v must have one dtype, got {[str(d) for d in self.dtypes]}.", hint="Cast them."
            )
        if self.dtype not in ITEM_BYTES:
            raise InputError(f"q, k, v are {self.dtype}.", hint=f"Use one of {', '.join(ITEM_BYTES)}.")
        if len(set(self.devices)) > 1:
            raise InputError(
                f"q, k, v must be on one device, got {[str(d) for d in self.devices]}.", hint="Move them."
            )

    def check_options(self) -> None:
        """Raise unless the options are valid, whatever the tensors are."""
        check_backend(self.backend)
        scale = self.scale
        if scale is not None and not (_is_a(scale, int, float) and math.isfinite(scale)):
            raise InputError(f"scale={scale!r} is not a finite number.", hint="Leave it out for 1/√head_dim.")
        if self.mask is not None and not _is_a(self.mask, BlockMask):
            raise InputError(
                f"mask is a {type(self.mask).__name__}.",
                hint="Give a name, such as sta, or a BlockMask, from weft.mask or BlockMask.from_tiles.",
            )
        self._check_plan()
        for name, count in (("prefix", self.prefix), ("suffix", self.suffix)):
            if not _is_a(count, int) or count < 0:
                raise InputError(
                    f"{name} must be an integer >= 0, got {count!r}.",
                    hint="Pass the number of tokens that every rank holds.",
                )
        for name, size in (("tokens", self.tokens), ("kv_tokens", self.kv_tokens)):
            if size is not None and not _is_a(size, Layout) and not (isinstance(size, int) and size > 0):
                raise InputError(
                    f"{name} must be an integer > 0 or a Layout, got {size!r}.",
                    hint="Pass the length of the whole sequence.",
                )

    def _check_plan(self) -> None:
        if self.topology is not None:
            from weft.core.topology import Topology

            if not _is_a(self.topology, Topology):
                raise InputError(
                    f"topology is a {type(self.topology).__name__}.",
                    hint="Give a weft.Topology, as from Topology.from_toml.",
                )
        if not isinstance(self.plan, str | Schedule):
            from weft.plan.choose import Plan
            from weft.plan.place import Planned

            if not _is_a(self.plan, Plan, Planned):
                raise InputError(f"plan={self.plan!r}.", hint="Give a strategy's name, a Plan or a Schedule.")


def check_layout(layout: str, *tensors: torch.Tensor) -> None:
    """Raise unless `layout` is bshd and the tensors have four dims, which are exchanged next."""
    if layout != "bshd":
        raise InputError(
            f"layout={layout!r} is unknown.",
            hint="Use bhsd for [batch, heads, local tokens, head_dim], or bshd.",
        )
    for name, x in zip("qkv", tensors, strict=True):
        if x.dim() != 4:
            raise InputError(
                f"{name} has shape {list(x.shape)}.",
                hint='Expected [batch, local tokens, heads, head_dim] with layout="bshd".',
            )


def _is_a(option: Hashable, *kinds: type) -> bool:
    """Whether an option is of a kind that its annotation requires, which a caller may have ignored."""
    return isinstance(option, kinds)


def schedule_for(
    call: AttentionCall, *, rank: int, ranks: int, counts: Counts | None = None, axes: str | None = None
) -> Schedule:
    """Return the schedule of a valid call, the same on all ranks; `axes`: the strategy that a mesh names."""
    if not isinstance(call.plan, str):
        return _planned_schedule(call, call.plan, rank, ranks)
    q, kv = _layouts(call, ranks, counts)
    batch, heads, _, head_dim = call.q
    _check_rows("q", call.q, q, rank)
    _check_rows("k and v", call.k, kv, rank)
    problem = Problem(
        batch=batch, heads=heads, kv_heads=call.k[1], head_dim=head_dim, q=q, kv=kv, dtype=call.dtype
    )
    mask = BlockMask.dense(heads, q.size, kv.size) if call.mask is None else call.mask
    fits = (mask.heads, mask.q_len, mask.kv_len) == (heads, q.size, kv.size)
    name = axes if axes and call.plan == "auto" else call.plan
    if ranks == 1 and name == "auto" and call.topology is None and fits:
        return _local_schedule(problem, mask)
    from weft.plan.choose import build
    from weft.run.topology import topology_for

    topology = topology_for(call.topology, ranks, call.devices[0], call.backend)
    return build(name, problem, mask, topology)


def _local_schedule(problem: Problem, mask: BlockMask) -> Schedule:
    """Return the only schedule of one rank: it computes all tiles, and nothing is sent."""
    work = WorkItem(problem.all_heads, Indices.span(0, problem.q.size))
    partition = Partition(((work,),), (Indices.span(0, problem.kv.size),))
    return usp(problem, mask, Mesh.of(ring=1), partition, name="ring")


def facts_of(call: AttentionCall, schedule: Schedule, kernel: str) -> dict[str, str]:
    """Return what must be equal on all ranks before anything is sent; the digest stands for the schedule."""
    problem, mask = schedule.attention
    return {
        "batch": str(problem.batch),
        "heads": f"{problem.heads}/{problem.kv_heads}",
        "head_dim": str(problem.head_dim),
        "dtype": problem.dtype,
        "device": call.devices[0].type,
        "tokens": f"{problem.q.size}×{problem.kv.size}",
        "layout": str(problem.q) if problem.q == problem.kv else f"{problem.q} and {problem.kv}",
        "mask": f"{mask!r} {mask.digest}",
        "scale": repr(None if call.scale is None else float(call.scale)),
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


def _planned_schedule(
    call: AttentionCall, plan: Plan | Planned | Schedule, rank: int, ranks: int
) -> Schedule:
    schedule = schedule_of(plan)
    problem, mask = schedule.attention
    if problem.ranks != ranks:
        raise InputError(f"The plan is for {problem.ranks} ranks, this world has {ranks}.")
    batch, heads, _, head_dim = call.q
    have = (batch, heads, call.k[1], head_dim, call.dtype)
    want = (problem.batch, problem.heads, problem.kv_heads, problem.head_dim, problem.dtype)
    if have != want:
        raise InputError(
            f"The plan is for (batch, heads, kv heads, head_dim, dtype) {want}, the tensors have {have}."
        )
    _check_rows("q", call.q, problem.q, rank)
    _check_rows("k and v", call.k, problem.kv, rank)
    if call.mask is not None and call.mask != mask:
        raise InputError("The plan was made for another mask.", hint="Leave mask out, or plan again.")
    from weft.plan.place import Planned

    if not isinstance(plan, Planned):  # which weft has just built: right by construction
        from weft.schedule.verify import verify

        verify(schedule)
    return schedule


def _layouts(call: AttentionCall, ranks: int, counts: Counts | None) -> tuple[Layout, Layout]:
    """Home layouts of the query and key/value tokens, from the options or from the rows of all ranks."""
    q, kv = call.tokens, call.kv_tokens
    if call.mask is not None:
        q = call.mask.q_len if q is None else q
        kv = call.mask.kv_len if kv is None else kv
    if counts is not None:
        q = _from_counts([row[0] for row in counts], call)
        if kv is None:
            same = all(row[0] == row[1] for row in counts)
            kv = q if same else _from_counts([row[1] for row in counts], call)
    q_layout = _layout(q, ranks, call)
    if call.kv_tokens is None and (kv is None or (isinstance(kv, int) and kv == q_layout.size)):
        return q_layout, q_layout
    return q_layout, _layout(kv, ranks, call)


def _layout(tokens: int | Layout | None, ranks: int, call: AttentionCall) -> Layout:
    if isinstance(tokens, Layout):
        if tokens.ranks != ranks:
            raise InputError(f"The layout is for {tokens.ranks} ranks, this world has {ranks}.")
        return tokens
    assert tokens is not None, "without tokens the rows of all ranks are counted"
    return Layout.even(tokens, ranks, prefix=call.prefix, suffix=call.suffix)


def _from_counts(rows: list[int], call: AttentionCall) -> Layout:
    own = [count - call.prefix - call.suffix for count in rows]
    if min(own) < 0:
        raise InputError(
            f"prefix={call.prefix} and suffix={call.suffix} are more than rank {own.index(min(own))}'s "
            f"{min(rows)} rows.",
            hint="The replicated tokens are part of every rank's q, k and v.",
        )
    return Layout.uneven(own, prefix=call.prefix, suffix=call.suffix)


def _check_rows(name: str, shape: tuple[int, ...], layout: Layout, rank: int) -> None:
    rows = layout.rows(rank)
    if shape[2] != rows:
        hint = "Cut the sequence as the layout says, or pass the Layout you cut it by as tokens=."
        if shape[1] == rows:
            hint = 'Pass layout="bshd" for tensors [batch, local tokens, heads, head_dim].'
        raise InputError(f"Rank {rank}'s {name} have {shape[2]} tokens; {layout} expects {rows}.", hint=hint)
