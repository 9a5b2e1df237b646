"""Options of commands that run on several machines, validated together.

Their defaults are the variables by which a cluster tells a process its place: those of LeaderWorkerSet,
of Slurm (one task per node), and those that torchrun reads (PET_*, as Kubeflow sets them).
"""

from __future__ import annotations

import os
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

Count = Annotated[
    int,
    typer.Option("--nodes", help="Machines; give this command on each of them.", envvar=COUNT_VARIABLES),
]
Node = Annotated[int, typer.Option("--node", help="Which machine this is, from 0.", envvar=NODE_VARIABLES)]
Master = Annotated[
    str,
    typer.Option(
        "--master", help="HOST[:PORT] at which machine 0 listens; port 29500.", envvar=MASTER_VARIABLES
    ),
]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="File with the secret that all machines share.")
]
Interface = Annotated[
    str, typer.Option("--interface", help="Network interface between machines; that of --master if left out.")
]
TLSCert = Annotated[
    Path | None, typer.Option("--tls-cert", help="PEM certificate of machine 0; self-signed if left out.")
]
TLSKey = Annotated[Path | None, typer.Option("--tls-key", help="PEM private key of --tls-cert.")]


def nodes_of(
    count: int, node: int, master: str, token_file: Path | None, interface: str,
    tls: tuple[Path | None, Path | None],
) -> Nodes:  # fmt: skip
    """Validate the options before anything listens."""
    from weft.run.net import interfaces
    from weft.run.spawn.nodes import Nodes

    if count == 1 and _source(NODE_VARIABLES, node):
        node = 0  # --nodes 1 takes this machine alone, wherever in a cluster it is
    if count < 1 or not 0 <= node < count:
        raise InputError(
            f"--nodes {count} --node {node} is not a machine of a group.",
            hint="--nodes must be >= 1 and 0 <= --node < --nodes.",
        )
    if count == 1:
        return Nodes()
    host, port = meeting_point(master, count)
    if token_file is None:
        source = _source(COUNT_VARIABLES, count)
        alone = f" {source} is set: pass --nodes 1 to use this machine alone." if source else ""
        raise InputError(
            f"--nodes {count} requires --token-file, the secret by which machines authenticate each other.",
            hint="Make one with openssl rand -hex 32 > token, chmod 600 it, and copy it to every machine."
            + alone,
        )
    from weft.serve.api.auth import read_key

    token, certificate = read_key(token_file), _certificate(*tls)
    if node == 0 and certificate is None:
        need("cryptography", extra="nodes")
    name, address = interfaces.choose(host, interface, is_master=node == 0)
    return Nodes(
        count=count, node=node, master=(host, port), address=address, interface=name, token=token,
        certificate=certificate,
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
