"""Suspects: what may cost the time of a timeline, each with what a replay without it saves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean

from weft.core.timeline import Span
from weft.report.evidence import Cause, Evidence, grouped_by, most, usual, worst

NOTICEABLE = 1.05
"""A message that takes this much longer than usual is slow."""


def suspects(evidence: Evidence) -> Iterator[Cause]:
    """Yield causes that name a rank, a link or a machine."""
    if any(evidence.expected.values()):
        if evidence.work:
            yield from _uneven_work(evidence)
        yield from _slow_ranks(evidence)
    yield from _late_starts(evidence)
    yield from _pauses(evidence)
    if evidence.sends:
        yield from _slow_links(evidence)


def _uneven_work(evidence: Evidence) -> Iterator[Cause]:
    """Yield the rank with the most work, in all and in single steps."""
    expected, spans, replay = evidence.expected, evidence.spans, evidence.replay
    planned = [sum(expected[i] for i in attends) for attends in evidence.attends]
    even = [fmean(planned) / one if one else 1.0 for one in planned]
    lengths = {i: replay.lengths[i] * even[spans[i].rank] for i in expected}
    rank, factor = most(planned)
    load = [0] * len(planned)
    for i, pairs in evidence.pairs.items():
        load[spans[i].rank] += pairs
    factor = load[rank] / (fmean(load) or 1.0)
    kind = "uneven work by head" if _is_by_head(evidence) else "uneven work"
    yield Cause(kind, replay.without(lengths=lengths), rank, factor=factor)
    steps: dict[str, list[float]] = defaultdict(lambda: [0.0] * evidence.timeline.ranks)
    for i, seconds in expected.items():
        steps[spans[i].name][spans[i].rank] += seconds
    means = {name: fmean(ranks) for name, ranks in steps.items()}
    lengths = {
        i: replay.lengths[i] * means[spans[i].name] / own
        for i in expected
        if (own := steps[spans[i].name][spans[i].rank])
    }
    over = [
        sum(max(0.0, ranks[rank] - means[name]) for name, ranks in steps.items())
        for rank in range(len(planned))
    ]
    factor = max(most(ranks)[1] for ranks in steps.values())
    yield Cause("uneven work by step", replay.without(lengths=lengths), most(over)[0], factor=factor)


def _is_by_head(evidence: Evidence) -> bool:
    """Whether each head is computed by one rank, for all queries."""
    pairs = {(op.rank, head) for op in evidence.work.values() for head in op.q.heads}
    rows = evidence.schedule.attention[0].q.size if evidence.schedule else 0
    return len(pairs) == len({head for _, head in pairs}) and all(
        op.q.tokens.size == rows for op in evidence.work.values()
    )


def _slow_ranks(evidence: Evidence) -> Iterator[Cause]:
    """Yield ranks that compute more slowly than the others, always or once."""
    expected, spans, replay = evidence.expected, evidence.spans, evidence.replay
    kind = "slow rank" if evidence.work else "uneven computing"
    took = [sum(spans[i].seconds for i in attends) for attends in evidence.attends]
    planned = [sum(expected[i] for i in attends) for attends in evidence.attends]
    slowness = {rank: took[rank] / plan for rank, plan in enumerate(planned) if plan}
    for rank in worst(slowness):
        speed = usual(value for other, value in slowness.items() if other != rank) or slowness[rank]
        factor = slowness[rank] / speed
        lengths = {i: expected[i] * speed for i in evidence.attends[rank]}
        yield Cause(kind, replay.without(lengths=lengths), rank, factor=factor)
        longest = max(lengths, key=lambda i: spans[i].seconds - lengths[i])
        rest = sum(lengths.values()) - lengths[longest]
        # A rank that is as fast as the others apart from one attention has stopped in that one.
        if rest and (took[rank] - spans[longest].seconds) / rest - 1 < (factor - 1) / 2:
            once = replay.without(lengths={longest: lengths[longest]})
            yield Cause("stall", once, rank, op=spans[longest].op)
    speed, slowest = usual(slowness.values()), worst(slowness)[0]
    lengths = {i: seconds * speed for i, seconds in expected.items()}
    yield Cause(kind, replay.without(lengths=lengths), slowest, factor=slowness[slowest] / speed)


def _late_starts(evidence: Evidence) -> Iterator[Cause]:
    for rank in worst(dict(enumerate(evidence.replay.first))):
        begin = {rank: _usual_start(evidence, rank)}
        yield Cause("late start", evidence.replay.without(first=begin), rank)


def _usual_start(evidence: Evidence, rank: int) -> float:
    return usual(time for other, time in enumerate(evidence.replay.first) if other != rank)


def _pauses(evidence: Evidence) -> Iterator[Cause]:
    """Yield ranks that do nothing before their sends, or once, for longer than others do."""
    replay, spans = evidence.replay, evidence.spans
    gaps = dict(enumerate(replay.gaps))

    def name(i: int) -> tuple[str, object]:
        span: Span = spans[i]
        return (span.kind, span.op) if span.kind == "send" else (span.kind, span.name)

    others = grouped_by(gaps, name, lambda group: max(0.0, usual(group)) if len(group) > 1 else 0.0)
    over: dict[int, dict[int, float]] = defaultdict(dict)
    for i, gap in gaps.items():
        if gap > others[name(i)] + replay.slack:
            over[replay.by[i]][i] = others[name(i)]
    for rank in worst({rank: sum(gaps[i] - gap for i, gap in some.items()) for rank, some in over.items()}):
        begin = {rank: _usual_start(evidence, rank)}
        yield Cause("late sends", replay.without(gaps=over[rank], first=begin), rank)
        if lane := {i: gaps[i] - gap for i, gap in over[rank].items() if spans[i].kind != "send"}:
            longest = worst(lane)[0]
            once = {i: gap for i, gap in over[rank].items() if replay.after[i] == replay.after[longest]}
            yield Cause("stall", replay.without(gaps=once), rank, op=spans[longest].op)


def _slow_links(evidence: Evidence) -> Iterator[Cause]:
    """Yield links, and all links of a rank or a machine, that are slower than the others."""
    spans, nominal = evidence.spans, evidence.nominal
    ratios = {i: spans[i].seconds / seconds for i, seconds in nominal.items() if seconds}
    fast = grouped_by(ratios, evidence.kind_of, lambda group: sorted(group)[len(group) // 4])
    groups: list[tuple[str, str, Callable[[int], Iterable[object]]]] = [
        ("slow link", "link", lambda i: [(spans[i].rank, spans[i].peer)]),
        ("slow rank links", "rank", lambda i: [spans[i].rank, spans[i].peer]),
        ("slow machine links", "machine", evidence.machines),
        ("slow machine links", "machine", lambda i: evidence.machines(i)[:1]),
        ("slow machine links", "machine", lambda i: evidence.machines(i)[1:]),
    ]
    for kind, what, members in groups:
        of: dict[object, list[int]] = defaultdict(list)
        for i in ratios:
            for member in members(i):
                of[member].append(i)
        excess = {
            member: sum(max(0.0, ratios[i] - fast[evidence.kind_of(i)]) * nominal[i] for i in some)
            for member, some in of.items()
        }
        for member in worst(excess):
            lengths = _as_others(evidence, ratios, of[member])
            factor = sum(spans[i].seconds for i in lengths) / (sum(lengths.values()) or 1.0)
            gain = evidence.replay.without(lengths=lengths)
            yield Cause(kind, gain, factor=factor, **{what: member})  # type: ignore[arg-type]


def _as_others(evidence: Evidence, ratios: dict[int, float], group: Sequence[int]) -> dict[int, float]:
    """Return the seconds of some messages if their links were as fast as those of all other messages."""
    members = set(group)
    others = {i: ratio for i, ratio in ratios.items() if i not in members}
    alike = grouped_by(others, evidence.kind_of, usual)
    near = grouped_by(others, evidence.is_near, usual)
    ratio = {i: alike.get(evidence.kind_of(i), near.get(evidence.is_near(i), ratios[i])) for i in group}
    return {i: evidence.nominal[i] * ratio[i] for i in group if ratios[i] > NOTICEABLE * ratio[i]}
