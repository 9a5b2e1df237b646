"""ServerSettings: the options that a server was started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.run.spawn.nodes import Nodes
from weft.serve.agent import AgentConfig, RankOptions


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    model: Path
    folder: Path
    name: str
    ranks: int = 2
    policy: str = "elastic"
    queue: int = 64
    keep: float = 24 * 3600.0
    """Retention time of results, in seconds."""
    quota: int = 10 << 30
    max_time: float | None = None
    max_step: float | None = None
    """Largest predicted seconds of a request, in all and for a step; None: see `weft.serve.admission`."""
    options: RankOptions = RankOptions()
    nodes: Nodes = Nodes()
    """The machines whose ranks the server has, with `ranks` on each."""

    @property
    def world(self) -> int:
        return self.ranks * self.nodes.count

    def agent(self, address: tuple[str, int] | str, token: str) -> AgentConfig:
        """Return the configuration of this machine's agent, whose ranks reach the server at `address`."""
        return AgentConfig(
            address=address, token=token, model=str(self.model), ranks=self.ranks, options=self.options,
            nodes=self.nodes.count, node=self.nodes.node, interface=self.nodes.interface,
        )  # fmt: skip
