"""`weft serve`: an OpenAI-compatible server of images and videos, over ranks of one or several machines."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import nodes as node_options
from weft.cli.numbers import amount, duration
from weft.cli.options import Backend, DeviceDtype
from weft.cli.packages import need
from weft.core.errors import InputError

if TYPE_CHECKING:
    from weft.serve.settings import ServerSettings

POLICIES = ("elastic", "all", "one")
LOG_LEVELS, LOG_FORMATS = ("debug", "info", "warning", "error"), ("auto", "text", "json")
PACKAGES = (
    "fastapi",
    "uvicorn",
    "sse_starlette",
    "prometheus_client",
    "python_multipart",
    "torch",
    "av",
    "PIL",
)
KeyFile = Annotated[
    Path | None, typer.Option(help="A file with the key of clients; without it, loopback only.")
]
MaxTime = Annotated[
    str | None,
    typer.Option(
        help="Longest predicted time of a request, alone: 10m, 2h. Longer ones are rejected with 400. "
        "[default: 1h, or 10 times the model's default request]"
    ),
]
MaxStep = Annotated[
    str | None,
    typer.Option(
        help="Longest predicted time of one step, which others may have to wait for: 30s. "
        "[default: 30s, or 10 times that of the model's default request]"
    ),
]
Data = Annotated[
    Path | None, typer.Option(help="Folder of jobs and results. [default: below ~/.local/state/weft]")
]
Model = Annotated[
    Path | None,
    typer.Argument(metavar="[MODEL]", help="A checkpoint of Diffusers, or the Hub id of a cached one."),
]
LogFormat = Annotated[str, typer.Option(help="text or json. [default: text in a terminal, else json]")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
Policy = Annotated[
    str, typer.Option(help="elastic; or first come, first served: `all` ranks, or `one` rank, for each job.")
]
RETRY_SECONDS = 2.0
"""Between two starts of an agent whose server is not reachable."""


def run(
    model: Model = None,
    *,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 finds a free one.")] = 8000,
    ranks: Annotated[int, typer.Option(help="Ranks to start on this machine.")] = 2,
    served_name: Annotated[str, typer.Option(help="Model name for clients; default: its folder's.")] = "",
    api_key_file: KeyFile = None,
    max_queue: Annotated[int, typer.Option(help="Queued jobs at most; more are rejected with 429.")] = 64,
    max_time: MaxTime = None,
    max_step: MaxStep = None,
    ttl: Annotated[str, typer.Option(help="Retention time of results: 15m, 24h, 7d.")] = "24h",
    quota: Annotated[str, typer.Option(help="Maximum disk usage of results.")] = "10GiB",
    data: Data = None,
    policy: Policy = "elastic",
    dtype: DeviceDtype = "",
    plan: Annotated[str, typer.Option(help="How attention is split; see weft plan.")] = "auto",
    backend: Backend = "auto",
    sparse: Annotated[str | None, typer.Option(help="Sparse attention: sta, svg, radial, topk:0.2.")] = None,
    nodes: node_options.Count = 1,
    node: node_options.Node = 0,
    master: node_options.Master = "",
    token_file: node_options.TokenFile = None,
    interface: node_options.Interface = "",
    tls_cert: node_options.TLSCert = None,
    tls_key: node_options.TLSKey = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log.")] = False,
    log_format: LogFormat = "auto",
    log_level: LogLevel = "info",
) -> None:
    """Serve a model: /v1/videos and /v1/images, compatible with OpenAI's clients, and a page at /.

    weft serve                                             the small model that comes with weft, on 2 ranks
    weft serve ./Wan2.1-T2V-1.3B-Diffusers --ranks 8

    Jobs survive lost ranks and a restart with the same --data. The first Ctrl-C or SIGTERM gives running jobs
    20 s to finish and keeps the others; a second exits at once. Logs are on stderr.
    """
    from weft.generate import pretrained
    from weft.video.saved_model import is_own, name_of, shipped

    directory = pretrained.locate(model or shipped()).resolve()
    _check_packages(own=is_own(directory))
    _check_options(policy, ranks=ranks, port=port, max_queue=max_queue)
    logs = _check_logs(log_level, log_format)
    from weft.serve.settings import RankOptions, ServerSettings

    name = _name(served_name or name_of(directory).rpartition("/")[2])
    settings = ServerSettings(
        model=directory, folder=(data or _state() / name).resolve(), name=name, ranks=ranks, policy=policy,
        queue=max_queue, keep=duration(ttl, "ttl"), quota=amount(quota, "quota"),
        max_time=duration(max_time, "max-time") if max_time else None,
        max_step=duration(max_step, "max-step") if max_step else None,
        options=RankOptions(name=name, dtype=dtype, plan=plan, sparse=sparse, backend=backend),
        nodes=node_options.nodes_of(nodes, node, master, token_file, interface, (tls_cert, tls_key)),
    )  # fmt: skip
    if node:
        _join(settings)
    else:
        _serve(settings, (host, port), api_key_file, logs, log_prompts=log_prompts)


def _serve(
    settings: ServerSettings, at: tuple[str, int], key_file: Path | None, log_options: tuple[str, str], *,
    log_prompts: bool,
) -> None:  # fmt: skip
    from weft.serve.api import auth, logs
    from weft.serve.api.app import create_app
    from weft.serve.api.limits import RequestLimits
    from weft.serve.api.server import address, bind, log_events, serve
    from weft.serve.engine import Engine

    key = auth.read_key(key_file) if key_file else None
    auth.check_bind(at[0], key)
    listener = bind(*at)

    def ready() -> None:
        ranks = f"{settings.world} rank{'s' * (settings.world > 1)}"
        print(f"weft: {settings.name} on {ranks} at {address(listener)} (page; API below /v1)", flush=True)

    with listener:
        logs.configure(*log_options)
        about = {"model": settings.name, "ranks": settings.world, "url": address(listener)}
        logging.getLogger("weft.serve").info("loading the model", extra=about)
        engine = Engine(settings)
        log_events(engine, prompts=log_prompts)
        serve(engine, create_app(engine, key=key, limits=RequestLimits()), listener, ready=ready)


def _join(settings: ServerSettings) -> None:
    """Run ranks on another machine than the server's: restart an agent until a signal ends this command."""
    from weft.run.net.channel import Closed
    from weft.run.net.secure import connect
    from weft.serve.agent import end, start

    ended, nodes = threading.Event(), settings.nodes
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    print(f"weft: {settings.ranks} ranks for the server at {nodes.master[0]}:{nodes.master[1]}", flush=True)
    while not ended.is_set():
        try:
            connect(nodes.master, nodes.token, "ping").close()  # a refused token ends this command
        except Closed as error:
            print(f"weft: {error} Retrying.", flush=True)
            ended.wait(RETRY_SECONDS)
            continue
        agent = start(settings.agent(nodes.master, nodes.token))
        while agent.poll() is None and not ended.wait(0.2):
            pass
        end(agent)
        if not ended.wait(RETRY_SECONDS):
            print("weft: the ranks of this machine exited (see above); restarting them", flush=True)


def _check_packages(*, own: bool) -> None:
    need(*PACKAGES, extra="serve")
    if not own:
        need("diffusers", "transformers", "accelerate")


def _check_options(policy: str, *, ranks: int, port: int, max_queue: int) -> None:
    if policy not in POLICIES:
        raise InputError(f"Unknown --policy {policy}.", hint=f"Policies are {', '.join(POLICIES)}.")
    if min(ranks, max_queue) < 1 or not 0 <= port < 2**16:
        raise InputError(
            "--ranks and --max-queue must be >= 1 and --port in 0 … 65535, "
            f"got --ranks {ranks} --max-queue {max_queue} --port {port}."
        )


def _check_logs(level: str, style: str) -> tuple[str, str]:
    for name, value, choices in (("level", level, LOG_LEVELS), ("format", style, LOG_FORMATS)):
        if value not in choices:
            raise InputError(f"Unknown --log-{name} {value}.", hint=f"Use one of {', '.join(choices)}.")
    return level, style


def _name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise InputError(
            f"Invalid model name {name!r}.", hint="Pass --served-name, of letters, digits, '.', '_' and '-'."
        )
    return name


def _state() -> Path:
    """Return the folder for persistent state of the user's programs."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "weft" / "serve"
