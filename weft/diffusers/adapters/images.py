"""Image models."""

from __future__ import annotations

from dataclasses import replace

from weft.diffusers.adapter import BLOCK, CONTROL, END, ROPE, SELF, TEXT, VIDEO, Adapter, Shard
from weft.diffusers.grids import from_ids, from_shapes, patches

JOINT = Shard("joint", 1)
"""Text and image in one tensor, in places that differ by sample."""


def _refined(
    model: str, attention: str, *, tokens: str, mask: str, rope: str, end: str, note: str = ""
) -> Adapter:
    """Return the adapter of a model that refines text and image apart, then attends to both together."""
    return Adapter(
        model,
        inputs={
            "": {"controlnet_block_samples": JOINT},
            "noise_refiner.0": {tokens: VIDEO},
            "noise_refiner.*": {mask: VIDEO, rope: VIDEO},
            "layers.0": {tokens: JOINT},
            "layers.*": {mask: JOINT, rope: JOINT},
        },
        gather={"noise_refiner.1": VIDEO, end: JOINT},
        attention={f"noise_refiner.*.{attention}": "video", f"layers.*.{attention}": "joint"},
        local=(f"context_refiner.*.{attention}",),
        note=note,
    )


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
    Adapter(
        "SD3Transformer2DModel",
        inputs={"": {"block_controlnet_hidden_states": VIDEO}},
        outputs={"pos_embed": VIDEO, "context_embedder": TEXT},
        gather=END,
        attention={"transformer_blocks.*.attn": "video text", "transformer_blocks.*.attn2": "video"},
        grid=patches,
    ),
    replace(
        FLUX,
        model="AuraFlowTransformer2DModel",
        inputs={"joint_transformer_blocks.0": BLOCK},
        attention={f"{kind}_transformer_blocks.*.attn": "text video" for kind in ("joint", "single")},
        grid=patches,
    ),
    replace(SELF, model="PixArtTransformer2DModel", outputs={"pos_embed": VIDEO}),
    Adapter(
        "QwenImageTransformer2DModel",
        inputs={"": CONTROL},
        streams=dict.fromkeys(("encoder_hidden_states", "encoder_hidden_states_mask", "pos_embed.1"), "text"),
        attention={"transformer_blocks.*.attn": "text video"},
        grid=from_shapes,
    ),
    _refined(
        "Lumina2Transformer2DModel", "attn",
        tokens="hidden_states", mask="attention_mask", rope="image_rotary_emb", end="norm_out",
    ),
    _refined(
        "ZImageTransformer2DModel", "attention",
        tokens="x", mask="attn_mask", rope="freqs_cis", end="all_final_layer.*", note="text to image",
    ),
    Adapter(
        "JoyImageEditTransformer3DModel",
        inputs={
            "double_blocks.0": BLOCK,
            "double_blocks.*": {"image_rotary_emb": (ROPE, Shard("text", 0))},
        },
        gather={"double_blocks.-1": (VIDEO, TEXT)},
        attention={"double_blocks.*.attn": "video text"},
        grid=patches,
    ),
    Adapter(
        "JoyImageEditPlusTransformer3DModel",
        inputs={"double_blocks.0": BLOCK, "double_blocks.*": {"image_rotary_emb": VIDEO}},
        gather={"double_blocks.-1": (VIDEO, TEXT)},
        attention={"double_blocks.*.attn": "video text"},
    ),
    Adapter(
        "PRXTransformer2DModel",
        inputs={
            "blocks.0": {"hidden_states": VIDEO},
            "blocks.*": {"image_rotary_emb": Shard("video", 2)},
        },
        gather={"blocks.-1": VIDEO},
        attention={"blocks.*.attention": "video <- * video"},
        note="without a mask of the text",
    ),
)  # fmt: skip
