"""Optional packages: their use, the extra that installs them, and the error if one is missing."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from weft.core.errors import MissingError
from weft.core.install import install_command


@dataclass(frozen=True, kw_only=True)
class Package:
    """An optional package: its use and the smallest extra that installs it."""

    gives: str
    extra: str
    distribution: str = ""
    """Name on the package index, if it differs from the import name."""

    @property
    def add(self) -> str:
        return install_command(self.extra)


TORCH = Package(gives="running attention", extra="torch")

PACKAGES = {
    "torch": TORCH,
    "triton": Package(gives="GPU kernels", extra="gpu"),
    "diffusers": Package(gives="ready-made models", extra="models"),
    "transformers": Package(gives="text encoders", extra="models"),
    "accelerate": Package(gives="loading checkpoints", extra="models"),
    "safetensors": Package(gives="model weights", extra="torch"),
    "av": Package(gives="writing video", extra="video"),
    "PIL": Package(gives="writing pictures", extra="video", distribution="pillow"),
    "fastapi": Package(gives="serving", extra="serve"),
    "uvicorn": Package(gives="serving", extra="serve"),
    "sse_starlette": Package(gives="serving", extra="serve", distribution="sse-starlette"),
    "prometheus_client": Package(gives="metrics", extra="serve", distribution="prometheus-client"),
    "python_multipart": Package(gives="uploads", extra="serve", distribution="python-multipart"),
    "httpx": Package(gives="load on a server", extra="serve"),
    "cryptography": Package(gives="TLS between machines, unless --tls-cert is given", extra="nodes"),
    "matplotlib": Package(gives="figures", extra="report"),
    "yunchang": Package(gives="a peer to measure against", extra="bench"),
}
"""Packages by import name."""


def need(*names: str, extra: str = "") -> None:
    """Raise for the first package that is not installed; `extra` is one that installs all of them."""
    for name in names:
        if find_spec(name) is None:
            raise missing_package(name, extra) or ModuleNotFoundError(name, name=name)


def missing_package(module: str, extra: str = "") -> MissingError | None:
    """Return the error for a module that cannot be imported, or None if no extra installs it."""
    name = module.partition(".")[0]
    if name not in PACKAGES:
        return None
    package = PACKAGES[name]
    return MissingError(
        f"This needs {name} (for {package.gives}), which is not installed.",
        hint=f"Add it with: {install_command(extra or package.extra)}",
    )
