"""Tokens into voxel order and back, along any axis of a tensor; gradients flow through both."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.core.voxels import Voxels


def group(x: Tensor, voxels: Voxels, dim: int = -2) -> Tensor:
    """The tokens of axis `dim` so that every whole cube of the grid is a run of `voxels.block`."""
    _check(x, voxels, dim)
    return x.index_select(dim, _index(voxels, x.device, back=False))


def ungroup(x: Tensor, voxels: Voxels, dim: int = -2) -> Tensor:
    """What `group` was given."""
    _check(x, voxels, dim)
    return x.index_select(dim, _index(voxels, x.device, back=True))


def _check(x: Tensor, voxels: Voxels, dim: int) -> None:
    if x.shape[dim] != voxels.length:
        raise InputError(
            f"Axis {dim} of shape {tuple(x.shape)} is not the {voxels.length} tokens of {voxels}.",
            hint="Name the axis of the tokens with dim=.",
        )


@lru_cache(maxsize=32)
def _index(voxels: Voxels, device: torch.device, *, back: bool) -> Tensor:
    return torch.from_numpy(voxels.inverse if back else voxels.order).to(device)
