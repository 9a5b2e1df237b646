"""Ranks in the machines of a test bed: what they compute, what crosses the wire, what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.distributed.jobs import Answer, attend, check, problem
from tests.run.dense import Truth
from tests.worlds import becomes_true, running
from weft.core.errors import InputError, MissingError, WeftError
from weft.core.problem import Problem
from weft.plan.strategies import parse
from weft.run.spawn.pool import RankFailure
from weft.run.spawn.testbed import NAMES, MachinePool, Testbed
from weft.run.world import machines

DEVICES = 2
MACHINES = (2, 3, 4)
MOST = max(MACHINES)
ORDERS = {
    "usp": lambda n: f"usp:{DEVICES}x{n}",
    "swapped": lambda n: f"swapped:{n}x{DEVICES}",
    "torus": lambda n: f"torus:{n}x{DEVICES}",
}


@cache
def why_not() -> str:
    try:
        Testbed(1).close()
    except MissingError as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def _needs_machines() -> None:
    if why_not():
        pytest.skip(why_not())


@pytest.fixture(scope="module")
def pool() -> Iterator[MachinePool]:
    """4 machines; 2 and 3 of them are worlds of their own in it, since ranks take long to start."""
    with Testbed(MOST, rate="400mbit") as bed, bed.pool(DEVICES, timeout=20.0, limit=60.0) as pool:
        yield pool


def named(name: str) -> list[str]:
    """The namespaces whose names begin so."""
    return sorted(path.name for path in NAMES.glob(f"{name}*"))


def run_of(name: str) -> str:
    """What all the namespaces of one bed begin with."""
    return name.rpartition("-")[0]


def exists(name: str, ranks: int) -> bool:
    try:
        parse(name, ranks)
    except WeftError:
        return False
    return True


CASES = [
    (count, order)
    for count in MACHINES
    for order, name in ORDERS.items()
    if exists(name(count), count * DEVICES)
]


def wire_bytes(case: Problem, count: int, order: str) -> float:
    """V(N, N_u) of the paper, for one machine: Q and O among N_u machines, K and V from all N."""
    n_u = 1 if order == "usp" else count
    elements = case.batch * case.heads * case.q.size * case.head_dim / count
    return elements * (2 * (n_u - 1) / n_u + 2 * (count - 1) / n_u) * case.item_bytes


# ------------------------------------------------------------------------------------------- ranks


@cache
def first(count: int) -> Any:
    """The world of the first machines."""
    return dist.new_group(range(count * DEVICES))


def whereabouts() -> tuple[int, str, str]:
    dist.barrier()
    return machines(), str(Path("/proc/thread-self/ns/net").readlink()), os.environ["LOCAL_RANK"]


def test_ranks_live_in_their_machines(pool) -> None:
    told = pool.run(whereabouts)
    assert {count for count, _, _ in told} == {MOST}
    assert [device for _, _, device in told] == ["0", "1"] * MOST
    where = [name for _, name, _ in told]
    assert where[0::2] == where[1::2]
    assert len({*where, str(Path("/proc/self/ns/net").readlink())}) == MOST + 1


def attend_among(count: int, truth: Truth, plan: str) -> Answer | None:
    world = first(count)
    return attend(truth, {"plan": plan, "mesh": world}) if dist.get_rank() < count * DEVICES else None


@pytest.mark.parametrize(("count", "order"), CASES)
def test_attention_over_machines_is_exact_both_ways(pool, count: int, order: str) -> None:
    # One token more than divides, heads that no number of machines divides.
    truth = Truth.of(problem(count * DEVICES, 16 * count + 1, heads=7, head_dim=8))
    answers = pool.run(attend_among, count, truth, ORDERS[order](count))
    check(truth, answers[: count * DEVICES], 5e-6)


def move_tensors(count: int, case: Problem, plan: str) -> None:
    world, rank = first(count), dist.get_rank()
    if rank < count * DEVICES:
        q, k, v = torch.randn(3, 1, case.heads, case.q.rows(rank), case.head_dim)
        weft.attention(q, k, v, plan=plan, tokens=case.q, mesh=world)


@pytest.mark.parametrize(("count", "order"), CASES)
def test_the_wire_carries_what_the_formula_says(pool, count: int, order: str) -> None:
    case = problem(count * DEVICES, 256 * count, heads=4 * count, head_dim=64)
    job = (move_tensors, count, case, ORDERS[order](count))
    pool.run(*job)  # agrees on the plan, which is traffic too
    before = pool.bed.traffic()
    pool.run(*job)
    after = pool.bed.traffic()
    expected = wire_bytes(case, count, order)
    for machine in range(count):
        for way in ("sent", "received"):
            moved = getattr(after[machine], way) - getattr(before[machine], way)
            assert moved == pytest.approx(expected, rel=0.02)


def send_inside(size: int) -> None:
    """To the other device of the same machine."""
    rank = dist.get_rank()
    x = torch.zeros(size, dtype=torch.uint8)
    if rank % DEVICES:
        dist.recv(x, rank - 1)
    else:
        dist.send(x, rank + 1)


def test_what_stays_inside_a_machine_is_not_on_its_wire(pool) -> None:
    before = pool.bed.traffic()
    pool.run(send_inside, 1 << 20)
    assert all(now.sent - then.sent < 1 << 14 for now, then in zip(pool.bed.traffic(), before, strict=True))


def die(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def test_after_a_rank_is_killed_the_next_ones_are_in_the_machines_too() -> None:
    with Testbed(2) as bed, bed.pool(devices=1) as pool:
        with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL"):
            pool.run(die, 1)
        told = pool.run(whereabouts)
    assert {count for count, _, _ in told} == {2}
    assert len({name for _, name, _ in told}) == 2


# ----------------------------------------------------------------------------------------- the bed


def output(words: list[str]) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout


def limits(bed: Testbed, machine: int) -> tuple[str, str]:
    """What tc says of a machine's link: where it sends, and where the switch sends to it."""
    own = output(["tc", "-n", bed.machines[machine].name, "qdisc", "show", "dev", "eth0"])
    switch = run_of(bed.machines[machine].name) + "-switch"
    return own, output(["tc", "-n", switch, "qdisc", "show", "dev", f"m{machine}"])


CONNECT = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
print(server.accept()[1][0])
"""


def test_every_machine_reaches_every_other() -> None:
    with Testbed(3, rate=None) as bed:
        for there, machine in enumerate(bed.machines):
            for here in {0, 1, 2} - {there}:
                serve = bed.command(there, sys.executable, "-c", CONNECT, machine.address)
                with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
                    assert server.stdout is not None
                    assert server.stdout.readline() == "ready\n"
                    call = f"import socket; socket.create_connection(('{machine.address}', 5000), 10)"
                    output(bed.command(here, sys.executable, "-c", call))
                    assert server.stdout.read().strip() == bed.machines[here].address


def test_links_are_limited_both_ways_as_asked_and_as_changed() -> None:
    with Testbed(2, rate="400mbit") as bed:
        for machine in (0, 1):
            assert all("tbf" in told and "rate 400Mbit" in told for told in limits(bed, machine))
        bed.change_rate("50mbit", machine=1)
        assert all("rate 400Mbit" in told for told in limits(bed, 0))
        assert all("rate 50Mbit" in told for told in limits(bed, 1))
        bed.change_rate(None)
        assert not any("tbf" in told for told in limits(bed, 0) + limits(bed, 1))
        bed.change_rate("1.5gbit")
        assert all("rate 1500Mbit" in told for told in limits(bed, 0) + limits(bed, 1))
        assert bed.rate == "1.5gbit"


def test_several_beds_live_side_by_side() -> None:
    with Testbed(2) as one, Testbed(3) as other:
        assert not {machine.name for machine in one.machines} & {machine.name for machine in other.machines}
        one.close()
        assert named(run_of(one.machines[0].name)) == []
        assert len(named(run_of(other.machines[0].name))) == 4


@pytest.mark.parametrize("machines", [0, -1, 251])
def test_sizes_that_make_no_bed_are_refused(machines: int) -> None:
    with pytest.raises(InputError, match=f"machines must be 1 to 250, got {machines}"):
        Testbed(machines)


@pytest.mark.parametrize("rate", ["fast", "400", "0mbit", "-1mbit", "400mbit; reboot", ""])
def test_rates_that_are_no_speed_are_refused(rate: str) -> None:
    with pytest.raises(InputError, match="rate must be"):
        Testbed(2, rate=rate)


# --------------------------------------------------------------------------------------- clean-up


def test_an_exception_leaves_nothing_behind_and_ends_what_ran_inside() -> None:
    with pytest.raises(ZeroDivisionError), Testbed(2) as bed:
        inside = subprocess.Popen(bed.command(1, "sleep", "1000"))
        assert becomes_true(lambda: "sleep" in Path(f"/proc/{inside.pid}/cmdline").read_text()[:5])
        _ = 1 / 0
    assert named(run_of(bed.machines[0].name)) == []
    assert inside.wait(timeout=10) == -signal.SIGKILL
    bed.close()


def test_a_bed_that_cannot_be_built_leaves_nothing_behind(monkeypatch) -> None:
    monkeypatch.setattr("weft.run.spawn.testbed.QUEUE", "burst nonsense")
    before = named("weft-")
    with pytest.raises(MissingError, match="cannot limit a link to 400mbit: .*burst"):
        Testbed(2)
    assert named("weft-") == before


def test_a_bed_is_removed_without_its_clean_up_and_while_another_process_holds_on_to_it() -> None:
    with Testbed(1) as killed, Testbed(1) as held:
        killed._cleaner.kill()
        assert held._cleaner.stdin is not None
        with subprocess.Popen(["sleep", "60"], pass_fds=[held._cleaner.stdin.fileno()]) as child:
            held.close()
            assert child.poll() is None, "close waited for it"
            child.kill()
    assert named(run_of(killed.machines[0].name)) == named(run_of(held.machines[0].name)) == []


OWNER = """
import subprocess, time
from weft.run.spawn.testbed import Testbed
bed = Testbed(2)
inside = subprocess.Popen(bed.command(0, "sleep", "1000"))
time.sleep(0.2)
print(bed.machines[0].name, inside.pid, bed._cleaner.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def said(owner: subprocess.Popen[str]) -> tuple[str, int, int]:
    assert owner.stdout is not None
    name, inside, cleaner = owner.stdout.readline().split()
    assert len(named(run_of(name))) == 3
    return run_of(name), int(inside), int(cleaner)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_owner_that_is_killed_leaves_nothing_behind(owner, how: signal.Signals) -> None:
    run, inside, _ = said(owner)
    owner.send_signal(how)
    assert becomes_true(lambda: named(run) == [] and not running(inside))


def test_what_a_killed_clean_up_left_is_removed_by_the_next_bed(owner) -> None:
    run, inside, cleaner = said(owner)
    os.kill(cleaner, signal.SIGKILL)
    Testbed(1).close()
    assert len(named(run)) == 3, "its owner lives"
    owner.kill()
    owner.wait()
    assert len(named(run)) == 3, "nobody is left to remove it"
    Testbed(1).close()
    assert named(run) == []
    assert becomes_true(lambda: not running(inside))
