"""Compare a checkpoint's transformer on N ranks with one, with its own weights: `weft verify MODEL_DIR`.

    call = first_call(directory, dtype)                  # in one process: how the pipeline calls it
    pool.run(run_alone, directory, name, call, place)    # on every rank, each by itself
    pool.run(compare, directory, name, plan)             # and together

In 16 bits, two correct results may differ as much as each does from float32. Where float32 weights fit
beside the model, the distance of one rank from float32 is measured, and N ranks may differ from one by twice
as much.
"""

from __future__ import annotations

import inspect
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from weft.diffusers.adapters import adapter_of
from weft.diffusers.parallelize import parallelize, restore
from weft.generate import pretrained
from weft.generate.pretrained import Kwargs
from weft.generate.state import PipelineState, copied
from weft.run.devices import device
from weft.run.exchange import all_gather_json, broadcast_json
from weft.run.measure import trace
from weft.run.measure.meter import Meter
from weft.run.spawn.launch import usable_cores
from weft.run.world import world_of
from weft.video.saved_model import is_own

TOLERANCE = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 2**-4, "float16": 2**-7}
"""Largest difference between N ranks and one, relative to the largest output."""
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11}
NOT_FINITE = 1e30
"""The error of a result that is not finite; JSON has no infinity."""
FLOAT32_FACTOR = 2.0
"""Allowed difference, relative to the distance of one rank from float32."""
PROMPT = "a loom at work"
SMALL = {"width": 160, "height": 96, "num_frames": 9, "num_inference_steps": 4}
"""Sizes that every VAE takes; for Wan, 3 × 6 × 10 tokens."""


class TransformerCall(NamedTuple):
    """Arguments of a transformer."""

    args: tuple[Any, ...]
    kwargs: Kwargs


class RunPlace(NamedTuple):
    """Device and dtype of a transformer."""

    device: str = "cpu"
    dtype: str = "float32"


CPU = RunPlace()


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """The largest error of all ranks; the same on each of them."""

    model: str
    attention: str
    plans: tuple[str, ...]
    dtype: str
    error: float
    """Difference from one rank."""
    alone_error: float | None
    """Difference of one rank from float32, if that was computed."""
    sent: int

    @property
    def tolerance(self) -> float:
        maximum = TOLERANCE[self.dtype]
        if self.alone_error is None:
            return maximum
        return min(maximum, FLOAT32_FACTOR * self.alone_error + ROUNDING[self.dtype])


class _CallCaptured(Exception):  # noqa: N818 - control flow, not an error
    """Ends a pipeline once its transformer was called."""


@torch.no_grad()
def first_call(directory: Path, dtype: str = "float32") -> TransformerCall:
    """Return a pipeline's first call of its transformer, for a small size, with noise and an encoded prompt.

    The pipeline is loaded on the CPU, once: ranks need only its transformers.
    """
    pipe = pretrained.load_pipeline(directory, getattr(torch, dtype))
    pipe.set_progress_bar_config(disable=True)
    captured: list[TransformerCall] = []

    def capture(_: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> None:
        captured.append(TransformerCall(args, kwargs))
        raise _CallCaptured

    models = [getattr(pipe, name) for name in pretrained.transformers(directory)]
    for model in models:
        model.register_forward_pre_hook(capture, with_kwargs=True)
    signature = inspect.signature(type(pipe).__call__).parameters
    kwargs: Kwargs = {"prompt": ""}
    if not is_own(directory):  # which has a vocabulary and sizes of its own
        kwargs = {"prompt": PROMPT} | {name: value for name, value in SMALL.items() if name in signature}
    if "video_length" in signature:  # Latte has positions for all of its frames
        kwargs["video_length"] = models[0].config.video_length
    if "image" in signature:
        from PIL import Image

        kwargs["image"] = Image.new("RGB", (SMALL["width"], SMALL["height"]), "gray")
    with suppress(_CallCaptured):
        pipe(**kwargs, generator=torch.Generator().manual_seed(0))
    return captured[0]


class _Loaded(NamedTuple):
    """A transformer, its arguments on its device, its output alone, and that in float32 if it fits."""

    model: nn.Module
    call: TransformerCall
    dtype: str
    output: Tensor
    exact: Tensor | None


_loaded: dict[tuple[Path, str], _Loaded] = {}


@torch.no_grad()
def run_alone(directory: Path, name: str, call: TransformerCall, place: RunPlace = CPU) -> None:
    """Load a transformer and run it in this process only, without a timeout of other ranks."""
    target = device() if place.device == "cuda" else torch.device("cpu")
    _loaded.clear()  # free the last one first: two may not fit in memory
    model = pretrained.load_transformer(directory, name, getattr(torch, place.dtype)).eval().to(target)
    call = tree_map_only(Tensor, lambda x: x.to(target), call)
    output = model(*call.args, **call.kwargs)[0]
    exact = _in_float32(model, call) if place.dtype in ROUNDING and _fits(model, target) else None
    _loaded[directory, name] = _Loaded(model, call, place.dtype, output, exact)


def _in_float32(model: nn.Module, call: TransformerCall) -> Tensor:
    """Return the output of the same weights, widened and narrowed again in place."""
    args, kwargs = tree_map_only(Tensor, lambda x: x.float() if x.is_floating_point() else x, tuple(call))
    tensors = [x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()]
    dtypes = [x.dtype for x in tensors]
    try:
        for x in tensors:
            x.data = x.data.float()
        return model(*args, **kwargs)[0]
    finally:
        for x, dtype in zip(tensors, dtypes, strict=True):
            x.data = x.data.to(dtype)


def _fits(model: nn.Module, target: torch.device) -> bool:
    """Return whether a model's weights in float32 and its activations fit in free memory."""
    if target.type == "cuda":
        free, _ = torch.cuda.mem_get_info(target)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // usable_cores()
    more = sum(x.numel() * max(0, 4 - x.element_size()) for x in model.parameters())
    return free > 1.25 * more + (1 << 30) * (target.type == "cuda")


@torch.no_grad()
def compare(directory: Path, name: str, plan: str, backend: str = "auto") -> ParityResult:
    """Run the same on all ranks together, and compare."""
    model, call, dtype, output, exact = _loaded[directory, name]
    comm, meter = world_of(None, 60.0).comm, Meter()
    parallelize(
        model, plan=plan, backend=backend, cfg="off"
    )  # with cfg, two ranks would split the batch only
    before = comm.bytes_sent
    try:
        with trace.observed_by(meter):
            parallel_output = model(*call.args, **call.kwargs)[0]
    finally:
        restore(model)
    alone_error = 0.0 if exact is None else _error(output, exact)
    numbers = _error(parallel_output, output), alone_error, comm.bytes_sent - before
    ranks = all_gather_json(numbers)
    error, alone_error, _ = max(ranks)
    return ParityResult(
        model=type(model).__name__,
        attention=adapter_of(model).kind,
        plans=tuple(meter.names(comm.size)),
        dtype=dtype,
        error=error,
        alone_error=None if exact is None else alone_error,
        sent=max(sent for *_, sent in ranks),
    )


def _error(output: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    error = (output.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-30)
    return min(NOT_FINITE, float(error.nan_to_num(torch.inf)))


def broadcast_call(call: TransformerCall | None) -> TransformerCall:
    """Broadcast rank 0's arguments to every rank of a launched world, without unpickling."""
    data = PipelineState(0, copied((call or TransformerCall((), {}))._asdict())).to_bytes()
    size = broadcast_json(len(data))
    buffer = torch.frombuffer(bytearray(data.ljust(size)[:size]), dtype=torch.uint8)
    dist.broadcast(buffer, 0)
    return TransformerCall(**PipelineState.from_bytes(buffer.numpy().tobytes()).values)
