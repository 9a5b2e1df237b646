"""Collect the facts of a report about GPUs, libraries and drivers; each rank reports its own device."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from weft.doctor.suite import Check, CheckContext

PACKAGES = (
    "numpy", "diffusers", "transformers", "flash-attn", "flash-attn-3", "flash-attn-4",
    "nvidia-cudnn-frontend", "nvidia-cutlass-dsl",
)  # fmt: skip


def checks(ctx: CheckContext) -> Iterator[Check]:
    yield Check(name="machine", status="measured", data=_facts(ctx))


def machine_of(facts: Sequence[dict[str, Any]], *, device: str, machines: int) -> dict[str, Any]:
    """Return the machine's entry of doctor.json from the facts of each rank; versions are rank 0's."""
    first = dict(facts[0]) if facts else {}
    first.pop("gpu", None)
    gpus = [each["gpu"] for each in facts if each.get("gpu")]
    return {"machines": machines, "ranks": len(facts), "device": device, "gpus": gpus, **first}


def _facts(ctx: CheckContext) -> dict[str, Any]:
    import torch

    is_gpu = ctx.device.type == "cuda"
    return {
        "gpu": _guarded(lambda: _gpu(ctx.device.index or 0)) if is_gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "nccl": _guarded(_nccl) if is_gpu else None,
        "cudnn": _guarded(torch.backends.cudnn.version) if is_gpu else None,
        "driver": _guarded(_driver) if is_gpu else None,
        "triton": _version("triton"),
        "packages": {name: number for name in PACKAGES if (number := _version(name))},
    }


def _guarded(fact: Callable[[], Any]) -> Any:
    # A driver may raise any error; only this fact is then missing.
    try:
        return fact()
    except Exception as error:
        return f"unknown: {type(error).__name__}"


def _gpu(index: int) -> dict[str, Any]:
    import torch

    from weft.run.gpus import _nvlinks
    from weft.run.kernels.choice import arch_of

    properties = torch.cuda.get_device_properties(index)
    others = (other for other in range(torch.cuda.device_count()) if other != index)
    peers = sum(torch.cuda.can_device_access_peer(index, other) for other in others)
    nvlinks = _nvlinks(index)
    links = f"reaches {peers} peers" if nvlinks is None else f"{nvlinks} NVLinks, reaches {peers} peers"
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "arch": arch_of(torch.device("cuda", index)),
        "links": links,
    }


def _nccl() -> str:
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.splitlines()[0].strip()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
