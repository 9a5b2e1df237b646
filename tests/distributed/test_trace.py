"""Traces of real ranks over gloo: against the schedule, the transport's own count, and the bits without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.distributed.jobs import Answer, Worlds, attend, problem, tiles_with_empty_rows, works
from tests.report.viewer import check
from tests.run.dense import Truth
from tests.run.test_trace import disjoint
from weft.plan.choose import build
from weft.program.lower import lower_all
from weft.program.steps import Attention, Gradient
from weft.report.perfetto import chrome_trace
from weft.run.measure import trace
from weft.run.measure.trace import read_trace
from weft.run.world import world_of
from weft.schedule.measure import measure
from weft.schedule.reverse import reverse


def truth_of(size: int, *, sparse: bool) -> Truth:
    mask = tiles_with_empty_rows(3, 37, 37, 4) if sparse else None
    return Truth.of(problem(size, 37), mask)


def traced(truth: Truth, options: dict[str, Any], directory: Path) -> tuple[Answer, Answer, int]:
    """What a rank answers without and with a trace, and the bytes it handed to the transport meanwhile."""
    plain = attend(truth, options)
    comm = world_of(None, 60.0).comm
    before = comm.bytes_sent
    with weft.trace(directory):
        answer = attend(truth, options)
    assert trace.active is None
    return plain, answer, comm.bytes_sent - before


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["ring", "ulysses", "gather", "zigzag"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_trace_of_processes_shows_what_they_did(
    worlds: Worlds, tmp_path: Path, size: int, name: str, sparse: bool
) -> None:
    truth = truth_of(size, sparse=sparse)
    options = {"plan": name} | ({"mask": truth.mask} if sparse else {})
    answers = worlds(size).run(traced, truth, options, tmp_path)
    for (out, grads), (traced_out, traced_grads), _ in answers:
        assert torch.equal(out, traced_out)
        assert all(torch.equal(x, y) for x, y in zip(grads, traced_grads, strict=True))
    whole = read_trace(tmp_path)
    assert whole.traffic.sum(axis=1).tolist() == [sent for _, _, sent in answers]
    assert disjoint(whole)
    check(chrome_trace(whole))
    ahead = build(name, truth.problem, truth.mask)
    for call, schedule in enumerate((ahead, reverse(ahead))):
        found = read_trace(tmp_path, call)
        links = {(i, j): int(found.traffic[i, j]) for i in range(size) for j in range(size)}
        assert {pair: size for pair, size in links.items() if size} == measure(schedule).link_bytes
        attends = [(s.rank, s.op, s.name) for s in found.spans if s.kind == "attend"]
        steps = [
            (p.rank, s) for p in lower_all(schedule) for s in p.steps if isinstance(s, Attention | Gradient)
        ]
        assert sorted(attends) == sorted((rank, step.op, step.label) for rank, step in steps)
        assert {(rank, op) for rank, op, _ in attends} == {(a.rank, i) for i, a in schedule.attends()}


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_one_machine_find_that_their_clocks_agree(worlds: Worlds, tmp_path: Path, size: int) -> None:
    worlds(size).run(traced, truth_of(size, sparse=False), {"plan": "ring"}, tmp_path)
    found = read_trace(tmp_path)
    assert [offset for offset, _ in found.clocks] == [0.0] * size
    assert all(0 <= unsure < 1 for _, unsure in found.clocks)
    # Who waits for a message cannot have it before it was posted.
    waits = {(s.call, s.op, s.peer, s.rank): s.end for s in found.spans if s.kind == "wait"}
    sends = [span for span in found.spans if span.kind == "send"]
    assert sends
    assert all(waits[s.call, s.op, s.rank, s.peer] >= s.start for s in sends)


class BoomError(Exception):
    pass


def fails_inside(truth: Truth, directory: Path) -> bool:
    try:
        with weft.trace(directory):
            attend(truth, {"plan": "ring"})
            raise BoomError
    except BoomError:
        return trace.active is None and works()


def test_an_exception_inside_leaves_readable_files_and_a_world_that_works(
    worlds: Worlds, tmp_path: Path
) -> None:
    truth = truth_of(2, sparse=False)
    assert worlds(2).run(fails_inside, truth, tmp_path) == [True, True]
    assert {span.call for span in read_trace(tmp_path).spans} == {0, 1}


def in_pairs(directory: Path) -> int:
    """Each rank with a neighbour, in a group of two; 3 ranks make one pair and one alone."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    group = groups[min(dist.get_rank(), 1)]
    x = torch.randn(1, 2, 5, 3)
    with weft.trace(directory):
        weft.attention(x, x, x, mesh=group, plan="ring")
    return world_of(group, 60.0).comm.bytes_sent


def test_ranks_of_a_group_are_called_as_the_world_calls_them(worlds: Worlds, tmp_path: Path) -> None:
    sent = worlds(3).run(in_pairs, tmp_path)
    found = read_trace(tmp_path)
    assert found.ranks == 3
    assert found.traffic.tolist() == [[0, 0, 0], [0, 0, sent[1]], [0, sent[2], 0]]
    assert {span.rank for span in found.spans if span.kind == "attend"} == {0, 1, 2}
