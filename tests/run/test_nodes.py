"""Launchers of several machines as one group: who is let in, and what each hears of the others' ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.worlds import becomes_true
from weft.core.errors import CommError
from weft.run.spawn.nodes import LaunchGroup, LaunchOutcome, Leader, Member, Nodes

TOKEN = "a-secret-of-all-machines"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def group(stack: ExitStack, folder: Path, count: int = 2) -> tuple[Leader, Nodes]:
    """Machine 0 with one rank, and how the others reach it."""
    nodes = Nodes(count=count, token=TOKEN)
    leader = Leader(nodes, 1, 0, folder)
    stack.callback(leader.close)
    return leader, replace(nodes, master=("127.0.0.1", leader._listener.port))


def member(stack: ExitStack, nodes: Nodes, node: int, ranks: int = 1) -> Member:
    found = Member(replace(nodes, node=node), ranks)
    stack.callback(found.close)
    return found


def gathered(*groups: LaunchGroup) -> None:
    threads = [threading.Thread(target=each.gather) for each in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


def heard(group: LaunchGroup, kind: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    assert becomes_true(
        lambda: bool(found.extend(each for each in group.messages() if each["type"] == kind) or found)
    )
    return found[0]


def test_machine_that_does_not_fit_is_refused_with_the_reason(stack: ExitStack, tmp_path: Path) -> None:
    leader, nodes = group(stack, tmp_path, count=3)
    for node, ranks, reason in ((1, 2, "--nodes 3 --ranks 1"), (3, 1, "--node 3 is not between 1 and 2")):
        with pytest.raises(CommError, match=reason):
            member(stack, nodes, node, ranks).gather()
    first = member(stack, nodes, 1)
    assert becomes_true(lambda: 1 in leader._members)
    with pytest.raises(CommError, match="another machine has --node 1"):
        member(stack, nodes, 1).gather()
    second = member(stack, nodes, 2)
    gathered(leader, first, second)
    assert [(each.first, each.world) for each in (leader, first, second)] == [(0, 3), (1, 3), (2, 3)]


def test_failure_reaches_all_machines_and_the_end_waits_for_all(stack: ExitStack, tmp_path: Path) -> None:
    leader, nodes = group(stack, tmp_path, count=3)
    first, second = member(stack, nodes, 1), member(stack, nodes, 2)
    gathered(leader, first, second)
    first.failed(LaunchOutcome(code=3, rank=1, reason="failed"))
    for each in (leader, second):
        assert heard(each, "outcome")["outcome"]["rank"] == 1
    first.send({"type": "signal", "number": 2})
    assert heard(second, "signal")["number"] == 2
    first.ended()
    assert becomes_true(lambda: leader._over == {1})
    assert not leader.is_over()
    second.ended()
    assert becomes_true(leader.is_over)
    assert not first.is_over()
    leader.ended()
    leader.close()
    assert becomes_true(lambda: first.is_over() and second.is_over())
    assert not [each for each in second.messages() if each["type"] == "outcome"]


def test_leader_that_ends_by_an_error_is_no_success(stack: ExitStack, tmp_path: Path) -> None:
    leader, nodes = group(stack, tmp_path)
    only = member(stack, nodes, 1)
    gathered(leader, only)
    leader.close()
    assert "Machine 0" in heard(only, "outcome")["outcome"]["reason"]


def test_machine_that_leaves_before_the_start_may_come_again(stack: ExitStack, tmp_path: Path) -> None:
    leader, nodes = group(stack, tmp_path)
    early = member(stack, nodes, 1)
    assert becomes_true(lambda: 1 in leader._members)
    early._channel.close()
    assert becomes_true(lambda: not leader._members)
    again = member(stack, nodes, 1)
    gathered(leader, again)
    assert [*leader.messages()] == []


def test_member_of_another_version_counts_as_lost(stack: ExitStack, tmp_path: Path) -> None:
    leader, nodes = group(stack, tmp_path)
    only = member(stack, nodes, 1)
    gathered(leader, only)
    only.send({"unknown": 1})
    assert "Machine 1" in heard(leader, "outcome")["outcome"]["reason"]
    assert becomes_true(leader.is_over)


def test_machine_that_is_gone_is_a_failure_on_the_others(stack: ExitStack, tmp_path: Path) -> None:
    leader, nodes = group(stack, tmp_path, count=3)
    first, second = member(stack, nodes, 1), member(stack, nodes, 2)
    gathered(leader, first, second)
    first._channel.close()
    for each in (leader, second):
        assert "Machine 1" in heard(each, "outcome")["outcome"]["reason"]
    for channel in leader._members.values():
        channel.close()
    assert "Machine 0" in heard(second, "outcome")["outcome"]["reason"]
    assert becomes_true(second.is_over)  # told before it is over, or a launcher could miss it


def test_member_says_that_the_leader_ended_before_the_start(stack: ExitStack, tmp_path: Path) -> None:
    leader, nodes = group(stack, tmp_path, count=3)
    first = member(stack, nodes, 1)
    assert becomes_true(lambda: 1 in leader._members)
    leader._members[1].close()
    with pytest.raises(CommError, match="ended before all machines"):
        first.gather()
