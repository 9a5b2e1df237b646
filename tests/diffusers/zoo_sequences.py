"""Tiny transformers whose blocks have one sequence of several kinds of tokens, and inputs for them."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.diffusers import given
from tests.diffusers import given_packed as packed
from tests.diffusers import given_sequences as inputs
from tests.diffusers.entry import Entry
from tests.diffusers.given import CHANNELS, POOLED, WORDS

_FLUX = {
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "in_channels": CHANNELS,
    "num_layers": 1,
    "num_single_layers": 1,
    "joint_attention_dim": WORDS,
    "axes_dims_rope": (4, 4, 4),
}


_KANDINSKY = {
    "in_text_dim": WORDS, "in_text_dim2": POOLED, "time_dim": 8, "model_dim": 36, "ff_dim": 16,
    "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 4, 4),
}  # fmt: skip
_HELIOS = {
    "num_attention_heads": 3, "attention_head_dim": 12, "in_channels": CHANNELS, "out_channels": CHANNELS,
    "text_dim": WORDS, "freq_dim": 8, "ffn_dim": 16, "num_layers": 2, "rope_dim": (4, 4, 4),
}  # fmt: skip
_FLUX3 = {**_FLUX, "cond_in_channels": CHANNELS, "timestep_channels": 8, "mlp_ratio": 1.0, "num_layers": 1,
          "axes_dims_rope": (2, 2, 4, 4)}  # fmt: skip
_KANDINSKY6 = {
    **_KANDINSKY, "in_visual_dim": CHANNELS, "out_visual_dim": CHANNELS, "visual_cond": False,
    "in_audio_dim": 6, "out_audio_dim": 6, "ca_rope": True, "cross_gates": True, "fix_modulation": True,
}  # fmt: skip
_LTX2 = {
    "in_channels": CHANNELS, "out_channels": CHANNELS, "num_attention_heads": 3, "attention_head_dim": 12,
    "cross_attention_dim": 36, "audio_in_channels": CHANNELS, "audio_out_channels": CHANNELS,
    "audio_num_attention_heads": 3, "audio_attention_head_dim": 8, "audio_cross_attention_dim": 24,
    "num_layers": 2, "caption_channels": WORDS,
}  # fmt: skip
_WAN = {
    "num_attention_heads": 3, "attention_head_dim": 12, "in_channels": CHANNELS, "out_channels": CHANNELS,
    "text_dim": WORDS, "freq_dim": 8, "ffn_dim": 16, "num_layers": 2,
}  # fmt: skip
SEQUENCES: dict[str, Entry] = {
    "chroma": Entry(
        "ChromaTransformer2DModel",
        {**_FLUX, "approximator_num_channels": 8, "approximator_hidden_dim": 8, "approximator_layers": 1},
        inputs.chroma,
    ),
    "bria-fibo": Entry("BriaFiboTransformer2DModel", {**_FLUX, "text_encoder_dim": 8}, inputs.fibo),
    "glm-image": Entry(
        "GlmImageTransformer2DModel",
        {"num_attention_heads": 3, "attention_head_dim": 12, "in_channels": CHANNELS,
         "out_channels": CHANNELS,
         "num_layers": 2, "text_embed_dim": WORDS, "time_embed_dim": 8, "condition_dim": 4,
         "prior_vq_quantizer_codebook_size": 16},
        inputs.glm,
    ),
    "krea2": Entry(
        "Krea2Transformer2DModel",
        {"in_channels": CHANNELS, "num_layers": 2, "attention_head_dim": 12, "num_attention_heads": 3,
         "num_key_value_heads": 1, "intermediate_size": 16, "timestep_embed_dim": 8, "text_hidden_dim": WORDS,
         "num_text_layers": 2, "text_num_attention_heads": 2, "text_num_key_value_heads": 1,
         "text_intermediate_size": 8, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1,
         "axes_dims_rope": (4, 4, 4)},
        inputs.krea,
    ),
    "flux3": Entry("Flux3Transformer2DModel", _FLUX3, inputs.flux3),
    "flux3-edit": Entry("Flux3Transformer2DModel", _FLUX3, inputs.flux3_edit),
    "ernie": Entry(
        "ErnieImageTransformer2DModel",
        {"hidden_size": 36, "num_attention_heads": 3, "num_layers": 2, "ffn_hidden_size": 16, "patch_size": 2,
         "in_channels": CHANNELS, "out_channels": CHANNELS, "text_in_dim": WORDS, "rope_axes_dim": (4, 4, 4)},
        inputs.ernie,
    ),
    "ideogram4": Entry(
        "Ideogram4Transformer2DModel",
        {"in_channels": CHANNELS, "num_layers": 2, "attention_head_dim": 12, "num_attention_heads": 3,
         "intermediate_size": 16, "adaln_dim": 8, "llm_features_dim": WORDS, "mrope_section": (2, 2, 2)},
        inputs.ideogram,
    ),
    "omnigen": Entry(
        "OmniGenTransformer2DModel",
        {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 16,
         "num_layers": 2, "vocab_size": 8, "pad_token_id": 0, "pos_embed_max_size": 24, "time_step_dim": 8,
         "rope_scaling": {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}},
        inputs.omnigen,
    ),
    "helios": Entry("HeliosTransformer3DModel", _HELIOS, inputs.helios),
    "helios-amplified": Entry(
        "HeliosTransformer3DModel",
        {**_HELIOS, "is_amplify_history": True, "guidance_cross_attn": False, "zero_history_timestep": False},
        inputs.helios,
    ),
    "framepack": Entry(
        "HunyuanVideoFramepackTransformer3DModel",
        {"num_attention_heads": 3, "attention_head_dim": 12, "in_channels": CHANNELS,
         "out_channels": CHANNELS,
         "num_layers": 1, "num_single_layers": 2, "num_refiner_layers": 1, "mlp_ratio": 1.0,
         "text_embed_dim": WORDS, "pooled_projection_dim": POOLED, "rope_axes_dim": (4, 4, 4),
         "has_image_proj": True, "image_proj_dim": 5, "has_clean_x_embedder": True},
        inputs.framepack,
    ),
    "minimax-h3": Entry(
        "MiniMaxH3Transformer3DModel",
        {"num_attention_heads": 3, "attention_head_dim": 12, "hidden_size": 20, "num_layers": 2,
         "num_refiner_layers": 1, "ffn_dim": 16, "in_channels": CHANNELS, "audio_in_channels": 6,
         "text_dim": WORDS, "freq_dim": 8, "time_embed_hidden_dim": 8, "time_embed_dim": 8,
         "rope_freq_dim": 2},
        inputs.h3,
    ),
    "minimax-music": Entry(
        "MiniMaxMusic3Transformer1DModel",
        {"in_channels": CHANNELS, "condition_dim": WORDS, "num_layers": 2, "num_attention_heads": 3,
         "attention_head_dim": 12, "ff_inner_dim": 16, "rotary_dim": 8, "fourier_embedding_dim": 8},
        inputs.music,
    ),
    "stable-audio": Entry(
        "StableAudioDiTModel",
        {"sample_size": 45, "in_channels": CHANNELS, "num_layers": 2, "attention_head_dim": 16,
         "num_attention_heads": 3, "num_key_value_attention_heads": 3, "out_channels": CHANNELS,
         "cross_attention_dim": 48, "time_proj_dim": 8, "global_states_input_dim": POOLED,
         "cross_attention_input_dim": WORDS},
        inputs.stable_audio,
    ),
    "ace-step": Entry(
        "AceStepTransformer1DModel",
        {"hidden_size": 36, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 3,
         "num_key_value_heads": 1, "head_dim": 12, "in_channels": 3 * CHANNELS,
         "audio_acoustic_hidden_dim": CHANNELS, "patch_size": 1, "sliding_window": 3,
         "encoder_hidden_size": WORDS},
        inputs.ace,
    ),
    "kandinsky5": Entry(
        "Kandinsky5Transformer3DModel",
        {**_KANDINSKY, "in_visual_dim": CHANNELS, "out_visual_dim": CHANNELS},
        inputs.kandinsky5,
    ),
    "kandinsky6": Entry("Kandinsky6Transformer3DModel", _KANDINSKY6, inputs.kandinsky6),
    "kandinsky6-video": Entry(
        "Kandinsky6Transformer3DModel", _KANDINSKY6, lambda size: inputs.kandinsky6(size, audio=False)
    ),
    "ltx2": Entry("LTX2VideoTransformer3DModel", _LTX2, inputs.ltx2),
    "ltx2.3": Entry(
        "LTX2VideoTransformer3DModel",
        {**_LTX2, "rope_type": "split", "gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True,
         "audio_cross_attn_mod": True, "perturbed_attn": True, "use_keyframes_abs_pos_embedding": True},
        lambda size: {
            **inputs.ltx2(size, per_token=True),
            "use_cross_timestep": True,
            "video_keyframes_mask": (torch.arange(size.tokens) < 5).expand(size.batch, -1)[..., None],
        },
    ),
    "anyflow": Entry("AnyFlowTransformer3DModel", _WAN, packed.anyflow),
    "wan-animate": Entry(
        "WanAnimateTransformer3DModel",
        {**_WAN, "in_channels": 12, "latent_channels": CHANNELS, "image_dim": 6, "added_kv_proj_dim": 36,
         "rope_max_seq_len": 32, "motion_encoder_size": 16, "motion_style_dim": 8, "motion_dim": 4,
         "motion_encoder_dim": 8, "face_encoder_hidden_dim": 12, "face_encoder_num_heads": 2,
         "inject_face_latents_blocks": 1,
         "motion_encoder_channel_sizes": {"4": 4, "8": 4, "16": 4}},
        packed.animate,
    ),
    "qwen21": Entry(
        "QwenImage21Transformer2DModel",
        {"in_channels": CHANNELS, "out_channels": CHANNELS, "num_layers": 2, "num_attention_heads": 3,
         "attention_head_dim": 12, "context_in_dim": WORDS, "mlp_ratio": 1, "axes_dims_rope": (4, 4, 4)},
        packed.qwen21,
    ),
    "cosmos3": Entry(
        "Cosmos3OmniTransformer",
        {"head_dim": 12, "hidden_size": 36, "intermediate_size": 16, "latent_channel": CHANNELS,
         "latent_patch_size": 2, "patch_latent_dim": 16, "num_attention_heads": 3, "num_hidden_layers": 2,
         "num_key_value_heads": 1, "vocab_size": 16, "rope_axes_dim": (2, 2, 2)},
        packed.cosmos3,
    ),
    "wan-animate2": Entry(
        "WanAnimate2Transformer3DModel",
        {"in_dim": 2 * CHANNELS, "dim": 36, "ffn_dim": 16, "freq_dim": 8, "text_dim": WORDS, "text_len": 7,
         "out_dim": CHANNELS, "num_heads": 3, "num_layers": 2, "use_img_emb": False},
        packed.animate2,
    ),
    "joyimage": Entry(
        "JoyImageEditTransformer3DModel",
        {"in_channels": CHANNELS, "hidden_size": 36, "num_attention_heads": 3, "text_dim": WORDS,
         "mlp_width_ratio": 1.0, "num_layers": 2, "rope_dim_list": [4, 4, 4], "rope_type": "mrope"},
        given.wan,
    ),
    "joyimage-plus": Entry(
        "JoyImageEditPlusTransformer3DModel",
        {"in_channels": CHANNELS, "hidden_size": 36, "num_attention_heads": 3, "text_dim": WORDS,
         "mlp_width_ratio": 1.0, "num_layers": 2, "rope_dim_list": [4, 4, 4]},
        packed.joyimage_plus,
    ),
    "skyreels-forced": Entry("SkyReelsV2Transformer3DModel", _WAN, packed.forced),
    "skyreels-causal": Entry(
        "SkyReelsV2Transformer3DModel", {**_WAN, "num_frame_per_block": 3},
        lambda size: packed.forced(replace(size, grid=(6, *size.grid[1:]))),
    ),
    "prx": Entry(
        "PRXTransformer2DModel",
        {"in_channels": CHANNELS, "context_in_dim": WORDS, "hidden_size": 36, "mlp_ratio": 1.0,
         "num_heads": 3, "depth": 2, "axes_dim": [6, 6]},
        packed.prx,
    ),
    "stable-audio3": Entry(
        "StableAudio3DiTModel",
        {"io_channels": CHANNELS, "embed_dim": 48, "depth": 2, "num_heads": 3, "cond_token_dim": WORDS,
         "global_cond_dim": POOLED, "local_add_cond_dim": 4, "timestep_features_dim": 8, "ff_mult": 1.0,
         "num_memory_tokens": 3},
        packed.stable_audio3,
    ),
    "longcat-audio": Entry(
        "LongCatAudioDiTTransformer",
        {"dit_dim": 36, "dit_depth": 2, "dit_heads": 3, "dit_text_dim": WORDS, "latent_dim": CHANNELS,
         "ff_mult": 1.0},
        packed.longcat_audio,
    ),
    "dit": Entry(
        "DiTTransformer2DModel",
        {"num_attention_heads": 3, "attention_head_dim": 12, "in_channels": CHANNELS, "num_layers": 2,
         "sample_size": 12, "num_embeds_ada_norm": 8, "norm_num_groups": 1},
        inputs.dit,
    ),
    "hunyuan-dit": Entry(
        "HunyuanDiT2DModel",
        {"num_attention_heads": 3, "attention_head_dim": 12, "in_channels": CHANNELS, "patch_size": 2,
         "sample_size": 12, "hidden_size": 36, "num_layers": 4, "mlp_ratio": 1.0,
         "cross_attention_dim": WORDS,
         "cross_attention_dim_t5": WORDS, "pooled_projection_dim": POOLED, "text_len": 7, "text_len_t5": 5},
        inputs.hunyuan_dit,
    ),
    "lumina-next": Entry(
        "LuminaNextDiT2DModel",
        {"sample_size": 12, "in_channels": CHANNELS, "hidden_size": 36, "num_layers": 2,
         "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 4, "cross_attention_dim": WORDS},
        inputs.lumina_next,
    ),
    "hidream": Entry(
        "HiDreamImageTransformer2DModel",
        {"patch_size": 2, "in_channels": CHANNELS, "out_channels": CHANNELS, "num_layers": 1,
         "num_single_layers": 1, "attention_head_dim": 12, "num_attention_heads": 3,
         "caption_channels": [WORDS, WORDS], "text_emb_dim": POOLED, "num_routed_experts": 2,
         "num_activated_experts": 1, "axes_dims_rope": (4, 4, 4), "max_resolution": (24, 24),
         "llama_layers": [0, 1]},
        inputs.hidream,
    ),
}  # fmt: skip
