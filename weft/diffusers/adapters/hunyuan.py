"""HunyuanVideo, its successor and HunyuanImage."""

from __future__ import annotations

from dataclasses import replace

from weft.diffusers.adapter import BLOCK, END, ROPE, TEXT, Adapter, Shard
from weft.diffusers.grids import patches

FIRST = Shard("video", None)
HUNYUAN = Adapter(
    "HunyuanVideoTransformer3DModel",
    inputs={
        "transformer_blocks.0": BLOCK,
        "transformer_blocks.*": {"num_tokens": FIRST},
        "single_transformer_blocks.*": {"num_tokens": FIRST},
    },
    outputs={"rope": ROPE},
    gather=END,
    attention={"transformer_blocks.*.attn": "video text", "single_transformer_blocks.*.attn": "video text"},
    local=("context_embedder",),
    grid=patches,
    note="text and image to video",
)
ADAPTERS = (
    HUNYUAN,
    replace(
        HUNYUAN,
        model="HunyuanVideo15Transformer3DModel",
        inputs={"transformer_blocks.0": BLOCK, "transformer_blocks.*": {"attention_mask": TEXT}},
    ),
    replace(HUNYUAN, model="HunyuanImageTransformer2DModel", inputs={"transformer_blocks.0": BLOCK}, note=""),
)
