"""FLUX and the image models of its kind."""

from __future__ import annotations

from dataclasses import replace

from weft.models.adapter import BLOCK, CONTROL, END, Adapter, Cut
from weft.models.grids import ids

FLUX = Adapter(
    "FluxTransformer2DModel",
    inputs={"": {**BLOCK, **CONTROL, "img_ids": Cut("video", -2), "txt_ids": Cut("text", -2)}},
    gather=END,
    attention={"transformer_blocks.*.attn": "text video", "single_transformer_blocks.*.attn": "text video"},
    grid=ids,
)
ADAPTERS = (
    FLUX,
    *(
        replace(FLUX, model=f"{name}Transformer2DModel")
        for name in ("Flux2", "Bria", "OvisImage", "LongCatImage")
    ),
)
