"""AttentionHook: inside one module, `scaled_dot_product_attention` is weft's, over the tokens of all ranks.

The module's own code runs as it is, on this rank's tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.diffusers.adapter import Shard
from weft.diffusers.checks import PlanSpec
from weft.diffusers.padding import Padding, padding_of
from weft.diffusers.shards import Counts
from weft.hooks.step_cache import cache_hooks
from weft.hooks.wrap import Args, Forward, FunctionMode, Kwargs
from weft.run.attention import attention
from weft.run.opaque import QKV, CallOptions, call, handle_of
from weft.run.transforms import untransformed

if TYPE_CHECKING:
    from weft.diffusers.region import ShardedRegion

BACKEND = "_weft_attention_backend"
"""Where a processor holds the backend that it was set to."""

IP_ADAPTERS = frozenset({"FluxIPAdapterAttnProcessor", "FluxIPAdapterJointAttnProcessor2_0"})
"""Processors that attend to the tokens of images after the attention of their module."""

_layout = lru_cache(1024)(Layout)


class AttentionHook:
    """Runs the forward of an attention module."""

    def __init__(self, region: ShardedRegion, name: str, module: nn.Module, streams: str, layer: int) -> None:
        self.region, self.name, self.module, self.layer = region, name, module, layer
        self.hidden: Tensor | None = None
        """The module's first tensor argument, while it runs."""
        self.padding: Padding | None = None
        """The last attention mask that was read."""
        calls = [each.strip() for each in streams.split(";")]
        self.turn = next(turn for turn, each in enumerate(calls) if each != "local")
        """Which of the module's attentions is over tokens of all ranks; the others have their keys whole."""
        processor = type(getattr(module, "processor", None)).__name__
        self.has_others = len(calls) > 1 or processor in IP_ADAPTERS
        self.drops_padding = streams.endswith("?")
        queries, _, keys = calls[self.turn].rstrip("?").partition("<-")
        self.streams = tuple(queries.split())
        self.keys = tuple(each for each in keys.split() if each != "*") or self.streams
        self.whole_keys = 0 if "*" in keys.split() else None
        """How many keys before the others are whole on every rank; None if none can be."""
        self.video = [stream for stream in self.streams if stream == "video"]
        self.handle = handle_of(self)

    def around(self, forward: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        mode = AttentionMode(self)
        if self.region.sparsity is not None:
            candidates = (*args, kwargs.get("hidden_states"))
            self.hidden = next((each for each in candidates if isinstance(each, Tensor)), None)
        try:
            with mode:
                out = self.region.around(forward, args, kwargs)
        finally:
            self.hidden = None
        if not mode.calls and not any(cache_hooks([self.module])):  # which may have skipped it
            raise InputError(
                f"{self.name} computed an attention that weft did not see, on this rank's tokens only.",
                hint="Give it a processor that calls scaled_dot_product_attention or dispatch_attention_fn.",
            )
        return out

    def attend(  # noqa: PLR0913 - scaled_dot_product_attention's own
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: ARG002, FBT001, FBT002 - implied by the heads
    ) -> Tensor:
        """Return the attention of this rank's queries to the keys of all ranks.

        For torch.compile this is one operation, so that a graph contains nothing that changes by step.
        """
        if dropout_p or is_causal:
            option = f"dropout_p={dropout_p}" if dropout_p else "is_causal=True"
            raise InputError(f"{self.name} calls attention with {option}, which weft cannot split.")
        if (probe := self.region.shards.probe_attention) is not None:
            return probe(self, query, key, value, scale)
        if not query.dtype == key.dtype == value.dtype and torch.is_autocast_enabled(query.device.type):
            lower = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(lower), key.to(lower), value.to(lower)
        qkv = query, key, value
        if torch.compiler.is_compiling() and not hasattr(self.region.sparsity, "finish"):
            return call(self.handle, qkv, mask=attn_mask, hidden=self.hidden, scale=scale)
        return self._attend(qkv, attn_mask, scale)

    def called(self, qkv: QKV, options: CallOptions) -> Tensor:
        """Compute an attention of a compiled module."""
        self.hidden = options.hidden
        try:
            return self._attend(qkv, options.mask, options.scale)
        finally:
            self.hidden = None

    def _attend(self, qkv: QKV, mask: Tensor | None, scale: float | None) -> Tensor:
        shards, rows, keys = self.region.shards, qkv[0].shape[2], qkv[1].shape[2]
        self.region.caches.computed += 1
        most, most_keys = shards.rows(self.streams), shards.rows(self.keys)
        if self.whole_keys is not None and keys >= most_keys:
            self.whole_keys, most_keys = keys - most_keys, keys
        is_short = self.drops_padding and rows == keys
        if rows > most or ((rows, keys) != (most, most_keys) and not is_short):
            raise InputError(
                f"{self.name} attends from {rows} to {keys} tokens; this rank has {most} of "
                f"{' and '.join(self.streams)}.",
                hint="If its keys are whole on every rank, its adapter must list it under local.",
            )
        if self.drops_padding:
            return self._sparse(qkv, scale, self._text_left(rows - shards.rows(self.video)))
        if mask is not None:
            return self._padded(qkv, mask, scale)
        if not self.is_self or not (self.video or self.region.adapter.grid is None):
            return self._attention(qkv, scale, _layout(*shards.runs(self.streams)), self.region.plan)
        if self.region.sparsity is not None or self.region.sampled_check is not None:
            return self._sparse(qkv, scale)
        return self._attention(qkv, scale, _layout(*shards.runs(self.streams)), self.region.plan)

    @property
    def is_self(self) -> bool:
        """Whether queries and keys are of the same tokens."""
        return self.keys == self.streams and self.whole_keys is None

    @property
    def key_layout(self) -> Layout:
        size, ranks = self.region.shards.runs(self.keys)
        if not (whole := self.whole_keys):
            return _layout(size, ranks)
        moved = (tuple((start + whole, stop + whole) for start, stop in runs) for runs in ranks)
        return _layout(size + whole, tuple(((0, whole), *runs) for runs in moved))

    # What has gradients of its own inside, as a gate of DSV's, torch.compile must not trace.
    vars(_attend)["_torchdynamo_disable"] = True

    def _text_left(self, count: int) -> Counts:
        """Return how many text tokens each rank has left in a module that drops padding.

        They must be the first: tokens that follow padding move to its positions, on each rank by itself.
        """
        shards = self.region.shards
        (text,) = (stream for stream in self.streams if stream != "video")
        left = tuple(count for (count,) in shards.world.comm.all_gather_ints([count]))
        short = [rank for rank in range(shards.ranks) if left[rank] < shards.rows([text], rank)]
        if short and any(left[short[0] + 1 :]) and not shards.is_replicated(text):
            raise InputError(
                f"{self.name} leaves out text tokens that others follow.", hint="Pad texts at their ends."
            )
        return left

    def _sparse(self, qkv: QKV, scale: float | None, text: Counts | None = None) -> Tensor:
        """Compute an attention with the mask of the sparse method, if there is one."""
        region, (q, k, _) = self.region, qkv
        layout = _layout(*region.shards.runs(self.streams, text))
        sparsity = region.sparsity
        if sparsity is None:
            return self._attention(qkv, scale, layout, region.plan)
        ctx = region.context(self, q, scale, layout)
        with untransformed(q, k) as values:
            mask = sparsity.mask(ctx, *values)
        if mask is None:
            out = self._attention(qkv, scale, layout, region.plan)
        else:
            reorder = getattr(sparsity, "tokens", None)
            tokens = layout if reorder is None else reorder(ctx)
            by_sample = mask.heads == q.shape[0] * q.shape[1] > q.shape[1]
            inputs = _batch_as_heads(qkv) if by_sample else qkv
            out = self._attention(inputs, scale, tokens, region.planned(ctx, mask, tokens, inputs), mask)
            out = out[0].unflatten(0, q.shape[:2]) if by_sample else out
        finish = getattr(sparsity, "finish", None)
        return out if finish is None else finish(ctx, *qkv, out)

    def _attention(
        self,
        qkv: QKV,
        scale: float | None,
        tokens: Layout,
        plan: PlanSpec,
        mask: BlockMask | None = None,
    ) -> Tensor:
        """Call `weft.attention`: the one place where a parallelized model does."""
        region, shards = self.region, self.region.shards
        kv_tokens = tokens if self.is_self else self.key_layout
        out = attention(
            *qkv, mask=mask, tokens=tokens, kv_tokens=kv_tokens,
            plan=plan, backend=region.backend, mesh=shards.mesh, scale=scale,
        )  # fmt: skip
        if region.sampled_check is not None and self.is_self:
            region.sampled_check.check(self.name, qkv, out, scale, mask, tokens, shards.world)
        return out

    def _padded(self, qkv: QKV, mask: Tensor, scale: float | None) -> Tensor:
        """Leave out the keys that a mask leaves out, and their queries, whose outputs are 0: none is read."""
        q, k, v = qkv
        padding = self.padding = padding_of(self, mask, q, self.padding)
        if padding.groups is None:
            return self._scored(qkv, mask, scale)
        if not padding.groups:
            return self._sparse(qkv, scale)
        out = torch.zeros_like(q)
        for samples, rows, text in padding.groups:
            at = rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
            own = [x.index_select(0, samples).gather(2, at[:, : x.shape[1]]) for x in (q, k, v)]
            rows_out = self._sparse((own[0], own[1], own[2]), scale, text)
            full = torch.zeros_like(q.index_select(0, samples)).scatter(2, at, rows_out)
            out = out.index_add(0, samples, full)
        return out

    def _scored(self, qkv: QKV, mask: Tensor, scale: float | None) -> Tensor:
        """Attend to all keys, which are gathered, with this rank's rows of a mask of all queries."""
        shards, (q, k, v) = self.region.shards, qkv
        if self.region.sparsity is not None:
            raise InputError(
                f"{self.name} has a mask of its own, beside which sparse= cannot be used.",
                hint="Leave out sparse=, or call the model without that mask.",
            )
        keys = Shard(" ".join(self.keys), 2)
        k, v = shards.gather(k, keys, self.name), shards.gather(v, keys, self.name)
        if mask.shape[-2] > 1:
            rows = _layout(*shards.runs(self.streams)).order(shards.world.comm.rank)
            mask = mask.index_select(-2, torch.from_numpy(rows).to(mask.device))
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


class AttentionMode(FunctionMode):
    """Replaces `scaled_dot_product_attention` by the attention of a hook."""

    functions = frozenset({F.scaled_dot_product_attention})

    def __init__(self, hook: AttentionHook) -> None:
        super().__init__()
        self.hook, self.calls = hook, 0

    def call(self, func: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        self.calls += 1
        if self.hook.has_others and self.calls != self.hook.turn + 1:
            return func(*args, **kwargs)
        return self.hook.attend(*args, **kwargs)


def _batch_as_heads(qkv: QKV) -> QKV:
    q, k, v = (x.flatten(0, 1)[None] for x in qkv)
    return q, k, v


def use_native_backend(module: nn.Module) -> None:
    """Set a processor to torch's attention: other backends of Diffusers cannot be intercepted."""
    processor = getattr(module, "processor", None)
    if (backend := getattr(processor, "_attention_backend", None)) is not None:
        vars(processor).update({BACKEND: backend, "_attention_backend": "native"})


def restore_backend(module: nn.Module) -> None:
    processor = getattr(module, "processor", None)
    if hasattr(processor, BACKEND):
        vars(processor)["_attention_backend"] = vars(processor).pop(BACKEND)
