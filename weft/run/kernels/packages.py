"""Kernels of optional packages: load the package at its first use, and check its rule before each call."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from weft.core.errors import InputError, MissingError
from weft.core.install import install_command
from weft.run.kernels.choice import arch_of, broken_rule
from weft.run.kernels.merge import MergingKernel
from weft.run.kernels.rules import KernelSpec
from weft.run.kernels.tiles import Tiles


class PackageKernel(MergingKernel):
    """A kernel of a package's module that an extra of weft installs."""

    name: str
    grouped = True
    module: str
    extra: str

    def __init__(self, package: Any = None, arch: str = "") -> None:
        """Tests replace the package's module and the architecture."""
        self._arch = arch
        try:
            self._package = package or import_module(self.module)
        except ImportError as error:
            raise MissingError(
                f"backend={self.name!r} needs the package of {self.module}: {error}.",
                hint=f"Add it with: {install_command(self.extra)}",
            ) from error

    def check(self, q: Tensor, k: Tensor, tiles: Tiles, scale: float, *, backward: bool = False) -> str:
        """Return the architecture; raise if the package does not serve these operands there."""
        arch = self._arch or arch_of(q.device)
        spec = KernelSpec.of_operands(q, k, tiles, scale, backward=backward)
        if why := broken_rule(self.name, spec, arch):
            raise InputError(
                f"backend={self.name!r} cannot compute the {spec} on {arch}: {why}",
                hint="backend='auto' takes one that can.",
            )
        return arch
