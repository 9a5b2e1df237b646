"""Choose the backend of a kernel on a GPU, by a table that can be read and tested without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from weft.run.kernels import rules
from weft.run.kernels.rules import KernelSpec

ParityCheck = Callable[[str, KernelSpec], str]
"""Return why a backend that can serve must not be used (a failed parity test), or ""."""

RULES: dict[str, Callable[[KernelSpec, str], str]] = {
    "fa4": rules.fa4,
    "cudnn": rules.cudnn,
    "flash": rules.flash,
    "cudnn_sparse": rules.cudnn_sparse,
    "triton": rules.triton,
    "gather": rules.gather,
    "exact": lambda _spec, _arch: "",
}

DISTRIBUTIONS = {
    "fa4": ("flash-attn-4",),
    "cudnn_sparse": ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl"),
    "triton": ("triton",),
}
"""Python packages that a backend needs besides torch."""

NEEDS = {name: " and ".join(names) for name, names in DISTRIBUTIONS.items()} | {
    "cudnn": "cuDNN newer than 9.15.0, and torch.backends.cuda.enable_cudnn_sdp(True)",
}

NOT_DETERMINISTIC = ("fa4", "cudnn", "cudnn_sparse")

# Torch's own flash attention is FlashAttention-2: mma.sync, without the wgmma of sm_90 and the tcgen05 of
# sm_100, which cuDNN's has. Torch itself prefers cuDNN's there.
_DENSE = ("fa4", "flash", "cudnn", "triton")
_DENSE_NEWER = ("fa4", "cudnn", "flash", "triton")
_SPARSE = ("cudnn_sparse", "fa4", "triton", "gather")

_FAMILIES = {(8, 7): "sm_86", (10, 1): "sm_100", (10, 3): "sm_100", (12, 1): "sm_120"}
_CUDNN = 91500
"""The last version of cuDNN that is wrong for lengths that 128 does not divide; torch avoids it too."""


@dataclass(frozen=True)
class GpuPlatform:
    """A GPU architecture (sm_90, gfx942) and the backends whose packages are installed."""

    arch: str
    installed: frozenset[str] = frozenset()
    activated: bool = False
    """Whether FA3 or FA4 is activated in torch; `flash` then calls it."""
    deterministic: bool = False
    """Whether torch.use_deterministic_algorithms is on."""


class Choice(NamedTuple):
    """The backend for a spec."""

    backend: str
    passed: dict[str, str]
    """Backends that come before it in the order, with the reason why they are not used."""


def order(spec: KernelSpec, platform: GpuPlatform) -> tuple[str, ...]:
    """Return the backends to try, in order."""
    if spec.dtype not in rules.HALF:
        return ("exact",)
    if spec.sparse:
        return (*_SPARSE, "exact")
    newer = platform.arch in ("sm_90", "sm_100") and not platform.activated
    return (*(_DENSE_NEWER if newer else _DENSE), "exact")


@lru_cache(1024)
def broken_rule(backend: str, spec: KernelSpec, arch: str) -> str:
    """Return why a backend has no kernel for this spec on an architecture; "" if it has one."""
    above_zero = spec.positive or backend == "exact"
    return RULES[backend](spec, arch) or ("" if above_zero else "it takes a scale above 0.")


def refusal(backend: str, spec: KernelSpec, platform: GpuPlatform, check: ParityCheck | None = None) -> str:
    """Return why a backend cannot compute this spec on this platform, or fails `check`; "" if it can."""
    if why := broken_rule(backend, spec, platform.arch):
        return why
    if platform.deterministic and spec.backward and backend in NOT_DETERMINISTIC:
        return "its backward is not deterministic, which torch.use_deterministic_algorithms requires."
    if backend in NEEDS and backend not in platform.installed:
        return f"it needs {NEEDS[backend]}, which is not here."
    return check(backend, spec) if check else ""


def decide(spec: KernelSpec, platform: GpuPlatform, check: ParityCheck | None = None) -> Choice:
    """Choose the first backend of the order that can serve and that passes `check`."""
    passed: dict[str, str] = {}
    for name in order(spec, platform):
        if not (why := refusal(name, spec, platform, check)):
            return Choice(name, passed)
        passed[name] = why
    raise AssertionError("exact always serves")


@cache
def installed() -> frozenset[str]:
    """Return the backends whose Python packages are installed, without importing them."""
    return frozenset(name for name, needs in DISTRIBUTIONS.items() if all(map(_is_installed, needs)))


def _is_installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def platform_of(device: torch.device) -> GpuPlatform:
    """Return the platform of a GPU, with the settings of torch that matter."""
    cudnn = (torch.backends.cudnn.version() or 0) > _CUDNN and torch.backends.cuda.cudnn_sdp_enabled()
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    strict = torch.are_deterministic_algorithms_enabled()
    return GpuPlatform(
        arch_of(device),
        installed() | ({"cudnn"} if cudnn else set()),
        activated=current() is not None,
        deterministic=strict and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@cache
def arch_of(device: torch.device) -> str:
    """Return the architecture of a GPU: sm_90, gfx942."""
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return _FAMILIES.get((major, minor), f"sm_{major}{minor}")
