"""Workload: the attention that `plan`, `simulate` and `report` evaluate, parsed from their options."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.numbers import sizes
from weft.core.errors import InputError

if TYPE_CHECKING:
    from weft.core.mask import BlockMask
    from weft.core.problem import Problem
    from weft.core.topology import Link, Topology
    from weft.simulate.models import ModelSizes

IN_PLACE_BANDWIDTH = 0.9e12
"""weft calibrate writes 1e12 bytes/s for ranks on CPUs that share memory, less rounding."""


@dataclass(frozen=True)
class Workload:
    """One attention of a model; a bare shape is a model of one layer."""

    model: ModelSizes
    grid: tuple[int, int, int]
    """(t, h, w) of the video's tokens."""
    spec: str
    block: int
    dtype: str

    @staticmethod
    def read(name: str, *, size: str, frames: int, mask: str, block: int, dtype: str) -> Workload:
        """Parse and validate the options, without building the mask."""
        model, grid = _bare(name, size, frames) or _known(name, size, frames)
        return Workload(model, grid, mask, block, dtype)

    @cached_property
    def mask(self) -> BlockMask:
        from weft.masks.grid import TokenGrid
        from weft.masks.spec import mask_from_spec

        grid = TokenGrid(*self.grid, prefix=self.model.text)
        return mask_from_spec(self.spec, heads=self.model.heads, grid=grid, block=self.block)

    def problem(self, ranks: int) -> Problem:
        from weft.core.layout import Layout
        from weft.core.problem import Problem

        (t, h, w), text, heads = self.grid, self.model.text, self.model.heads
        layout = Layout.even(t * h * w + text, ranks, prefix=text)
        dim = self.model.head_dim
        return Problem(
            batch=1, heads=heads, kv_heads=heads, head_dim=dim, q=layout, kv=layout, dtype=self.dtype
        )

    def __str__(self) -> str:
        (t, h, w), model = self.grid, self.model
        text = f" + {model.text} text" if model.text else ""
        return f"{model.name} · {t * h * w:,} tokens{text} · {model.heads} heads × {model.head_dim}"


def read_topology(text: str) -> Topology:
    from weft.core.topology import Topology
    from weft.simulate.clusters import cluster

    return Topology.from_toml(text) if text.endswith(".toml") or Path(text).is_file() else cluster(text)


def bandwidth(link: Link, topology: Topology) -> str:
    """Return a bandwidth as text, unless ranks read each other's memory in place: then no bytes are sent."""
    if topology.cores and link.bandwidth >= IN_PLACE_BANDWIDTH:
        return "memory read in place"
    gbytes = link.bandwidth / 1e9
    return f"{gbytes:,.0f} GB/s" if gbytes >= 100 else f"{gbytes:.3g} GB/s"


def assumed(topology: Topology, mask: BlockMask) -> dict[str, str]:
    """Return the kernel speeds and the host costs that predictions assume, one line each."""
    kernels = {"dense": topology.kernel} if mask.is_dense else {
        "sparse": topology.sparse_kernel, "dense": topology.kernel
    }  # fmt: skip
    speeds: list[str] = []
    for kind, kernel in kernels.items():
        name, _, source = kernel.partition(", ")
        flops = topology.attention_flops(sparse=kind == "sparse") / 1e12
        speeds.append(f"{name or 'kernel'} {flops:,.3g} {kind}" + f" ({source})" * bool(source))
    host = {field.name: 1e6 * getattr(topology.host, field.name) for field in fields(topology.host)}
    costs = (
        ", ".join(f"{name} {cost:.3g}" for name, cost in host.items()) if any(host.values()) else "nothing"
    )
    return {"kernel TFLOP/s": ", ".join(speeds), "host µs": costs}


def assumed_lines(topology: Topology, mask: BlockMask) -> str:
    return "\n".join(f"assumed {what}: {speeds}" for what, speeds in assumed(topology, mask).items())


def _bare(name: str, size: str, frames: int) -> tuple[ModelSizes, tuple[int, int, int]] | None:
    from weft.simulate.models import ModelSizes

    if not re.fullmatch(r"\d+(x\d+x\d+)?x\d+x\d+", name):
        return None
    *tokens, heads, dim = map(int, name.split("x"))
    if not min(*tokens, heads, dim):
        raise InputError(
            f"All sizes of {name} must be >= 1.", hint="Write TOKENSxHEADSxDIM, such as 32768x24x128."
        )
    if size or frames:
        raise InputError(f"{name} already has its token count.", hint="Leave out --size and --frames.")
    t, h, w = [1, 1, *tokens][-3:]
    return ModelSizes(name=name, layers=1, heads=heads, head_dim=dim, steps=1), (t, h, w)


def _known(name: str, size: str, frames: int) -> tuple[ModelSizes, tuple[int, int, int]]:
    from weft.simulate.models import model

    try:
        spec = model(name)
    except InputError as error:
        hint = f"{error.hint} Or write a shape, TOKENSxHEADSxDIM, such as 32768x24x128."
        raise InputError(error.message, hint=hint) from None
    width, height = sizes(size, "width x height", "1280x720") if size else (0, 0)
    if frames < 0:
        raise InputError(f"--frames must be >= 0, got {frames}.", hint="0 takes the default of the model.")
    return spec, spec.grid(width, height, frames)
