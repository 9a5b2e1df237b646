"""A storm: how many requests, kills and faults, the server that they meet, and what is left."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.serve.faults import FaultPlan
from tests.serve.hosting import ROOT
from weft.serve.api.server import bind

MAX_DESCRIPTORS = 1024
"""Of the server: what most systems give."""


@dataclass(frozen=True, kw_only=True)
class Storm:
    requests: int
    """At least; more until `sure_kills` ranks were killed: fast ones may be done before they are seen."""
    sure_kills: int = 0
    together: int = 6
    specs: int = 4
    """Of which one in two is a video."""
    steps: int = 6
    every: float = 0.0
    """Seconds between two kills of a rank; 0 is as soon as there was progress since the last."""
    rank_kills: int = 2
    """At most."""
    server_kills: int = 1
    """At even shares of what is done."""
    ranks: int = 2
    nodes: int = 1
    """With so many ranks each; those after the first are ranks for its server."""
    policy: str = "elastic"
    transport: str = "auto"
    """Of $WEFT_TRANSPORT; "group" is what ranks of different machines have."""
    patience: float = 300.0
    faults: FaultPlan = FaultPlan()

    def body(self, spec: int) -> tuple[str, dict[str, Any]]:
        seed, said = spec // 2, {"prompt": "a red circle moving left", "num_inference_steps": self.steps}
        if spec % 2:
            return "videos", said | {"seed": seed}
        return "images", said | {"seed": seed, "response_format": "url"}


@dataclass
class Left:
    """What a storm left: what each id is by the server, its digest, and how the server did."""

    requests: int = 0
    """How many were sent: the storm's own, and those sent while ranks were still to be killed."""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    expected: dict[int, str] = field(default_factory=dict)
    found: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By id: the spec that was asked for, and the digest of what came."""
    answered: list[str] = field(default_factory=list)
    rank_kills: int = 0
    server_kills: int = 0
    restarts: int = 0
    widest: int = 0
    """The most ranks that a job was seen on."""
    lives: list[list[tuple[float, int, int]]] = field(default_factory=list)
    """Of each life of the server, while no fault holds connections: seconds, bytes and descriptors."""
    peak_bytes: int = 0
    peak_descriptors: int = 0
    deleted: list[str] = field(default_factory=list)
    """Jobs that were checked and deleted during the storm."""
    faults: Counter[str] = field(default_factory=Counter)
    probes: Counter[str] = field(default_factory=Counter)
    """Answers of `/health`."""
    false_probes: list[str] = field(default_factory=list)
    slowest_probe: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Return what a report of the storm has."""
        return {
            "requests": len(self.answered), "jobs": len(self.jobs), "deleted": len(self.deleted),
            "wrong": [id for id, (spec, digest) in self.found.items() if digest != self.expected[spec]],
            "rank kills": self.rank_kills, "server kills": self.server_kills, "faults": dict(self.faults),
            "restarts told": sum(line["message"] == "ranks are started again" for line in self.log),
            "probes": dict(self.probes), "false probes": self.false_probes,
            "slowest probe": round(self.slowest_probe, 3), "peak MB": self.peak_bytes >> 20,
            "peak descriptors": self.peak_descriptors,
            "lives": [
                {"seconds": life[-1][0] - life[0][0], "samples": len(life),
                 "MB": [life[len(life) * at // 4][1] >> 20 for at in range(4)] + [life[-1][1] >> 20],
                 "descriptors": [life[len(life) * at // 4][2] for at in range(4)] + [life[-1][2]]}
                for life in self.lives if life
            ],
        }  # fmt: skip


class Server:
    """`weft serve` on one folder and one port, however often it is started."""

    def __init__(self, folder: Path, storm: Storm) -> None:
        self.folder, self.storm = folder, storm
        with bind("127.0.0.1", 0) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "log.jsonl"
        self.process: subprocess.Popen[bytes] | None = None
        self.others: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        if self.storm.nodes == 1:
            self.process = self._node(0)
            return
        with bind("127.0.0.1", 0) as free:
            master = f"127.0.0.1:{free.getsockname()[1]}"
        token = self.folder / "token"
        token.write_text("a-secret-of-all-nodes\n")
        token.chmod(0o600)
        words = ("--nodes", self.storm.nodes, "--master", master, "--token-file", token)
        self.process, *self.others = (
            self._node(node, *words, "--node", node) for node in range(self.storm.nodes)
        )

    def _node(self, node: int, *more: object) -> subprocess.Popen[bytes]:
        data, ranks = self.folder / f"data{node}", self.storm.ranks
        words = ("--data", data, "--port", self.port, "--ranks", ranks, "--policy", self.storm.policy, *more)
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "weft", "serve", *map(str, words), "--max-queue", "100000"], cwd=ROOT,
                stdout=subprocess.DEVNULL, stderr=log,
                # Equal bits are promised for equal threads, which otherwise depend on the ranks of a machine.
                env=os.environ | {"WEFT_TRANSPORT": self.storm.transport, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, most))
        return process

    def signal(self, number: int) -> int:
        """And wait for its end."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)
