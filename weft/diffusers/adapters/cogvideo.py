"""CogVideoX, CogView and EasyAnimate."""

from __future__ import annotations

from dataclasses import replace

from weft.diffusers.adapter import BLOCK, END, ROPE, Adapter
from weft.diffusers.grids import frames_first, patches

COG = Adapter(
    "CogVideoXTransformer3DModel",
    inputs={"transformer_blocks.0": BLOCK, "transformer_blocks.*": {"image_rotary_emb": ROPE}},
    gather=END,
    attention={"transformer_blocks.*.attn1": "text video"},
    grid=frames_first,
)
ADAPTERS = (
    COG,
    replace(COG, model="EasyAnimateTransformer3DModel", grid=patches),
    replace(COG, model="CogView4Transformer2DModel", grid=patches),
    replace(
        COG, model="CogView3PlusTransformer2DModel", inputs={"transformer_blocks.0": BLOCK}, grid=patches
    ),
)
