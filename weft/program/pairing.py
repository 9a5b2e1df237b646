"""Pairing: check that the messages of all ranks pair up, and that programs cannot deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NoReturn

from weft.core.errors import ScheduleError
from weft.program.slots import Slot
from weft.program.steps import Post, Program, Wait

MessageKey = tuple[int, int, int]
"""(op, source, target)."""
End = tuple[Program, int, Slot]
"""A program, the step that posts a message, and its buffer."""


def check_messages(programs: Sequence[Program]) -> None:
    """Raise a ScheduleError if messages do not pair up, or programs can deadlock."""
    _pair(programs)
    _check_collectives(programs)
    _run(programs)
    for program in programs:
        _check_order(program)


def fail(reason: str, *steps: tuple[Program, int]) -> NoReturn:
    """Raise an error that names steps by rank, index and text."""
    named = "; ".join(_named(program, at) for program, at in steps)
    raise ScheduleError(f"{named}: {reason}.")


def _named(program: Program, at: int) -> str:
    step = program.steps[at]
    text = f"{type(step).__name__} of op {step.op}, {step.label}"
    if isinstance(step, Wait):
        text += f" {'to' if step.sent else 'from'} rank {step.peer}"
    return f"Rank {program.rank}, step {at} ({text})"


def _pair(programs: Sequence[Program]) -> None:
    """Check that each message is sent and received once, with equal sizes and the same transport."""
    sends: dict[MessageKey, End] = {}
    receives: dict[MessageKey, End] = {}
    for program in programs:
        rank = program.rank
        for at, post in program.exchanges():
            ends = [(sends, (post.op, rank, peer), slot) for peer, slot in post.sends]
            ends += [(receives, (post.op, peer, rank), slot) for peer, slot in post.receives]
            for posted, message, slot in ends:
                if message in posted:
                    fail(f"{slot.name} is not the only message of its exchange and peer", (program, at))
                posted[message] = program, at, slot
    for message in sends.keys() ^ receives.keys():
        program, at, slot = sends.get(message) or receives[message]
        other = message[2] if message in sends else message[1]
        fail(f"rank {other} posts no other end of {slot.name}", (program, at))
    for message, (program, at, slot) in sends.items():
        receiver, there, target = receives[message]
        both = (program, at), (receiver, there)
        if slot.num_bytes != target.num_bytes:
            fail(f"{slot.num_bytes:,} bytes are sent and {target.num_bytes:,} received", *both)
        near = receiver.rank in program.target.near
        if near != (program.rank in receiver.target.near) or near != (target.root.memory == "peer"):
            fail(f"the ranks disagree on whether {target.name} is read in place", *both)
        if near and slot.root.memory not in ("window", "peer"):
            fail(f"{slot.name} is not in memory that rank {receiver.rank} can read", *both)


def _check_collectives(programs: Sequence[Program]) -> None:
    """Check that all ranks take part in a collective, and each end is one buffer in the order of ranks."""
    posts: defaultdict[int, list[tuple[Program, int, Post]]] = defaultdict(list)
    for program in programs:
        for at, post in program.exchanges():
            posts[post.op].append((program, at, post))
    for ends in posts.values():
        together = [end for end in ends if end[2].collective]
        if together and len(together) < len(programs):
            fail("not all ranks take part in its collective", together[0][:2])
        for program, at, post in together:
            for messages in (post.sends, post.receives):
                places = [(peer, slot.root, slot.start, slot.num_bytes) for peer, slot in messages]
                for (peer, root, start, size), after in zip(places, places[1:], strict=False):
                    if after[0] <= peer or after[1] is not root or after[2] != start + size:
                        fail(
                            "the parts of its buffer are not side by side in the order of ranks",
                            (program, at),
                        )


def _run(programs: Sequence[Program]) -> None:
    """Run until no rank can go on: a Wait, at either end, needs the Post of the other end."""
    at = [0] * len(programs)
    posted: set[tuple[int, int]] = set()
    blocked: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        for step in programs[rank].steps[at[rank] :]:
            if isinstance(step, Wait) and (step.peer, step.op) not in posted:
                blocked[step.peer, step.op].append(rank)
                break
            if isinstance(step, Post):
                posted.add((rank, step.op))
                ready += blocked.pop((rank, step.op), ())
            at[rank] += 1
    for (peer, _), ranks in blocked.items():
        stuck = [(programs[rank], at[rank]) for rank in (ranks[0], peer)]
        fail("they wait for each other, directly or through other ranks", *stuck)


def _check_order(program: Program) -> None:
    """Check the order of posts: exchanges of a group proceed one by one, in the order of the schedule."""
    posts = list(program.exchanges())
    for (before, earlier), (at, post) in zip(posts, posts[1:], strict=False):
        if post.op <= earlier.op:
            fail("exchanges must be posted in the order of the schedule", (program, before), (program, at))
