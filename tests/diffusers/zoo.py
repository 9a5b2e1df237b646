"""Tiny transformers of the real Diffusers classes with random weights, and inputs for them.

    model, given = ZOO["wan"].make(), ZOO["wan"].inputs()
    out = model(**given)[0]                      # inputs ask for a tuple

All have 3 heads. `inputs(batch=2, text=7, grid=(3, 3, 5))` gives as many video tokens as the grid has cells;
texts of models that know padding have other lengths in each sample.
"""

from __future__ import annotations

from typing import Any

from tests.diffusers import given
from tests.diffusers.entry import Entry
from tests.diffusers.given import CHANNELS, POOLED, WORDS, Size, without
from tests.diffusers.zoo_sequences import SEQUENCES

_HEADS = {"num_attention_heads": 3, "attention_head_dim": 12}
_LATENT = {"in_channels": CHANNELS, "out_channels": CHANNELS}
_PLAIN = {**_HEADS, **_LATENT, "num_layers": 2}
_CROSS = {**_PLAIN, "cross_attention_dim": 36, "caption_channels": WORDS}
_JOINT = {**_PLAIN, "joint_attention_dim": WORDS}
_TIMED = {**_PLAIN, "text_embed_dim": WORDS, "time_embed_dim": 8}
_WAN = {**_PLAIN, "text_dim": WORDS, "freq_dim": 8, "ffn_dim": 16, "rope_max_seq_len": 32}
_WAN_IMAGE = {**_WAN, "image_dim": 6, "added_kv_proj_dim": 36}
_REFINED = {
    **_HEADS,
    **_LATENT,
    "num_layers": 1,
    "num_refiner_layers": 1,
    "mlp_ratio": 1.0,
    "text_embed_dim": WORDS,
    "rope_axes_dim": (4, 4, 4),
}
_HUNYUAN = {**_REFINED, "num_single_layers": 1, "pooled_projection_dim": POOLED}
_ANIMATE = {**_TIMED, "attention_head_dim": 16}
_COG = {
    **_ANIMATE,
    "sample_width": 10,
    "sample_height": 6,
    "sample_frames": 9,
    "max_text_seq_length": given.FIXED,
}
_ROTARY = {**_COG, "use_rotary_positional_embeddings": True}
_COGVIEW = {**_TIMED, "condition_dim": 4, "sample_size": 8}
_FLUX = {
    **_HEADS,
    "in_channels": CHANNELS,
    "num_layers": 1,
    "num_single_layers": 1,
    "joint_attention_dim": WORDS,
    "axes_dims_rope": (4, 4, 4),
}
_POOLED = {**_FLUX, "pooled_projection_dim": POOLED}
_SD3 = {
    **_JOINT,
    "sample_size": 8,
    "pooled_projection_dim": POOLED,
    "caption_projection_dim": 36,
    "pos_embed_max_size": 24,
}
_QWEN = {**_JOINT, "patch_size": 1, "axes_dims_rope": (4, 4, 4)}
_LUMINA = {
    **_LATENT,
    "hidden_size": 36,
    "num_layers": 2,
    "num_attention_heads": 3,
    "num_kv_heads": 1,
    "multiple_of": 4,
    "axes_dim_rope": (4, 4, 4),
    "axes_lens": (64, 32, 32),
    "cap_feat_dim": WORDS,
    "sample_size": 8,
}
_ZIMAGE = {
    "in_channels": CHANNELS,
    "dim": 36,
    "n_layers": 2,
    "n_heads": 3,
    "n_kv_heads": 3,
    "cap_feat_dim": WORDS,
    "axes_dims": [4, 4, 4],
    "axes_lens": [128, 64, 64],
}
_HUNYUAN_15 = {**_REFINED, "num_layers": 2, "text_embed_2_dim": 6, "image_embed_dim": 5}
_AURA = {
    **without("num_layers", _JOINT),
    "sample_size": 8,
    "num_mmdit_layers": 1,
    "num_single_dit_layers": 1,
    "caption_projection_dim": 36,
    "pos_embed_max_size": 576,
}
_COSMOS = {
    **_PLAIN,
    "mlp_ratio": 1.0,
    "text_embed_dim": WORDS,
    "adaln_lora_dim": 4,
    "max_size": (4, 64, 64),
    "concat_padding_mask": False,
    "extra_pos_embed_type": None,
}
_HUNYUAN_IMAGE = {**_REFINED, "num_single_layers": 1, "guidance_embeds": True, "rope_axes_dim": (4, 8)}


def _plain_flux(size: Size) -> dict[str, Any]:
    return without("guidance pooled_projections", given.flux(size))


ZOO: dict[str, Entry] = {
    **SEQUENCES,
    "wan": Entry("WanTransformer3DModel", _WAN, given.wan),
    "wan-i2v": Entry("WanTransformer3DModel", _WAN_IMAGE, given.wan_image),
    "wan-ti2v": Entry("WanTransformer3DModel", _WAN, given.wan_times),
    "chronoedit": Entry(
        "ChronoEditTransformer3DModel",
        _WAN_IMAGE,
        lambda size: {**given.wan_image(size), "timestep": size.times()},
    ),
    "wan-vace": Entry(
        "WanVACETransformer3DModel", {**_WAN, "vace_layers": [0, 1], "vace_in_channels": 6}, given.vace
    ),
    "skyreels": Entry("SkyReelsV2Transformer3DModel", _WAN, given.wan),
    "hunyuan": Entry("HunyuanVideoTransformer3DModel", _HUNYUAN, given.hunyuan),
    "hunyuan-replace": Entry(
        "HunyuanVideoTransformer3DModel", {**_HUNYUAN, "image_condition_type": "token_replace"}, given.hunyuan
    ),
    "hunyuan-concat": Entry(
        "HunyuanVideoTransformer3DModel",
        {**_HUNYUAN, "image_condition_type": "latent_concat", "in_channels": 2 * CHANNELS + 1},
        lambda size: given.hunyuan(size, 2 * CHANNELS + 1),
    ),
    "hunyuan-1.5": Entry("HunyuanVideo15Transformer3DModel", _HUNYUAN_15, given.hunyuan15),
    "hunyuan-image": Entry("HunyuanImageTransformer2DModel", _HUNYUAN_IMAGE, given.hunyuan_image),
    "cogvideox": Entry("CogVideoXTransformer3DModel", _COG, given.cogvideox),
    "cogvideox-rotary": Entry(
        "CogVideoXTransformer3DModel", _ROTARY, lambda size: given.cogvideox(size, rotary=True)
    ),
    "cogvideox-1.5": Entry(
        "CogVideoXTransformer3DModel",
        {**_ROTARY, "patch_size_t": 2, "patch_bias": False, "ofs_embed_dim": 8},
        lambda size: {**given.cogvideox(size, 2, rotary=True), "ofs": size.time(2.0)},
    ),
    "easyanimate": Entry("EasyAnimateTransformer3DModel", {**_ANIMATE, "patch_size": 2}, given.wan),
    "cogview4": Entry("CogView4Transformer2DModel", {**_COGVIEW, "rope_axes_dim": (32, 32)}, given.cogview),
    "cogview3": Entry(
        "CogView3PlusTransformer2DModel", {**_COGVIEW, "pos_embed_max_size": 24}, given.cogview
    ),
    "flux": Entry("FluxTransformer2DModel", {**_POOLED, "guidance_embeds": True}, given.flux),
    "flux2": Entry(
        "Flux2Transformer2DModel", {**_FLUX, "mlp_ratio": 1.0, "axes_dims_rope": (2, 2, 4, 4)}, given.flux2
    ),
    "bria": Entry("BriaTransformer2DModel", _POOLED, _plain_flux),
    "ovis": Entry("OvisImageTransformer2DModel", {**_FLUX, "out_channels": CHANNELS}, _plain_flux),
    "longcat": Entry("LongCatImageTransformer2DModel", _POOLED, _plain_flux),
    "sd3": Entry("SD3Transformer2DModel", _SD3, given.sd3),
    "sd3-dual": Entry(
        "SD3Transformer2DModel", {**_SD3, "dual_attention_layers": (0,), "qk_norm": "rms_norm"}, given.sd3
    ),
    "auraflow": Entry(
        "AuraFlowTransformer2DModel", _AURA, lambda size: without("pooled_projections", given.sd3(size))
    ),
    "cosmos": Entry("CosmosTransformer3DModel", _COSMOS, given.cosmos),
    "pixart": Entry("PixArtTransformer2DModel", {**_CROSS, "sample_size": 8}, given.pixart),
    "ltx": Entry("LTXVideoTransformer3DModel", _CROSS, given.ltx),
    "ltx-times": Entry("LTXVideoTransformer3DModel", _CROSS, lambda size: given.ltx(size, per_token=True)),
    "mochi": Entry("MochiTransformer3DModel", {**_TIMED, "pooled_projection_dim": POOLED}, given.mochi),
    "allegro": Entry("AllegroTransformer3DModel", _CROSS, given.allegro),
    "qwen": Entry("QwenImageTransformer2DModel", _QWEN, given.qwen),
    "qwen-padded": Entry("QwenImageTransformer2DModel", _QWEN, lambda size: given.qwen(size, padded=True)),
    "qwen-edit": Entry("QwenImageTransformer2DModel", {**_QWEN, "zero_cond_t": True}, given.qwen_edit),
    "lumina2": Entry("Lumina2Transformer2DModel", _LUMINA, given.lumina),
    "zimage": Entry("ZImageTransformer2DModel", _ZIMAGE, given.zimage),
}
"""By name; `weft.diffusers.adapters.adapter_of(entry.make())` is the adapter of each."""
