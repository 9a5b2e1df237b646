"""Whole tiny pipelines of the real Diffusers classes, with random weights: no test downloads anything.

    pipe = tiny_wan()                    # a pipeline: text encoder, tokenizer, transformer, VAE, scheduler
    tiny_flux(tmp_path / "flux")         # the same, saved there as a checkpoint directory
    pipe(PROMPT, **CALLS["wan"], generator=torch.Generator().manual_seed(0))
    TINY["sd3"](), CALLS["sd3"]          # all of them by name, and arguments of a call that takes a second

Weights are the same in every process (one seed for all). Head counts and token counts are awkward on
purpose: 3 heads or 5, and sequences that no rank count above 1 divides where the model allows it.
`tiny_wan(moe=True)`, "wan2.2", has two transformers. Needs diffusers and
transformers; to load a saved Wan again, Diffusers wants accelerate. Mochi warns of a CPU autocast.
`arguments(name)` are those of a call to latents, with two branches of guidance or one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.diffusers.encoders import IMAGE, TEXT, clip, llama, numbered, qwen, t5, vision
from tests.diffusers.toys import normal, seeded

diffusers: Any = import_module("diffusers")  # its classes are there when they are asked for

PROMPT = "a loom at work"
NEGATIVE = "blurry"
WORDS = 17
"""Tokens of text: the prompt and some padding."""

_STEPS: dict[str, Any] = {"num_inference_steps": 4, "max_sequence_length": WORDS}
_WAN = {**_STEPS, "height": 48, "width": 80, "num_frames": 9}
CALLS: dict[str, dict[str, Any]] = {
    "wan": _WAN,
    "wan2.2": _WAN,
    "wan-i2v": {**_WAN, "image": Image.linear_gradient("L").convert("RGB")},
    "hunyuan": {**_WAN, "prompt_template": {"template": "{}", "crop_start": 0}},
    "allegro": {**_WAN, "num_frames": 12, "clean_caption": False},
    "ltx": {**_STEPS, "height": 96, "width": 160, "num_frames": 17},
    "cogvideox": {**_STEPS, "height": 48, "width": 80, "num_frames": 9},
    "latte": {"num_inference_steps": 4, "height": 16, "width": 16, "video_length": 5, "clean_caption": False},
    "mochi": {**_STEPS, "height": 48, "width": 80, "num_frames": 7},
    "flux": {**_STEPS, "height": 48, "width": 80},
    "sd3": {**_STEPS, "height": 48, "width": 80},
    "qwen": {**_STEPS, "height": 48, "width": 80},
}
"""Sizes for a call of each pipeline."""


def arguments(name: str, *, branches: int = 2) -> dict[str, Any]:
    """What a pipeline is called with, for latents with classifier-free guidance, or without."""
    given = {**CALLS[name], "prompt": PROMPT, "output_type": "latent", "return_dict": False}
    if branches == 2:
        given["negative_prompt"] = NEGATIVE
    if name == "wan-i2v":  # to read words, this pipeline needs ftfy
        for seed, key in enumerate(key for key in ("prompt", "negative_prompt") if given.pop(key, None)):
            given[f"{key}_embeds"] = normal(1, WORDS, TEXT, seed=seed, dtype=torch.float32)
    given["true_cfg_scale" if name in ("flux", "hunyuan", "qwen") else "guidance_scale"] = 2.0 * branches - 1
    return given


def _tiny(build: Callable[..., Any]) -> Callable[..., Any]:
    """Every process draws the same weights; a directory gets them as a checkpoint."""

    @wraps(build)
    def built(directory: Path | str | None = None, **options: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe = build(**options)
        for name, part in pipe.components.items():
            if isinstance(part, torch.nn.Module):
                part.eval()  # as from_pretrained does
            if name.startswith("transformer") and part is not None:
                seeded(part, seed=len(name), dtype=torch.float32)  # two transformers differ
                with torch.no_grad():  # the larger, the more does one token say in another
                    for parameter in part.parameters():
                        parameter.mul_(2)
        pipe.set_progress_bar_config(disable=True)
        if directory is not None:
            pipe.save_pretrained(directory)
        return pipe

    return built


def _kl(latent: int) -> Any:
    """The VAE of images, eight times smaller on each side."""
    return diffusers.AutoencoderKL(
        block_out_channels=(4,) * 4, down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=latent, norm_num_groups=2,
        sample_size=32, shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip


def _wan(**config: Any) -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=3, attention_head_dim=12, num_layers=2, ffn_dim=24, text_dim=TEXT, freq_dim=16,
        rope_max_seq_len=32, **config,
    )  # fmt: skip


def _wan_parts() -> dict[str, Any]:
    return {
        **t5("UMT5"),
        "vae": diffusers.AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


@_tiny
def tiny_wan(*, moe: bool = False) -> Any:
    """Text to video; self- and cross-attention, 3 heads, 3 × 3 × 5 tokens."""
    more = {"transformer_2": _wan(), "boundary_ratio": 0.8} if moe else {}
    return diffusers.WanPipeline(**_wan_parts(), transformer=_wan(), **more)


@_tiny
def tiny_wan_i2v() -> Any:
    """Text and image to video; the image's embeddings in cross-attention."""
    transformer = _wan(in_channels=36, image_dim=IMAGE, added_kv_proj_dim=36)
    return diffusers.WanImageToVideoPipeline(**_wan_parts(), **vision(), transformer=transformer)


@_tiny
def tiny_hunyuan() -> Any:
    """Text to video; joint attention that leaves out padded text, 3 heads, 3 × 3 × 5 tokens."""
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=12, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, mlp_ratio=1.0, text_embed_dim=TEXT,
        pooled_projection_dim=TEXT, rope_axes_dim=(4, 4, 4), guidance_embeds=True,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLHunyuanVideo(
        block_out_channels=(4,) * 4, latent_channels=4, layers_per_block=1, norm_num_groups=2
    )
    return diffusers.HunyuanVideoPipeline(
        **llama(),
        **numbered(clip(projected=False), 2),
        transformer=transformer,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


@_tiny
def tiny_allegro() -> Any:
    """Text to video; self- and cross-attention, 3 heads, 3 × 3 × 5 tokens; a scheduler that draws noise."""
    transformer = diffusers.AllegroTransformer3DModel(
        num_attention_heads=3, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=2,
        cross_attention_dim=36, caption_channels=TEXT,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLAllegro(
        block_out_channels=(4,) * 4, latent_channels=4, layers_per_block=1, norm_num_groups=2
    )
    scheduler = diffusers.EulerAncestralDiscreteScheduler()
    return diffusers.AllegroPipeline(**t5(), transformer=transformer, vae=vae, scheduler=scheduler)


@_tiny
def tiny_qwen() -> Any:
    """Text to image; joint attention over the words there are, 3 heads, 3 × 5 tokens."""
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_attention_heads=3, attention_head_dim=12, num_layers=2,
        joint_attention_dim=TEXT, axes_dims_rope=(4, 4, 4),
    )  # fmt: skip
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipe = diffusers.QwenImagePipeline(**qwen(), transformer=transformer, vae=vae, scheduler=scheduler)
    pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx = "{}", 0
    return pipe


@_tiny
def tiny_ltx() -> Any:
    """Text to video; self- and cross-attention with a mask of the text, 3 heads, 3 × 3 × 5 tokens."""
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
    )  # fmt: skip
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=3, attention_head_dim=12, cross_attention_dim=36,
        num_layers=2, caption_channels=TEXT,
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return diffusers.LTXPipeline(**t5(), transformer=transformer, vae=vae, scheduler=scheduler)


@_tiny
def tiny_cogvideox() -> Any:
    """Text to video; joint attention with rotary positions, 3 heads, 3 × 3 × 5 tokens and 17 of text."""
    vae = diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(4, 4, 4, 4), latent_channels=4, layers_per_block=1, norm_num_groups=2
    )
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=TEXT, num_layers=2, sample_width=10, sample_height=6, sample_frames=9,
        max_text_seq_length=WORDS, use_rotary_positional_embeddings=True,
    )  # fmt: skip
    scheduler = diffusers.CogVideoXDDIMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"
    )
    return diffusers.CogVideoXPipeline(**t5(), transformer=transformer, vae=vae, scheduler=scheduler)


@_tiny
def tiny_latte() -> Any:
    """Text to video; attention in turn within frames and through time, 2 heads."""
    transformer = diffusers.LatteTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
        cross_attention_dim=16, attention_bias=True, sample_size=2, patch_size=1, norm_eps=1e-6,
        activation_fn="gelu-approximate", num_embeds_ada_norm=1000, norm_type="ada_norm_single",
        norm_elementwise_affine=False, caption_channels=TEXT, video_length=5,
    )  # fmt: skip
    scheduler = diffusers.DDIMScheduler(clip_sample=False)
    return diffusers.LattePipeline(**t5(), transformer=transformer, vae=_kl(4), scheduler=scheduler)


@_tiny
def tiny_mochi() -> Any:
    """Text to video; joint attention whose last block drops the text, 3 heads, 2 × 3 × 5 tokens."""
    transformer = diffusers.MochiTransformer3DModel(
        num_attention_heads=3, attention_head_dim=12, num_layers=2, pooled_projection_dim=TEXT,
        text_embed_dim=TEXT, time_embed_dim=4, max_sequence_length=WORDS,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4, layers_per_block=(1,) * 5
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    return diffusers.MochiPipeline(**t5(), transformer=transformer, vae=vae, scheduler=scheduler)


@_tiny
def tiny_flux() -> Any:
    """Text to image; joint attention in double and single blocks, 5 heads, 3 × 5 tokens and 17 of text."""
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=5,
        joint_attention_dim=TEXT, pooled_projection_dim=TEXT, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    return diffusers.FluxPipeline(
        **clip(projected=False),
        **numbered(t5(), 2),
        transformer=transformer,
        vae=_kl(4),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


@_tiny
def tiny_sd3() -> Any:
    """Text to image; joint attention, three text encoders and guidance, 3 heads, 3 × 5 tokens."""
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=10, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=12,
        num_attention_heads=3, joint_attention_dim=2 * TEXT, caption_projection_dim=36,
        pooled_projection_dim=2 * TEXT, pos_embed_max_size=16,
    )  # fmt: skip
    return diffusers.StableDiffusion3Pipeline(
        **clip(projected=True),
        **numbered(clip(projected=True), 2),
        **numbered(t5(width=2 * TEXT), 3),
        transformer=transformer,
        vae=_kl(4),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


TINY: dict[str, Callable[..., Any]] = {
    "wan": tiny_wan,
    "wan2.2": partial(tiny_wan, moe=True),
    "wan-i2v": tiny_wan_i2v,
    "hunyuan": tiny_hunyuan,
    "allegro": tiny_allegro,
    "ltx": tiny_ltx,
    "cogvideox": tiny_cogvideox,
    "latte": tiny_latte,
    "mochi": tiny_mochi,
    "flux": tiny_flux,
    "sd3": tiny_sd3,
    "qwen": tiny_qwen,
}
"""The builders, as CALLS names them."""
