"""Topology: where work can run and how fast each link is."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path

from weft.core import files, tables
from weft.core.codec import value
from weft.core.errors import InputError
from weft.core.mesh import MAX_RANKS

MAX_NUMBER = 1e30
"""Of a speed or a time, and its inverse: what they are multiplied and divided to stays finite."""


def _is_usable(number: float) -> bool:
    return 1 / MAX_NUMBER <= number <= MAX_NUMBER


@value
@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of one connection: seconds before the first byte, bytes per second after it."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not 0 <= self.latency <= MAX_NUMBER:
            raise InputError(f"A link's latency is {self.latency} s.", hint="Give seconds, 0 or more.")
        if not _is_usable(self.bandwidth):
            raise InputError(
                f"A link's bandwidth is {self.bandwidth} bytes/s.", hint="Give a positive number."
            )


@dataclass(frozen=True, kw_only=True)
class _OneWay(Link):
    """As [[links]] tell it."""

    source: int = field(metadata={"name": "from"})
    target: int = field(metadata={"name": "to"})

    @property
    def link(self) -> Link:
        return Link(latency=self.latency, bandwidth=self.bandwidth)


@value
@dataclass(frozen=True, kw_only=True)
class Speed:
    """One measured attention call. `tokens` is the geometric mean of its queries and keys."""

    tokens: float
    density: float
    block: int
    head_dim: int
    flops: float
    """FLOP/s over active tiles, without the cost of the call."""

    def __post_init__(self) -> None:
        for name in ("tokens", "density", "block", "head_dim", "flops"):
            given = getattr(self, name)
            if not _is_usable(given):
                raise InputError(f"A measured attention has {name}={given}.", hint="Give a number above 0.")


@value
@dataclass(frozen=True, kw_only=True)
class Host:
    """Seconds that the host of a device takes to start each kind of step; 0 where the host is the device.

    The host runs ahead: no step waits for it as long as it takes less time in all than the device does.
    """

    call: float = 0.0
    """One attention: look it up and check it."""
    attend: float = 0.0
    """Launch one partial attention and its merge."""
    copy: float = 0.0
    """Launch one copy, cast or fill."""
    collective: float = 0.0
    """Start an exchange between all ranks, which is one all_to_all."""
    post: float = 0.0
    """Start another exchange, which is one batch of messages."""
    message: float = 0.0
    """One message of a batch: start it and wait for it."""

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not 0 <= seconds <= MAX_NUMBER:
                raise InputError(f"host.{name} must be ≥ 0, got {seconds}.", hint="Pass seconds.")

    def seconds(self, *, attends: int, copies: int, collectives: int, posts: int, messages: int) -> float:
        """Return what all steps of one attention take."""
        exchanges = collectives * self.collective + posts * self.post + messages * self.message
        return self.call + attends * self.attend + copies * self.copy + exchanges


# A laptop until `weft calibrate` says better: gloo over loopback.
LOOPBACK = Link(latency=1e-4, bandwidth=1e9)
TRANSPORTS = ("", "group", "symmetric")
COSTS = (
    "cores", "call_seconds", "tile_seconds", "row_seconds", "memory_bandwidth", "post_seconds",
    "pair_bandwidth", "nic_bandwidth", "half_bytes", "comm_slowdown",
    "sparse_flops", "backward_flops", "sparse_backward_flops",
)  # fmt: skip


@value
@dataclass(frozen=True, kw_only=True)
class Topology:
    """`machines` × `devices` of one kind; ranks fill a machine before the next one begins."""

    name: str = "local"
    machines: int = 1
    devices: int = 1
    intra: Link = LOOPBACK
    inter: Link = LOOPBACK
    flops: float = 6e10
    """Attention FLOP/s of one device on dense tiles."""
    sparse_flops: float = 0.0
    """Of sparse tiles, where another kernel computes them; 0: as dense ones, and `tile_seconds` for each."""
    backward_flops: float = 0.0
    """Of the backward, which has 2.5 times the FLOPs; 0: as the forward."""
    sparse_backward_flops: float = 0.0
    """Of the backward of sparse tiles; 0: as the forward."""
    kernel: str = ""
    """The kernel that dense speeds are of, and who says so."""
    sparse_kernel: str = ""
    host: Host = Host()
    """What starting a step costs, where a host launches what a device computes."""
    cores: int = 0
    """Cores that the devices of a machine share, where devices are processes on a CPU; 0: none to share."""
    call_seconds: float = 1e-4
    """What every attention call costs, however small; on GPUs a launch and a merge."""
    tile_seconds: float = 0.0
    """What every tile of a sparse mask costs beyond its FLOPs."""
    row_seconds: float = 0.0
    """What every row of blocks costs in a call, by head, however few its tiles: queries in, outputs out."""
    memory_bandwidth: float = 0.0
    """Bytes/s that one device reads and writes; a copy does both. 0: memory costs nothing."""
    post_seconds: float = 0.0
    """What starting one message, or waiting to receive one, costs the device that computes."""
    pair_bandwidth: float = 0.0
    """What one pair of devices may have of `intra`; 0: all of it."""
    nic_bandwidth: float = 0.0
    """What all devices of a machine share, each way, to other machines; 0: each has its `inter`."""
    half_bytes: float = 0.0
    """The size of a message that gets half of the bandwidth; smaller ones get less."""
    two_sided: bool = False
    """A message starts only when its receiver is there too (NCCL, gloo); else as soon as it is sent."""
    comm_slowdown: float = 0.0
    """The share of its compute speed that a device loses while two-sided messages come or go."""
    barriers: bool = False
    """All ranks meet before every exchange."""
    transport: str = ""
    """What carries messages faster, as `weft calibrate` measured it; empty: not measured."""
    attention: tuple[Speed, ...] = ()
    """Measured calls; where none is near, `flops` and `tile_seconds` tell."""
    links: tuple[tuple[int, int, Link], ...] = ()
    """Links that differ from the two above, as (source rank, destination rank, link)."""

    def __post_init__(self) -> None:
        if self.machines < 1 or self.devices < 1:
            raise InputError(
                f"A topology of {self.machines} machines × {self.devices} devices is empty.",
                hint="Both are 1 or more.",
            )
        if self.ranks > MAX_RANKS:
            raise InputError(
                f"A topology of {self.ranks:,} ranks.", hint=f"At most {MAX_RANKS:,} are possible."
            )
        if not _is_usable(self.flops):
            raise InputError(f"flops={self.flops} is no speed.", hint="Give FLOP/s of one device, above 0.")
        for name in COSTS:
            if getattr(self, name) and not _is_usable(getattr(self, name)):
                raise InputError(f"{name}={getattr(self, name)}.", hint="Give a number, 0 or more.")
        if self.comm_slowdown >= 1:
            raise InputError(
                f"comm_slowdown={self.comm_slowdown} leaves nothing.", hint="Give a share below 1."
            )
        if self.transport not in TRANSPORTS:
            raise InputError(
                f"transport must be one of {', '.join(map(repr, TRANSPORTS))}, got {self.transport!r}.",
                hint="Take it from `weft calibrate`, or leave it out.",
            )
        for source, target, _ in self.links:
            if not (0 <= source < self.ranks and 0 <= target < self.ranks):
                raise InputError(
                    f"A link joins ranks {source} and {target}.",
                    hint=f"{self.name} has ranks 0 to {self.ranks - 1}.",
                )

    @property
    def ranks(self) -> int:
        return self.machines * self.devices

    def machine(self, rank: int) -> int:
        return rank // self.devices

    def link(self, source: int, target: int) -> Link:
        for a, b, link in self.links:
            if (a, b) == (source, target):
                return link
        return self.intra if self.machine(source) == self.machine(target) else self.inter

    def attention_flops(self, *, sparse: bool, backward: bool = False) -> float:
        """Return the FLOP/s of the kernel that computes such tiles."""
        forward = self.sparse_flops * sparse or self.flops
        return (self.sparse_backward_flops if sparse else self.backward_flops) * backward or forward

    @staticmethod
    def local(ranks: int) -> Topology:
        return Topology(devices=ranks)

    @staticmethod
    def from_toml(path: str | Path) -> Topology:
        """Read a topology; names that do not exist are errors, so that no typing slip is ignored."""
        table, where = files.toml(Path(path)), str(path)
        rows: tuple[_OneWay, ...] = tables.entry(tuple[_OneWay, ...], table.pop("links", ()), where, "links")
        table["links"] = [(row.source, row.target, row.link) for row in rows]
        return tables.read(Topology, table, where)

    def to_toml(self) -> str:
        """What `from_toml` reads."""
        plain = [f for f in fields(self) if f.name not in (*_TABLES, "links", "attention")]
        lines = [f"{f.name} = {json.dumps(getattr(self, f.name))}" for f in plain]
        for name in _TABLES:
            lines += ["", f"[{name}]", *_lines(getattr(self, name))]
        for source, target, link in self.links:
            lines += ["", "[[links]]", f"from = {source}", f"to = {target}", *_lines(link)]
        for speed in self.attention:
            lines += ["", "[[attention]]", *_lines(speed)]
        return "\n".join(lines) + "\n"


_TABLES = ("intra", "inter", "host")


def _lines(thing: Link | Speed | Host) -> list[str]:
    return [f"{f.name} = {getattr(thing, f.name)!r}" for f in fields(thing)]
