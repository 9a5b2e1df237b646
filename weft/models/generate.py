"""Generate: a checkpoint directory and a prompt to an image or a video, on the ranks there are."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from weft import __version__
from weft.core.errors import InputError
from weft.models import checkpoint, media
from weft.models.explain import explain
from weft.models.parallelize import parallelize, restore
from weft.models.progress import Progress, terminal
from weft.models.request import Request, arguments
from weft.run import trace
from weft.run.devices import device
from weft.run.exchange import broadcast_json
from weft.run.meter import Meter
from weft.run.world import world_of


def prepare(request: Request) -> None:
    """Refuse what cannot be, then load; takes as long as it takes, nobody waits for anybody."""
    arguments(request)
    _pipeline(request)


def generate(request: Request) -> dict[str, Any]:
    """Run on every rank of the world; rank 0 writes the file. What was made, the same on all of them."""
    comm, meter = world_of(None, 60.0).comm, Meter()
    progress = Progress(comm, meter, request.steps, terminal(rank=comm.rank, quiet=request.quiet))
    given, fps = arguments(request, progress)
    pipe = _pipeline(request)
    if comm.size > 1:
        dist.barrier()  # of a process group that is patient; other waits are bounded
    options = {name: getattr(request, name) for name in ("plan", "cfg", "check", "backend")}
    regions = list(parallelize(pipe, sparse=request.sparse, **options)._weft.regions.values())
    explained: dict[str, Any] = {}
    sparse = [sparsity for region in regions if (sparsity := getattr(region, "sparsity", None))]
    proofs = [proof for region in regions if (proof := getattr(region, "proof", None))]
    given["generator"] = torch.Generator().manual_seed(request.seed)
    began = progress.began = time.monotonic()
    try:
        with checkpoint.quiet_libraries() if comm.rank and "diffusers" in sys.modules else nullcontext():
            frames = _call(pipe, given, progress)
        found = explain(pipe)
        explained = broadcast_json({**asdict(found), "gain": found.gain})  # rank 0 has planned
    finally:
        restore(pipe)
    if not progress.done:  # a pipeline that tells of no steps is one
        progress(pipe, 0, None, {})
    seconds = time.monotonic() - began
    about = _about(request, comm.size, meter.names(comm.size))
    if comm.rank == 0:
        media.write(request.out, frames, about, fps=fps)
    done, (_, height, width, _) = progress.summary(), frames.shape
    return {
        **about, "out": str(request.out), "frames": len(frames), "size": f"{width}x{height}", "fps": fps,
        "steps": len(progress.done), "seconds": seconds, "seconds_per_step": done.seconds,
        "imbalance": done.imbalance, "exposed": done.exposed, "checked": _checked(proofs),
        "sparse": [sparsity.summary() for sparsity in sparse], "explained": explained,
    }  # fmt: skip


_loaded: dict[tuple[Path, str, bool], Any] = {}
"""The pipeline that this rank has loaded."""


def _pipeline(request: Request) -> Any:
    key = request.model, request.dtype, request.tiling
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = _load(request)
    return _loaded[key]


def _load(request: Request) -> Any:
    pipe = checkpoint.load_pipeline(request.model, dtype=getattr(torch, request.dtype))
    pipe.set_progress_bar_config(disable=True)
    if request.tiling:
        if not hasattr(getattr(pipe, "vae", None), "enable_tiling"):
            raise InputError(f"The VAE of a {type(pipe).__name__} has no tiles.", hint="Leave out --tiling.")
        pipe.vae.enable_tiling()
    return pipe.to(device())


def _call(pipe: Any, given: dict[str, Any], progress: Progress) -> np.ndarray:
    """Frames [F, H, W, 3] from 0 to 1."""
    try:
        if trace.active is None:
            with trace.watched_by(progress.meter):
                made = pipe(**given)
        else:
            made = pipe(**given)
    except ValueError as error:
        if progress.done or isinstance(error, InputError):
            raise
        # Pipelines look at their arguments themselves, and say well what is wrong.
        raise InputError(f"A {type(pipe).__name__} refuses this: {error}") from error
    frames = made.frames[0] if hasattr(made, "frames") else made.images[:1]
    return np.asarray(frames, dtype=np.float32)


def _about(request: Request, ranks: int, plans: list[str]) -> dict[str, Any]:
    """What the file says of itself: enough to make it again."""
    packages = ("torch", "diffusers", "transformers")
    versions = {name: version(name) for name in packages if find_spec(name)}
    asked = (
        "negative", "width", "height", "frames", "steps", "guidance", "fps", "sparse", "dtype", "cfg",
        "backend",
    )  # fmt: skip
    options = {name: getattr(request, name) for name in asked}
    return {
        "prompt": request.prompt,
        "seed": request.seed,
        "model": request.model.resolve().name,
        "ranks": ranks,
        "plan": request.plan,
        "plans": plans,
        **{name: value for name, value in options.items() if value is not None},
        **({"image": request.image.name} if request.image else {}),
        **({"more": dict(request.more)} if request.more else {}),
        **({"tiling": True} if request.tiling else {}),
        "versions": {"weft": __version__, **versions},
    }


def _checked(proofs: list[Any]) -> dict[str, Any] | None:
    """What check="first" found, of all transformers together."""
    errors = [error for proof in proofs for error in proof.errors.values()]
    if not errors:
        return None
    allowed = max(proof.allowed for proof in proofs)
    seconds = sum(proof.seconds for proof in proofs)
    return {"attentions": len(errors), "error": max(errors), "allowed": allowed, "seconds": seconds}
