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
from weft.hooks.module_tree import unwrapped

_NAMES = (
    "added_cond_kwargs additional_t_cond attention_kwargs attention_mask cap_feats condition_mask "
    "control_hidden_states control_hidden_states_scale control_latents controlnet_blocks_repeat crop_coords "
    "cross_attention_kwargs encoder_attention_mask encoder_attention_mask_2 encoder_hidden_states "
    "encoder_hidden_states_2 encoder_hidden_states_image encoder_hidden_states_mask encoder_hidden_states_t5 "
    "f_patch_size fps guidance height hidden_states image_embeds image_rotary_emb img_shapes inpaint_latents "
    "joint_attention_kwargs num_frames ofs original_size padding_mask patch_size pooled_projections "
    "return_dict rope_interpolation_scale skip_layers t target_size timestep timestep_cond timestep_r "
    "video_coords width x"
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


def find_adapter(model: nn.Module) -> Adapter | None:
    """Return the adapter of a model's class, or of one it is derived from."""
    names = [base.__name__ for base in type(unwrapped(model)).__mro__]
    return next((ADAPTERS[name] for name in names if name in ADAPTERS), None)


def adapter_of(model: nn.Module) -> Adapter:
    if (adapter := find_adapter(model)) is not None:
        return adapter
    raise InputError(
        f"weft has no adapter for a {type(unwrapped(model)).__name__}.",
        hint="Declare one, weft.parallelize(model, adapter=weft.Adapter(…)): docs/models.md shows how in 20 "
        f"lines. Known are {', '.join(ADAPTERS)}.",
    )
