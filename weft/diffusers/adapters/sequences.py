"""Models whose blocks have one sequence of several kinds of tokens."""

from __future__ import annotations

from dataclasses import replace

from weft.diffusers.adapter import BLOCK, END, ROPE, SELF, TEXT, VIDEO, Adapter, Shard, Whole
from weft.diffusers.adapters.images import FLUX
from weft.diffusers.adapters.videos import COG, HUNYUAN, WAN
from weft.diffusers.grids import frames_first, from_packed, from_rows, from_shape, from_sizes, patches

AUDIO = Shard("audio", 1)
SEQUENCE = Shard("sequence", 1)
"""Tokens in an order that the caller chose, or with others that are no text before them."""
ROTARY = Shard("sequence", -2)
BOTH = Shard("text video", 1)
PACKED = Shard("context video", 1)


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


def sequence(model: str, blocks: str, attention: str, **each: Shard) -> Adapter:
    """Return the adapter of a model that makes one sequence, and takes from it what it returns."""
    return Adapter(
        model,
        inputs={f"{blocks}.0": {"hidden_states": SEQUENCE}, f"{blocks}.*": each},
        gather={f"{blocks}.-1": SEQUENCE},
        attention={f"{blocks}.*.{attention}": "sequence"},
    )


ADAPTERS = (
    replace(FLUX, model="ChromaTransformer2DModel"),
    replace(
        FLUX,
        model="BriaFiboTransformer2DModel",
        inputs={"": {**FLUX.inputs[""], "text_encoder_layers": TEXT}},
    ),
    replace(COG, model="GlmImageTransformer2DModel", grid=patches),
    Adapter(
        "Krea2Transformer2DModel",
        inputs={"transformer_blocks.*": {"image_rotary_emb": BOTH._replace(dim=0)}},
        outputs={"txt_in": TEXT, "img_in": VIDEO},
        gather={"transformer_blocks.-1": BOTH},
        attention={"transformer_blocks.*.attn": "text video"},
        local=("text_fusion.layerwise_blocks.*.attn", "text_fusion.refiner_blocks.*.attn"),
        grid=from_packed,
    ),
    Adapter(
        "Flux3Transformer2DModel",
        inputs={
            "": {
                **FLUX.inputs[""],
                "image_cond_hidden_states": Shard("reference", 1),
                "image_cond_ids": Shard("reference", 0),
            }
        },
        gather=END,
        attention={
            "txt_mode_blocks.*.attn": "text",
            "mode_blocks.image.*.attn": "video",
            "mode_blocks.image_cond.*.attn": "reference",
            "single_transformer_blocks.*.attn": "text video reference",
        },
        grid=FLUX.grid,
    ),
    Adapter(
        "ErnieImageTransformer2DModel",
        inputs={
            "layers.0": {"x": Shard("video text", 0)},
            "layers.*": {"rotary_pos_emb": Shard("video text", 1), "temb": Shard("video text", 0)},
        },
        gather={"layers.-1": Shard("video text", 0)},
        attention={"layers.*.self_attention": "video text"},
        grid=patches,
    ),
    sequence(
        "Ideogram4Transformer2DModel", "layers", "attention",
        image_rotary_emb=SEQUENCE, adaln_input=SEQUENCE,
    ),
    sequence("OmniGenTransformer2DModel", "layers", "self_attn", image_rotary_emb=ROTARY),
    replace(
        sequence(
            "HeliosTransformer3DModel", "blocks", "attn1",
            temb=SEQUENCE._replace(ndim=4), rotary_emb=SEQUENCE,
            original_context_length=Shard("sequence", None, last=True),
        ),
        local=("blocks.*.attn2",),
    ),
    replace(
        HUNYUAN,
        model="HunyuanVideoFramepackTransformer3DModel",
        inputs={
            "transformer_blocks.0": BLOCK,
            "transformer_blocks.*": {"freqs_cis": ROPE},
            "single_transformer_blocks.*": {"image_rotary_emb": ROPE},
        },
        outputs={},
        gather={"single_transformer_blocks.-1": (VIDEO, TEXT)},
        grid=None,
        note="",
    ),
    Adapter(
        "MiniMaxH3Transformer3DModel",
        inputs={
            "transformer_blocks.0": {"hidden_states": PACKED},
            "transformer_blocks.*": {"adaln_indices": PACKED._replace(dim=0)},
            "norm_out": {"timestep_indices": PACKED._replace(dim=0)},
        },
        outputs={"rope": PACKED._replace(dim=0)},
        gather={"proj_out": PACKED, "audio_proj_out": PACKED},
        attention={"transformer_blocks.*.attn": "context video"},
        grid=from_rows,
        local=("token_refiner.refiner_blocks.*.attn",),
        note="video and audio",
    ),
    Adapter(
        "Kandinsky5Transformer3DModel",
        inputs={
            "visual_transformer_blocks.0": {"visual_embed": VIDEO},
            "visual_transformer_blocks.*": {"rope": VIDEO},
        },
        gather={"visual_transformer_blocks.-1": VIDEO},
        attention={"visual_transformer_blocks.*.self_attention": "video"},
        local=("visual_transformer_blocks.*.cross_attention", "text_transformer_blocks.*.self_attention"),
        grid=from_shape,
    ),
    Adapter(
        "Kandinsky6Transformer3DModel",
        inputs={
            "visual_transformer_blocks.0": {"vis": VIDEO, "aud": AUDIO},
            "visual_transformer_blocks.*": {"vis_rope": ROPE, "aud_rope": Shard("audio", 0)},
        },
        gather={"visual_transformer_blocks.-1": (VIDEO, AUDIO)},
        attention={
            "visual_transformer_blocks.*.video_dec_block.self_attention": "video",
            "visual_transformer_blocks.*.audio_dec_block.self_attention": "audio",
            "visual_transformer_blocks.*.va_cross_attention": "video <- audio",
            "visual_transformer_blocks.*.av_cross_attention": "audio <- video",
        },
        local=(
            "visual_transformer_blocks.*.*.cross_attention",
            "*_text_transformer_blocks.*.self_attention",
        ),
        grid=from_shape,
        note="video and audio",
    ),
    Adapter(
        "LTX2VideoTransformer3DModel",
        inputs={
            "": {
                "hidden_states": VIDEO,
                "audio_hidden_states": AUDIO,
                "timestep": VIDEO._replace(ndim=2),
                "audio_timestep": AUDIO._replace(ndim=2),
                "video_keyframes_mask": VIDEO,
            }
        },
        outputs={
            "rope": VIDEO._replace(dim=-2),
            "cross_attn_rope": VIDEO._replace(dim=-2),
            "audio_rope": AUDIO._replace(dim=-2),
            "cross_attn_audio_rope": AUDIO._replace(dim=-2),
        },
        gather={"proj_out": VIDEO, "audio_proj_out": AUDIO},
        attention={
            "transformer_blocks.*.attn1": "video",
            "transformer_blocks.*.audio_attn1": "audio",
            "transformer_blocks.*.audio_to_video_attn": "video <- audio",
            "transformer_blocks.*.video_to_audio_attn": "audio <- video",
        },
        local=("transformer_blocks.*.attn2", "transformer_blocks.*.audio_attn2"),
        grid=from_sizes,
        note="video and audio",
    ),
    replace(
        WAN,
        model="WanAnimateTransformer3DModel",
        inputs={"blocks.0": {"hidden_states": VIDEO}, "face_adapter.*": {"hidden_states": Whole("video", 1)}},
        outputs={"rope": VIDEO, "face_adapter.*": VIDEO},
        gather=END,
        attention={"blocks.*.attn1": "video"},
        local=("blocks.*.attn2", "face_adapter.*"),
        note="",
    ),
    Adapter(
        "WanAnimate2Transformer3DModel",
        inputs={
            "blocks.0": {"hidden_states": VIDEO},
            "blocks.*.self_attn": {"hidden_states": Whole("video", 1)},
        },
        outputs={"blocks.*.self_attn": VIDEO},
        gather={"blocks.-1": VIDEO},
        attention={"blocks.*.self_attn": "whole"},
        local=("blocks.*.cross_attn",),
        note="each rank attends to all",
        replicated=_names(
            "hidden_states timestep encoder_hidden_states condition_latents kv_cache kv_cache_mode "
            "seq_len encoder_hidden_states_image offset_grid_sizes reference_grid_sizes origin_len "
            "origin_area is_uncondtion return_dict"
        ),
    ),
    Adapter(
        "QwenImage21Transformer2DModel",
        inputs={
            "transformer_blocks.0": {"hidden_states": SEQUENCE},
            "transformer_blocks.*": {"target_token_mask": SEQUENCE._replace(dim=0)},
            "transformer_blocks.*.attn": {"hidden_states": Whole("sequence", 1)},
        },
        outputs={"transformer_blocks.*.attn": SEQUENCE},
        gather={"transformer_blocks.-1": SEQUENCE},
        attention={"transformer_blocks.*.attn": "whole"},
        note="each rank attends to all",
        replicated=_names(
            "hidden_states encoder_hidden_states timestep img_shapes img_mask "
            "encoder_hidden_states_mask attention_kwargs kv_cache kv_cache_mode return_dict"
        ),
    ),
    replace(
        WAN,
        model="AnyFlowTransformer3DModel",
        inputs={"blocks.0": {"hidden_states": VIDEO}, "blocks.*": {"temb": VIDEO}},
        outputs={"rope": VIDEO._replace(dim=2)},
        gather={"blocks.-1": VIDEO},
        grid=frames_first,
        note="",
    ),
    Adapter(
        "Cosmos3OmniTransformer",
        inputs={
            "layers.0": {"gen_seq": ROPE},
            "layers.*": {"rotary_emb": (None, None, ROPE, ROPE)},
        },
        gather={"layers.-1": (None, ROPE)},
        attention={"layers.*.self_attn": "local; video <- * video"},
        note="video, sound and actions",
        replicated=_names(
            "input_ids text_indexes position_ids und_len sequence_length vision_tokens vision_token_shapes "
            "vision_sequence_indexes vision_mse_loss_indexes vision_timesteps vision_noisy_frame_indexes "
            "sound_tokens sound_token_shapes sound_sequence_indexes sound_mse_loss_indexes sound_timesteps "
            "sound_noisy_frame_indexes action_tokens action_token_shapes action_sequence_indexes "
            "action_mse_loss_indexes action_timesteps action_noisy_frame_indexes action_domain_ids "
            "return_dict"
        ),
    ),
    replace(
        SELF,
        model="DiTTransformer2DModel",
        outputs={"pos_embed": VIDEO},
        gather={"proj_out_2": VIDEO},
    ),
    replace(
        SELF,
        model="HunyuanDiT2DModel",
        inputs={"": {"controlnet_block_samples": VIDEO}, "blocks.*": {"image_rotary_emb": ROPE}},
        outputs={"pos_embed": VIDEO},
        attention={"blocks.*.attn1": "video"},
        local=("blocks.*.attn2",),
    ),
    replace(
        SELF,
        model="LuminaNextDiT2DModel",
        inputs={},
        outputs={"patch_embedder": (VIDEO, None, None, VIDEO)},
        gather={"norm_out": VIDEO},
        attention={"layers.*.attn1": "video"},
        local=("layers.*.attn2",),
    ),
    Adapter(
        "HiDreamImageTransformer2DModel",
        inputs={
            "double_stream_blocks.0": {"hidden_states": VIDEO},
            "double_stream_blocks.*": {
                "hidden_states_masks": VIDEO,
                "encoder_hidden_states": TEXT,
                "image_rotary_emb": Shard("video text", 1),
            },
            "single_stream_blocks.*": {
                "hidden_states": Shard("video text", 1),
                "hidden_states_masks": Shard("video text", 1),
                "image_rotary_emb": Shard("video text", 1),
            },
        },
        gather={
            "double_stream_blocks.*": (None, TEXT),
            "double_stream_blocks.-1": (VIDEO, TEXT),
            "single_stream_blocks.*": Shard("video text", 1),
        },
        attention={
            "double_stream_blocks.*.block.attn1": "video text",
            "single_stream_blocks.*.block.attn1": "video text",
        },
        grid=patches,
    ),
)  # fmt: skip
