"""Lumina 2 and Z-Image: text and image are refined apart, then attended to together."""

from __future__ import annotations

from weft.diffusers.adapter import VIDEO, Adapter, Shard

JOINT = Shard("joint", 1)
"""Text and video in one tensor, in places that differ by sample."""
ADAPTERS = (
    Adapter(
        "Lumina2Transformer2DModel",
        inputs={
            "noise_refiner.0": {"hidden_states": VIDEO},
            "noise_refiner.*": {"image_rotary_emb": VIDEO},
            "layers.0": {"hidden_states": JOINT},
            "layers.*": {"attention_mask": JOINT, "image_rotary_emb": JOINT},
        },
        gather={"noise_refiner.1": VIDEO, "norm_out": JOINT},
        attention={"noise_refiner.*.attn": "video", "layers.*.attn": "joint"},
        local=("context_refiner.*.attn",),
    ),
    Adapter(
        "ZImageTransformer2DModel",
        inputs={
            "noise_refiner.0": {"x": VIDEO},
            "noise_refiner.*": {"attn_mask": VIDEO, "freqs_cis": VIDEO},
            "layers.0": {"x": JOINT},
            "layers.*": {"attn_mask": JOINT, "freqs_cis": JOINT},
        },
        gather={"noise_refiner.1": VIDEO, "all_final_layer.*": JOINT},
        attention={"noise_refiner.*.attention": "video", "layers.*.attention": "joint"},
        local=("context_refiner.*.attention",),
        note="text to image",
    ),
)
