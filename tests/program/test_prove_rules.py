"""Rules of `prove`, one by one, on programs written by hand: what random ones do not break, or not alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.program.mutants import Programs
from weft.core.errors import ScheduleError
from weft.core.indices import Indices
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Piece
from weft.plan.choose import build
from weft.program.lower import lower_all
from weft.program.prove import prove
from weft.program.slots import Slot
from weft.program.steps import Cast, Fill, Post, Program, Step, Target, Wait
from weft.program.workspace import Workspace

PAIR = Layout.even(8, 2)
PROBLEM = Problem(batch=1, heads=1, kv_heads=1, head_dim=2, q=PAIR, kv=PAIR)
PIECE = Piece("q", Indices.span(0, 1), Indices.span(0, 4))


def slot(name: str, memory: str = "workspace", num_bytes: int = 32) -> Slot:
    return Slot(name, memory, num_bytes, "float32", PIECE, (1, 1, 1, 4, 2), unit=8)


def swap(rank: int, *ops: int) -> list[Step]:
    """For each operation in turn: fill a buffer, exchange it with the other rank, wait."""
    steps: list[Step] = []
    for op in ops:
        going, coming, peer = slot(f"out {op}"), slot(f"in {op}"), 1 - rank
        steps += [Fill(op, going), Post(op, "swap", ((peer, going),), ((peer, coming),))]
        steps += [Wait(op, "swap", peer, coming), Wait(op, "swap", peer, going, sent=True)]
    return steps


def pair(first: list[Step], second: list[Step], near: bool = False) -> list[Program]:
    targets = [Target(near=frozenset({1 - rank}) if near else frozenset()) for rank in range(2)]
    return [Program(rank, PROBLEM, targets[rank], steps) for rank, steps in enumerate((first, second))]


def test_exchanges_in_order_are_accepted() -> None:
    prove(pair(swap(0, 3, 5), swap(1, 3, 5)))


def test_ranks_that_wait_for_each_other_are_rejected() -> None:
    with pytest.raises(
        ScheduleError, match=r"Rank \d, step 2 .*; Rank \d, step 2 .*: they wait for each other"
    ):
        prove(pair(swap(0, 3, 5), swap(1, 5, 3)))


def test_exchanges_out_of_order_are_rejected() -> None:
    def late(steps: list[Step]) -> list[Step]:
        return sorted(steps, key=lambda step: isinstance(step, Wait))

    message = r"Rank 1, step 1 .*; Rank 1, step 3 .*: exchanges must be posted in the order"
    with pytest.raises(ScheduleError, match=message):
        prove(pair(late(swap(0, 3, 5)), late(swap(1, 5, 3))))


def test_a_message_without_its_other_end_is_rejected() -> None:
    with pytest.raises(ScheduleError, match=r"Rank 0, step 5 .*: rank 1 posts no other end of"):
        prove(pair(swap(0, 3, 5), swap(1, 3)))


def test_two_messages_of_one_exchange_between_two_ranks_are_rejected() -> None:
    a, b = slot("a"), slot("b")
    sender: list[Step] = [Fill(3, a), Post(3, "twice", ((1, a), (1, a)), ())]
    sender += [Wait(3, "twice", 1, a, sent=True)]
    receiver: list[Step] = [Post(3, "twice", (), ((0, b),)), Wait(3, "twice", 0, b)]
    with pytest.raises(ScheduleError, match=r"Rank 0, step 1 .*: a is not the only message"):
        prove(pair(sender, receiver))


def test_messages_of_different_sizes_are_rejected() -> None:
    going, coming = slot("going"), slot("coming", num_bytes=64)
    sender: list[Step] = [
        Fill(3, going),
        Post(3, "one", ((1, going),), ()),
        Wait(3, "one", 1, going, sent=True),
    ]
    receiver: list[Step] = [Post(3, "one", (), ((0, coming),)), Wait(3, "one", 0, coming)]
    with pytest.raises(
        ScheduleError, match=r"Rank 0, step 1 .*; Rank 1, step 0 .*: 32 bytes are sent and 64"
    ):
        prove(pair(sender, receiver))


@pytest.mark.parametrize(
    ("memory", "says"), [("window", ""), ("workspace", "not in memory that rank 1 can read")]
)
def test_what_is_read_in_place_lies_in_the_window(memory: str, says: str) -> None:
    sender, receiver = one_sided(memory)
    if not says:
        prove(pair(sender, receiver, near=True))
        return
    with pytest.raises(ScheduleError, match=says):
        prove(pair(sender, receiver, near=True))


def one_sided(memory: str = "window") -> tuple[list[Step], list[Step]]:
    going, coming = slot("going", memory), slot("coming", "peer")
    sender: list[Step] = [Fill(3, going), Post(3, "one", ((1, going),), ())]
    return sender, [Post(3, "one", (), ((0, coming),)), Wait(3, "one", 0, coming)]


def test_what_is_read_in_place_is_not_written_until_the_call_ends() -> None:
    sender, receiver = one_sided()
    with pytest.raises(ScheduleError, match=r"step 1 .*; Rank 0, step 2 .*: the first reads going while"):
        prove(pair([*sender, sender[0]], receiver, near=True))


def landing(between: list[Step], after: list[Step]) -> list[Program]:
    """Rank 1 copies a message of rank 0 into its workspace; steps before and after it waits for it."""
    sender, (post, wait) = one_sided()
    programs = pair(sender, [post, *between, wait, *after], near=True)
    return [replace(each, target=replace(each.target, lands=True)) for each in programs]


def test_bytes_that_a_message_lands_in_are_its_own_from_post_to_wait() -> None:
    other = slot("other")
    too_early = landing([Fill(4, other)], [])
    coming = too_early[1].steps[0].receives[0][1]  # type: ignore[union-attr]
    spaces = [Workspace({}, 0, 0), Workspace({coming: (0, 0), other: (0, 0)}, 32, 32)]
    with pytest.raises(ScheduleError, match="the first writes coming while the second writes other"):
        prove(too_early, spaces)
    prove(too_early)  # where each has its own bytes


def test_landed_bytes_are_free_once_they_were_read_also_if_they_are_passed_on() -> None:
    back, other = slot("back", "peer"), slot("other")
    programs = landing([], [])
    coming = programs[1].steps[0].receives[0][1]  # type: ignore[union-attr]
    programs[1].steps += [Post(4, "on", ((0, coming),), ()), Fill(5, other)]
    programs[0].steps += [Post(4, "on", (), ((1, back),)), Wait(4, "on", 1, back)]
    spaces = [Workspace({back: (0, 0)}, 32, 32), Workspace({coming: (0, 0), other: (0, 0)}, 32, 32)]
    prove(programs, spaces)
    programs[1].steps.insert(2, programs[1].steps.pop())
    with pytest.raises(ScheduleError, match="it writes over coming, which is read later"):
        prove(programs, spaces)


def test_ranks_that_disagree_on_who_is_near_are_rejected() -> None:
    programs = pair(*one_sided(), near=True)
    programs[0] = replace(programs[0], target=Target())
    programs[0].steps.append(Wait(3, "one", 1, programs[0].steps[0].slot, sent=True))  # type: ignore[union-attr]
    with pytest.raises(ScheduleError, match="disagree on whether coming is read in place"):
        prove(programs)


def test_a_near_receive_has_no_buffer_of_its_own() -> None:
    programs = pair(swap(0, 3), swap(1, 3)[:-1])
    programs[1] = replace(programs[1], target=Target(near=frozenset({0})))
    with pytest.raises(ScheduleError, match="disagree on whether in 3 is read in place"):
        prove(programs)


def test_a_place_beyond_the_end_of_its_block_is_rejected() -> None:
    programs = Programs.of(pair(swap(0, 3), swap(1, 3)))
    space = programs.workspaces[1]
    last = max(space.places, key=lambda slot: space.places[slot][1])
    spaces = programs.workspaces[0], replace(space, num_bytes=space.places[last][1])
    with pytest.raises(
        ScheduleError, match=f"Rank 1: {last.name} is at byte .*, beyond the end of its block"
    ):
        prove(programs.ranks, spaces)


@pytest.mark.parametrize("spoil", ["one rank", "order", "gap"])
def test_collectives_that_do_not_fit_are_rejected(spoil: str) -> None:
    tokens = Layout.even(12, 3)
    problem = Problem(batch=1, heads=3, kv_heads=3, head_dim=2, q=tokens, kv=tokens)
    programs = lower_all(build("ulysses", problem, BlockMask.dense(3, 12)), Target(collective=True))
    prove(programs)
    at, post = next((at, post) for at, post in programs[1].exchanges() if post.collective)
    if spoil == "one rank":
        programs[1].steps[at] = post._replace(collective=False)
    elif spoil == "order":
        programs[1].steps[at] = post._replace(sends=post.sends[::-1])
    else:
        post.sends[-1][1].offset += 1
    with pytest.raises(ScheduleError, match=r"Rank \d, step \d+ .*: (not all ranks|the parts of its buffer)"):
        prove(programs)


def test_a_message_that_no_step_waits_for_is_rejected() -> None:
    with pytest.raises(ScheduleError, match=r"Rank 1, step 1 .*: no step waits for the message out 3"):
        prove(pair(swap(0, 3), swap(1, 3)[:-1]))


def test_a_wait_for_another_slot_is_rejected() -> None:
    steps = swap(1, 3)
    steps[2] = steps[2]._replace(slot=slot("another"))  # type: ignore[call-arg]
    with pytest.raises(ScheduleError, match=r"Rank 1, step 2 .*: another is not in flight"):
        prove(pair(swap(0, 3), steps))


def test_a_message_is_passed_on_after_its_wait() -> None:
    sender, receiver = one_sided()
    passed = receiver[1].slot  # type: ignore[union-attr]
    on = Post(5, "on", ((2, passed),), ())
    wait = Wait(5, "on", 2, passed, sent=True)
    relay = Program(1, PROBLEM, Target(near=frozenset({0})), [*receiver, on, wait])
    last = slot("last")
    end = Program(2, PROBLEM, Target(), [Post(5, "on", (), ((1, last),)), Wait(5, "on", 1, last)])
    prove([pair(sender, receiver, near=True)[0], relay, end])
    relay.steps[1], relay.steps[2] = on, receiver[1]
    with pytest.raises(ScheduleError, match=r"Rank 1, step 1 .*: coming is read, but not all"):
        prove([pair(sender, receiver, near=True)[0], relay, end])


def placed(
    steps: list[Step], places: dict[Slot, tuple[int, int]], results: tuple[tuple[Slot, int], ...] = ()
) -> None:
    """Prove the program of a single rank in places that are given, in a workspace of 96 bytes."""
    prove([Program(0, PROBLEM, Target(), steps)], [Workspace(places, 96, 96, results)])


@pytest.mark.parametrize("start", [0, 16, 32])
def test_a_step_does_not_write_over_what_it_reads(start: int) -> None:
    a, b = slot("a"), slot("b")
    steps: list[Step] = [Fill(0, a), Cast(0, a, b)]
    if start == 32:
        placed(steps, {a: (0, 0), b: (0, start)})
        return
    with pytest.raises(ScheduleError, match=r"Rank 0, step 1 .*: it writes b over a, which it reads"):
        placed(steps, {a: (0, 0), b: (0, start)})


@pytest.mark.parametrize("start", [16, 32])
def test_a_message_does_not_arrive_over_what_is_read_later(start: int) -> None:
    early, late = slot("early"), slot("late")
    first = [Fill(0, early), *swap(0, 3), Cast(4, early, late)]
    coming, going = first[3].slot, first[4].slot  # type: ignore[union-attr]
    programs = pair(first, swap(1, 3))
    other = Programs.of(programs).workspaces[1]
    places = {early: (0, 0), coming: (0, start), going: (0, 64), late: (0, 96)}
    spaces = Workspace(places, 128, 128), other
    if start == 32:
        prove(programs, spaces)
        return
    with pytest.raises(ScheduleError, match=r"Rank 0, step 2 .*; Rank 0, step 5 .*: it writes over early"):
        prove(programs, spaces)


@pytest.mark.parametrize(
    ("plane", "start", "fits"), [(0, 0, True), (1, 0, True), (0, 16, False), (1, 16, False)]
)
def test_what_borrows_a_result_stays_within_one_of_its_tensors(plane: int, start: int, fits: bool) -> None:
    a, result = slot("a"), Slot("result", "result", 64, "float32", PIECE, (2, 1, 1, 4, 2), unit=16)
    results = (result, 0), (result, 1)
    if fits:
        placed([Fill(0, a), Fill(0, result)], {a: (1 + plane, start)}, results)
        return
    with pytest.raises(ScheduleError, match="Rank 0: a is at byte .* beyond the end"):
        placed([Fill(0, a), Fill(0, result)], {a: (1 + plane, start)}, results)


@pytest.mark.parametrize("count", [1, 2])
def test_a_message_is_sent_when_all_its_parts_are_written(count: int) -> None:
    whole, parts = Slot("whole", "workspace", 64), [slot("a"), slot("b")]
    for at, part in enumerate(parts):
        part.parent, part.offset = whole, 32 * at
    coming = slot("coming", num_bytes=64)
    sender: list[Step] = [Fill(3, part) for part in parts[:count]]
    sender += [Post(3, "one", ((1, whole),), ()), Wait(3, "one", 1, whole, sent=True)]
    programs = pair(sender, [Post(3, "one", (), ((0, coming),)), Wait(3, "one", 0, coming)])
    if count == 2:
        prove(programs)
        return
    with pytest.raises(ScheduleError, match=r"Rank 0, step 1 .*: whole is read, but not all of it"):
        prove(programs)


def test_the_tensors_of_the_caller_are_not_written() -> None:
    with pytest.raises(
        ScheduleError, match=r"Rank 0, step 0 .*: it writes home q, which is not the program's"
    ):
        placed([Fill(0, slot("home q", "input"))], {})


def test_what_is_saved_is_written() -> None:
    program = Program(0, PROBLEM, Target(), [], saved={"q0": slot("q0", "saved")})
    with pytest.raises(ScheduleError, match="Rank 0: no step writes q0, which is saved"):
        prove([program])
