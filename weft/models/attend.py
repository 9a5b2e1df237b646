"""Site: an attention module of a model, whose attention runs over everybody's tokens.

The module's own code runs as it is, on this rank's tokens; where it calls
`scaled_dot_product_attention`, weft's attention answers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.models.padding import Padding, padding_of
from weft.models.shards import Counts
from weft.run.attention import attention
from weft.run.opaque import call, handle_of
from weft.run.transforms import untransformed

if TYPE_CHECKING:
    from weft.models.region import Region

QKV = tuple[Tensor, Tensor, Tensor]
Forward = Callable[..., Any]


class Site:
    """What happens around the forward of an attention module."""

    def __init__(self, region: Region, name: str, module: nn.Module, streams: str, layer: int) -> None:
        self.region, self.name, self.module, self.layer = region, name, module, layer
        self.hidden: Tensor | None = None
        """What the module was given, while it runs."""
        self.padding: Padding | None = None
        """What the last attention mask said."""
        self.ragged = streams.endswith("?")
        self.streams = tuple(streams.rstrip("?").split())
        self.video = [stream for stream in self.streams if stream == "video"]
        self.handle = handle_of(self)

    def around(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        catch = _Catch(self)
        if self.region.sparsity is not None:
            given = (*args, kwargs.get("hidden_states"))
            self.hidden = next((each for each in given if isinstance(each, Tensor)), None)
        try:
            with catch:
                out = self.region.around(forward, args, kwargs)
        finally:
            self.hidden = None
        if not catch.caught:
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
        enable_gqa: bool = False,  # noqa: ARG002, FBT001, FBT002 - heads tell
    ) -> Tensor:
        """What scaled_dot_product_attention would give this rank's queries, had it everybody's keys.

        For torch.compile this is one operation, so that nothing of a step is part of a graph.
        """
        if dropout_p or is_causal:
            what = f"dropout_p={dropout_p}" if dropout_p else "is_causal=True"
            raise InputError(f"{self.name} asks for attention with {what}, which weft cannot split.")
        if (answer := self.region.shards.answer) is not None:
            return answer(self, query, key, value, scale)
        if not query.dtype == key.dtype == value.dtype and torch.is_autocast_enabled(query.device.type):
            lower = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(lower), key.to(lower), value.to(lower)
        qkv = query, key, value
        if torch.compiler.is_compiling() and not hasattr(self.region.sparsity, "finish"):
            return call(self.handle, qkv, mask=attn_mask, hidden=self.hidden, scale=scale)
        return self._attend(qkv, attn_mask, scale)

    def called(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, hidden: Any, scale: Any, _: Any) -> Tensor:
        """Answer an attention of a compiled module."""
        self.hidden = hidden
        try:
            return self._attend((q, k, v), mask, scale)
        finally:
            self.hidden = None

    def _attend(self, qkv: QKV, mask: Tensor | None, scale: float | None) -> Tensor:
        shards, rows, keys = self.region.shards, qkv[0].shape[2], qkv[1].shape[2]
        most = shards.rows(self.streams)
        if keys != rows or rows > most or (rows < most and not self.ragged):
            raise InputError(
                f"{self.name} attends from {rows} to {keys} tokens; this rank has {most} of "
                f"{' and '.join(self.streams)}.",
                hint="If its keys are whole on every rank, its adapter must list it under local.",
            )
        if self.ragged:
            return self._call(qkv, scale, self._left(rows - shards.rows(self.video)))
        if mask is not None:
            return self._padded(qkv, mask, scale)
        if self.region.watched:
            return self._call(qkv, scale)
        return self._attention(qkv, scale, shards.runs(self.streams), self.region.plan)

    # What has gradients of its own inside, as a gate of DSV's, torch.compile leaves to Python.
    _attend._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _left(self, count: int) -> Counts:
        """How many text tokens each rank has left in a module that drops padding: they must be the first.

        Others it would put in their places, as if there were no other ranks.
        """
        shards = self.region.shards
        (text,) = (stream for stream in self.streams if stream != "video")
        left = tuple(count for (count,) in shards.world.comm.gather_numbers([count]))
        short = [rank for rank in range(shards.ranks) if left[rank] < shards.rows([text], rank)]
        if short and any(left[short[0] + 1 :]) and not shards.is_whole(text):
            raise InputError(
                f"{self.name} leaves out text tokens that others follow.", hint="Pad texts at their ends."
            )
        return left

    def _call(self, qkv: QKV, scale: float | None, text: Counts | None = None) -> Tensor:
        region, (q, k, _) = self.region, qkv
        layout = Layout(*region.shards.runs(self.streams, text))
        if region.sparsity is None:
            return self._attention(qkv, scale, layout, region.plan)
        sparse: Any = region.sparsity
        ctx = region.context(self, q, scale, layout)
        with untransformed(q, k) as values:
            mask = sparse.mask(ctx, *values)
        if mask is None:
            out = self._attention(qkv, scale, layout, region.plan)
        else:
            tokens = sparse.tokens(ctx) if hasattr(sparse, "tokens") else layout
            by_sample = mask.heads == q.shape[0] * q.shape[1] > q.shape[1]
            given: Any = [x.flatten(0, 1)[None] for x in qkv] if by_sample else qkv
            plan = region.planned(ctx, mask, tokens, given)
            out = self._attention(given, scale, tokens, plan, mask)
            out = out[0].unflatten(0, q.shape[:2]) if by_sample else out
        return sparse.finish(ctx, *qkv, out) if hasattr(sparse, "finish") else out

    def _attention(
        self, qkv: QKV, scale: float | None, tokens: Any, plan: Any, mask: BlockMask | None = None
    ) -> Tensor:
        """The one call of a parallelized model, and the one check of it."""
        region, shards = self.region, self.region.shards
        how = {"plan": plan, "backend": region.backend, "mesh": shards.mesh, "scale": scale}
        out = attention(*qkv, mask=mask, tokens=tokens, kv_tokens=tokens, **how)
        if region.proof is not None:
            region.proof.check(self.name, qkv, out, scale, mask, tokens, shards.world)
        return out

    def _padded(self, qkv: QKV, mask: Tensor, scale: float | None) -> Tensor:
        """Leave out the keys that a mask leaves out, and their queries: nothing reads their outputs, 0."""
        q = qkv[0]
        padding = self.padding = padding_of(self, mask, q, self.padding)
        if not padding.groups:
            return self._call(qkv, scale)
        out = torch.zeros_like(q)
        for samples, rows, text in padding.groups:
            at = rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
            parts = [x.index_select(0, samples).gather(2, at[:, : x.shape[1]]) for x in qkv]
            part = self._call((parts[0], parts[1], parts[2]), scale, text)
            whole = torch.zeros_like(q.index_select(0, samples)).scatter(2, at, part)
            out = out.index_add(0, samples, whole)
        return out


class _Catch(TorchFunctionMode):
    """Answers the attention of a site."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site, self.caught = site, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.caught = True
            return self.site.attend(*args, **(kwargs or {}))
        return passed_on(func, args, kwargs or {})


def passed_on(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a function that a mode has no interest in.

    torch.compile can trace the methods of a tensor, but not the functions in Python behind some of them.
    """
    if isinstance(func, FunctionType) and getattr(Tensor, func.__name__, None) is func:
        return getattr(args[0], func.__name__)(*args[1:], **kwargs)
    return func(*args, **kwargs)
