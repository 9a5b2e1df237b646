"""Video models, and image models that are made like one of them."""

from __future__ import annotations

from dataclasses import replace

from weft.diffusers.adapter import BLOCK, END, ROPE, SELF, TEXT, VIDEO, Adapter, Shard
from weft.diffusers.grids import frames_first, from_sizes, patches

FIRST = {"hidden_states": VIDEO}
TIMES = {"embedded_timestep": VIDEO._replace(ndim=3), "temb": VIDEO._replace(ndim=3)}
"""Where each token has its own."""
COUNT = {"num_tokens": Shard("video", None)}
WAN = Adapter(
    "WanTransformer3DModel",
    inputs={"": {"timestep": VIDEO._replace(ndim=2)}},
    attention={"vace_blocks.*.attn1": "video", "blocks.*.attn1": "video"},
    local=("blocks.*.attn2", "vace_blocks.*.attn2"),
    grid=patches,
    note="2.1 and 2.2, text and image to video",
)
HUNYUAN = Adapter(
    "HunyuanVideoTransformer3DModel",
    inputs={
        "transformer_blocks.0": BLOCK,
        "transformer_blocks.*": COUNT,
        "single_transformer_blocks.*": COUNT,
    },
    outputs={"rope": ROPE},
    gather=END,
    attention={"transformer_blocks.*.attn": "video text", "single_transformer_blocks.*.attn": "video text"},
    local=("context_embedder",),
    grid=patches,
    note="text and image to video",
)
COG = Adapter(
    "CogVideoXTransformer3DModel",
    inputs={"transformer_blocks.0": BLOCK, "transformer_blocks.*": {"image_rotary_emb": ROPE}},
    gather=END,
    attention={"transformer_blocks.*.attn1": "text video"},
    grid=frames_first,
)
ADAPTERS = (
    WAN,
    replace(WAN, model="ChronoEditTransformer3DModel", note=""),
    replace(
        WAN,
        model="SkyReelsV2Transformer3DModel",
        inputs={"blocks.0": FIRST, "blocks.*": {"temb": Shard("video", 2, ndim=4)}},
        outputs={"rope": VIDEO},
        gather={"blocks.-1": VIDEO},  # with diffusion forcing, each token has its own scale after them
        note="with diffusion forcing",
    ),
    replace(
        WAN,
        model="WanVACETransformer3DModel",
        inputs={"blocks.0": FIRST, "vace_blocks.0": {**FIRST, "control_hidden_states": VIDEO}},
        outputs={"rope": VIDEO},
        gather=END,
        note="",
    ),
    HUNYUAN,
    replace(
        HUNYUAN,
        model="HunyuanVideo15Transformer3DModel",
        inputs={"transformer_blocks.0": BLOCK, "transformer_blocks.*": {"attention_mask": TEXT}},
    ),
    replace(HUNYUAN, model="HunyuanImageTransformer2DModel", inputs={"transformer_blocks.0": BLOCK}, note=""),
    COG,
    *(
        replace(COG, model=f"{name}Model", grid=patches)
        for name in ("EasyAnimateTransformer3D", "CogView4Transformer2D")
    ),
    replace(
        COG, model="CogView3PlusTransformer2DModel", inputs={"transformer_blocks.0": BLOCK}, grid=patches
    ),
    replace(
        SELF,
        model="CosmosTransformer3DModel",
        inputs={
            "transformer_blocks.0": FIRST,
            "transformer_blocks.*": TIMES | {"extra_pos_emb": VIDEO, "controlnet_residual": VIDEO},
            "norm_out": TIMES,
        },
        outputs={"rope": ROPE},
    ),
    replace(
        SELF,
        model="LTXVideoTransformer3DModel",
        inputs={"": {"hidden_states": VIDEO, "timestep": VIDEO._replace(ndim=2)}},
        outputs={"rope": VIDEO},
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
    replace(
        SELF,
        model="AllegroTransformer3DModel",
        inputs={
            "transformer_blocks.0": FIRST,
            "transformer_blocks.*": {"image_rotary_emb": (None, VIDEO)},
        },
    ),
    Adapter("LatteTransformer3DModel", attention={}, note="by switching the sharded dim"),
)
