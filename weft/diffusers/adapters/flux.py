"""FLUX and the image models of its kind."""

from __future__ import annotations

from dataclasses import replace

from weft.diffusers.adapter import BLOCK, CONTROL, END, Adapter, Shard
from weft.diffusers.grids import from_ids

FLUX = Adapter(
    "FluxTransformer2DModel",
    inputs={"": {**BLOCK, **CONTROL, "img_ids": Shard("video", -2), "txt_ids": Shard("text", -2)}},
    gather=END,
    attention={"transformer_blocks.*.attn": "text video", "single_transformer_blocks.*.attn": "text video"},
    grid=from_ids,
)
ADAPTERS = (
    FLUX,
    *(
        replace(FLUX, model=f"{name}Transformer2DModel")
        for name in ("Flux2", "Bria", "OvisImage", "LongCatImage")
    ),
)
