"""Test bed: several machines on one, as network namespaces on a switch, with limited links.

    with Testbed(3, rate="400mbit") as bed, bed.pool(devices=2) as pool:
        pool.run(fn, x)                    # 6 ranks, two in each machine
        bed.traffic()                      # bytes that left and entered each machine
        bed.command(0, "ping", "10.77.0.2")

A machine is a namespace with one interface, limited where it sends and where the switch sends to it.
What stays inside a machine goes over its own loopback, which nothing limits.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from weft.core.errors import InputError, MissingError
from weft.run.spawn.pool import Pool
from weft.run.spawn.pool_rank import call, join_world

INTERFACE = "eth0"
MAX_MACHINES = 250
"""Addresses of one subnet."""
NAMES = Path("/run/netns")
NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET
# Smaller ones stop TCP from filling the link, larger ones let whole messages through unlimited.
QUEUE = "burst 128kb limit 2mb"
# Only reno may be chosen inside a namespace; without IPv6 the counters see nothing but the ranks.
SETTINGS = {
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
}
# Waits for a line or the end of its input, which comes when the owner dies too, however it does.
CLEAN_UP = """
read -r _
for name in "$@"; do
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        processes=$(ip netns pids "$name") && [ -n "$processes" ] || break
        kill -9 $processes
        sleep 0.05
    done
    ip netns del "$name"
done
"""

_serial = itertools.count()


class NamespaceMachine(NamedTuple):
    """A namespace, for `ip netns exec`, and its address."""

    name: str
    address: str


class Traffic(NamedTuple):
    """Bytes on a machine's wire since the bed was built, headers and acknowledgements included."""

    sent: int
    received: int


class Testbed:
    """Machines on a switch, there until `close`, and never longer than the process that made them.

    `rate` limits each machine both ways: a number with kbit, mbit or gbit, or None for no limit.
    """

    __test__ = False  # for pytest, which takes the name for a test

    def __init__(self, machines: int, *, rate: str | None = "400mbit") -> None:
        if not 1 <= machines <= MAX_MACHINES:
            raise InputError(f"machines must be 1 to {MAX_MACHINES}, got {machines}.")
        self.rate = _checked(rate)
        _need_tools()
        remove_stale()
        run = f"weft-{os.getpid()}-{_started(os.getpid())}-{next(_serial)}"
        self.machines = tuple(NamespaceMachine(f"{run}-m{i}", f"10.77.0.{i + 1}") for i in range(machines))
        self._switch = f"{run}-switch"
        # The switch last: a machine without it is cut off, but still has a name to be found by.
        self._names = [*(machine.name for machine in self.machines), self._switch]
        self._cleaner = subprocess.Popen(
            ["sh", "-c", CLEAN_UP, "sh", *self._names],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )
        try:
            self._build()
            if self.rate:
                self.change_rate(self.rate)
        except BaseException:
            self.close()
            raise

    def pool(self, devices: int, **options: Any) -> MachinePool:
        """Return ranks in the machines, `devices` in each; options are those of a Pool."""
        return MachinePool(self, devices, **options)

    def command(self, machine: int, *words: str) -> list[str]:
        """Return the words that run a command in a machine."""
        return ["ip", "netns", "exec", self.machines[machine].name, *words]

    def environment(self) -> dict[str, str]:
        """Return variables beside torchrun's: gloo must listen on an interface that others reach."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE, "MASTER_ADDR": self.machines[0].address}

    def traffic(self) -> tuple[Traffic, ...]:
        """Return the bytes of each machine, read at the switch: a port receives what its machine sends."""
        links = json.loads(_run(["ip", "-n", self._switch, "-s", "-j", "link", "show", "type", "veth"]))
        ports = {link["ifname"]: link["stats64"] for link in links}
        counted = (ports[f"m{i}"] for i in range(len(self.machines)))
        return tuple(Traffic(port["rx"]["bytes"], port["tx"]["bytes"]) for port in counted)

    def change_rate(self, rate: str | None, machine: int | None = None) -> None:
        """Limit one machine, or all of them, from now on."""
        rate = _checked(rate)
        queue = f"tbf rate {rate} {QUEUE}" if rate else "noqueue"
        indices = range(len(self.machines)) if machine is None else [machine]
        try:
            for i in indices:
                line = f"qdisc replace dev {INTERFACE} root {queue}"
                _run(["tc", "-n", self.machines[i].name, "-batch", "-"], [line])
            ports = [f"qdisc replace dev m{i} root {queue}" for i in indices]
            _run(["tc", "-n", self._switch, "-batch", "-"], ports)
        except _RefusedError as error:
            raise MissingError(
                f"This kernel cannot limit a link to {rate}: {error}.",
                hint="It needs tbf (CONFIG_NET_SCH_TBF); a test bed with no limit, --rate none, does not.",
            ) from None
        if machine is None:
            self.rate = rate

    def close(self) -> None:
        """Remove the machines and end what still runs in them; a second call does nothing."""
        with suppress(ValueError, BrokenPipeError):  # closed already, or killed
            self._cleaner.communicate(b"\n")  # a line and not just the end: forked children may hold the pipe
        if self._cleaner.wait() < 0:
            _remove(self._names)

    def __enter__(self) -> Testbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        try:
            _run(["ip", "-batch", "-"], [f"netns add {name}" for name in self._names])
            settings = "; ".join(
                f"[ ! -e /proc/sys/net/{key} ] || echo {value} >/proc/sys/net/{key}"
                for key, value in SETTINGS.items()
            )
            for name in self._names:
                _run(["ip", "netns", "exec", name, "sh", "-ec", settings])
            switch = ["link add bridge type bridge", "link set bridge up"]
            for i, machine in enumerate(self.machines):
                switch += [
                    f"link add m{i} type veth peer name {INTERFACE} netns {machine.name}",
                    f"link set m{i} master bridge up",
                ]
            _run(["ip", "-n", self._switch, "-batch", "-"], switch)
            for name, address in self.machines:
                own = ["link set lo up", f"link set {INTERFACE} up", f"addr add {address}/24 dev {INTERFACE}"]
                _run(["ip", "-n", name, "-batch", "-"], own)
        except _RefusedError as error:
            raise MissingError(
                f"This machine refuses network namespaces: {error}.",
                hint="In a container, start it with --privileged (or SYS_ADMIN and NET_ADMIN).",
            ) from None


class MachinePool(Pool):
    """`devices` ranks in each machine of a bed, numbered as by torchrun: those of one machine in a row."""

    def __init__(self, bed: Testbed, devices: int, **options: Any) -> None:
        if devices < 1:
            raise InputError(f"devices must be > 0, got {devices}.")
        self.bed = bed
        self.devices = devices
        super().__init__(len(bed.machines) * devices, **options)

    def __enter__(self) -> MachinePool:
        return self

    def _first_calls(self, directory: str) -> list[list[bytes]]:
        """Move the ranks to their machines once they are ready."""
        folder = Path(directory, "machines")
        folder.mkdir()
        move = [self._move(rank, str(folder)) for rank in range(self.size)]
        return [*super()._first_calls(directory), move]

    def _move(self, rank: int, folder: str) -> bytes:
        machine, device = divmod(rank, self.devices)
        environment = self.bed.environment() | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(device),
            "LOCAL_WORLD_SIZE": str(self.devices),
            "GROUP_RANK": str(machine),
        }
        namespace = str(NAMES / self.bed.machines[machine].name)
        return call(_join_from, namespace, environment, (rank, self.size, self.timeout, folder))


def _join_from(namespace: str, environment: dict[str, str], world: tuple[int, int, float, str]) -> None:
    """Leave the pool's world, move this thread and all that it will start, and join again from there."""
    import torch.distributed as dist

    dist.destroy_process_group()
    with Path(namespace).open("rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), NETWORK_NAMESPACE):  # os.setns is there from Python 3.12 on
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
    os.environ.update(environment)
    join_world(*world)


def remove_stale() -> None:
    """Remove the machines of owners that were killed together with their clean-up process."""
    stale = [path.name for path in NAMES.glob("weft-*-*-*") if not _has_owner(path.name)]
    if stale:
        _remove(sorted(stale))


def _remove(names: Sequence[str]) -> None:
    words = ["sh", "-c", CLEAN_UP, "sh", *names]
    subprocess.run(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def _has_owner(name: str) -> bool:
    _, pid, started, *_ = name.split("-")
    return _started(int(pid)) == started if pid.isdigit() else True  # not one of ours


def _started(pid: int) -> str:
    """Return the start time of a process, which no later process with its id has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _need_tools() -> None:
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        raise MissingError(
            f"A test bed needs ip and tc; {' and '.join(absent)} cannot be found.",
            hint="Both are in iproute2 (Debian: apt install iproute2), for Linux only.",
        )
    if os.geteuid() != 0:
        raise MissingError(
            f"A test bed needs root, to make network namespaces; this is user {os.geteuid()}.",
            hint="Run it with sudo, or as root in a privileged container.",
        )


def _checked(rate: str | None) -> str | None:
    if rate is not None and not re.fullmatch(r"[1-9]\d*(\.\d+)?[kmg]bit", rate):
        raise InputError(
            f"rate must be a number with kbit, mbit or gbit, got {rate!r}.", hint="Use for example 400mbit."
        )
    return rate


class _RefusedError(Exception):
    """The error message of ip or tc."""


def _run(words: Sequence[str], lines: Sequence[str] = ()) -> str:
    done = subprocess.run(words, input="\n".join(lines), capture_output=True, text=True, check=False)
    if done.returncode:
        raise _RefusedError(" ".join(done.stderr.split()).rstrip(".") or f"{words[0]} failed")
    return done.stdout
