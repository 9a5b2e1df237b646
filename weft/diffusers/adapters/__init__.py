"""Adapters of the models in Diffusers and of weft's own; `weft models` lists them.

Each file of this folder has `ADAPTERS`. Where a model has a `_cp_plan` of Diffusers' own that splits what
weft splits, its adapter only declares the rest.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from weft.core.errors import InputError
from weft.core.modules import modules
from weft.diffusers.adapter import Adapter
from weft.diffusers.refused import REFUSED
from weft.hooks.module_tree import unwrapped

_NAMES = (
    "added_cond_kwargs additional_t_cond attention_kwargs attention_mask audio_coords "
    "audio_encoder_attention_mask audio_encoder_hidden_states audio_hidden_states audio_indices "
    "audio_num_frames audio_sigma block_controlnet_hidden_states cap_feats class_labels "
    "condition_mask context_latents control_hidden_states control_hidden_states_scale control_latents "
    "controlnet_blocks_repeat crop_coords cross_attention_kwargs enable_diffusion_forcing "
    "encoder_attention_mask encoder_attention_mask_2 encoder_hidden_states encoder_hidden_states_2 "
    "encoder_hidden_states_image encoder_hidden_states_llama3 encoder_hidden_states_mask "
    "encoder_hidden_states_t5 encoder_mask f_patch_size face_pixel_values fps global_hidden_states "
    "guidance height hidden_states hidden_states_masks image_embeds image_meta_size image_rotary_emb "
    "img_ids img_shapes img_sizes indicator indices_hidden_states indices_latents "
    "indices_latents_clean indices_latents_history_2x indices_latents_history_4x "
    "indices_latents_history_long indices_latents_history_mid indices_latents_history_short "
    "inpaint_latents input_ids input_image_sizes input_img_latents isolate_modalities "
    "joint_attention_kwargs latent_cond latents_clean latents_history_2x latents_history_4x "
    "latents_history_long latents_history_mid latents_history_short motion_encode_batch_size "
    "num_frames ofs original_size padding_mask patch_size pooled_embeds pooled_projections "
    "pose_hidden_states position_ids prior_token_drop prior_token_id r_timestep return_dict "
    "rope_interpolation_scale rotary_embedding scale_factor segment_ids shape_list sigma skip_layers "
    "style t target_size target_timestep text_bth text_embedding_mask text_embedding_mask_t5 "
    "text_indices text_lens text_rope_pos timestep timestep_cond timestep_indices timestep_r "
    "timesteps token_tags use_cross_timestep video_coords video_indices visual_rope_pos "
    "visual_token_type_ids width x"
)
REPLICATED = frozenset(_NAMES.split())
"""Arguments of Diffusers' models that are not tokens, or from which the model makes the tokens to split."""


def load_adapters() -> dict[str, Adapter]:
    """Return the adapters of this folder's files, by the name of the model's class."""
    known = [adapter for module in modules(__name__).values() for adapter in module.ADAPTERS]
    return {
        each.model: each if each.replicated is not None else replace(each, replicated=REPLICATED)
        for each in known
    }


ADAPTERS = load_adapters()


def _names(model: nn.Module) -> list[str]:
    """Return the names of a model's class, and of those that it is derived from."""
    return [base.__name__ for base in type(unwrapped(model)).__mro__]


def find_adapter(model: nn.Module) -> Adapter | None:
    """Return the adapter of a model's class, or of one it is derived from."""
    return next((ADAPTERS[name] for name in _names(model) if name in ADAPTERS), None)


def adapter_of(model: nn.Module) -> Adapter:
    if (adapter := find_adapter(model)) is not None:
        return adapter
    for name in _names(model):
        if name in REFUSED:
            raise InputError(
                f"weft does not split a {name}, which {REFUSED[name]}.", hint="Run it on one rank."
            )
    raise InputError(
        f"weft has no adapter for a {type(unwrapped(model)).__name__}.",
        hint="Declare one, weft.parallelize(model, adapter=weft.Adapter(…)): docs/models.md shows how in 20 "
        f"lines. Known are {', '.join(ADAPTERS)}.",
    )
