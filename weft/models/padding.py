"""Padding: attention masks that leave out padded text, read once and then trusted on the device.

Reading a mask waits for the device. A pipeline passes the same mask tensors in every denoising step, so what
was read is cached with them; that a later mask is the same is asserted on the device, without waiting for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.models.shards import Counts

if TYPE_CHECKING:
    from weft.models.attend import Site

NEVER = -9e3
"""Added to a score, this or less leaves a weight of 0. Models add -10000, which in bfloat16 is -9984."""


class Group(NamedTuple):
    """Samples of a batch of which every rank has equally many tokens left."""

    samples: Tensor
    rows: Tensor
    """[samples, tokens]: those that count."""
    text: Counts
    """Text tokens that each rank has left."""


@dataclass(frozen=True)
class Padding:
    """What a mask says: the groups of samples, or none if no token is left out."""

    inputs: tuple[Any, ...]
    mask: Tensor
    groups: tuple[Group, ...]


def mask_inputs(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Identify the tensors that attention masks are made of: their memory and its version.

    Storages are held, so that no other tensor can take their place.
    """
    tensors = [
        x
        for name, value in given.items()
        if "mask" in name
        for x in tree_leaves(value)
        if isinstance(x, Tensor)
    ]
    return tuple(
        (x.untyped_storage(), x.storage_offset(), x.shape, x.stride(), x.dtype, _version(x)) for x in tensors
    )


def padding_of(site: Site, mask: Tensor, q: Tensor, known: Padding | None) -> Padding:
    """Return what a mask says; `known` if it was read before, in a step with the same inputs."""
    shards = site.region.shards
    inputs = (
        site.region.mask_inputs,
        shards.world,
        tuple(shards.sizes.items()),
        q.shape,
        mask.shape,
        q.device,
    )
    if known is not None and site.region.mask_inputs and _is_same(known.inputs, inputs):
        if mask is not known.mask:
            same = (mask == known.mask).all()
            torch.ops.aten._assert_async.msg(same, f"The attention mask of {site.name} has changed.")
        return known
    keep, counts = _kept(site, mask, q)
    full = all(row == [shards.rows(site.streams, rank)] * len(row) for rank, row in enumerate(counts))
    groups = () if full else tuple(_groups(site, keep, counts))
    return Padding(inputs, mask, groups)


def _is_same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Compare identities; storages have no equality of their own."""
    old, new = a[0], b[0]
    return a[1:] == b[1:] and len(old) == len(new) and all(
        x[0]._cdata == y[0]._cdata and x[1:] == y[1:] for x, y in zip(old, new, strict=True)
    )  # fmt: skip


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _groups(site: Site, keep: Tensor, counts: list[list[int]]) -> list[Group]:
    video = [site.region.shards.rows(site.video, rank) for rank in range(len(counts))]
    groups: list[Group] = []
    for lengths in sorted({tuple(row[b] for row in counts) for b in range(len(keep))}):
        samples = [b for b in range(len(keep)) if tuple(row[b] for row in counts) == lengths]
        rows = torch.stack([keep[b].nonzero().flatten() for b in samples])
        text = tuple(length - own for length, own in zip(lengths, video, strict=True))
        groups.append(Group(torch.tensor(samples, device=keep.device), rows, text))
    return groups


def _kept(site: Site, mask: Tensor, q: Tensor) -> tuple[Tensor, list[list[int]]]:
    """[B, rows]: the tokens of this rank that count; by rank and sample, how many do."""
    shards = site.region.shards
    layout, mine = Layout(*shards.runs(site.streams)), shards.world.comm.rank
    keep = _keeps(site.name, mask).expand(len(q), -1)
    if keep.shape[1] == layout.size and layout.size != q.shape[2]:
        orders = [torch.from_numpy(layout.order(rank)).to(keep.device) for rank in range(shards.ranks)]
        counts = [_counts(site, keep[:, order], rank) for rank, order in enumerate(orders)]
        keep = keep[:, orders[mine]]
    elif keep.shape[1] == q.shape[2]:
        counts = shards.world.comm.gather_numbers(_counts(site, keep, mine))
    else:
        raise InputError(
            f"{site.name} has a mask of {keep.shape[1]} keys; there are {layout.size}, {q.shape[2]} of "
            "them on this rank."
        )
    if any(-1 in row for row in counts):
        raise InputError(
            f"{site.name} has a mask that leaves out tokens of the video.",
            hint="weft leaves out padded text; for sparse attention use mask= of weft.parallelize.",
        )
    return keep, counts


def _counts(site: Site, keep: Tensor, rank: int) -> list[int]:
    """Tokens of each sample that count; -1 where some of the video do not."""
    shards = site.region.shards
    start = shards.rows(site.streams[: site.streams.index("video")], rank) if site.video else 0
    video = keep[:, start : start + shards.rows(site.video, rank)].all(1)
    return torch.where(video, keep.sum(1), -1).tolist()


def _keeps(name: str, mask: Tensor) -> Tensor:
    """[B or 1, keys]: whether a key counts, of a mask that is the same for all heads and queries that do."""
    mask = mask[(None,) * (4 - mask.dim())]
    seen = mask if mask.dtype == torch.bool else mask > NEVER
    keep = seen.any(2, keepdim=True).any(1, keepdim=True)
    differs = seen != keep if mask.dtype == torch.bool else (seen != keep) | (mask.masked_fill(~seen, 0) != 0)
    if mask.shape[2] == mask.shape[3]:
        differs = differs & keep.transpose(2, 3)
    if differs.any():
        raise InputError(
            f"{name} has a mask that differs by query or head, or adds to scores.",
            hint="weft splits attentions whose mask leaves out keys; sparse ones come from mask= of "
            "weft.parallelize.",
        )
    return keep[:, 0, 0]
