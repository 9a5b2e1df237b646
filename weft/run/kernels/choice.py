"""Choice: which backend computes what on which GPU, as a table that can be read and tested without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from weft.run.kernels import package_rules, rules
from weft.run.kernels.rules import Work

Judge = Callable[[str, Work], str]
"""Say why a backend that can serve must not (a failed parity test), or nothing."""

RULES: dict[str, Callable[[Work, str], str]] = {
    "fa4": package_rules.fa4,
    "cudnn": rules.cudnn,
    "flash": rules.flash,
    "cudnn_sparse": package_rules.cudnn_sparse,
    "triton": rules.triton,
    "gather": rules.gather,
    "exact": rules.exact,
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

WHY = {
    "fa4": "the fastest dense kernel where it is installed; sparse where its block rules fit",
    "flash": "in torch, with log-sum-exp, on every GPU",
    "cudnn": "in torch; it has the matrix instructions of sm_90 and sm_100, torch's flash has not",
    "cudnn_sparse": "block-sparse with the matrix instructions of sm_90 and sm_100",
    "triton": "weft's own block-sparse kernels",
    "gather": "no block-sparse kernel fits: rows are gathered for torch's flash attention",
    "exact": "float32 or float64 operands, or a GPU that no 16-bit backend serves",
}


@dataclass(frozen=True)
class Machine:
    """A GPU architecture (sm_90, gfx942) and the backends whose packages or libraries are installed."""

    arch: str
    installed: frozenset[str] = frozenset()
    activated: bool = False
    """Whether the user activated FA3 or FA4 in torch, which then is what `flash` calls."""
    deterministic: bool = False
    """Whether the user asked torch for deterministic algorithms."""


@dataclass(frozen=True)
class Choice:
    """The backend for a piece of work, why it, and why not those before it."""

    backend: str
    reason: str
    candidates: tuple[str, ...]
    """Those that can serve, in order."""
    passed: dict[str, str]
    """Those that come first and were passed over, with the reason."""


def order(work: Work, machine: Machine) -> tuple[str, ...]:
    """Backends by preference; only those without a reason to refuse are taken."""
    if work.dtype not in rules.HALF:
        return ("exact",)
    if work.sparse:
        return (*_SPARSE, "exact")
    newer = machine.arch in ("sm_90", "sm_100") and not machine.activated
    return (*(_DENSE_NEWER if newer else _DENSE), "exact")


def cannot(backend: str, work: Work, machine: Machine) -> str:
    """Return why a backend cannot do this work on this machine; "" if it can."""
    if why := RULES[backend](work, machine.arch):
        return why
    if not work.positive and backend != "exact":
        return "it takes a scale above 0."
    if machine.deterministic and work.backward and backend in NOT_DETERMINISTIC:
        return "its backward is not deterministic, which torch.use_deterministic_algorithms asks for."
    if backend in NEEDS and backend not in machine.installed:
        return f"it needs {NEEDS[backend]}, which is not here."
    return ""


def decide(work: Work, machine: Machine, judge: Judge | None = None) -> Choice:
    """Choose the first backend of the order that can serve and that `judge` has nothing against."""
    refusals = {name: cannot(name, work, machine) for name in order(work, machine)}
    candidates = tuple(name for name, why in refusals.items() if not why)
    for name in candidates:
        if judge is None or not (why := judge(name, work)):
            first = tuple(refusals).index(name)
            passed = {other: refusals[other] for other in tuple(refusals)[:first]}
            return Choice(name, WHY[name], candidates, passed)
        refusals[name] = why
    raise AssertionError("exact always serves")


@cache
def installed() -> frozenset[str]:
    """Return the backends whose Python packages are here; nothing is imported."""
    return frozenset(name for name, needs in DISTRIBUTIONS.items() if all(map(_is_installed, needs)))


def _is_installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False
