"""Labels: what the spans of a schedule are called. Simulated and measured timelines ask here, so that
they can be laid over each other.
"""

from __future__ import annotations

from weft.core.schedule import Exchange, Schedule

COPY = "copy"


def attend_name(schedule: Schedule, index: int) -> str:
    """By the exchange that brought its keys and values; those of hop 0 were there from the start."""
    verb = "gradient" if schedule.backward else "attend"
    return f"{verb} {schedule.brought_by.get(index, 'hop 0')}"


def send_name(schedule: Schedule, index: int, dst: int) -> str:
    return f"send {_label(schedule, index)} → {dst}"


def wait_name(schedule: Schedule, index: int, src: int) -> str:
    """Of the rank that waits for a message of exchange `index` from `src`."""
    return f"wait {_label(schedule, index)} ← {src}"


def post_name(schedule: Schedule, index: int) -> str:
    """Of handing the messages of an exchange to the transport."""
    return f"post {_label(schedule, index)}"


def finish_name(schedule: Schedule, index: int) -> str:
    """Of the wait, at the end of a run, until all that a rank sent in an exchange has left."""
    return f"finish {_label(schedule, index)}"


def _label(schedule: Schedule, index: int) -> str:
    op = schedule.ops[index]
    assert isinstance(op, Exchange), f"operation {index} moves nothing"
    return op.label or "exchange"
