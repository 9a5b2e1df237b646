"""Video models that share nothing with others."""

from __future__ import annotations

from weft.diffusers.adapter import BLOCK, END, ROPE, TEXT, VIDEO, Adapter
from weft.diffusers.grids import from_sizes, patches

TIMES = {"embedded_timestep": VIDEO._replace(ndim=3), "temb": VIDEO._replace(ndim=3)}
"""Where each token has its own."""
ADAPTERS = (
    Adapter(
        "CosmosTransformer3DModel",
        inputs={
            "transformer_blocks.0": {"hidden_states": VIDEO},
            "transformer_blocks.*": TIMES | {"extra_pos_emb": VIDEO},
            "norm_out": TIMES,
        },
        outputs={"rope": ROPE},
        gather=END,
        attention={"transformer_blocks.*.attn1": "video"},
        local=("transformer_blocks.*.attn2",),
        grid=patches,
    ),
    Adapter(
        "LTXVideoTransformer3DModel",
        inputs={"": {"hidden_states": VIDEO, "timestep": VIDEO._replace(ndim=2)}},
        outputs={"rope": VIDEO},
        gather=END,
        attention={"transformer_blocks.*.attn1": "video"},
        local=("transformer_blocks.*.attn2",),
        grid=from_sizes,
    ),
    Adapter(
        "MochiTransformer3DModel",
        inputs={"transformer_blocks.0": BLOCK, "transformer_blocks.*": {"encoder_attention_mask": TEXT}},
        outputs={"rope": ROPE},
        gather=END,
        attention={"transformer_blocks.*.attn1": "video text?"},
        grid=patches,
    ),
    Adapter(
        "AllegroTransformer3DModel",
        inputs={
            "transformer_blocks.0": {"hidden_states": VIDEO},
            "transformer_blocks.*": {"image_rotary_emb": (None, VIDEO)},
        },
        gather=END,
        attention={"transformer_blocks.*.attn1": "video"},
        local=("transformer_blocks.*.attn2",),
        grid=patches,
    ),
    Adapter("LatteTransformer3DModel", attention={}, note="by switching the sharded dim"),
)
