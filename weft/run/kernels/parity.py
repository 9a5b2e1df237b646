"""Parity: try a GPU backend on a few blocks against the reference before a call relies on it.

A kernel may be silently wrong: FlashAttention's block-sparse backward was, for one head dim. Every backend is
tried once for each direction, dtype, head dim and block size on a kind of device; the outcome is stored.
All ranks learn the outcomes of all, and refuse what fails on any of them.
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
from weft.run.kernels.choice import DISTRIBUTIONS, Judge
from weft.run.kernels.machine import machine_of
from weft.run.kernels.parity_sample import examine
from weft.run.kernels.rules import Work

_log = logging.getLogger(__name__)

Trial = Callable[[str, Work, torch.device], str]
"""Say what is wrong with a backend for a piece of work on a device, or nothing."""

_UNTESTED = ("exact", "reference", "cpu")
_DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")

_agreed: WeakKeyDictionary[Comm, dict[tuple[str, Work], str]] = WeakKeyDictionary()
_known: dict[tuple[str, Work, torch.device], str] = {}


def judge(comm: Comm | None, device: torch.device, trial: Trial | None = None) -> Judge:
    """Return the judge of backends on a device. All ranks must ask it the same things in the same order.

    It answers with the reason for a refusal, the same on all ranks, or with "". Without `comm`, for calls
    that send no message, a rank judges for itself.
    """
    trial = trial or verdict
    agreed = _agreed.setdefault(comm, {}) if comm else {}

    def refusal(backend: str, work: Work) -> str:
        if backend in _UNTESTED or device.type != "cuda" or active_fake_mode() is not None:
            return ""
        if (backend, work) not in agreed:
            why = trial(backend, work, device)
            why = agreed[backend, work] = _agree(comm, backend, work, why) if comm else why
            if why and (comm is None or comm.rank == 0):
                _log.warning("backend %s is not used for the %s: %s", backend, work, why)
        return agreed[backend, work]

    return refusal


def _agree(comm: Comm, backend: str, work: Work, why: str) -> str:
    everyone = gather_facts(comm, {"backend": f"{backend} for the {work}", "why": why})
    check_same(everyone, ("backend",), "parity tests")
    failed = [(rank, facts["why"]) for rank, facts in enumerate(everyone) if facts["why"]]
    if not failed:
        return ""
    ranks = ", ".join(str(rank) for rank, _ in failed[:4])
    return f"its parity test failed on {len(failed)} of {comm.size} ranks ({ranks}): {failed[0][1]}"


def verdict(backend: str, work: Work, device: torch.device) -> str:
    """Try a backend, unless this process or another one on this machine has."""
    key = backend, work, device
    if key not in _known:
        facts = _facts(backend, work, device)
        path = cache() / "parity" / f"{sha256(json.dumps(facts).encode()).hexdigest()[:32]}.json"
        why = _recall(path, facts)
        if why is None:
            if torch.cuda.is_current_stream_capturing():
                raise InputError(
                    f"The first {work} by backend={backend!r} is captured in a CUDA graph.",
                    hint="Make the call once before the capture: the backend is tested then.",
                )
            try:
                why = examine(make(backend), work, device)
                _keep(path, facts, why)
            # Whatever a package raises; it may be this run's own trouble, so it is not kept on disk.
            except Exception as error:  # noqa: BLE001
                why = f"it raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        _known[key] = why
    return _known[key]


def _facts(backend: str, work: Work, device: torch.device) -> dict[str, object]:
    """What an outcome is valid for: a change of any of it is a reason to try again."""
    machine = machine_of(device)
    return {
        "backend": backend,
        "work": asdict(work),
        "arch": machine.arch,
        "activated": machine.activated,
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
    found = [Path(path).read_text().partition("\n")[0] for path in _DRIVERS if Path(path).is_file()]
    return found[0] if found else "unknown"


def _source() -> str:
    """A digest of the code that calls the kernels, some of which are its own."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _recall(path: Path, facts: dict[str, object]) -> str | None:
    with suppress(InputError):
        kept = read_json(path)
        if kept.get("facts") == facts and isinstance(kept.get("why"), str):
            return kept["why"]
    return None


def _keep(path: Path, facts: dict[str, object], why: str) -> None:
    with suppress(OSError):  # a home that cannot be written: the next process tries again
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as temporary:
            temporary.write_text(json.dumps({"facts": facts, "why": why}))
