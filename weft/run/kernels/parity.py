"""Parity tests: compare a GPU backend with the reference on a few blocks before a call relies on it.

A kernel may be silently wrong: FlashAttention's block-sparse backward was, for one head dim. Every backend is
tested once for each direction, dtype, head dim and block size on a kind of device; the outcome is cached on
disk. The ranks exchange outcomes, and none uses a backend that fails on any of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch._guards import active_fake_mode

from weft.core.errors import InputError
from weft.core.files import cache, read_json, whole
from weft.run.agree import check_same, gather_facts
from weft.run.comm import Comm
from weft.run.kernels import make
from weft.run.kernels.choice import DISTRIBUTIONS, ParityCheck, platform_of
from weft.run.kernels.parity_sample import compare_with_reference
from weft.run.kernels.rules import KernelSpec

_log = logging.getLogger(__name__)

Trial = Callable[[str, KernelSpec, torch.device], str]
"""Return what is wrong with a backend for a spec on a device, or ""."""

_UNTESTED = ("exact", "reference", "cpu")
_DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")

_agreed: WeakKeyDictionary[Comm, dict[tuple[str, KernelSpec], str]] = WeakKeyDictionary()
_known: dict[tuple[str, KernelSpec, torch.device], str] = {}


def parity_check(comm: Comm | None, device: torch.device, trial: Trial | None = None) -> ParityCheck:
    """Return the check of backends on a device. All ranks must call it with the same specs in the same order.

    It returns why a backend must not be used, the same on all ranks, or "". Without `comm`, for calls that
    send no message, each rank decides alone.
    """
    trial = trial or run_trial
    agreed = _agreed.setdefault(comm, {}) if comm else {}

    def refusal(backend: str, spec: KernelSpec) -> str:
        if backend in _UNTESTED or device.type != "cuda" or active_fake_mode() is not None:
            return ""
        if (backend, spec) not in agreed:
            why = trial(backend, spec, device)
            why = agreed[backend, spec] = _agree(comm, backend, spec, why) if comm else why
            if why and (comm is None or comm.rank == 0):
                _log.warning("backend %s is not used for the %s: %s", backend, spec, why)
        return agreed[backend, spec]

    return refusal


def _agree(comm: Comm, backend: str, spec: KernelSpec, why: str) -> str:
    facts_by_rank = gather_facts(comm, {"backend": f"{backend} for the {spec}", "why": why})
    check_same(facts_by_rank, ("backend",), "parity tests")
    failed = [(rank, facts["why"]) for rank, facts in enumerate(facts_by_rank) if facts["why"]]
    if not failed:
        return ""
    ranks = ", ".join(str(rank) for rank, _ in failed[:4])
    return f"its parity test failed on {len(failed)} of {comm.size} ranks ({ranks}): {failed[0][1]}"


def run_trial(backend: str, spec: KernelSpec, device: torch.device) -> str:
    """Test a backend, unless this process or another one on this machine has."""
    key = backend, spec, device
    if key not in _known:
        facts = _facts(backend, spec, device)
        path = cache() / "parity" / f"{sha256(json.dumps(facts).encode()).hexdigest()[:32]}.json"
        why = _load(path, facts)
        if why is None:
            if torch.cuda.is_current_stream_capturing():
                raise InputError(
                    f"The first {spec} by backend={backend!r} is captured in a CUDA graph.",
                    hint="Make the call once before the capture: the backend is tested then.",
                )
            try:
                why = compare_with_reference(make(backend), spec, device)
                _save(path, facts, why)
            # Whatever a package raises. It may be due to this run, so it is not cached on disk.
            except Exception as error:  # noqa: BLE001
                why = f"it raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        _known[key] = why
    return _known[key]


def _facts(backend: str, spec: KernelSpec, device: torch.device) -> dict[str, object]:
    """Return what an outcome depends on; a change of any of it invalidates the cached outcome."""
    platform = platform_of(device)
    return {
        "backend": backend,
        "work": asdict(spec),
        "arch": platform.arch,
        "activated": platform.activated,
        "device": torch.cuda.get_device_name(device),
        "driver": _driver(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "packages": {name: version(name) for name in _distributions(backend)},
        "weft": _source(),
    }


def _distributions(backend: str) -> tuple[str, ...]:
    """The packages of a backend, with the compiler of its kernels."""
    names = DISTRIBUTIONS.get(backend, ())
    return (*names, "nvidia-cutlass-dsl") if backend == "fa4" else names


def _driver() -> str:
    paths = (Path(path) for path in _DRIVERS)
    return next((path.read_text().partition("\n")[0] for path in paths if path.is_file()), "unknown")


def _source() -> str:
    """Return a digest of the code of the kernels room."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _load(path: Path, facts: dict[str, object]) -> str | None:
    with suppress(InputError):
        cached = read_json(path)
        if cached.get("facts") == facts and isinstance(cached.get("why"), str):
            return cached["why"]
    return None


def _save(path: Path, facts: dict[str, object], why: str) -> None:
    with suppress(OSError):  # a home that is not writable: the next process tests again
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as temporary:
            temporary.write_text(json.dumps({"facts": facts, "why": why}))
