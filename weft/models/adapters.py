"""Adapters of the models in Diffusers and of weft's own, one entry each; `weft models` lists them.

Where a model has a `_cp_plan` of Diffusers' own that splits what weft splits, the entry only says the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from weft.core.errors import InputError
from weft.models import dit
from weft.models.adapter import Adapter, Cut, unwrapped

VIDEO, TEXT = Cut("video", 1), Cut("text", 1)
ROPE = Cut("video", 0)
"""[tokens, …], without a batch."""
FIRST = Cut("video", None)
JOINT = Cut("joint", 1)
"""Text and video in one tensor, in places that differ by sample."""
BLOCK = {"hidden_states": VIDEO, "encoder_hidden_states": TEXT}
CONTROL = {"controlnet_block_samples": VIDEO, "controlnet_single_block_samples": VIDEO}
TIMES = {"embedded_timestep": VIDEO._replace(ndim=3), "temb": VIDEO._replace(ndim=3)}
"""Where each token has its own."""
END = {"proj_out": VIDEO}


def _patches(model: Any, given: Mapping[str, Any], order: str = "cthw") -> tuple[int, int, int]:
    """Of latents [batch, …] whose other dims come in an order; images have no frames."""
    shape, patch = given["hidden_states"].shape[1:], model.config.patch_size
    size = dict(zip(order if len(shape) == len(order) else order.replace("t", ""), shape, strict=True))
    if isinstance(patch, int):
        patch = getattr(model.config, "patch_size_t", None) or 1, patch, patch
    frames, rows, columns = (1, 1, *patch)[-3:]
    return -(-size.get("t", 1) // frames), size["h"] // rows, size["w"] // columns


def _frames_first(model: Any, given: Mapping[str, Any]) -> tuple[int, int, int]:
    return _patches(model, given, "tchw")


def _told(_: Any, given: Mapping[str, Any]) -> tuple[int, int, int]:
    return given["num_frames"], given["height"], given["width"]


def _ids(_: Any, given: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of positions [tokens, (what, row, column, …)]; images one after another are frames."""
    ids = given["img_ids"]
    places = (ids if ids.dim() == 2 else ids[0])[:, 1:3]
    rows, columns = (len(each.unique()) for each in places.T)
    first = places[: rows * columns]
    frames, rest = divmod(len(places), rows * columns)
    if rest or bool((places != first.repeat(frames, 1)).any()):
        raise _no_grid(len(places))
    return frames, rows, columns


def _shapes(_: Any, given: Mapping[str, Any]) -> tuple[int, int, int]:
    """Images one after another are frames."""
    shapes = given["img_shapes"][0]
    if len({tuple(shape[1:]) for shape in shapes}) > 1:
        raise _no_grid(sum(map(prod, shapes)))
    return sum(shape[0] for shape in shapes), *shapes[0][1:]


def _no_grid(tokens: int) -> InputError:
    return InputError(
        f"{tokens} tokens of images of different sizes are no grid.",
        hint="Masks need one; without mask= images can have any sizes.",
    )


WAN = Adapter(
    "WanTransformer3DModel",
    inputs={"": {"timestep": VIDEO._replace(ndim=2)}},
    attention={"blocks.*.attn1": "video"},
    local=("blocks.*.attn2",),
    grid=_patches,
    note="2.1 and 2.2, text and image to video",
)
WAN_FAMILY = (
    WAN,
    replace(WAN, model="ChronoEditTransformer3DModel", note=""),
    replace(
        WAN,
        model="SkyReelsV2Transformer3DModel",
        inputs={"blocks.0": {"hidden_states": VIDEO}},
        outputs={"rope": VIDEO},
        gather=END,
        note="without diffusion forcing",
    ),
    replace(
        WAN,
        model="WanVACETransformer3DModel",
        inputs={
            "blocks.0": {"hidden_states": VIDEO},
            "vace_blocks.0": {"hidden_states": VIDEO, "control_hidden_states": VIDEO},
        },
        outputs={"rope": VIDEO},
        gather=END,
        attention={"vace_blocks.*.attn1": "video", "blocks.*.attn1": "video"},
        local=("blocks.*.attn2", "vace_blocks.*.attn2"),
        note="",
    ),
)
HUNYUAN = Adapter(
    "HunyuanVideoTransformer3DModel",
    inputs={
        "transformer_blocks.0": BLOCK,
        "transformer_blocks.*": {"num_tokens": FIRST},
        "single_transformer_blocks.*": {"num_tokens": FIRST},
    },
    outputs={"rope": ROPE},
    gather=END,
    attention={"transformer_blocks.*.attn": "video text", "single_transformer_blocks.*.attn": "video text"},
    local=("context_embedder",),
    grid=_patches,
    note="text and image to video",
)
HUNYUAN_FAMILY = (
    HUNYUAN,
    replace(
        HUNYUAN,
        model="HunyuanVideo15Transformer3DModel",
        inputs={"transformer_blocks.0": BLOCK, "transformer_blocks.*": {"attention_mask": TEXT}},
    ),
    replace(HUNYUAN, model="HunyuanImageTransformer2DModel", inputs={"transformer_blocks.0": BLOCK}, note=""),
)
FLUX = Adapter(
    "FluxTransformer2DModel",
    inputs={"": {**BLOCK, **CONTROL, "img_ids": Cut("video", -2), "txt_ids": Cut("text", -2)}},
    gather=END,
    attention={"transformer_blocks.*.attn": "text video", "single_transformer_blocks.*.attn": "text video"},
    grid=_ids,
)
FLUX_FAMILY = (
    FLUX,
    *(
        replace(FLUX, model=f"{name}Transformer2DModel")
        for name in ("Flux2", "Bria", "OvisImage", "LongCatImage")
    ),
)
COG = Adapter(
    "CogVideoXTransformer3DModel",
    inputs={"transformer_blocks.0": BLOCK, "transformer_blocks.*": {"image_rotary_emb": ROPE}},
    gather=END,
    attention={"transformer_blocks.*.attn1": "text video"},
    grid=_frames_first,
)
COG_FAMILY = (
    COG,
    replace(COG, model="EasyAnimateTransformer3DModel", grid=_patches),
    replace(COG, model="CogView4Transformer2DModel", grid=_patches),
    replace(
        COG, model="CogView3PlusTransformer2DModel", inputs={"transformer_blocks.0": BLOCK}, grid=_patches
    ),
)
KNOWN = (
    *WAN_FAMILY,
    *HUNYUAN_FAMILY,
    *COG_FAMILY,
    *FLUX_FAMILY,
    Adapter(
        "SD3Transformer2DModel",
        inputs={"": {"block_controlnet_hidden_states": VIDEO}},
        outputs={"pos_embed": VIDEO, "context_embedder": TEXT},
        gather=END,
        attention={"transformer_blocks.*.attn": "video text", "transformer_blocks.*.attn2": "video"},
        grid=_patches,
    ),
    Adapter(
        "AuraFlowTransformer2DModel",
        inputs={"joint_transformer_blocks.0": BLOCK},
        gather=END,
        attention={
            "joint_transformer_blocks.*.attn": "text video",
            "single_transformer_blocks.*.attn": "text video",
        },
        grid=_patches,
    ),
    Adapter(
        "CosmosTransformer3DModel",
        inputs={
            "transformer_blocks.0": {"hidden_states": VIDEO},
            "transformer_blocks.*": TIMES | {"extra_pos_emb": VIDEO},
            "norm_out": TIMES,
        },
        outputs={"rope": ROPE},
        gather=END,
        attention={"transformer_blocks.*.attn1": "video"},
        local=("transformer_blocks.*.attn2",),
        grid=_patches,
    ),
    Adapter(
        "PixArtTransformer2DModel",
        outputs={"pos_embed": VIDEO},
        gather=END,
        attention={"transformer_blocks.*.attn1": "video"},
        local=("transformer_blocks.*.attn2",),
        grid=_patches,
    ),
    Adapter(
        "LTXVideoTransformer3DModel",
        inputs={"": {"hidden_states": VIDEO, "timestep": VIDEO._replace(ndim=2)}},
        outputs={"rope": VIDEO},
        gather=END,
        attention={"transformer_blocks.*.attn1": "video"},
        local=("transformer_blocks.*.attn2",),
        grid=_told,
    ),
    Adapter(
        "MochiTransformer3DModel",
        inputs={"transformer_blocks.0": BLOCK, "transformer_blocks.*": {"encoder_attention_mask": TEXT}},
        outputs={"rope": ROPE},
        gather=END,
        attention={"transformer_blocks.*.attn1": "video text?"},
        grid=_patches,
    ),
    Adapter(
        "AllegroTransformer3DModel",
        inputs={
            "transformer_blocks.0": {"hidden_states": VIDEO},
            "transformer_blocks.*": {"image_rotary_emb": (None, VIDEO)},
        },
        gather=END,
        attention={"transformer_blocks.*.attn1": "video"},
        local=("transformer_blocks.*.attn2",),
        grid=_patches,
    ),
    Adapter(
        "QwenImageTransformer2DModel",
        inputs={"": CONTROL},
        streams={
            "encoder_hidden_states": "text",
            "encoder_hidden_states_mask": "text",
            "pos_embed.1": "text",
        },
        attention={"transformer_blocks.*.attn": "text video"},
        grid=_shapes,
    ),
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
    Adapter("LatteTransformer3DModel", attention={}, note="by switching the sharded dim"),
    dit.ADAPTER,
)
ADAPTERS: dict[str, Adapter] = {adapter.model: adapter for adapter in KNOWN}


def knows(model: Any) -> Adapter | None:
    """The adapter of a model's class, or of one it is derived from."""
    names = [base.__name__ for base in type(unwrapped(model)).__mro__]
    return next((ADAPTERS[name] for name in names if name in ADAPTERS), None)


def adapter_of(model: Any) -> Adapter:
    if (adapter := knows(model)) is not None:
        return adapter
    raise InputError(
        f"weft has no adapter for a {type(unwrapped(model)).__name__}.",
        hint="Declare one, weft.parallelize(model, adapter=weft.Adapter(…)): docs/models.md shows how in 20 "
        f"lines. Known are {', '.join(ADAPTERS)}.",
    )
