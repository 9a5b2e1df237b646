"""Facts: what a loaded model can make and what it is made of, as JSON for the server.

model, class           its name here, and the class of its pipeline
kinds                  video, image
frames, height, width  what it makes by default; steps, guidance (None: it has none) and fps too
multiple, first        sizes that it can make: frames are `first` more than a multiple of the first number
patch                  frames × rows × columns of pixels that are one token
heads, head_dim, depth, width_model, text_tokens, params, dtype      of its transformer
bytes                  of all weights that a rank holds
takes                  arguments of its pipeline
needs_image            whether it begins with one
memory                 bytes that the rank may have, 0 if it does not know; added by the rank
vocabulary             the words that it was trained on, if they are few
closed_vocabulary      whether it refuses a prompt with others
alike                  what jobs of one batch must have in common, beside their shape
batches                whether jobs may share a batch; not where each must have the bits that it has alone
"""

from __future__ import annotations

import inspect
from math import prod
from typing import Any

import torch
from torch import nn

from weft.models.adapter import unwrapped
from weft.models.request import FPS
from weft.models.video import VideoPipeline
from weft.models.vocabulary import UNKNOWN
from weft.models.words import WORDS

SPATIAL = (
    "vae_scale_factor_spatial",
    "vae_spatial_compression_ratio",
    "vae_spatial_scale_factor",
    "vae_scale_factor",
)
TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
"""What pipelines call the pixels of a latent."""
TEXT = 77
"""Tokens of a prompt, where a pipeline does not say."""


def facts_of(pipe: Any, name: str) -> dict[str, Any]:
    """Of a pipeline that is loaded."""
    parts = {part: unwrapped(x) for part, x in pipe.components.items() if isinstance(x, nn.Module)}
    model: Any = parts["transformer"]
    takes = inspect.signature(type(pipe).__call__).parameters
    defaults = {name: None if at.default is at.empty else at.default for name, at in takes.items()}
    about = {
        "model": name, "class": type(pipe).__name__, "fps": float(defaults.get("frame_rate") or FPS),
        "steps": defaults.get("num_inference_steps") or 30,
        "takes": [each for each in takes if each != "self"],
        "params": sum(x.numel() for x in model.parameters()),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "bytes": sum(x.numel() * x.element_size() for part in parts.values() for x in part.parameters()),
    }  # fmt: skip
    return about | (_own(pipe) if isinstance(pipe, VideoPipeline) else _of_diffusers(pipe, model, defaults))


def _own(pipe: VideoPipeline) -> dict[str, Any]:
    config = pipe.transformer.config
    frames, height, width = config.video
    own = pipe.vocabulary
    return {
        "vocabulary": list(WORDS[1:] if own is None else own.words[UNKNOWN + 1 :]),
        "closed_vocabulary": own is None,
        "kinds": ["video", "image"] if config.pixels else [],
        "frames": frames, "height": height, "width": width,
        "multiple": list(config.patch), "first": 0, "patch": list(config.patch), "guidance": 2.0,
        "heads": config.heads, "head_dim": config.head, "depth": config.depth, "width_model": config.width,
        "text_tokens": config.length, "alike": ["more"], "needs_image": False,
        # On CPUs equal bits are promised, and a matrix product of more rows rounds otherwise.
        "batches": torch.cuda.is_available(),
    }  # fmt: skip


def _of_diffusers(pipe: Any, model: Any, defaults: dict[str, Any]) -> dict[str, Any]:
    patch = _patch(pipe, model)
    video = next((name for name in ("num_frames", "video_length") if name in defaults), None)
    frames = (defaults[video] or _config(model, "sample_frames", 16)) if video else 1
    if frames % patch[0] not in (0, 1):
        frames *= patch[0]  # they were latents
    first = frames % patch[0] if video else 0  # of most VAEs the first frame is a latent of its own
    kinds = (["video"] if video else []) + (["image"] if not video or first else [])
    depth = _config(model, "num_layers", 0) + _config(model, "num_single_layers", 0)
    heads, dim = _config(model, "num_attention_heads", 1), _config(model, "attention_head_dim", 64)
    guides = [name for name in ("true_cfg_scale", "guidance_scale") if name in defaults]
    distilled = _config(model, "guidance_embeds", None)
    return {
        "kinds": ["video"] if (needs := _needs_image(pipe)) else kinds, "needs_image": needs,
        "frames": frames,
        "height": defaults.get("height") or _side(pipe, model, "height"),
        "width": defaults.get("width") or _side(pipe, model, "width"),
        "multiple": patch, "first": first, "patch": patch,
        "guidance": float(defaults[guides[-1 if distilled else 0]]) if guides else None,
        "heads": heads, "head_dim": dim, "width_model": heads * dim,
        "depth": depth or max((len(x) for x in model.modules() if isinstance(x, nn.ModuleList)), default=1),
        "text_tokens": defaults.get("max_sequence_length") or TEXT, "alike": ["guidance", "more", "image"],
    }  # fmt: skip


def _needs_image(pipe: Any) -> bool:
    image = inspect.signature(type(pipe).__call__).parameters.get("image")
    return image is not None and image.default is image.empty


def _patch(pipe: Any, model: Any) -> list[int]:
    """Pixels of a token: those of a latent, times the latents of a patch."""
    side = next((int(getattr(pipe, name)) for name in SPATIAL if hasattr(pipe, name)), 8)
    time = next((int(getattr(pipe, name)) for name in TEMPORAL if hasattr(pipe, name)), 1)
    said = _config(model, "patch_size", 1)
    patch = (
        list(said) if isinstance(said, list | tuple) else [_config(model, "patch_size_t", None) or 1, said]
    )
    latents = _config(getattr(pipe, "vae", None), "latent_channels", 0) or _config(pipe.vae, "z_dim", 0)
    if prod(patch) == 1 and latents and _config(model, "in_channels", 0) == 4 * latents:
        patch = [1, 2]  # packed by the pipeline
    rows, columns = (patch[1], patch[2]) if len(patch) > 2 else (patch[-1], patch[-1])
    return [time * patch[0], side * rows, side * columns]


def _side(pipe: Any, model: Any, name: str) -> int:
    """A height or width that a call leaves open."""
    own = getattr(pipe, f"default_{name}", None)
    latents = _config(model, f"sample_{name}", None) or getattr(pipe, "default_sample_size", None)
    side = next((int(getattr(pipe, name)) for name in SPATIAL if hasattr(pipe, name)), 8)
    return int(own or side * (latents or 64))


def _config(part: Any, name: str, default: Any) -> Any:
    found = getattr(getattr(part, "config", None), name, None)
    return default if found is None else found
