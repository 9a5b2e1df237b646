"""Calibrate: measure the links, kernels and hosts of this world, as a Topology for the planner.

Every rank calls `calibrate` at the same time; all return the same Topology. `weft doctor --gpu` takes the
same steps one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import count
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist

from weft.core.topology import Host, Link, Topology
from weft.run import world
from weft.run.attention import attention
from weft.run.comm import Comm, symmetric
from weft.run.comm.group import GroupComm
from weft.run.comm.onesided import OneSidedComm
from weft.run.devices import check_devices, default_dtype
from weft.run.devices import device as own_device
from weft.run.exchange import all_gather_json, broadcast_json
from weft.run.gpus import topology_here
from weft.run.kernels.parity import parity_check
from weft.run.kernels.speeds import Speeds, TimingSizes
from weft.run.measure import links
from weft.run.measure.hosts import measure_host
from weft.run.measure.stopwatch import device_seconds, lowest_eighth
from weft.run.spawn.launch import usable_cores
from weft.simulate.costs import BACKWARD_FLOPS_RATIO

TIMEOUT = 60.0  # equal to the default of `attention`, so that they share a world
ROUNDS = 20
"""On CPUs, which other processes disturb for seconds: the best of all rounds is what a machine can do."""
DIGITS = 4
"""Significant digits of a measurement."""
ALL_TO_ALL, SYMMETRIC = "all-to-all", "symmetric"

Numbers = dict[str, float]
Step = Callable[[], Numbers]


def calibrate(
    *, head_dim: int = 0, dtype: str = "", backend: str = "auto", machines: int = 1, quick: bool = False
) -> Topology:
    """Measure links inside and between machines, and what attention costs on one device of each.

    dtype and head_dim default to bfloat16 and 128 on GPUs, float32 and 64 on CPUs.
    quick   one round of small sizes, for tests: its numbers mean little.
    """
    device = own_device()
    calibration = Calibration(device, head_dim, dtype or default_dtype(), backend, machines, quick=quick)
    for _ in range(1 if quick or device.type == "cuda" else ROUNDS):
        for step in calibration.steps().values():
            step()
    return calibration.topology()


class Calibration:
    """Steps that all ranks run together, in the same order, and their results so far.

    A step that runs again keeps the better of its results. Without a step, the values of the table of GPUs
    remain.
    """

    def __init__(
        self,
        device: torch.device,
        head_dim: int,
        dtype: str,
        backend: str,
        machines: int,
        *,
        quick: bool = False,
    ) -> None:
        comm: Comm = world.world_of(None, TIMEOUT).comm
        # Whichever transport is set or was calibrated: on GPUs the process group is measured first.
        self.comm = comm.base if isinstance(comm, OneSidedComm) and device.type == "cuda" else comm
        self.device, self.dtype = device, dtype
        self.machines, self.devices = machines, self.comm.size // machines
        self.cores = usable_cores() if device.type == "cpu" else 0
        if self.comm.size > 1:  # the first messages are those of two ranks, and NCCL needs all to connect any
            check_devices(self.comm, device)
            self.comm.warm_up(device)
        tested = parity_check(self.comm, device) if device.type == "cuda" else None
        head_dim = head_dim or (128 if device.type == "cuda" else 64)
        self.speeds = Speeds(backend, dtype, head_dim, device, TimingSizes.of(device, quick=quick), tested)
        self.sizes = links.MessageSizes.of(device, quick=quick)
        self.base = Topology(machines=machines, devices=self.devices)
        if device.type == "cuda":
            self.base = topology_here(machines, self.devices, device, backend)
        self.links: dict[tuple[int, int], Link] = {}
        self.times: dict[str, float] = {}
        """The shortest of each, in seconds."""
        self.by_rank: dict[str, list[float]] = {}
        """The times that several ranks measure."""
        self.rates: dict[str, float] = {}
        """The highest of each, in bytes per second."""
        self.host = Host()
        self.one_sided: tuple[Link, float] | None = None
        """Through symmetric memory: the link of a pair, and the bytes/s of an all-to-all."""
        self.symmetric_comms: list[Comm] = []
        """The owners of that memory, which peers may still signal in."""

    def steps(self) -> dict[str, Step]:
        """Return the steps by name, in order; the same on all ranks."""
        on_gpu, several = not self.cores, self.comm.size > 1
        steps: dict[str, Step] = {}
        for a, b in links.pairs(self.devices):  # the same pair of devices in every machine at once
            together = [(first + a, first + b) for first in range(0, self.comm.size, self.devices)]
            steps[f"{a}→{b}"] = partial(self._links, together)
        if self.devices > 1:
            steps[ALL_TO_ALL] = self._all_to_all
        if self.machines > 1:
            steps[f"0→{self.devices}"] = partial(self._links, [(0, self.devices)])
        if self.machines > 1 and self.devices > 1:
            steps["network card"] = self._card
        if several and not on_gpu:
            steps |= {"post": self._post, "ring": self._ring}
        steps |= {"dense": self._dense, "sparse": self._sparse, "copy": self._copy}
        if on_gpu:
            steps["host"] = self._host
        if on_gpu and self.devices > 1:
            steps[SYMMETRIC] = self._symmetric  # last: it may end the process
        return steps

    def topology(self) -> Topology:
        """Return the results of the steps."""
        fields: dict[str, Any] = {"name": "calibrated", "cores": self.cores}
        if {"dense", "few"} <= self.times.keys():
            fields |= self.speeds.fields(self.times)
        if self.host != Host():
            fields["host"] = self.host
        fields |= {name: rate for name, rate in self.rates.items() if name != ALL_TO_ALL}
        fields |= links.topology_fields(self.links, self.devices, self.device, self.rates.get(ALL_TO_ALL))
        if self.comm.size > 1:
            fields["two_sided"] = self.machines > 1 or not links.is_one_sided(self.comm, self.device)
        fields |= self._transport_fields()
        topology = replace(self.base, **fields)
        return _rounded(replace(topology, **self._call_fields(topology)))

    def _transport_fields(self) -> dict[str, Any]:
        """Return the faster transport, and its links if those were not measured."""
        if self.one_sided is None or ALL_TO_ALL not in self.rates:
            return {}
        link, rate = self.one_sided
        if rate <= self.rates[ALL_TO_ALL]:
            return {"transport": "group"}
        # Copy engines move its messages, beside kernels and whenever they are sent.
        intra = Link(latency=link.latency, bandwidth=max(rate, link.bandwidth))
        two_sided = self.machines > 1
        return {
            "transport": SYMMETRIC, "intra": intra, "comm_slowdown": 0.0, "links": (), "two_sided": two_sided,
        }  # fmt: skip

    def _call_fields(self, topology: Topology) -> dict[str, float]:
        """Return the costs of an attention that do not depend on its tokens."""
        fields = {"post_seconds": self.times["post"]} if "post" in self.times else {}
        if "ring" in self.times:
            ranks, waited = self.comm.size, (self.comm.size - 1) * topology.link(0, 1).latency
            hop = (self.times["ring"] - waited) / ranks * min(1.0, self.cores / self.devices)
            fields["call_seconds"] = max(topology.call_seconds, hop)
        return fields

    # Steps.

    def _links(self, together: list[tuple[int, int]]) -> Numbers:
        measured = links.measure_pairs(self.comm, self.device, together, self.sizes)
        for pair, link in zip(together, measured, strict=True):
            best = self.links.get(pair, link)
            self.links[pair] = Link(
                latency=min(link.latency, best.latency), bandwidth=max(link.bandwidth, best.bandwidth)
            )
        first = self.links[together[0]]
        return {"gbytes_per_s": first.bandwidth / 1e9, "microseconds": first.latency * 1e6}

    def _all_to_all(self) -> Numbers:
        rate = links.measure_all_to_all(self.comm, self.device, self.devices, self.sizes)
        return self._rate(ALL_TO_ALL, rate)

    def _card(self) -> Numbers:
        rate = links.measure_card(self.comm, self.device, self.machines, self.sizes)
        return self._rate("nic_bandwidth", rate)

    def _post(self) -> Numbers:
        return self._time("post", links.measure_post(self.comm, self.device, (0, 1), self.sizes))

    def _ring(self) -> Numbers:
        q, k, v = (torch.zeros(1, 1, 1, 8, device=self.device) for _ in range(3))
        call = partial(attention, q, k, v, tokens=self.comm.size, plan="ring")
        links.barrier(self.comm)
        with torch.no_grad():
            seconds = lowest_eighth(device_seconds(call, self.device, self.sizes.small_repeats))
        return self._time("ring", broadcast_json(seconds))

    def _dense(self) -> Numbers:
        self._together(self.speeds.dense_times)
        return self._tflops("dense", self.speeds.sizes.tiles)

    def _sparse(self) -> Numbers:
        self._together(self.speeds.sparse_times)
        return self._tflops("some", self.speeds.sizes.some * self.speeds.sizes.rows)

    def _tflops(self, key: str, tiles: int) -> Numbers:
        work = self.speeds.flops(tiles) / 1e12
        return {
            "tflops": work / self.times[key],
            "backward_tflops": BACKWARD_FLOPS_RATIO * work / self.times[f"{key} backward"],
        }

    def _copy(self) -> Numbers:
        """Copy heads into messages, as packing does; count bytes read and written."""
        pieces, num_bytes = (18, self.sizes.large // 8) if self.cores else (6, self.sizes.large // 2)
        source = torch.zeros(pieces, 2, num_bytes // 4, device=self.device)
        target, turn = torch.zeros_like(source), count()

        def copy() -> None:
            # Other memory each time, since the operands of an attention are not in the cache either.
            i = next(turn) % pieces
            target[-i, 0].copy_(source[i, 1])

        self._together(lambda: {"copy": lowest_eighth(device_seconds(copy, self.device, 6 * pieces))})
        return self._rate("memory_bandwidth", 2 * num_bytes / self.times["copy"])

    def _together(self, measure: Callable[[], Numbers]) -> None:
        """Measure on all ranks that have a device, or a core, of their own, and take the medians.

        Busy cores share caches and memory, and a schedule keeps them all busy.
        """
        takes_part = self.comm.rank < min(self.devices, self.cores) or not self.cores
        links.barrier(self.comm)
        by_rank: list[Numbers] = [each for each in all_gather_json(measure() if takes_part else None) if each]
        for name in by_rank[0]:
            # Each rank's best of all rounds: other processes disturb different ranks in different rounds.
            taken = [each[name] for each in by_rank]
            best = self.by_rank[name] = [*map(min, taken, self.by_rank.get(name, taken))]
            self.times[name] = median(best)

    def _host(self) -> Numbers:
        kernel, dtype, head_dim = self.speeds.selected, self.dtype, self.speeds.head_dim
        self.host = measure_host(self.comm, self.device, kernel, dtype, head_dim)
        return {f"{name}_microseconds": seconds * 1e6 for name, seconds in vars(self.host).items()}

    def _symmetric(self) -> Numbers:
        """Exchange messages through symmetric memory, if all ranks have it."""
        group = dist.group.WORLD
        assert group is not None
        rendezvous = partial(symmetric.rendezvous, group)
        comm = OneSidedComm(GroupComm(group, TIMEOUT), rendezvous, TIMEOUT, group=group, transport=SYMMETRIC)
        self.symmetric_comms.append(comm)
        if not links.is_one_sided(comm, self.device):
            return {}
        together = [(first, first + 1) for first in range(0, self.comm.size, self.devices)]
        link = links.measure_pairs(comm, self.device, together, self.sizes)[0]
        rate = links.measure_all_to_all(comm, self.device, self.devices, self.sizes)
        self.one_sided = link, rate
        return {"gbytes_per_s": rate / 1e9, "microseconds": link.latency * 1e6}

    def _time(self, name: str, seconds: float) -> Numbers:
        self.times[name] = min(seconds, self.times.get(name, seconds))
        return {f"{name}_microseconds": self.times[name] * 1e6}

    def _rate(self, name: str, rate: float) -> Numbers:
        self.rates[name] = max(rate, self.rates.get(name, 0.0))
        return {"gbytes_per_s": self.rates[name] / 1e9}


def _rounded(value: Any) -> Any:
    """Return a value with no more digits than a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, tuple):
        return tuple(_rounded(each) for each in cast("tuple[Any, ...]", value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _rounded(getattr(value, f.name)) for f in fields(value)})
    return value
