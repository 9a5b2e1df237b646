"""`weft generate`: generate an image or a video from a local checkpoint, on several ranks."""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import output
from weft.cli.numbers import sizes
from weft.cli.options import Backend, Cache, DeviceDtype, Json, PlanName, RanksHere, Sparse
from weft.cli.packages import need
from weft.core.errors import InputError

if TYPE_CHECKING:
    from weft.generate.pretrained import Kwargs
    from weft.generate.request import Request

SEEDS = 2**31


def run(
    first: Annotated[
        str, typer.Argument(metavar="[MODEL_DIR]", help="A checkpoint directory of Diffusers; or weft's own.")
    ],
    second: Annotated[str | None, typer.Argument(metavar="PROMPT", help="What to show.")] = None,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="The .mp4, .gif or .png (a sheet of frames).")],
    ranks: RanksHere = 2,
    size: Annotated[str, typer.Option(help="Width x height, such as 832x480.")] = "",
    frames: Annotated[int | None, typer.Option(help="Frames of a video.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Determines the result, on any number of ranks.")] = None,
    negative: Annotated[str | None, typer.Option(help="Negative prompt.")] = None,
    guidance: Annotated[float | None, typer.Option(help="How closely to follow the prompt.")] = None,
    image: Annotated[Path | None, typer.Option(help="The image that a video begins with.")] = None,
    fps: Annotated[float | None, typer.Option(help="Frames per second.")] = None,
    more: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, an argument of this pipeline; repeatable.")
    ] = None,
    tiling: Annotated[bool, typer.Option("--tiling", help="Decode in tiles, each on one rank.")] = False,
    dtype: DeviceDtype = "",
    plan: PlanName = "auto",
    backend: Backend = "auto",
    sparse: Sparse = None,
    cache: Cache = None,
    cfg: Annotated[str, typer.Option(help="Guidance on two halves of the ranks: auto, on, off.")] = "auto",
    check: Annotated[str, typer.Option(help="first: prove rows of the first step; or none.")] = "first",
    as_json: Json = False,
) -> None:
    """Generate an image or a video from a local Diffusers checkpoint, with its tokens split over ranks.

    weft generate ./Wan2.1-T2V-1.3B-Diffusers "a loom" --ranks 4 -o loom.mp4

    Without a checkpoint, use the small model that comes with weft, which knows moving colored shapes:

    weft generate "a red circle moving left" -o ball.mp4
    """
    from weft.generate import media, pretrained
    from weft.video.saved_model import is_own

    media.check_target(out)
    model_dir, prompt = _model_and_prompt(first, second)
    model_dir = pretrained.locate(model_dir)
    if image is not None and not image.is_file():
        raise InputError(f"--image {image} is not a file.")
    check_packages(out, own=is_own(model_dir))
    from weft.generate.request import Request
    from weft.run.devices import default_dtype

    width, height = sizes(size, "width x height", "832x480") if size else (None, None)
    request = Request(
        model=model_dir, prompt=prompt, out=out, seed=_seed(seed), width=width, height=height, frames=frames,
        steps=steps, negative=negative, guidance=guidance, image=image, fps=fps, more=_more(more or []),
        tiling=tiling, dtype=dtype or default_dtype(), plan=plan, sparse=sparse, cache=cache, cfg=cfg,
        check=check, backend=backend, quiet=as_json or output.verbosity < 0,
    )  # fmt: skip
    report = _generate(request, ranks)
    if report is not None:
        typer.echo(json.dumps(report, indent=2, default=vars) if as_json else _summary(report))


def _model_and_prompt(first: str, second: str | None) -> tuple[Path, str]:
    """Return model and prompt; a single argument is the prompt."""
    from weft.video.saved_model import shipped

    if second is not None:
        return Path(first), second
    if not first.strip():
        raise InputError("The prompt is empty.", hint='Write what to show: "a red circle moving left".')
    if Path(first).is_dir():
        raise InputError(f"There is no prompt for {first}.", hint="Write it after the directory, in quotes.")
    return shipped(), first


def check_packages(out: Path, *, own: bool) -> None:
    """Check the packages that weft's own model or Diffusers needs, and the format of the file."""
    from weft.generate.media import SUFFIXES

    models = ("safetensors",) if own else ("diffusers", "transformers")
    need("torch", *models, SUFFIXES[out.suffix.lower()], extra="video" if own else "models")


def _seed(seed: int | None) -> int:
    if seed is not None and not 0 <= seed < 2**63:
        raise InputError(f"--seed must be in [0, 2⁶³ - 1], got {seed}.")
    return secrets.randbelow(SEEDS) if seed is None else seed


def _more(pairs: list[str]) -> Kwargs:
    """Parse NAME=VALUE; values that are not JSON are strings."""
    kwargs: Kwargs = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--set {pair} is not NAME=VALUE.", hint="Write --set max_sequence_length=256.")
        try:
            kwargs[name] = json.loads(value)
        except json.JSONDecodeError:
            kwargs[name] = value
    return kwargs


def _generate(request: Request, ranks: int) -> Kwargs | None:
    """Return the report, on rank 0."""
    import torch

    from weft.cli.ranks import launched, model_ranks, run_once
    from weft.generate.generate import generate, prepare
    from weft.run.world import is_launched, world_of

    if is_launched():
        report = generate(request)
        return report if world_of(None, 60.0).comm.rank == 0 else None
    if torch.cuda.is_available() and ranks > 1:  # as torchrun would: one process for each GPU
        sys.exit(launched(ranks))
    with model_ranks(ranks) as pool:
        with output.progress("loading the model …", quiet=request.quiet):
            run_once(pool, prepare, request)
        return run_once(pool, generate, request)[0]


def _summary(report: Kwargs) -> str:
    """Return the file, how to generate it again, and the timing."""
    frames = f", {report['frames']} frames" if report["frames"] > 1 else ""
    lines = [
        f"{report['out']}: {report['size']}{frames}, seed {report['seed']}",
        f"{report['steps']} steps of {report['seconds_per_step']:.2f} s, {report['seconds']:.1f} s in all",
    ]
    if report["division"]:
        lines.append(report["division"])
    if gain := report["explained"].get("gain"):
        lines.append(f"plans that followed the masks: attention {gain:.2f} × as fast as with the first plans")
    return "\n".join(lines)
