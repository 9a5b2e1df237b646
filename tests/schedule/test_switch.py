"""Switches as schedules: proved, counted, timed; and spoiled ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.codec import dumps, loads
from weft.core.errors import InputError, ScheduleError
from weft.core.indices import Indices
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem, Switch
from weft.core.schedule import Attend, Exchange, Piece, Schedule, Transfer
from weft.core.topology import Link, Topology
from weft.plan.choose import build
from weft.program.workspace import peak_memory
from weft.schedule.measure import measure
from weft.schedule.reverse import reverse
from weft.schedule.switch import switch
from weft.schedule.verify import verify
from weft.simulate.events import simulate
from weft.simulate.predict import critical_path, predict

SIZES = st.integers(1, 23)
RANKS = st.integers(1, 7)


def even(time: int, space: int, ranks: int, *, width: int = 4, dtype: str = "float32") -> Schedule:
    before, after = Layout.even(time, ranks, dim="time"), Layout.even(space, ranks, dim="space")
    return switch(Switch.of(before, after, width=width, dtype=dtype))


def moved(schedule: Schedule, whole: np.ndarray) -> list[np.ndarray]:
    """Run it on [tokens, heads]: what each rank has in the end, NaN where it has nothing."""
    problem = schedule.problem
    assert isinstance(problem, Switch)
    have = [np.full(whole.shape, np.nan) for _ in range(problem.ranks)]
    for rank in range(problem.ranks):
        rows = problem.before.held(rank).array
        have[rank][rows] = whole[rows]
    for op in schedule.ops:
        assert isinstance(op, Exchange)
        for t in op.transfers:
            where = np.ix_(t.piece.tokens.array, t.piece.heads.array)
            assert not np.isnan(have[t.src][where]).any()
            have[t.dst][where] = have[t.src][where]
    return have


@settings(max_examples=150)
@given(time=SIZES, space=SIZES, ranks=RANKS)
def test_any_sizes_on_any_ranks_arrive(time: int, space: int, ranks: int) -> None:
    schedule = even(time, space, ranks)
    verify(schedule)
    verify(reverse(schedule))
    whole = np.arange(time * space, dtype=float).reshape(time, space)
    for rank, have in enumerate(moved(schedule, whole)):
        columns = Layout.even(space, ranks).held(rank).array
        assert np.array_equal(have[:, columns], whole[:, columns])


@settings(max_examples=80)
@given(time=SIZES, space=SIZES, ranks=RANKS, seed=st.integers(0, 999))
def test_any_layouts_arrive(time: int, space: int, ranks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def permuted(size: int) -> Layout:
        return Layout.permuted(np.split(rng.permutation(size), np.sort(rng.integers(0, size + 1, ranks - 1))))

    problem = Switch.of(permuted(time), permuted(space), width=1)
    verify(switch(problem))
    verify(reverse(switch(problem)))


@settings(max_examples=80)
@given(time=SIZES, ranks=RANKS)
def test_a_gather_is_a_switch_to_what_everybody_holds(time: int, ranks: int) -> None:
    schedule = switch(Switch.of(Layout.even(time, ranks, dim="time"), width=6))
    verify(schedule)
    verify(reverse(schedule))
    whole = np.arange(time, dtype=float)[:, None]
    assert all(np.array_equal(have, whole) for have in moved(schedule, whole))
    report = measure(schedule)
    assert report.total_bytes == (ranks - 1) * time * 6 * 4


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_rank_sends_its_share_of_a_shard_in_one_message_a_peer(ranks: int) -> None:
    schedule = even(2 * ranks, 3 * ranks, ranks, width=64, dtype="bfloat16")
    report = measure(schedule)
    M = 2 * ranks * 3 * ranks * 64 * 2
    assert {report.sent(rank) for rank in range(ranks)} == {M * (ranks - 1) // ranks**2}
    assert set(report.messages.values()) == {1}
    assert len(report.messages) == ranks * (ranks - 1)
    # What was, what will be, and what leaves; what comes is received in place.
    assert set(peak_memory(schedule)) == {2 * M // ranks + M * (ranks - 1) // ranks**2}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_layer_sends_half_of_ulysses_and_an_nth_of_a_ring(ranks: int) -> None:
    """Space is the batch of an attention through time, whose tokens are sharded."""
    T, S, heads, dim = 2 * ranks, 3 * ranks, 2 * ranks, 5
    time = Layout.even(T, ranks)
    problem = Problem(batch=S, heads=heads, kv_heads=heads, head_dim=dim, q=time, kv=time)
    there = measure(even(T, S, ranks, width=heads * dim)).sent(0)
    back = measure(even(S, T, ranks, width=heads * dim)).sent(0)
    ulysses, ring = (
        measure(build(n, problem, BlockMask.dense(heads, T))).sent(0) for n in ("ulysses", "ring")
    )
    assert 2 * (there + back) == ulysses
    assert ranks * (there + back) == ring


def test_a_whole_tensor_is_split_without_a_message() -> None:
    whole = Layout.replicated(5, 3, dim="time")
    schedule = switch(Switch.of(whole, Layout.even(7, 3), width=2))
    assert schedule.ops == ()
    verify(schedule)


def test_in_each_round_nobody_is_sent_to_by_two() -> None:
    [op] = even(8, 8, 4).ops
    assert isinstance(op, Exchange)
    for number in range(3):
        part = op.transfers[4 * number : 4 * number + 4]
        assert len({t.dst for t in part}) == len({t.src for t in part}) == 4


def test_a_switch_is_a_value_like_any_other() -> None:
    schedule = even(5, 7, 3)
    assert loads(dumps(schedule)) == schedule
    assert schedule.digest != even(5, 7, 3, width=5).digest != reverse(schedule).digest
    assert schedule.ops[0].label == "time → space"  # pyright: ignore
    assert reverse(schedule).ops[0].label == "time → space backward"  # pyright: ignore


def test_predicted_time_is_latency_and_bytes() -> None:
    link = Link(latency=1e-3, bandwidth=1e6)
    topology = Topology(devices=4, intra=link)
    schedule = even(8, 8, 4, width=100)
    sent = measure(schedule).sent(0)
    for timing in (predict(schedule, topology), critical_path(schedule, topology)):
        assert timing.seconds == pytest.approx(sent / 1e6 + 3e-3, rel=0.7)
        assert timing.seconds >= sent / 1e6
    timeline = simulate(schedule, topology)
    assert timeline.traffic.sum(axis=1).tolist() == [sent] * 4
    assert {span.name for span in timeline.spans if span.kind == "send" and span.rank == 1} == {
        f"send time → space → {peer}" for peer in (0, 2, 3)
    }


def test_both_copies_are_timed() -> None:
    slow = Topology(devices=2, memory_bandwidth=1e6)
    schedule = even(4, 6, 2, width=10)
    copies = simulate(schedule, slow).computing
    # Half of the shard is packed, half of it stays; what comes is received in place. A copy reads and writes.
    assert copies.tolist() == pytest.approx([2 * 4 * 6 * 10 * 4 / 2 / 1e6] * 2)


def without_one(schedule: Schedule) -> Schedule:
    [op] = schedule.ops
    assert isinstance(op, Exchange)
    return replace(schedule, ops=(replace(op, transfers=op.transfers[1:]),))


def twice(schedule: Schedule) -> Schedule:
    return replace(schedule, ops=schedule.ops * 2)


def changed(schedule: Schedule, change: Callable[[Transfer], Transfer]) -> Schedule:
    [op] = schedule.ops
    assert isinstance(op, Exchange)
    return replace(schedule, ops=(replace(op, transfers=(change(op.transfers[0]), *op.transfers[1:])),))


def to_the_wrong_rank(t: Transfer) -> Transfer:
    return replace(t, dst=(t.dst + 1) % 3 if (t.dst + 1) % 3 != t.src else (t.dst + 2) % 3)


def of_what_it_has_not(t: Transfer) -> Transfer:
    return replace(t, piece=replace(t.piece, tokens=Indices.span(0, 7)))


def too_little(t: Transfer) -> Transfer:
    return replace(t, piece=replace(t.piece, tokens=Indices.of([t.piece.tokens.array[0]])))


def of_another_tensor(t: Transfer) -> Transfer:
    return replace(t, piece=replace(t.piece, tensor="q"))


@pytest.mark.parametrize("direction", [lambda s: s, reverse])
@pytest.mark.parametrize(
    "spoil",
    [
        without_one,
        twice,
        lambda s: changed(s, to_the_wrong_rank),
        lambda s: changed(s, of_what_it_has_not),
        lambda s: changed(s, too_little),
        lambda s: changed(s, of_another_tensor),
    ],
)
def test_a_spoiled_switch_is_refused(
    spoil: Callable[[Schedule], Schedule], direction: Callable[[Schedule], Schedule]
) -> None:
    schedule = direction(even(7, 11, 3))
    verify(schedule)
    with pytest.raises(ScheduleError):
        verify(spoil(schedule))


def test_a_switch_attends_to_nothing() -> None:
    schedule = even(1, 1, 1)
    mine = Indices.of([0])
    attend = Attend(0, Piece("q", mine, mine), Piece("kv", mine, mine))
    with pytest.raises(ScheduleError, match="has no Attend"):
        verify(replace(schedule, ops=(attend,)))


def relayed() -> Schedule:
    """Rank 0's half of x reaches rank 2 by rank 1, in a second exchange."""
    before = Layout.uneven([1, 1, 0], dim="time")
    after = Layout.uneven([0, 0, 1], dim="space")
    first, second = Indices.of([0]), Indices.of([1])
    relay = Exchange((Transfer(Piece("x", first, first), 0, 1),), "relay")
    last = Exchange(tuple(Transfer(Piece("x", first, half), 1, 2) for half in (first, second)), "last")
    return replace(switch(Switch.of(before, after, width=1)), ops=(relay, last))


def test_gradients_of_a_relayed_switch_go_back_from_the_last_exchange() -> None:
    schedule = relayed()
    verify(schedule)
    back = reverse(schedule)
    verify(back)
    assert [getattr(op, "label", "") for op in back.ops] == ["last backward", "relay backward"]
    for wrong in (replace(back, ops=back.ops[::-1]), replace(schedule, ops=schedule.ops[::-1])):
        with pytest.raises(ScheduleError, match="does not have"):
            verify(wrong)


def test_a_switch_has_no_mask_and_keeps_nothing() -> None:
    schedule, mine = even(4, 6, 2), Indices.of([0])
    assert str(schedule).startswith("switch on") and "time → space · " in str(schedule)
    assert schedule.mask is None
    attend = Attend(0, Piece("q", mine, mine), Piece("kv", mine, mine))
    for wrong in (
        replace(schedule, mask=BlockMask.dense(6, 4)),
        replace(schedule, ops=(attend,)),
        replace(build("ring", PROBLEM, BlockMask.dense(2, 4)), mask=None),
    ):
        with pytest.raises(InputError, match="not an attention"):
            wrong.check()
    with pytest.raises(InputError, match="a Switch with no mask"):
        _ = schedule.attention
    kept = replace(reverse(schedule), kept=((Piece("x", mine, mine),), ()))
    with pytest.raises(ScheduleError, match="kept"):
        verify(kept)


@pytest.mark.parametrize("shape", [(2, 0, 4, 3, 6), (2, 5, 4, 3, 6)])
def test_bytes_are_those_of_the_tensor(shape: tuple[int, ...]) -> None:
    before, after = Layout.even(4, 2, dim="time"), Layout.even(6, 2, dim="space")
    problem = Switch(before=before, after=after, shape=shape, dims=(2, 4), dtype="bfloat16")
    report = verify(switch(problem))
    assert report.total_bytes == 2 * int(np.prod(shape)) // 2
    assert problem.home_bytes(0) == 2 * int(np.prod(shape))
    assert loads(dumps(problem)) == problem


EVEN = Layout.even(4, 2)
WHOLE = Layout.replicated(1, 2, dim="whole")
PROBLEM = Problem(batch=1, heads=2, kv_heads=2, head_dim=1, q=EVEN, kv=EVEN)


@pytest.mark.parametrize(
    ("after", "shape", "dims", "message"),
    [
        (EVEN, (4, 4), (0, 0), "at dims"),
        (EVEN, (4, 4), (0, 2), "at dims"),
        (EVEN, (4, 4), (-2, 1), "at dims"),
        (EVEN, (4, 5), (0, 1), "at dims"),
        (EVEN, (5, 4), (0, 1), "at dims"),
        (EVEN, (4, 4), (0, None), "after a gather"),
        (WHOLE, (), (0, None), "at dims"),
        (WHOLE, (4, -1), (0, None), "sizes ≥ 0"),
        (WHOLE, (4, 0, 2**62), (0, None), "at most .* elements"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    after: Layout, shape: tuple[int, ...], dims: tuple[int, int | None], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Switch(before=EVEN, after=after, shape=shape, dims=dims)


def test_layouts_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(InputError, match="same number of ranks, got 2 and 3"):
        Switch.of(Layout.even(4, 2), Layout.even(4, 3), width=1)
    with pytest.raises(InputError, match="already a backward"):
        reverse(reverse(even(2, 2, 2)))
