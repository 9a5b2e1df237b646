"""Settings: what one server was started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.serve.agent import Orders


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of one server."""

    model: Path
    folder: Path
    name: str
    ranks: int = 2
    policy: str = "elastic"
    queue: int = 64
    keep: float = 24 * 3600.0
    """Seconds that results are kept."""
    quota: int = 10 << 30
    options: dict[str, Any] = field(default_factory=dict)
    """Of `weft.serve.rank.main`: dtype, plan, mask."""
    nodes: int = 1
    master: str = ""
    host: str = "127.0.0.1"
    """Where ranks connect to; another address than loopback if they are on several machines."""
    port: int = 0
    token: str = ""
    """That ranks of other machines show; one is made up where there are none."""

    def orders(self, port: int, token: str, node: int = 0) -> Orders:
        """For the agent of a machine."""
        return Orders(
            host=self.host, port=port, token=token, model=str(self.model), ranks=self.ranks,
            options=self.options, nodes=self.nodes, node=node, master=self.master,
        )  # fmt: skip
