"""`weft serve`: an OpenAI-compatible server of images and videos, over ranks here or on several machines."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.generate import DTYPES
from weft.cli.numbers import amount, duration, meeting_point
from weft.cli.packages import need
from weft.core.errors import InputError

if TYPE_CHECKING:
    from weft.serve.settings import Settings

POLICIES = ("elastic", "all", "one")
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
AGAIN_SECONDS = 2.0
"""Between two starts of an agent whose server is not there."""


def run(
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL_DIR]", help="A checkpoint of Diffusers; or weft's own.")
    ] = None,
    *,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 finds a free one.")] = 8000,
    ranks: Annotated[int, typer.Option(help="Ranks to start on this machine.")] = 2,
    served_name: Annotated[str, typer.Option(help="What clients call the model; its folder's name.")] = "",
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with the key that clients show; without, only loopback.")
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Jobs that may wait; more are refused with 429.")] = 64,
    ttl: Annotated[str, typer.Option(help="How long results are kept: 15m, 24h, 7d.")] = "24h",
    quota: Annotated[str, typer.Option(help="Disk space for results.")] = "10GiB",
    data: Annotated[
        Path | None, typer.Option(help="Folder of jobs and results; below ~/.local/state/weft if not given.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="elastic; or first come first served by all ranks, or by one each: all, one.")
    ] = "elastic",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    plan: Annotated[str, typer.Option(help="How attention is split; see weft plan.")] = "auto",
    mask: Annotated[str | None, typer.Option(help="Sparse attention: sta, svg, radial, topk:0.2, …")] = None,
    nodes: Annotated[int, typer.Option(help="Machines; this command is given on each of them.")] = 1,
    node: Annotated[int, typer.Option(help="Which machine this is; 0 has the server.")] = 0,
    master: Annotated[str, typer.Option(help="HOST:PORT of machine 0, which needs the next port too.")] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the secret that all machines share, the same on each.")
    ] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log.")] = False,
) -> None:
    """Serve a model: /v1/videos and /v1/images as OpenAI's clients know them, and a page at /.

    weft serve                                             the small model that comes with weft, on 2 ranks
    weft serve ./Wan2.1-T2V-1.3B-Diffusers --ranks 8 --dtype bfloat16

    Jobs survive lost ranks and a restart with the same --data. The first Ctrl-C or SIGTERM finishes what
    runs, for at most 20 s, and keeps the rest; a second ends at once. Logs are JSON on stderr.
    """
    from weft.models import checkpoint

    directory = (model or checkpoint.shipped()).resolve()
    checkpoint.check(directory)
    _check_packages(own=checkpoint.is_own(directory))
    _check_numbers(ranks=ranks, port=port, max_queue=max_queue, nodes=nodes, node=node)
    _check_words(policy=(policy, POLICIES), dtype=(dtype, DTYPES))
    from weft.serve.settings import Settings

    name = _name(served_name, directory, own=model is None)
    settings = Settings(
        model=directory, folder=(data or _state() / name).resolve(), name=name, ranks=ranks, policy=policy,
        queue=max_queue, keep=duration(ttl, "ttl"), quota=amount(quota, "quota"), nodes=nodes, master=master,
        options={"name": name, "dtype": dtype, "plan": plan, "mask": mask},
        **_meeting(nodes, master, token_file),
    )  # fmt: skip
    if node:
        _join(settings, node)
    else:
        _serve(settings, (host, port), api_key_file, log_prompts=log_prompts)


def _check_packages(*, own: bool) -> None:
    need(*PACKAGES, extra="serve")
    if not own:
        need("diffusers", "transformers", "accelerate")


def _check_words(**options: tuple[str, Sequence[str]]) -> None:
    for name, (given, known) in options.items():
        if given not in known:
            raise InputError(f"--{name} {given} is unknown.", hint=f"It is one of {', '.join(known)}.")


def _serve(settings: Settings, at: tuple[str, int], key_file: Path | None, *, log_prompts: bool) -> None:
    from weft.serve import auth, logs
    from weft.serve.app import Limits, create_app
    from weft.serve.engine import Engine
    from weft.serve.host import address, bind, host, log_events

    key = auth.read_key(key_file) if key_file else None
    auth.check_bind(at[0], key)
    listener = bind(*at)

    def ready() -> None:
        many = f"{settings.ranks * settings.nodes} rank{'s' * (settings.ranks * settings.nodes > 1)}"
        print(
            f"weft: {settings.name} on {many} at {address(listener)} (a page there, the API below /v1)",
            flush=True,
        )

    with listener:
        engine = Engine(settings)
        logs.configure()
        log_events(engine, prompts=log_prompts)
        host(engine, create_app(engine, key=key, limits=Limits()), listener, ready=ready)


def _join(settings: Settings, node: int) -> None:
    """Ranks on another machine than the server's: an agent, again and again until somebody ends this."""
    from weft.serve.agent import end, start

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    print(f"weft: {settings.ranks} ranks for the server at {settings.host}", flush=True)
    while not ended.is_set():
        agent = start(settings.orders(settings.port, settings.token, node))
        while agent.poll() is None and not ended.wait(0.2):
            pass
        end(agent)
        if not ended.wait(AGAIN_SECONDS):
            print("weft: the ranks here have ended, as is said above; they are started again", flush=True)


def _check_numbers(*, ranks: int, port: int, max_queue: int, nodes: int, node: int) -> None:
    if min(ranks, max_queue, nodes) < 1 or not 0 <= port < 2**16 or not 0 <= node < nodes:
        given = f"--ranks {ranks} --port {port} --max-queue {max_queue} --nodes {nodes} --node {node}"
        rule = "Ranks, queue and nodes are 1 or more, a port is below 65536, a node below the nodes."
        raise InputError(f"{given}: no such server.", hint=rule)


def _name(given: str, directory: Path, *, own: bool) -> str:
    name = given or ("weft-shapes" if own else directory.name)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise InputError(
            f"{name!r} is no name for clients to call a model by.",
            hint="Give --served-name, of letters, digits, '.', '_' and '-'.",
        )
    return name


def _state() -> Path:
    """Where programs of a user keep what is not to be lost."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "weft" / "serve"


def _meeting(nodes: int, master: str, token_file: Path | None) -> dict[str, Any]:
    """Where ranks meet their server, and the secret that they show it."""
    if nodes == 1:
        return {}
    host, port = meeting_point(master, nodes, ports=2)
    if token_file is None:
        raise InputError(
            f"Ranks of {nodes} machines connect to the server, and it must know them by a secret.",
            hint="Make a file with one (openssl rand -hex 32), copy it to all, give each --token-file.",
        )
    from weft.serve.auth import read_key

    return {"host": host, "port": port + 1, "token": read_key(token_file)}
