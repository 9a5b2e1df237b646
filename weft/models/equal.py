"""Equal: is a checkpoint's transformer on N ranks what it is on one? On its own weights, in float32.

call = first_call(directory)                    # in one process: how the pipeline calls it
pool.run(alone, directory, part, call)          # on every rank, each by itself
pool.run(compare, directory, part, call, plan)  # and together
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.models import checkpoint
from weft.models.adapters import adapter_of
from weft.models.parallelize import parallelize, restore
from weft.run import trace
from weft.run.meter import Meter
from weft.run.world import world_of

TOLERANCE = 2e-5
"""Of the largest output."""
PROMPT = "a loom at work"
SMALL = {"width": 160, "height": 96, "num_frames": 9, "num_inference_steps": 4}
"""Sides and frames that every VAE takes; of Wan, 3 × 6 × 10 tokens."""


class Call(NamedTuple):
    """Arguments of a transformer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What one rank found."""

    model: str
    attention: str
    plans: tuple[str, ...]
    error: float
    sent: int


class _Enough(Exception):  # noqa: N818 - nothing went wrong
    """Ends a pipeline that has shown what was asked."""


@torch.no_grad()
def first_call(directory: Path) -> Call:
    """How a pipeline calls its transformer for a small size: with noise, and a prompt as it encodes it."""
    pipe = checkpoint.load_pipeline(directory, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    seen: list[Call] = []

    def see(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(Call(args, kwargs))
        raise _Enough

    models = [getattr(pipe, part) for part in checkpoint.transformers(directory)]
    for model in models:
        model.register_forward_pre_hook(see, with_kwargs=True)
    takes = inspect.signature(type(pipe).__call__).parameters
    if checkpoint.is_own(directory):  # it has words and sizes of its own
        given: dict[str, Any] = {"prompt": ""}
    else:
        given = {"prompt": PROMPT} | {name: value for name, value in SMALL.items() if name in takes}
    if "video_length" in takes:  # of Latte: positions in time are those of all frames
        given["video_length"] = models[0].config.video_length
    if "image" in takes:
        from PIL import Image

        given["image"] = Image.new("RGB", (SMALL["width"], SMALL["height"]), "gray")
    with suppress(_Enough):
        pipe(**given, generator=torch.Generator().manual_seed(0))
    return seen[0]


_known: dict[tuple[Path, str], tuple[Any, Tensor]] = {}
"""The transformer that a rank has loaded, and its output alone."""


@torch.no_grad()
def alone(directory: Path, part: str, call: Call) -> None:
    """Load a transformer and run it in this process only; takes as long as it takes, nobody waits."""
    model = checkpoint.load_part(directory, part, dtype=torch.float32).eval()
    _known.clear()
    _known[directory, part] = model, model(*call.args, **call.kwargs)[0]


@torch.no_grad()
def compare(directory: Path, part: str, call: Call, plan: str, backend: str = "auto") -> Compared:
    """The same with all ranks."""
    model, expected = _known[directory, part]
    comm, meter = world_of(None, 60.0).comm, Meter()
    parallelize(model, plan=plan, backend=backend, cfg="off")  # two ranks would split nothing but the batch
    before = comm.bytes_sent
    try:
        with trace.watched_by(meter):
            found = model(*call.args, **call.kwargs)[0]
    finally:
        restore(model)
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return Compared(
        model=type(model).__name__,
        attention=adapter_of(model).kind,
        plans=tuple(meter.names(comm.size)),
        error=float(error.nan_to_num(torch.inf)),
        sent=comm.bytes_sent - before,
    )
