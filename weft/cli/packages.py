"""The optional packages: what each one gives and the command that adds it."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.errors import MissingError


@dataclass(frozen=True, kw_only=True)
class Package:
    """What a package is for and what adds it."""

    gives: str
    add: str
    distribution: str = ""
    """What pip calls it, if not what import does."""


TORCH = Package(gives="running attention", add="pip install 'weft[torch]'")

PACKAGES = {
    "torch": TORCH,
    # Not the newest: the one torch 2.13 is built with.
    "triton": Package(gives="GPU kernels", add="pip install triton==3.7.1"),
    "diffusers": Package(gives="ready-made models", add="pip install 'weft[models]'"),
    "transformers": Package(gives="text encoders", add="pip install 'weft[models]'"),
    "accelerate": Package(gives="loading checkpoints", add="pip install 'weft[models]'"),
    "safetensors": Package(gives="model weights", add="pip install safetensors"),
    "av": Package(gives="writing video", add="pip install 'weft[models]'"),
    "PIL": Package(gives="writing pictures", add="pip install 'weft[models]'", distribution="pillow"),
    "fastapi": Package(gives="serving", add="pip install 'weft[serve]'"),
    "uvicorn": Package(gives="serving", add="pip install 'weft[serve]'"),
    "sse_starlette": Package(gives="serving", add="pip install 'weft[serve]'", distribution="sse-starlette"),
    "prometheus_client": Package(
        gives="metrics", add="pip install 'weft[serve]'", distribution="prometheus-client"
    ),
    "python_multipart": Package(
        gives="uploads", add="pip install 'weft[serve]'", distribution="python-multipart"
    ),
    "httpx": Package(gives="load on a server", add="pip install 'weft[serve]'"),
    "matplotlib": Package(gives="figures", add="pip install matplotlib"),
    "yunchang": Package(gives="a peer to measure against", add="pip install 'weft[bench]'"),
}
"""By the name that imports them."""


def missing_package(module: str) -> MissingError | None:
    """The error to show when `module` cannot be imported, if weft knows what adds it."""
    name = module.partition(".")[0]
    if name not in PACKAGES:
        return None
    package = PACKAGES[name]
    return MissingError(
        f"This needs {name} (for {package.gives}), which is not installed.",
        hint=f"Add it with: {package.add}",
    )
