"""The names of attention backends, to check them before torch is imported."""

from __future__ import annotations

from weft.core.errors import InputError

BACKENDS = (
    "auto", "exact", "flash", "cudnn", "fa4", "cudnn_sparse", "triton", "gather", "cpu", "reference",
)  # fmt: skip
"""What `backend=` and `--backend` take; `weft.run.kernels` has one implementation for each."""


def check_backend(name: str) -> None:
    """Raise an InputError for a name that is not in BACKENDS."""
    if name not in BACKENDS:
        raise InputError(f"backend={name!r} is unknown.", hint=f"Use one of {', '.join(BACKENDS)}.")
