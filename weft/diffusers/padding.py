"""Attention masks that leave out padded text: read once, then asserted on the device.

Reading a mask waits for the device. A pipeline passes the same mask tensors in every denoising step, so what
was read is cached with them; that a later mask is the same is asserted on the device, without waiting for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import PyTree, tree_leaves

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.diffusers.shards import Counts
from weft.hooks.digest import version_of

if TYPE_CHECKING:
    from weft.diffusers.attention_hook import AttentionHook

MASKED_SCORE = -9e3
"""Added to a score, this or less leaves a weight of 0. Models add -10000, which in bfloat16 is -9984."""


class SampleGroup(NamedTuple):
    """Samples of a batch of which every rank has equally many tokens left."""

    samples: Tensor
    rows: Tensor
    """[samples, tokens]: those that count."""
    text: Counts
    """Text tokens that each rank has left."""


class MaskInputs(NamedTuple):
    """The tensors that attention masks are made of: their memory, and what identifies it and its version.

    Storages are held, so that no other tensor can take their place; they have no equality of their own.
    """

    storages: tuple[torch.UntypedStorage, ...] = ()
    identity: tuple[tuple[PyTree, ...], ...] = ()


class Padding(NamedTuple):
    """A mask that was read: the groups of samples, or none if no token is left out.

    groups   None: the mask differs by query or head, adds to scores or leaves out video.
    """

    inputs: MaskInputs
    key: tuple[PyTree, ...]
    mask: Tensor
    groups: tuple[SampleGroup, ...] | None


def mask_inputs(arguments: Mapping[str, PyTree]) -> MaskInputs:
    """Return the tensors among a model's arguments that attention masks are made of."""
    leaves = [leaf for name, value in arguments.items() if "mask" in name for leaf in tree_leaves(value)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    storages = tuple(x.untyped_storage() for x in tensors)
    views = ((x.storage_offset(), x.shape, x.stride(), x.dtype, version_of(x)) for x in tensors)
    return MaskInputs(
        storages, tuple((each._cdata, *view) for each, view in zip(storages, views, strict=True))
    )


def padding_of(hook: AttentionHook, mask: Tensor, q: Tensor, cached: Padding | None) -> Padding:
    """Read a mask; return `cached` if it was read in a step with the same inputs."""
    shards, inputs = hook.region.shards, hook.region.mask_inputs
    key = inputs.identity, shards.world, tuple(shards.sizes.items()), q.shape, mask.shape, q.device
    if cached is not None and inputs.storages and key == cached.key:
        if mask is not cached.mask:
            same = (mask == cached.mask).all()
            torch.ops.aten._assert_async.msg(same, f"The attention mask of {hook.name} has changed.")
        return cached
    read = _unmasked_rows(hook, mask, q)
    if read is None:
        return Padding(inputs, key, mask, None)
    keep, counts = read
    full = all(row == [shards.rows(hook.streams, rank)] * len(row) for rank, row in enumerate(counts))
    groups = () if full else tuple(_groups(hook, keep, counts))
    return Padding(inputs, key, mask, groups)


def _groups(hook: AttentionHook, keep: Tensor, counts: list[list[int]]) -> list[SampleGroup]:
    video = [hook.region.shards.rows(hook.video, rank) for rank in range(len(counts))]
    lengths_of = list(zip(*counts, strict=True))  # of each sample, by rank
    groups: list[SampleGroup] = []
    for lengths in sorted({*lengths_of}):
        samples = [sample for sample, each in enumerate(lengths_of) if each == lengths]
        rows = torch.stack([keep[sample].nonzero().flatten() for sample in samples])
        text = tuple(length - own for length, own in zip(lengths, video, strict=True))
        groups.append(SampleGroup(torch.tensor(samples, device=keep.device), rows, text))
    return groups


def _unmasked_rows(hook: AttentionHook, mask: Tensor, q: Tensor) -> tuple[Tensor, list[list[int]]] | None:
    """Return [B, rows]: the tokens of this rank that count; and by rank and sample, how many do.

    None: the mask of all queries and keys is more than that.
    """
    shards = hook.region.shards
    layout, own_rank = Layout(*shards.runs(hook.streams)), shards.world.comm.rank
    of_all = mask.shape[-1] == hook.key_layout.size and mask.shape[-2] in (1, layout.size)
    keep = _unmasked_keys(mask) if hook.is_self else None
    if keep is None:
        if of_all:
            return None
        raise InputError(
            f"{hook.name} has a mask that differs by query or head, or adds to scores, of some tokens only.",
            hint="weft splits such attentions if their mask has all queries and all keys on every rank.",
        )
    keep = keep.expand(len(q), -1)
    if keep.shape[1] == layout.size and layout.size != q.shape[2]:
        orders = [torch.from_numpy(layout.order(rank)).to(keep.device) for rank in range(shards.ranks)]
        counts = [_counts(hook, keep[:, order], rank) for rank, order in enumerate(orders)]
        keep = keep[:, orders[own_rank]]
    elif keep.shape[1] == q.shape[2]:
        counts = shards.world.comm.all_gather_ints(_counts(hook, keep, own_rank))
    else:
        raise InputError(
            f"{hook.name} has a mask of {keep.shape[1]} keys; there are {layout.size}, {q.shape[2]} of "
            "them on this rank."
        )
    if any(-1 in row for row in counts):
        if of_all:
            return None
        raise InputError(
            f"{hook.name} has a mask that leaves out tokens of the video.",
            hint="weft leaves out padded text; for sparse attention use sparse= of weft.parallelize.",
        )
    return keep, counts


def _counts(hook: AttentionHook, keep: Tensor, rank: int) -> list[int]:
    """Count the unmasked tokens of each sample; -1 if any video token is masked."""
    shards = hook.region.shards
    start = shards.rows(hook.streams[: hook.streams.index("video")], rank) if hook.video else 0
    video = keep[:, start : start + shards.rows(hook.video, rank)].all(1)
    return torch.where(video, keep.sum(1), -1).tolist()


def _unmasked_keys(mask: Tensor) -> Tensor | None:
    """Return [B or 1, keys]: whether a key counts; None if heads, or queries that count, do not agree."""
    mask = mask[(None,) * (4 - mask.dim())]
    is_bool = mask.dtype == torch.bool
    unmasked = mask if is_bool else mask > MASKED_SCORE
    keep = unmasked.any(2, keepdim=True).any(1, keepdim=True)
    differs = unmasked != keep
    if not is_bool:
        differs |= mask.masked_fill(~unmasked, 0) != 0
    if mask.shape[2] == mask.shape[3]:
        differs = differs & keep.transpose(2, 3)
    return None if differs.any() else keep[:, 0, 0]
