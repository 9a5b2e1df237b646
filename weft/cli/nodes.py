"""Options of commands that run on several machines, validated together.

Their defaults are the variables by which a cluster passes a process its position: those of LeaderWorkerSet,
of Slurm (one task per node), and those that torchrun reads (PET_*, as Kubeflow sets them).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.numbers import meeting_point
from weft.cli.packages import need
from weft.core.errors import InputError

if TYPE_CHECKING:
    from weft.run.net.tls import Certificate
    from weft.run.spawn.nodes import Nodes

COUNT_VARIABLES = [
    "LWS_GROUP_SIZE",
    "SLURM_STEP_NUM_NODES",
    "SLURM_NNODES",
    "SLURM_JOB_NUM_NODES",
    "PET_NNODES",
]
NODE_VARIABLES = ["LWS_WORKER_INDEX", "SLURM_NODEID", "PET_NODE_RANK"]
MASTER_VARIABLES = ["LWS_LEADER_ADDRESS", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "PET_MASTER_ADDR"]


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Options of a command that runs on several machines, to be given on each of them."""

    nodes: Annotated[
        int, typer.Option(help="Machines; give this command on each of them.", envvar=COUNT_VARIABLES)
    ] = 1
    node: Annotated[int, typer.Option(help="Which machine this is, from 0.", envvar=NODE_VARIABLES)] = 0
    master: Annotated[
        str,
        typer.Option(help="HOST[:PORT] at which machine 0 listens; port 29500.", envvar=MASTER_VARIABLES),
    ] = ""
    token_file: Annotated[Path | None, typer.Option(help="File with the secret that all machines share.")] = (
        None
    )
    interface: Annotated[
        str, typer.Option(help="Network interface between machines; that of --master if left out.")
    ] = ""
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM certificate of machine 0; self-signed if left out.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM private key of --tls-cert.")] = None

    def validated(self) -> Nodes:
        """Validate the options before anything listens."""
        from weft.run.net import interfaces
        from weft.run.spawn.nodes import Nodes

        node = self.node
        if self.nodes == 1 and _source(NODE_VARIABLES, node):
            node = 0  # --nodes 1 takes this machine alone, wherever in a cluster it is
        if self.nodes < 1 or not 0 <= node < self.nodes:
            raise InputError(
                f"--nodes {self.nodes} --node {node} is not a machine of a group.",
                hint="--nodes must be >= 1 and 0 <= --node < --nodes.",
            )
        if self.nodes == 1:
            return Nodes()
        host, port = meeting_point(self.master, self.nodes)
        if self.token_file is None:
            source = _source(COUNT_VARIABLES, self.nodes)
            alone = f" {source} is set: pass --nodes 1 to use this machine alone." if source else ""
            raise InputError(
                f"--nodes {self.nodes} requires --token-file, the secret that authenticates machines.",
                hint="Make one with openssl rand -hex 32 > token, chmod 600 it, copy it to every machine."
                + alone,
            )
        from weft.serve.api.auth import read_key

        token, certificate = read_key(self.token_file), _certificate(self.tls_cert, self.tls_key)
        is_master = node == 0
        if is_master and certificate is None:
            need("cryptography", extra="nodes")
        name, address = interfaces.choose(host, self.interface, is_master=is_master)
        return Nodes(
            count=self.nodes, node=node, master=(host, port), address=address, interface=name,
            token=token, certificate=certificate,
        )  # fmt: skip


def _source(variables: list[str], value: int) -> str:
    """Return the variable that has the value of an option, or ""."""
    return next((name for name in variables if os.environ.get(name) == str(value)), "")


def _certificate(cert: Path | None, key: Path | None) -> Certificate | None:
    from weft.run.net.tls import Certificate, server_context

    if (cert is None) != (key is None):
        raise InputError("--tls-cert and --tls-key belong together.", hint="Pass both, or neither.")
    if cert is None or key is None:
        return None
    certificate = Certificate(cert=cert.resolve(), key=key.resolve())
    server_context(certificate)
    return certificate
