"""Topology: machines, their devices, the links between them, and what steps cost on them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path

from weft.core.codec import Value
from weft.core.errors import InputError
from weft.core.mesh import MAX_RANKS

MAX_NUMBER = 1e30
"""Of a speed or a time, and of its inverse, so that products and quotients stay finite."""


def _is_usable(number: float) -> bool:
    return 1 / MAX_NUMBER <= number <= MAX_NUMBER


@dataclass(frozen=True, kw_only=True)
class Link(Value):
    """One direction of one connection: seconds before the first byte, bytes per second after it."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not 0 <= self.latency <= MAX_NUMBER:
            raise InputError(f"latency must be ≥ 0 seconds, got {self.latency}.")
        if not _is_usable(self.bandwidth):
            raise InputError(f"bandwidth must be > 0 bytes/s, got {self.bandwidth}.")


@dataclass(frozen=True, kw_only=True)
class _LinkRow(Link):
    """A row of [[links]] in a file."""

    source: int = field(metadata={"name": "from"})
    target: int = field(metadata={"name": "to"})

    @property
    def link(self) -> Link:
        return Link(latency=self.latency, bandwidth=self.bandwidth)


@dataclass(frozen=True, kw_only=True)
class Speed(Value):
    """One measured attention call. `tokens` is the geometric mean of its queries and keys."""

    tokens: float
    density: float
    block: int
    head_dim: int
    flops: float
    """FLOP/s over active tiles, without the cost of the call."""

    def __post_init__(self) -> None:
        for name in ("tokens", "density", "block", "head_dim", "flops"):
            number = getattr(self, name)
            if not _is_usable(number):
                raise InputError(f"{name} of a measured attention must be > 0, got {number}.")


@dataclass(frozen=True, kw_only=True)
class Host(Value):
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
        """Return the seconds that all steps of one attention take."""
        exchanges = collectives * self.collective + posts * self.post + messages * self.message
        return self.call + attends * self.attend + copies * self.copy + exchanges


# A laptop, gloo over loopback: the default until `weft calibrate` has measured.
LOOPBACK = Link(latency=1e-4, bandwidth=1e9)
TRANSPORTS = ("", "group", "symmetric")
COSTS = (
    "cores", "call_seconds", "tile_seconds", "row_seconds", "memory_bandwidth", "post_seconds",
    "pair_bandwidth", "nic_bandwidth", "half_bytes", "comm_slowdown",
    "sparse_flops", "backward_flops", "sparse_backward_flops",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Topology(Value):
    """`machines` × `devices` of one kind; ranks fill a machine before the next one begins.

    `Topology.from_toml` reads one that `weft calibrate` has measured; `weft.simulate.clusters.cluster` has
    those of GPUs by name.

    >>> Topology(name="lab", machines=2, devices=4, inter=Link(latency=5e-5, bandwidth=25e9)).ranks
    8
    """

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
    """The kernel of the dense speeds, and their source."""
    sparse_kernel: str = ""
    host: Host = Host()
    """The cost of launching each kind of step, if a host launches the kernels of a device."""
    cores: int = 0
    """Cores that the devices of a machine share, where devices are processes on a CPU; 0: none to share."""
    call_seconds: float = 1e-4
    """The cost of every attention call, however small; on GPUs a launch and a merge."""
    tile_seconds: float = 0.0
    """The cost of every tile of a sparse mask beyond its FLOPs."""
    row_seconds: float = 0.0
    """The cost of every row of blocks in a call, by head, however few its tiles: queries in, outputs out."""
    memory_bandwidth: float = 0.0
    """Bytes/s that one device reads and writes; a copy does both. 0: memory costs nothing."""
    post_seconds: float = 0.0
    """The cost, to the device that computes, of starting one message or of waiting to receive one."""
    pair_bandwidth: float = 0.0
    """The bandwidth of one pair of devices within `intra`; 0: all of it."""
    nic_bandwidth: float = 0.0
    """The bandwidth to other machines, each way, that the devices of a machine share; 0: each has `inter`."""
    half_bytes: float = 0.0
    """The size of a message that gets half of the bandwidth; smaller ones get less."""
    two_sided: bool = False
    """A message starts only when its receiver has posted it too (NCCL, gloo); else as soon as it is sent."""
    comm_slowdown: float = 0.0
    """The share of its compute speed that a device loses while two-sided messages come or go."""
    barriers: bool = False
    """All ranks wait for each other before every exchange."""
    transport: str = ""
    """The faster transport, as `weft calibrate` measured it; empty: not measured."""
    attention: tuple[Speed, ...] = ()
    """Measured calls; where none is near, `flops` and `tile_seconds` are used."""
    links: tuple[tuple[int, int, Link], ...] = ()
    """Links that differ from the two above, as (source rank, destination rank, link)."""

    def __post_init__(self) -> None:
        if self.machines < 1 or self.devices < 1:
            raise InputError(f"machines and devices must be ≥ 1, got {self.machines} and {self.devices}.")
        if self.ranks > MAX_RANKS:
            raise InputError(f"A topology has at most {MAX_RANKS:,} ranks, got {self.ranks:,}.")
        if not _is_usable(self.flops):
            raise InputError(f"flops must be > 0, got {self.flops}.", hint="Pass the FLOP/s of one device.")
        for name in COSTS:
            if getattr(self, name) and not _is_usable(getattr(self, name)):
                raise InputError(f"{name} must be ≥ 0, got {getattr(self, name)}.")
        if self.comm_slowdown >= 1:
            raise InputError(f"comm_slowdown must be in [0, 1), got {self.comm_slowdown}.")
        if self.transport not in TRANSPORTS:
            raise InputError(
                f"transport must be one of {', '.join(map(repr, TRANSPORTS))}, got {self.transport!r}.",
                hint="Take it from `weft calibrate`, or leave it out.",
            )
        for source, target, _ in self.links:
            if not (0 <= source < self.ranks and 0 <= target < self.ranks):
                raise InputError(
                    f"A link joins ranks {source} and {target}; {self.name} has ranks 0 to {self.ranks - 1}."
                )

    def __repr__(self) -> str:
        machines = f"{self.machines} machines × " * (self.machines > 1)
        return (
            f"Topology({self.name}: {machines}{self.devices} devices, {self.flops / 1e12:.3g} TFLOP/s, "
            f"{self.intra.bandwidth / 1e9:.4g} GB/s)"
        )

    @cached_property
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
        """Read a topology; unknown names are errors."""
        from weft.core import files, tables

        table, source = files.toml(Path(path)), str(path)
        rows: tuple[_LinkRow, ...] = tables.entry(
            tuple[_LinkRow, ...], table.pop("links", ()), source, "links"
        )
        table["links"] = [(row.source, row.target, row.link) for row in rows]
        return tables.read(Topology, table, source)

    def to_toml(self) -> str:
        """Return the TOML that `from_toml` reads."""
        import json

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


def _lines(table: Link | Speed | Host) -> list[str]:
    return [f"{f.name} = {getattr(table, f.name)!r}" for f in fields(table)]
