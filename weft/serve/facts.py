"""Find out the `ModelFacts` of a pipeline that is loaded."""

from __future__ import annotations

import inspect
from math import prod
from typing import Any, TypeVar

import torch
from torch import nn

from weft.generate.request import FPS
from weft.hooks.module_tree import unwrapped
from weft.serve.jobs import JsonObject, Kind
from weft.serve.loaded_model import Pipeline
from weft.serve.model_facts import Grid, ModelFacts
from weft.video.captions import WORDS
from weft.video.pipeline import VideoPipeline
from weft.video.vocabulary import UNKNOWN

SPATIAL_FACTORS = (
    "vae_scale_factor_spatial",
    "vae_spatial_compression_ratio",
    "vae_spatial_scale_factor",
    "vae_scale_factor",
)
TEMPORAL_FACTORS = (
    "vae_scale_factor_temporal",
    "vae_temporal_compression_ratio",
    "vae_temporal_scale_factor",
)
"""Names that pipelines have for the pixels of a latent, in space and in time."""
EXAMPLES = (
    "a red circle moving left over a blue square",
    "a green triangle moving up and a white star",
    "a purple star shaking",
    "a yellow square moving right over a cyan circle moving down",
)
"""Prompts for the model that comes with weft."""
DEFAULT_TEXT_TOKENS = 77
"""Of a prompt, if the pipeline has no `max_sequence_length`."""


Default = TypeVar("Default")


def facts_of(pipe: Pipeline, name: str) -> ModelFacts:
    modules = {each: unwrapped(x) for each, x in pipe.components.items() if isinstance(x, nn.Module)}
    model = modules["transformer"]
    takes = inspect.signature(type(pipe).__call__).parameters
    defaults = {name: None if at.default is at.empty else at.default for name, at in takes.items()}
    facts = _own(pipe) if isinstance(pipe, VideoPipeline) else _of_diffusers(pipe, model, defaults)
    return ModelFacts(
        model=name, pipeline=type(pipe).__name__, fps=float(defaults.get("frame_rate") or FPS),
        steps=defaults.get("num_inference_steps") or 30,
        takes=tuple(each for each in takes if each != "self"),
        params=sum(x.numel() for x in model.parameters()),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        bytes=sum(x.numel() * x.element_size() for each in modules.values() for x in each.parameters()),
        **facts,
    )  # fmt: skip


def _own(pipe: VideoPipeline) -> JsonObject:
    config = pipe.transformer.config
    frames, height, width = config.video
    own = pipe.vocabulary
    return {
        "vocabulary": WORDS[1:] if own is None else own.words[UNKNOWN + 1 :],
        "closed_vocabulary": own is None, "examples": EXAMPLES if own is None else (),
        "kinds": ("video", "image") if config.pixels else (),
        "frames": frames, "height": height, "width": width,
        "multiple": config.patch, "patch": config.patch, "guidance": 2.0,
        "heads": config.heads, "head_dim": config.head_dim, "depth": config.depth,
        "width_model": config.width, "text_tokens": config.length, "alike": ("more",),
        # On CPUs equal bits are promised, and a matrix product of more rows rounds otherwise.
        "batches": torch.cuda.is_available(),
    }  # fmt: skip


def _of_diffusers(pipe: Pipeline, model: nn.Module, defaults: dict[str, Any]) -> JsonObject:
    patch = _patch(pipe, model)
    video = next((name for name in ("num_frames", "video_length") if name in defaults), None)
    frames = (defaults[video] or _config(model, "sample_frames", 16)) if video else 1
    if frames % patch[0] not in (0, 1):
        frames *= patch[0]  # they were latents
    first = frames % patch[0] if video else 0  # of most VAEs the first frame is a latent of its own
    kinds: tuple[Kind, ...] = ("video",) * bool(video) + ("image",) * (not video or bool(first))
    depth = _config(model, "num_layers", 0) + _config(model, "num_single_layers", 0)
    heads, dim = _config(model, "num_attention_heads", 1), _config(model, "attention_head_dim", 64)
    scales = [name for name in ("true_cfg_scale", "guidance_scale") if name in defaults]
    distilled = _config(model, "guidance_embeds", default=False)
    text_tokens = defaults.get("max_sequence_length") or DEFAULT_TEXT_TOKENS
    return {
        "kinds": ("video",) if (needs := _needs_image(pipe)) else kinds, "needs_image": needs,
        "frames": frames,
        "height": defaults.get("height") or _side(pipe, model, "height"),
        "width": defaults.get("width") or _side(pipe, model, "width"),
        "multiple": patch, "first": first, "patch": patch,
        "guidance": float(defaults[scales[-1 if distilled else 0]]) if scales else None,
        "heads": heads, "head_dim": dim, "width_model": heads * dim,
        "depth": depth or max((len(x) for x in model.modules() if isinstance(x, nn.ModuleList)), default=1),
        "text_tokens": text_tokens, "alike": ("guidance", "more", "image"),
    }  # fmt: skip


def _needs_image(pipe: Pipeline) -> bool:
    image = inspect.signature(type(pipe).__call__).parameters.get("image")
    return image is not None and image.default is image.empty


def _patch(pipe: Pipeline, model: nn.Module) -> Grid:
    """Return the pixels of a token: those of a latent, times the latents of a patch."""
    size = _config(model, "patch_size", 1)
    is_list = isinstance(size, list | tuple)
    patch = list(size) if is_list else [_config(model, "patch_size_t", 0) or 1, size]
    latents = _config(getattr(pipe, "vae", None), "latent_channels", 0) or _config(pipe.vae, "z_dim", 0)
    if prod(patch) == 1 and latents and _config(model, "in_channels", 0) == 4 * latents:
        patch = [1, 2]  # packed by the pipeline
    side, rows = _factor(pipe, SPATIAL_FACTORS, 8), patch[1] if len(patch) > 2 else patch[-1]
    return _factor(pipe, TEMPORAL_FACTORS, 1) * patch[0], side * rows, side * patch[-1]


def _factor(pipe: Pipeline, names: tuple[str, ...], default: int) -> int:
    return next((int(getattr(pipe, name)) for name in names if hasattr(pipe, name)), default)


def _side(pipe: Pipeline, model: nn.Module, name: str) -> int:
    """Return the height or width that a call without it makes."""
    own = getattr(pipe, f"default_{name}", None)
    latents = _config(model, f"sample_{name}", 0) or getattr(pipe, "default_sample_size", 0)
    return int(own or _factor(pipe, SPATIAL_FACTORS, 8) * (latents or 64))


def _config(owner: nn.Module | None, name: str, default: Default) -> Default:
    value = getattr(getattr(owner, "config", None), name, None)
    return default if value is None else value
