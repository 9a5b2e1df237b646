"""Choose a strategy: prune candidates by a closed form, then build the others and predict their times."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from weft.core.errors import InputError
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Op, Schedule
from weft.core.topology import Topology
from weft.plan.assignment import Assignment, assemble
from weft.plan.balanced import Balancer
from weft.plan.reasons import TIE, family, gain, loss
from weft.plan.strategies import kinds, parse
from weft.plan.strategy import Strategy, factors
from weft.schedule.measure import attend_works, measure
from weft.simulate.clusters import cluster
from weft.simulate.predict import Timing, predict

MAX_FINALISTS = 6
MAX_COSTLY_FINALISTS = 6
"""Beside the others: many costly ones are alike, and must not crowd out what is not."""
PRUNE_RATIO = 1.1
"""Costly strategies take long to build and to time: only those estimated this near to the best are."""
COMPLEXITY_PENALTY = 1.01
"""On the seconds of costly strategies, which have many messages: a smaller gain is not worth them."""
LATENESS_PENALTY = 0.01
"""On seconds of sending between machines, and of uneven work on shared cores: both stay hidden only while
nothing is late."""


@dataclass(frozen=True)
class Candidate:
    """A strategy that was built and timed."""

    strategy: Strategy
    timing: Timing
    intra_bytes: int
    inter_bytes: int
    """Bytes that all ranks together send inside machines and between them."""
    imbalance: float
    bound: float
    """The least imbalance that this kind of partition could have."""
    schedule: Schedule = field(repr=False, compare=False)
    estimate: float = 0.0
    """Seconds by the closed form."""

    def __repr__(self) -> str:
        return f"Candidate({self.name} {self.seconds * 1e3:.3g} ms)"

    @cached_property
    def memory(self) -> int:
        """Peak bytes of the fullest rank, computed on demand: choosing does not need them."""
        from weft.program.workspace import peak_memory

        return max(peak_memory(self.schedule))

    @property
    def name(self) -> str:
        return str(self.strategy)

    @property
    def seconds(self) -> float:
        return self.timing.seconds


@dataclass(frozen=True)
class Plan:
    """A schedule, what it was chosen from, and why."""

    schedule: Schedule
    ranked: tuple[Candidate, ...]
    """What was timed, the best first."""
    left_out: tuple[tuple[str, float], ...] = ()
    """Names and estimated seconds of candidates that were pruned."""

    def __repr__(self) -> str:
        best, *others = self.ranked
        second = f", {others[0].name} {others[0].seconds / (best.seconds or 1.0):.2f}×" if others else ""
        return f"Plan({best.name} {best.seconds * 1e3:.3g} ms{second}; {len(self.ranked)} timed)"

    def explain(self) -> str:
        """One line for each candidate, the best first, and why it is first."""
        best = self.ranked[0].seconds or 1.0
        lines = [
            f"{option.name:<22} {option.seconds * 1e3:9.2f} ms   {option.seconds / best:5.2f}×   "
            f"{option.timing.exposed:6.1%} exposed   "
            f"imbalance {option.imbalance:.3f}, at least {option.bound:.3f}"
            for option in self.ranked
        ]
        return "\n".join([*lines, self.why()])

    def why(self) -> str:
        """Say in one sentence what makes the first better than the best of another kind."""
        first, *others = self.ranked
        if not others:
            return f"{first.name} is the only strategy."
        kind = family(first.name)
        other = next((each for each in others if family(each.name) != kind), others[0])
        if first.seconds >= (1 - TIE) * other.seconds:
            return f"{first.name} and {other.name} are equally fast to half a percent."
        ahead = other.seconds / first.seconds - 1
        return f"{first.name} is {ahead:.1%} ahead of {other.name}: {gain(first, other)}."

    def why_not(self, topology: Topology | None = None) -> list[tuple[Candidate, str]]:
        """Return the best candidate of each other kind, and why it was not chosen.

        With a topology, kinds that were not worth building are built and timed, too.
        """
        first, *others = self.ranked
        best: dict[str, Candidate] = {family(first.name): first}
        for each in others:
            best.setdefault(family(each.name), each)
        if topology is not None:
            problem, mask = self.schedule.attention
            balancer = Balancer(problem, mask, topology)
            for name, _ in self.left_out:
                if family(name) not in best:
                    timed: dict[tuple[Op, ...], Candidate] = {}
                    _time(parse(name, problem.ranks), balancer, timed)
                    best[family(name)] = next(iter(timed.values()))
        ranked = sorted(best.values(), key=lambda each: each.seconds)
        return [(each, loss(each, first)) for each in ranked if each is not first]


def build(
    name: str,
    problem: Problem,
    mask: BlockMask | None = None,
    topology: Topology | str | None = None,
    *,
    assignment: Assignment | None = None,
) -> Schedule:
    """Build a schedule by its strategy's name: ulysses, ring, zigzag, gather, usp:UxR, …+balanced, …+cuts.

    mask         the tiles that are computed; by default all.
    topology     a Topology or the name of a cluster, such as 4x8xh100. Only auto, torus and balances read it.
    assignment   replaces the one that the strategy's balance makes of this mask.

    `auto` is the choice of `weft.plan`.

    >>> from weft import Layout
    >>> tokens = Layout.even(2047, 5)
    >>> build("ring", Problem(batch=1, heads=3, kv_heads=3, head_dim=64, q=tokens, kv=tokens))
    Schedule(ring on ring 5: 4 exchanges, 25 attends)
    """
    mask, topology = _dense_by_default(mask, problem), _topology(topology)
    if name == "auto" and assignment is None:
        return choose(problem, mask, topology).schedule
    strategy = parse(name, problem.ranks)
    balancer = Balancer(problem, mask, topology or Topology.local(problem.ranks))
    if assignment is not None and not assignment.fits(problem, mask, strategy):
        raise InputError(
            f"The assignment does not fit {name}, {problem.heads} heads and {mask}.",
            hint="It must contain each head and each block of the mask exactly once.",
        )
    return _schedule(strategy, balancer, assignment or balancer.assignment(strategy))


def _dense_by_default(mask: BlockMask | None, problem: Problem) -> BlockMask:
    return BlockMask.dense(problem.heads, problem.q.size, problem.kv.size) if mask is None else mask


def _topology(topology: Topology | str | None) -> Topology | None:
    return cluster(topology) if isinstance(topology, str) else topology


def _schedule(strategy: Strategy, balancer: Balancer, assignment: Assignment) -> Schedule:
    partition = assemble(balancer.problem, balancer.mask, strategy.mesh_on(balancer.topology), assignment)
    return strategy.build(balancer.problem, balancer.mask, partition, balancer.topology)


def usp_names(ranks: int) -> list[str]:
    return [f"usp:{u}x{r}" for u, r in factors(ranks)]


def candidates(problem: Problem, mask: BlockMask, topology: Topology) -> list[Strategy]:
    """Return the strategies that may be fastest: heads × ring, each exchange, each balance that matters."""
    strategies: list[Strategy] = []
    for heads, hops in reversed(factors(problem.ranks)):
        uneven = problem.heads % heads > 0
        balances = ["none"] + ["balanced"] * (uneven or not mask.is_dense)
        if hops > 1 and not mask.is_dense:
            balances.append("cuts")
        plain = [each for kind in kinds() for each in kind.candidates(heads, hops, topology)]
        strategies += [replace(each, balance=balance) for each in plain for balance in balances]
    return strategies


def choose(
    problem: Problem,
    mask: BlockMask | None = None,
    topology: Topology | str | None = None,
    *,
    strategy: str = "auto",
) -> Plan:
    """Return the plan with the shortest predicted time; ties go to the first in the list.

    mask       the tiles that are computed; by default all.
    topology   a Topology or the name of a cluster, such as 4x8xh100; by default a machine without GPUs.
    strategy   auto, or one that is timed alone, by its name as in `build`.

    >>> from weft import Layout
    >>> tokens = Layout.even(4096, 8)
    >>> problem = Problem(batch=1, heads=12, kv_heads=12, head_dim=64, q=tokens, kv=tokens)
    >>> choose(problem, topology="8xh100")
    Plan(gather 0.202 ms, ulysses 1.01×; 6 timed)
    """
    mask = _dense_by_default(mask, problem)
    topology = _topology(topology) or Topology.local(problem.ranks)
    if topology.ranks != problem.ranks:
        raise InputError(
            f"The topology {topology.name} has {topology.ranks} ranks, the tensors are on {problem.ranks}."
        )
    balancer = Balancer(problem, mask, topology)
    if strategy != "auto":
        return _named_plan(parse(strategy, problem.ranks), balancer)
    estimated = [_tuned(each, balancer) for each in candidates(problem, mask, topology)]
    estimated.sort(key=lambda item: item[0])  # stable: equal estimates stay in the order of the list
    timed: dict[tuple[Op, ...], Candidate] = {}
    assigned: set[tuple[Strategy, Assignment]] = set()
    left_out: list[tuple[str, float]] = []
    for seconds, option in estimated:
        alike = sum(each.strategy.costly == option.costly for each in timed.values())
        hopeless = option.costly and seconds > PRUNE_RATIO * estimated[0][0]
        if hopeless or alike >= (MAX_COSTLY_FINALISTS if option.costly else MAX_FINALISTS):
            left_out.append((str(option), seconds))
            continue
        # On a balanced mask, variants have equal assignments; detect that before building them.
        key = replace(option, balance=""), balancer.assign(option).assignment
        if key not in assigned:
            assigned.add(key)
            _time(option, balancer, timed)
    best = min(timed.values(), key=lambda each: _penalized_seconds(each, topology)).strategy
    # A closed form cannot resolve how much a torus should defer: also time all and none.
    settings = best.tuned(topology)
    for option in (settings[0], settings[-1]):
        if option != best:
            _time(option, balancer, timed)
    ranked = sorted(timed.values(), key=lambda each: _penalized_seconds(each, topology))
    return Plan(ranked[0].schedule, tuple(ranked), tuple(left_out))


def _named_plan(strategy: Strategy, balancer: Balancer) -> Plan:
    schedule = _schedule(strategy, balancer, balancer.assignment(strategy))
    return Plan(schedule, (_candidate(strategy, schedule, balancer, 0.0),))


def _tuned(strategy: Strategy, balancer: Balancer) -> tuple[float, Strategy]:
    """Return the estimated seconds of a strategy in its fastest settings, and the first of those."""
    problem, topology = balancer.problem, balancer.topology
    settings = strategy.tuned(topology)
    seconds = [each.estimate(problem, topology, balancer.assign(each)) for each in settings]
    return min(zip(seconds, settings, strict=True), key=lambda item: item[0])


def _penalized_seconds(candidate: Candidate, topology: Topology) -> float:
    factor = COMPLEXITY_PENALTY if candidate.strategy.costly else 1.0
    if topology.cores:  # uneven ranks leave shared cores idle at the end
        factor += LATENESS_PENALTY * (candidate.imbalance - 1)
    sending = min(candidate.seconds, max(candidate.timing.sending)) if candidate.inter_bytes else 0.0
    return candidate.seconds * factor + LATENESS_PENALTY * sending


def _time(strategy: Strategy, balancer: Balancer, timed: dict[tuple[Op, ...], Candidate]) -> None:
    """Build a strategy and predict its time, unless its schedule has been timed under another name."""
    cost = balancer.assign(strategy)
    schedule = _schedule(strategy, balancer, cost.assignment)
    if schedule.ops not in timed:
        seconds = strategy.estimate(balancer.problem, balancer.topology, cost)
        timed[schedule.ops] = _candidate(strategy, schedule, balancer, seconds)


def _candidate(strategy: Strategy, schedule: Schedule, balancer: Balancer, estimate: float) -> Candidate:
    topology, works = balancer.topology, attend_works(schedule)
    report = measure(schedule, works)
    inside = sum(
        size for (a, b), size in report.link_bytes.items() if topology.machine(a) == topology.machine(b)
    )
    return Candidate(
        strategy,
        predict(schedule, topology, works),
        inside,
        report.total_bytes - inside,
        report.imbalance,
        balancer.bound(strategy),
        schedule,
        estimate,
    )
