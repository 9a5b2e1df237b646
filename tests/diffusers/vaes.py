"""Tiny VAEs of the real Diffusers classes with random weights, and tilings of small latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.diffusers.toys import normal, seeded

SIDES = ("height", "width")


@dataclass(frozen=True)
class Case:
    """A VAE, how it tiles (3 or 4 latents on a side, one row shared, ragged edges) and what it is given."""

    name: str
    config: dict[str, Any]
    settings: dict[str, Any]
    shape: tuple[int, ...]
    tiles: int
    calls: int = 1
    """Of the decoder, for each tile."""

    def build(self, **settings: Any) -> Any:
        import diffusers  # here: ranks that build none need not wait for it

        vae = seeded(getattr(diffusers, self.name)(**self.config), dtype=torch.float32).eval()
        for name, value in ({"use_tiling": True} | self.settings | settings).items():
            assert hasattr(vae, name)
            setattr(vae, name, value)
        return vae

    def latents(self, dtype: torch.dtype = torch.float32, **sizes: int) -> Tensor:
        shape = [sizes.get("batch", self.shape[0]), *self.shape[1:]]
        return normal(*shape, dtype=dtype)


def tiling(scale: int) -> dict[str, int]:
    sizes = {"min": 3 * scale, "stride": 2 * scale}
    return {f"tile_sample_{what}_{side}": size for what, size in sizes.items() for side in SIDES}


def fixed(latent: int, sample: int) -> dict[str, int]:
    sizes = {"latent": latent, "sample": sample}
    return {f"tile_{what}_min_{side}": size for what, size in sizes.items() for side in SIDES}


IMAGES: dict[str, Any] = {
    "block_out_channels": (4, 4), "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4, "norm_num_groups": 2, "sample_size": 8,
}  # fmt: skip
VIDEOS: dict[str, Any] = {
    "block_out_channels": (4, 4, 4, 4), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2,
}  # fmt: skip
WAN: dict[str, Any] = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
WAN22 = {"patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
HUNYUAN15: dict[str, Any] = {
    "latent_channels": 4, "block_out_channels": (8, 8, 8), "layers_per_block": 1,
    "spatial_compression_ratio": 4, "temporal_compression_ratio": 2,
}  # fmt: skip
LTX: dict[str, Any] = {
    "latent_channels": 4, "block_out_channels": (8,) * 4, "layers_per_block": (1,) * 5, "patch_size": 1,
}  # fmt: skip
LTX1 = {"decoder_block_out_channels": (8,) * 4, "decoder_layers_per_block": (1,) * 5}
LTX2 = {
    "decoder_block_out_channels": (8,) * 3, "decoder_layers_per_block": (1,) * 4,
    "upsample_factor": (1,) * 3, "upsample_residual": (False,) * 3,
}  # fmt: skip
MOCHI: dict[str, Any] = {
    "encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4, "latent_channels": 4,
    "layers_per_block": (1,) * 5, "latents_mean": (0.0,) * 4, "latents_std": (1.0,) * 4,
}  # fmt: skip
DC: dict[str, Any] = {
    f"{part}_{what}": (value, value)
    for part in ("encoder", "decoder")
    for what, value in {
        "block_out_channels": 4, "layers_per_block": 1, "qkv_multiscales": (), "block_types": "ResBlock",
    }.items()
} | {"latent_channels": 4, "attention_head_dim": 4}  # fmt: skip
HUNYUAN_IMAGE: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 16, "block_out_channels": (32, 32),
    "layers_per_block": 1, "spatial_compression_ratio": 2, "sample_size": 8,
}  # fmt: skip
KVAE: dict[str, Any] = {
    "channels": 32, "num_enc_blocks": 1, "num_dec_blocks": 1, "z_channels": 4, "ch_mult": (1, 1),
    "sample_size": 8,
}  # fmt: skip
TINY: dict[str, Any] = {
    "encoder_block_out_channels": (4, 4), "decoder_block_out_channels": (4, 4),
    "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1),
}  # fmt: skip
FRAMES = {"tile_sample_min_num_frames": 8, "tile_sample_stride_num_frames": 4, "use_framewise_decoding": True}
LTX_FRAMES = FRAMES | {"tile_sample_min_num_frames": 16, "tile_sample_stride_num_frames": 8}

V, I = (1, 4, 2, 5, 4), (1, 4, 7, 5)  # noqa: E741 - a video, an image
LONG = (1, 4, 3, 5, 4)
CASES = {
    "kl": Case("AutoencoderKL", IMAGES, {}, (2, 4, 7, 5), 6),
    "flux2": Case("AutoencoderKLFlux2", IMAGES, {}, I, 6),
    "wan": Case("AutoencoderKLWan", WAN, tiling(8), V, 6, 2),
    "wan2.2": Case("AutoencoderKLWan", WAN | WAN22, tiling(16), V, 6, 2),
    "qwen": Case("AutoencoderKLQwenImage", WAN, tiling(8), V, 6, 2),
    "qwen2.1": Case(
        "AutoencoderKLQwenImage21",
        WAN | {"decoder_base_dim": 4, "dim_mult": [1] * 5},
        tiling(16),
        (1, 4, 1, 5, 4),
        6,
    ),
    "hunyuan": Case("AutoencoderKLHunyuanVideo", VIDEOS, tiling(8), V, 6),
    "hunyuan frames": Case("AutoencoderKLHunyuanVideo", VIDEOS, tiling(8) | FRAMES, LONG, 3 * 6),
    "hunyuan frames only": Case(
        "AutoencoderKLHunyuanVideo", VIDEOS, FRAMES | {"use_tiling": False}, (1, 4, 5, 3, 2), 5
    ),
    "hunyuan1.5": Case("AutoencoderKLHunyuanVideo15", HUNYUAN15, fixed(4, 16), (1, 4, 2, 7, 5), 6),
    "hunyuan image": Case("AutoencoderKLHunyuanImage", HUNYUAN_IMAGE, {}, (1, 16, 7, 5), 6),
    "refiner": Case(
        "AutoencoderKLHunyuanImageRefiner",
        HUNYUAN15,
        {f"tile_sample_min_{side}": 16 for side in SIDES},
        (1, 4, 2, 7, 5),
        6,
    ),
    "cogvideox": Case("AutoencoderKLCogVideoX", VIDEOS, fixed(3, 24), (1, 4, 5, 5, 4), 6, 2),
    "ltx": Case("AutoencoderKLLTXVideo", LTX | LTX1, tiling(8), V, 6),
    "ltx frames": Case("AutoencoderKLLTXVideo", LTX | LTX1, tiling(8) | LTX_FRAMES, LONG, 3 * 6),
    "ltx2": Case("AutoencoderKLLTX2Video", LTX | LTX2, tiling(16), (1, 4, 2, 6, 4), 6),
    "mochi": Case("AutoencoderKLMochi", MOCHI, tiling(8), V, 6),
    "mochi frames": Case(
        "AutoencoderKLMochi", MOCHI, tiling(8) | {"use_framewise_decoding": True}, LONG, 6, 2
    ),
    "allegro": Case(
        "AutoencoderKLAllegro", VIDEOS, {"kernel": (8, 24, 24), "stride": (4, 16, 8)}, LONG, 2 * 2 * 2
    ),
    "dc": Case("AutoencoderDC", DC, tiling(2) | fixed(3, 6), (1, 4, 5, 4), 6),
    "kvae": Case("AutoencoderKLKVAE", KVAE, {}, I, 6),
    "tiny": Case(
        "AutoencoderTiny",
        TINY,
        {"tile_latent_min_size": 4, "tile_overlap_factor": 0.25, "spatial_scale_factor": 2},
        I,
        6,
    ),
}
