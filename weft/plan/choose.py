"""Choose a strategy: a closed form leaves out what cannot win, the rest is built and timed."""

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
from weft.plan.partition import zigzag
from weft.plan.strategies import kinds, parse
from weft.plan.strategy import Strategy, factors
from weft.program.workspace import peak_memory
from weft.schedule.measure import attend_works, measure
from weft.simulate.critical import Timing
from weft.simulate.predict import predict

FINALISTS = 6
WORTH = 1.01  # what is costly has many messages, and each of its settings its reason: not for less than this
RISK = 0.01  # of the time of sending between machines, and of uneven work on shared cores: both stay hidden
# only while nothing is late
COSTLY = 6  # beside the finalists: many of them are alike, and must not crowd out what is not
HOPE = 1.1  # what is costly takes long to build and to time: only what is guessed this near to the best


@dataclass(frozen=True)
class Option:
    """One candidate that was built and timed, and what it costs."""

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

    @cached_property
    def memory(self) -> int:
        """Peak bytes of the fullest rank, worked out when asked for: choosing does not need them."""
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
    ranked: tuple[Option, ...]
    """What was timed, the best first."""
    left_out: tuple[tuple[str, float], ...] = ()
    """Names and estimated seconds of candidates that were not worth building."""

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
        """What makes the first better than the second, in one sentence."""
        first, *others = self.ranked
        if not others:
            return f"{first.name} is the only way."
        second = others[0]
        if first.seconds >= 0.995 * second.seconds:
            return f"{first.name} and {second.name} are equally fast to half a percent."
        one, two = first.timing, second.timing
        computing, more = max(one.compute), max(two.compute)
        sending, longer = max(one.sending), max(two.sending)
        gains = {
            f"its slowest rank computes {_percent(computing, more)} less": more - computing,
            f"its slowest rank sends for {_percent(sending, longer)} less time": longer - sending,
            "more of its transfers are hidden": two.waiting - one.waiting,
            "its launches hold it up less": two.launching - one.launching,
        }
        reason = max(gains, key=lambda gain: gains[gain])
        ahead = second.seconds / first.seconds - 1
        return f"{first.name} is {ahead:.1%} ahead of {second.name}: {reason}."


def _percent(less: float, more: float) -> str:
    return f"{1 - less / more:.0%}" if more else "0 %"


def build(
    name: str,
    problem: Problem,
    mask: BlockMask,
    topology: Topology | None = None,
    *,
    assignment: Assignment | None = None,
) -> Schedule:
    """A schedule by its strategy's name: ulysses, ring, zigzag, gather, usp:UxR, …+balanced, …+cuts.

    `auto` is the planner's choice. `assignment` says which rank takes which heads and blocks, in place
    of what the strategy's balance would make of this mask.
    """
    if name == "auto" and assignment is None:
        return choose(problem, mask, topology).schedule
    strategy = parse(name, problem.ranks)
    balancer = Balancer(problem, mask, topology or Topology.local(problem.ranks))
    if assignment is None:
        return _build(strategy, balancer)
    if not assignment.fits(problem, mask, strategy):
        raise InputError(
            f"The assignment does not fit {name}, {problem.heads} heads and {mask}.",
            hint="It has each head and each block of the mask once.",
        )
    return _schedule(strategy, balancer, assignment)


def _build(strategy: Strategy, balancer: Balancer) -> Schedule:
    if strategy.balance == "zigzag":
        mesh = strategy.mesh_on(balancer.topology)
        partition = zigzag(balancer.problem, balancer.mask, mesh)
        return strategy.build(balancer.problem, balancer.mask, partition, balancer.topology)
    return _schedule(strategy, balancer, balancer.assign(strategy).assignment)


def _schedule(strategy: Strategy, balancer: Balancer, assignment: Assignment) -> Schedule:
    partition = assemble(balancer.problem, balancer.mask, strategy.mesh_on(balancer.topology), assignment)
    return strategy.build(balancer.problem, balancer.mask, partition, balancer.topology)


def usp_names(ranks: int) -> list[str]:
    return [f"usp:{u}x{r}" for u, r in factors(ranks)]


def candidates(problem: Problem, mask: BlockMask, topology: Topology) -> list[Strategy]:
    """Every way to cut ranks into heads × ring, each exchange, each balance that could matter here."""
    found: list[Strategy] = []
    for heads, hops in reversed(factors(problem.ranks)):
        uneven = problem.heads % heads > 0
        balances = ["none"] + ["balanced"] * (uneven or not mask.is_dense)
        if hops > 1 and not mask.is_dense:
            balances.append("cuts")
        ways = [way for kind in kinds() for way in kind.ways(heads, hops, topology)]
        found += [replace(way, balance=how) for way in ways for how in balances]
    return found


def choose(problem: Problem, mask: BlockMask, topology: Topology | None = None) -> Plan:
    """The candidate with the shortest predicted time; ties go to the first in the list."""
    topology = topology or Topology.local(problem.ranks)
    if topology.ranks != problem.ranks:
        raise InputError(
            f"The topology {topology.name} has {topology.ranks} ranks, the tensors lie on {problem.ranks}."
        )
    balancer = Balancer(problem, mask, topology)
    guessed: list[tuple[float, Strategy]] = []
    for strategy in candidates(problem, mask, topology):
        ways = [
            (way.estimate(problem, topology, balancer.assign(way)), way) for way in strategy.tuned(topology)
        ]
        guessed.append(min(ways, key=lambda item: item[0]))  # of equal ones the first
    guessed.sort(key=lambda item: item[0])  # stable: equal guesses stay in the order of the list
    built: dict[tuple[Op, ...], tuple[Strategy, Schedule]] = {}
    seen: set[tuple[object, ...]] = set()
    left_out: list[tuple[str, float]] = []
    for guess, strategy in guessed:
        alike = [had for had, _ in built.values() if had.costly == strategy.costly]
        hopeless = strategy.costly and guess > HOPE * guessed[0][0]
        if hopeless or len(alike) >= (COSTLY if strategy.costly else FINALISTS):
            left_out.append((str(strategy), guess))
            continue
        # Where nothing is out of balance, names coincide; most of them before anything is built.
        key = replace(strategy, balance=""), balancer.assign(strategy).assignment
        if key not in seen:
            seen.add(key)
            schedule = _build(strategy, balancer)
            built.setdefault(schedule.ops, (strategy, schedule))
    timed = {ops: _option(strategy, schedule, balancer) for ops, (strategy, schedule) in built.items()}
    best = min(timed.values(), key=lambda option: _worth(option, topology)).strategy
    # How much a torus puts off is finer than a closed form sees: the best is timed with all and none too.
    ways = best.tuned(topology)
    for way in (way for way in (ways[0], ways[-1]) if way != best):
        schedule = _build(way, balancer)
        if schedule.ops not in built:
            built[schedule.ops] = way, schedule
            timed[schedule.ops] = _option(way, schedule, balancer)
    ranked = sorted(timed.items(), key=lambda item: _worth(item[1], topology))
    return Plan(built[ranked[0][0]][1], tuple(option for _, option in ranked), tuple(left_out))


def _worth(option: Option, topology: Topology) -> float:
    reason = WORTH if option.strategy.costly else 1.0
    if topology.cores:  # ranks that are uneven take turns on shared cores, but the last ones leave some idle
        reason += RISK * (option.imbalance - 1)
    sending = min(option.seconds, max(option.timing.sending)) if option.inter_bytes else 0.0
    return option.seconds * reason + RISK * sending


def _option(strategy: Strategy, schedule: Schedule, balancer: Balancer) -> Option:
    topology, works = balancer.topology, attend_works(schedule)
    report = measure(schedule, works)
    inside = sum(
        size for (a, b), size in report.link_bytes.items() if topology.machine(a) == topology.machine(b)
    )
    return Option(
        strategy,
        predict(schedule, topology, works),
        inside,
        report.total_bytes - inside,
        report.imbalance,
        balancer.bound(strategy),
        schedule,
        strategy.estimate(balancer.problem, topology, balancer.assign(strategy)),
    )
