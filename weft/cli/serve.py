"""`weft serve`: an OpenAI-compatible server of images and videos, over ranks of one or several machines."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import output
from weft.cli.nodes import NodeOptions
from weft.cli.numbers import amount, duration
from weft.cli.options import Backend, Cache, DeviceDtype, PlanName, Ranks, Sparse, at_least
from weft.cli.packages import need
from weft.core.errors import InputError

if TYPE_CHECKING:
    from weft.serve.settings import ServerSettings

POLICIES = ("elastic", "all", "one")
LOG_FORMATS = ("auto", "text", "json")
PACKAGES = (
    "fastapi", "uvicorn", "sse_starlette", "prometheus_client", "python_multipart", "torch", "av", "PIL",
)  # fmt: skip
KeyFile = Annotated[
    Path | None, typer.Option(help="A file with the key of clients; without it, loopback only.")
]
Model = Annotated[
    Path | None,
    typer.Argument(metavar="[MODEL]", help="A checkpoint of Diffusers, or the Hub id of a cached one."),
]
LogFormat = Annotated[str, typer.Option(help="text or json. [default: text in a terminal, else json]")]
Policy = Annotated[
    str, typer.Option(help="elastic; or first come, first served: `all` ranks, or `one` rank, for each job.")
]
RETRY_SECONDS = 2.0
"""Between two starts of an agent whose server is not reachable."""


@dataclass(frozen=True, kw_only=True)
class ServeLimits:
    """Options that bound requests and what is stored of them."""

    max_queue: Annotated[
        int, typer.Option(help="Queued jobs at most; more are rejected with 429.", callback=at_least(1))
    ] = 64
    max_time: Annotated[
        str | None,
        typer.Option(
            help="Longest predicted time of a request, alone: 10m, 2h. Longer ones are rejected with 400. "
            "[default: 1h, or 10 times the model's default request]"
        ),
    ] = None
    max_step: Annotated[
        str | None,
        typer.Option(
            help="Longest predicted time of one step, which others may have to wait for: 30s. "
            "[default: 30s, or 10 times that of the model's default request]"
        ),
    ] = None
    ttl: Annotated[str, typer.Option(help="Retention time of results: 15m, 24h, 7d.")] = "24h"
    quota: Annotated[str, typer.Option(help="Maximum disk usage of results.")] = "10GiB"
    data: Annotated[
        Path | None, typer.Option(help="Folder of jobs and results. [default: below ~/.local/state/weft]")
    ] = None

    def settings(self) -> dict[str, Any]:
        """Return them as fields of `ServerSettings`, without the folder."""
        return {
            "queue": self.max_queue,
            "max_time": duration(self.max_time, "max-time") if self.max_time else None,
            "max_step": duration(self.max_step, "max-step") if self.max_step else None,
            "keep": duration(self.ttl, "ttl"),
            "quota": amount(self.quota, "quota"),
        }


def run(
    model: Model = None,
    *,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 finds a free one.")] = 8000,
    ranks: Ranks = 2,
    served_name: Annotated[str, typer.Option(help="Model name for clients; default: its folder's.")] = "",
    api_key_file: KeyFile = None,
    limits: ServeLimits,
    policy: Policy = "elastic",
    dtype: DeviceDtype = "",
    plan: PlanName = "auto",
    backend: Backend = "auto",
    sparse: Sparse = None,
    cache: Cache = None,
    machines: NodeOptions,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log.")] = False,
    log_format: LogFormat = "auto",
) -> None:
    """Serve a model: /v1/videos and /v1/images, compatible with OpenAI's clients, and a page at /.

    Without a checkpoint, serve the small model that comes with weft:

    weft serve

    A checkpoint of Diffusers:

    weft serve ./Wan2.1-T2V-1.3B-Diffusers --ranks 8

    Jobs survive lost ranks and a restart with the same --data. The first Ctrl-C or SIGTERM gives running jobs
    20 s to finish and keeps the others; a second exits at once. Logs are on stderr.
    """
    from weft.generate import pretrained
    from weft.video.saved_model import is_own, name_of, shipped

    directory = pretrained.locate(model or shipped()).resolve()
    need(*PACKAGES, extra="serve")
    if not is_own(directory):
        need("diffusers", "transformers", "accelerate")
    elif cache is not None:
        raise InputError("weft's own model has no step caches.", hint="Leave out --cache.")
    for option, text, choices in (("policy", policy, POLICIES), ("log-format", log_format, LOG_FORMATS)):
        if text not in choices:
            raise InputError(f"Unknown --{option} {text}.", hint=f"Use one of {', '.join(choices)}.")
    if not 0 <= port < 2**16:
        raise InputError(f"--port must be in 0 … 65535, got {port}.")
    from weft.serve.settings import RankOptions, ServerSettings

    name = _name(served_name or name_of(directory).rpartition("/")[2])
    settings = ServerSettings(
        model=directory, folder=(limits.data or _state() / name).resolve(), name=name, ranks=ranks,
        policy=policy, nodes=machines.validated(), **limits.settings(),
        options=RankOptions(name=name, dtype=dtype, plan=plan, sparse=sparse, cache=cache, backend=backend),
    )  # fmt: skip
    if settings.nodes.node:
        _join(settings)
    else:
        _serve(settings, (host, port), api_key_file, log_format, log_prompts=log_prompts)


def _serve(
    settings: ServerSettings,
    at: tuple[str, int],
    key_file: Path | None,
    log_format: str,
    *,
    log_prompts: bool,
) -> None:
    from weft.serve.api import auth, logs
    from weft.serve.api.app import create_app
    from weft.serve.api.limits import RequestLimits
    from weft.serve.api.server import address, bind, log_events, serve
    from weft.serve.engine import Engine

    key = auth.read_key(key_file) if key_file else None
    auth.check_bind(at[0], key)
    listener = bind(*at)

    def ready() -> None:
        ranks = output.counted(settings.world, "rank")
        print(f"weft: {settings.name} on {ranks} at {address(listener)} (page; API below /v1)", flush=True)

    with listener:
        logs.configure(output.log_level or "info", log_format)
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
    ranks = output.counted(settings.ranks, "rank")
    print(f"weft: {ranks} for the server at {nodes.master[0]}:{nodes.master[1]}", flush=True)
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
