"""`weft generate`: an image or a video from a local checkpoint, or from weft's own, on several ranks."""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.numbers import sizes
from weft.cli.options import Backend, DeviceDtype, Json
from weft.cli.packages import need
from weft.core.errors import InputError

if TYPE_CHECKING:
    from weft.models.request import Request

SEEDS = 2**31


def run(
    first: Annotated[
        str, typer.Argument(metavar="[MODEL_DIR]", help="A checkpoint directory of Diffusers; or weft's own.")
    ],
    second: Annotated[str | None, typer.Argument(metavar="PROMPT", help="What to show.")] = None,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="The .mp4, .gif or .png (a sheet of frames).")],
    ranks: Annotated[int, typer.Option(help="Ranks to start here; under torchrun its world is used.")] = 2,
    size: Annotated[str, typer.Option(help="Width x height, such as 832x480.")] = "",
    frames: Annotated[int | None, typer.Option(help="Frames of a video.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed makes the same, on any number of ranks.")
    ] = None,
    negative: Annotated[str | None, typer.Option(help="What not to show.")] = None,
    guidance: Annotated[float | None, typer.Option(help="How closely to follow the prompt.")] = None,
    image: Annotated[Path | None, typer.Option(help="The image that a video begins with.")] = None,
    fps: Annotated[float | None, typer.Option(help="Frames per second.")] = None,
    more: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, an argument of this pipeline; repeatable.")
    ] = None,
    tiling: Annotated[bool, typer.Option("--tiling", help="Decode in tiles, each on one rank.")] = False,
    dtype: DeviceDtype = "",
    plan: Annotated[str, typer.Option(help="How attention is split; see weft plan.")] = "auto",
    backend: Backend = "auto",
    sparse: Annotated[str | None, typer.Option(help="Sparse attention: sta, svg, radial, topk:0.2.")] = None,
    cfg: Annotated[str, typer.Option(help="Guidance on two halves of the ranks: auto, on, off.")] = "auto",
    check: Annotated[str, typer.Option(help="first: prove rows of the first step; or none.")] = "first",
    as_json: Json = False,
) -> None:
    """Generate an image or a video from a local Diffusers checkpoint, with its tokens split over ranks.

    weft generate ./Wan2.1-T2V-1.3B-Diffusers "a loom at work" --ranks 4 -o loom.mp4

    Without a checkpoint, by the small model that comes with weft, which knows coloured shapes that move:

    weft generate "a red circle moving left" -o ball.mp4
    """
    from weft.models import checkpoint, media

    media.check_target(out)
    model_dir, prompt = _asked(first, second)
    checkpoint.check(model_dir)
    if ranks < 1 or (image is not None and not image.is_file()):
        raise InputError(f"ranks={ranks}, image={image}.", hint="Ranks are 1 or more, an image is a file.")
    check_packages(out, own=checkpoint.is_own(model_dir))
    from weft.models.request import Request
    from weft.run.devices import default_dtype

    width, height = sizes(size, "width x height", "832x480") if size else (None, None)
    request = Request(
        model=model_dir, prompt=prompt, out=out, seed=_seed(seed), width=width, height=height, frames=frames,
        steps=steps, negative=negative, guidance=guidance, image=image, fps=fps, more=_more(more or []),
        tiling=tiling, dtype=dtype or default_dtype(), plan=plan, sparse=sparse, cfg=cfg, check=check,
        backend=backend, quiet=as_json,
    )  # fmt: skip
    made = _generate(request, ranks)
    if made is not None:
        typer.echo(json.dumps(made, indent=2, default=vars) if as_json else _words(made))


def _asked(first: str, second: str | None) -> tuple[Path, str]:
    """The model and the prompt; alone, the prompt is the first."""
    from weft.models.checkpoint import shipped

    if second is not None:
        return Path(first), second
    if Path(first).is_dir():
        raise InputError(f"There is no prompt for {first}.", hint="Write it after the directory, in quotes.")
    return shipped(), first


def check_packages(out: Path, *, own: bool) -> None:
    """What a model of weft's own, or of Diffusers, needs to make this file."""
    from weft.models.media import SUFFIXES

    models = ("safetensors",) if own else ("diffusers", "transformers")
    need("torch", *models, SUFFIXES[out.suffix.lower()], extra="video" if own else "models")


def _seed(seed: int | None) -> int:
    if seed is not None and not 0 <= seed < 2**63:
        raise InputError(f"seed={seed} is out of range.", hint="A seed is from 0 to 2⁶³ - 1.")
    return secrets.randbelow(SEEDS) if seed is None else seed


def _more(pairs: list[str]) -> dict[str, Any]:
    """NAME=VALUE, where a value is JSON if it can be."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--set {pair} is not NAME=VALUE.", hint="Write --set max_sequence_length=256.")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def _generate(request: Request, ranks: int) -> dict[str, Any] | None:
    """What was made, on the rank that tells."""
    import torch
    from rich.console import Console

    from weft.cli.ranks import launched, model_ranks, run_once
    from weft.models.generate import generate, prepare
    from weft.run.world import is_launched, world_of

    if is_launched():
        made = generate(request)
        return made if world_of(None, 60.0).comm.rank == 0 else None
    if torch.cuda.is_available() and ranks > 1:  # as torchrun would: one process for each GPU
        sys.exit(launched(ranks))
    with model_ranks(ranks) as pool:
        with Console(stderr=True, quiet=request.quiet).status(f"loading {request.model.name} …"):
            run_once(pool, prepare, request)
        return run_once(pool, generate, request)[0]


def _words(made: dict[str, Any]) -> str:
    """What is told at the end: where it is, how to make it again, how it went."""
    many = f", {made['frames']} frames" if made["frames"] > 1 else ""
    plans = f" ({', '.join(made['plans'])})" if made["plans"] else ""
    lines = [
        f"{made['out']}: {made['size']}{many}, seed {made['seed']}",
        f"{made['steps']} steps of {made['seconds_per_step']:.2f} s on {made['ranks']} ranks{plans}, "
        f"{made['seconds']:.1f} s in all",
    ]
    if gain := made["explained"].get("gain"):
        lines.append(f"plans that followed the masks: attention {gain:.2f} × as fast as by the first ones")
    return "\n".join(lines)
