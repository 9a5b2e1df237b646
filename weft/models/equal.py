"""Equal: is a checkpoint's transformer on N ranks what it is on one? On its own weights, on CPUs or GPUs.

call = first_call(directory, dtype)             # in one process: how the pipeline calls it
pool.run(alone, directory, part, call, place)   # on every rank, each by itself
pool.run(compare, directory, part, plan)        # and together

In 16 bits two results may both be right and differ by as much as they differ from float32. Where float32
weights fit beside the model, one rank's own distance from float32 is measured, and N ranks may differ by no
more than twice that from one.
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
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten, treespec_dumps, treespec_loads

from weft.models import checkpoint
from weft.models.adapters import adapter_of
from weft.models.parallelize import parallelize, restore
from weft.run import trace
from weft.run.devices import device
from weft.run.exchange import all_gather_json, broadcast_json
from weft.run.launch import usable_cores
from weft.run.meter import Meter
from weft.run.world import world_of

TOLERANCE = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 2**-4, "float16": 2**-7}
"""Of the largest output: what N ranks may differ by from one, at most."""
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11}
FAILED = 1e30
"""The error of a result that is not finite."""
FAR = 2.0
"""Distances of one rank from float32."""
PROMPT = "a loom at work"
SMALL = {"width": 160, "height": 96, "num_frames": 9, "num_inference_steps": 4}
"""Sides and frames that every VAE takes; of Wan, 3 × 6 × 10 tokens."""


class Call(NamedTuple):
    """Arguments of a transformer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Place(NamedTuple):
    """Where and in what a transformer runs."""

    device: str = "cpu"
    dtype: str = "float32"


CPU = Place()


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What the worst of all ranks found; the same on each of them."""

    model: str
    attention: str
    plans: tuple[str, ...]
    dtype: str
    error: float
    """From one rank."""
    alone_error: float | None
    """Of one rank from float32, where that was computed."""
    sent: int

    @property
    def tolerance(self) -> float:
        most = TOLERANCE[self.dtype]
        return most if self.alone_error is None else min(most, FAR * self.alone_error + ROUNDING[self.dtype])


class _Enough(Exception):  # noqa: N818 - nothing went wrong
    """Ends a pipeline that has shown what was asked."""


@torch.no_grad()
def first_call(directory: Path, dtype: str = "float32") -> Call:
    """How a pipeline calls its transformer for a small size: with noise, and a prompt as it encodes it.

    It is loaded on the CPU, once: only its transformers are needed on every rank.
    """
    pipe = checkpoint.load_pipeline(directory, dtype=getattr(torch, dtype))
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


class _Loaded(NamedTuple):
    """A transformer, its arguments where it is, and its output alone, also in float32 if that fits."""

    model: Any
    call: Call
    dtype: str
    output: Tensor
    exact: Tensor | None


_known: dict[tuple[Path, str], _Loaded] = {}
"""What a rank has loaded."""


@torch.no_grad()
def alone(directory: Path, part: str, call: Call, place: Place = CPU) -> None:
    """Load a transformer and run it in this process only; takes as long as it takes, nobody waits."""
    where = device() if place.device == "cuda" else torch.device("cpu")
    _known.clear()  # first: two of them may not fit
    model = checkpoint.load_part(directory, part, dtype=getattr(torch, place.dtype)).eval().to(where)
    call = tree_map_only(Tensor, lambda x: x.to(where), call)
    output = model(*call.args, **call.kwargs)[0]
    exact = _in_float32(model, call) if place.dtype in ROUNDING and _fits(model, where) else None
    _known[directory, part] = _Loaded(model, call, place.dtype, output, exact)


def _in_float32(model: Any, call: Call) -> Tensor:
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


def _fits(model: Any, where: torch.device) -> bool:
    """Whether there is room for the weights of a model in float32, and for what it computes."""
    if where.type == "cuda":
        free, _ = torch.cuda.mem_get_info(where)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // usable_cores()
    more = sum(x.numel() * max(0, 4 - x.element_size()) for x in model.parameters())
    return free > 1.25 * more + (1 << 30) * (where.type == "cuda")


@torch.no_grad()
def compare(directory: Path, part: str, plan: str, backend: str = "auto") -> Compared:
    """Run the same with all ranks."""
    model, call, dtype, output, exact = _known[directory, part]
    comm, meter = world_of(None, 60.0).comm, Meter()
    parallelize(model, plan=plan, backend=backend, cfg="off")  # two ranks would split nothing but the batch
    before = comm.bytes_sent
    try:
        with trace.watched_by(meter):
            found = model(*call.args, **call.kwargs)[0]
    finally:
        restore(model)
    distance = 0.0 if exact is None else _error(output, exact)
    own = _error(found, output), distance, comm.bytes_sent - before
    error, alone_error, _ = max(ranks := all_gather_json(own))
    return Compared(
        model=type(model).__name__,
        attention=adapter_of(model).kind,
        plans=tuple(meter.names(comm.size)),
        dtype=dtype,
        error=error,
        alone_error=None if exact is None else alone_error,
        sent=max(sent for *_, sent in ranks),
    )


def _error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest value; JSON has no infinity."""
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-30)
    return min(FAILED, float(error.nan_to_num(torch.inf)))


def share_call(call: Call | None) -> Call:
    """Return the arguments that rank 0 has, on every rank of a launched world; nothing is unpickled."""
    leaves, spec = tree_flatten(tuple(call or ((), {})))
    plain = [_heading(x) if isinstance(x, Tensor) else {"value": x} for x in leaves]
    heading = broadcast_json({"spec": treespec_dumps(spec), "leaves": plain})
    shared: list[Any] = []
    for number, each in enumerate(heading["leaves"]):
        if "value" in each:
            shared.append(each["value"])
            continue
        dtype = getattr(torch, each["dtype"])
        x = leaves[number] if call else torch.empty(each["shape"], dtype=dtype)
        data = x.contiguous().reshape(-1).view(torch.uint8)
        dist.broadcast(data, 0)
        shared.append(data.view(dtype).reshape(each["shape"]))
    return Call(*tree_unflatten(shared, treespec_loads(heading["spec"])))


def _heading(x: Tensor) -> dict[str, Any]:
    return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}
