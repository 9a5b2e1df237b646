"""Image models that share nothing with others."""

from __future__ import annotations

from weft.diffusers.adapter import BLOCK, CONTROL, END, TEXT, VIDEO, Adapter
from weft.diffusers.grids import from_shapes, patches

ADAPTERS = (
    Adapter(
        "SD3Transformer2DModel",
        inputs={"": {"block_controlnet_hidden_states": VIDEO}},
        outputs={"pos_embed": VIDEO, "context_embedder": TEXT},
        gather=END,
        attention={"transformer_blocks.*.attn": "video text", "transformer_blocks.*.attn2": "video"},
        grid=patches,
    ),
    Adapter(
        "AuraFlowTransformer2DModel",
        inputs={"joint_transformer_blocks.0": BLOCK},
        gather=END,
        attention={
            "joint_transformer_blocks.*.attn": "text video",
            "single_transformer_blocks.*.attn": "text video",
        },
        grid=patches,
    ),
    Adapter(
        "PixArtTransformer2DModel",
        outputs={"pos_embed": VIDEO},
        gather=END,
        attention={"transformer_blocks.*.attn1": "video"},
        local=("transformer_blocks.*.attn2",),
        grid=patches,
    ),
    Adapter(
        "QwenImageTransformer2DModel",
        inputs={"": CONTROL},
        streams={
            "encoder_hidden_states": "text",
            "encoder_hidden_states_mask": "text",
            "pos_embed.1": "text",
        },
        attention={"transformer_blocks.*.attn": "text video"},
        grid=from_shapes,
    ),
)
