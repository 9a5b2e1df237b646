"""Encode each prompt once over the calls of a pipeline."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.utils._pytree import tree_leaves

from weft.diffusers.guidance import PLAIN_TYPES
from weft.generate.pretrained import PretrainedPipeline
from weft.generate.state import Value

MAX_PROMPTS = 16
"""Prompts whose encoding is cached."""
Method = Callable[..., Any]


def remember_prompts(pipe: PretrainedPipeline) -> None:
    """Cache the encoded prompts of a pipeline over its calls."""
    encode: Method | None = getattr(pipe, "encode_prompt", None)
    if encode is None:
        return
    cache: OrderedDict[str, Value] = OrderedDict()

    @wraps(encode)
    def encode_prompt(*args: Value, **kwargs: Value) -> Value:
        if not all(isinstance(leaf, PLAIN_TYPES) for leaf in tree_leaves((args, kwargs))):
            return encode(*args, **kwargs)
        key = repr((args, sorted(kwargs.items())))
        cache[key] = cache.pop(key) if key in cache else encode(*args, **kwargs)
        if len(cache) > MAX_PROMPTS:
            cache.popitem(last=False)
        return cache[key]

    setattr(pipe, "encode_prompt", encode_prompt)  # noqa: B010 - not in the protocol
