"""Wan and what was made of it."""

from __future__ import annotations

from dataclasses import replace

from weft.diffusers.adapter import END, VIDEO, Adapter
from weft.diffusers.grids import patches

WAN = Adapter(
    "WanTransformer3DModel",
    inputs={"": {"timestep": VIDEO._replace(ndim=2)}},
    attention={"blocks.*.attn1": "video"},
    local=("blocks.*.attn2",),
    grid=patches,
    note="2.1 and 2.2, text and image to video",
)
ADAPTERS = (
    WAN,
    replace(WAN, model="ChronoEditTransformer3DModel", note=""),
    replace(
        WAN,
        model="SkyReelsV2Transformer3DModel",
        inputs={"blocks.0": {"hidden_states": VIDEO}},
        outputs={"rope": VIDEO},
        gather=END,
        note="without diffusion forcing",
    ),
    replace(
        WAN,
        model="WanVACETransformer3DModel",
        inputs={
            "blocks.0": {"hidden_states": VIDEO},
            "vace_blocks.0": {"hidden_states": VIDEO, "control_hidden_states": VIDEO},
        },
        outputs={"rope": VIDEO},
        gather=END,
        attention={"vace_blocks.*.attn1": "video", "blocks.*.attn1": "video"},
        local=("blocks.*.attn2", "vace_blocks.*.attn2"),
        note="",
    ),
)
