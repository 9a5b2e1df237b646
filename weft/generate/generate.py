"""Generate an image or a video from a checkpoint directory and a prompt, on all ranks of the world."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from weft import __version__
from weft.core.errors import InputError
from weft.diffusers.explain import explain
from weft.diffusers.parallelize import parallelize, restore
from weft.generate import media, pretrained
from weft.generate.pretrained import Kwargs
from weft.generate.progress import StepProgress
from weft.generate.request import Request, arguments
from weft.generate.step_cache import disable_cache, enable_cache
from weft.run.devices import device
from weft.run.exchange import broadcast_json
from weft.run.measure import trace
from weft.run.measure.meter import Meter
from weft.run.world import world_of
from weft.video.saved_model import name_of

if TYPE_CHECKING:
    from weft.diffusers.sampled_check import SampledCheck

STORED_OPTIONS = (
    "negative", "width", "height", "frames", "steps", "guidance", "fps", "sparse", "cache", "dtype", "cfg",
    "backend",
)  # fmt: skip
"""Of a request, in the metadata of its file."""


def prepare(request: Request) -> None:
    """Check the request and load the pipeline, without a timeout of other ranks."""
    arguments(request)
    _pipeline(request)


def generate(request: Request) -> Kwargs:
    """Run on every rank; rank 0 writes the file. Return a report, the same on all ranks."""
    comm, meter = world_of(None, 60.0).comm, Meter()
    stream = None if request.quiet or comm.rank else sys.stderr
    progress = StepProgress(comm, meter, request.steps, stream)
    kwargs, fps = arguments(request, progress)
    pipe = _pipeline(request)
    if comm.size > 1:
        dist.barrier()  # the process group waits for slow loading; other waits have short timeouts
    options = {name: getattr(request, name) for name in ("plan", "cfg", "check", "backend")}
    if request.cache is not None:
        enable_cache(pipe, request.cache)
    handle = parallelize(pipe, sparse=request.sparse, **options)._weft
    regions = list(handle.regions.values())
    sparse = [sparsity for region in regions if (sparsity := getattr(region, "sparsity", None))]
    proofs = [proof for region in regions if (proof := getattr(region, "sampled_check", None))]
    kwargs["generator"] = torch.Generator().manual_seed(request.seed)
    start = progress.began = time.monotonic()
    try:
        with pretrained.quiet_libraries() if comm.rank and "diffusers" in sys.modules else nullcontext():
            frames = _call(pipe, kwargs, progress)
        explanation = explain(pipe)
        # Only rank 0 has the plans.
        explained = broadcast_json({**asdict(explanation), "gain": explanation.gain})
        caches = [cache.summary() for cache in handle.step_caches if cache.is_used]
    finally:
        restore(pipe)
        disable_cache(pipe)
    if not progress.done:  # a pipeline without a callback counts as one step
        progress(pipe, 0, None, {})
    seconds = time.monotonic() - start
    metadata = _metadata(request, comm.size, meter.names(comm.size))
    if comm.rank == 0:
        media.write(request.out, frames, metadata, fps=fps)
    mean, (_, height, width, _) = progress.summary(), frames.shape
    return {
        **metadata, "out": str(request.out), "frames": len(frames), "size": f"{width}x{height}", "fps": fps,
        "steps": len(progress.done), "seconds": seconds, "seconds_per_step": mean.seconds,
        "imbalance": mean.imbalance, "exposed": mean.exposed, "checked": _checked(proofs),
        "sparse": [sparsity.summary() for sparsity in sparse], "explained": explained,
        "caches": caches, "division": division(meter.plans, comm.size),
    }  # fmt: skip


def division(plans: Iterable[tuple[str, int]], ranks: int) -> str:
    """Return one line about what the ranks do, by the names and ranks of the schedules that were run."""
    names: dict[int, str] = {}
    for name, size in plans:
        names[size] = f"{names[size]}, {name}" if size in names else name
    texts = [f"each attention sharded over all of them by {names[ranks]}"] if ranks in names else []
    for size in sorted(names.keys() - {ranks}):
        each = "one" if size == 1 else str(size)
        sharded = "" if size == 1 else f", each sharded by {names[size]}"
        texts.append(f"guidance in two halves, {each} with the prompt and {each} without{sharded}")
    return f"{ranks} ranks: {'; '.join(texts)}" if ranks > 1 and texts else ""


_loaded: dict[tuple[Path, str, bool], Any] = {}
"""The last pipeline."""


def _pipeline(request: Request) -> Any:
    key = request.model, request.dtype, request.tiling
    if key not in _loaded:
        _loaded.clear()
        pipe = pretrained.load_pipeline(request.model, getattr(torch, request.dtype))
        pipe.set_progress_bar_config(disable=True)
        if request.tiling:
            if not hasattr(getattr(pipe, "vae", None), "enable_tiling"):
                raise InputError(
                    f"The VAE of a {type(pipe).__name__} has no tiles.", hint="Leave out --tiling."
                )
            pipe.vae.enable_tiling()
        _loaded[key] = pipe.to(device())
    return _loaded[key]


def _call(pipe: pretrained.PretrainedPipeline, kwargs: Kwargs, progress: StepProgress) -> np.ndarray:
    """Return frames [F, H, W, 3] from 0 to 1."""
    try:
        with trace.observed_by(progress.meter) if trace.active is None else nullcontext():
            output = pipe(**kwargs)
    except ValueError as error:
        if progress.done or isinstance(error, InputError):
            raise
        # Pipelines check their arguments themselves, with good messages.
        raise InputError(f"{type(pipe).__name__} refused its arguments: {error}") from error
    frames = output.frames[0] if hasattr(output, "frames") else output.images[:1]
    return np.asarray(frames, dtype=np.float32)


def _metadata(request: Request, ranks: int, plans: list[str]) -> Kwargs:
    """Return the metadata of the file: enough to generate it again."""
    packages = ("torch", "diffusers", "transformers")
    versions = {name: version(name) for name in packages if find_spec(name)}
    options = {name: getattr(request, name) for name in STORED_OPTIONS}
    return {
        "prompt": request.prompt,
        "seed": request.seed,
        "model": name_of(request.model),
        "ranks": ranks,
        "plan": request.plan,
        "plans": plans,
        **{name: value for name, value in options.items() if value is not None},
        **({"image": request.image.name} if request.image else {}),
        **({"more": dict(request.more)} if request.more else {}),
        **({"tiling": True} if request.tiling else {}),
        "versions": {"weft": __version__, **versions},
    }


def _checked(proofs: list[SampledCheck]) -> dict[str, float] | None:
    """Return the results of check="first" for all transformers together."""
    errors = [error for proof in proofs for error in proof.errors.values()]
    if not errors:
        return None
    allowed = max(proof.allowed for proof in proofs)
    seconds = sum(proof.seconds for proof in proofs)
    return {"attentions": len(errors), "error": max(errors), "allowed": allowed, "seconds": seconds}
