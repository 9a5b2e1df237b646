"""Check a parallelized Diffusers pipeline: its latents must be those of one process.

The pipeline is small and has random weights. The reference is computed without parallelism, in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import CommError
from weft.diffusers.parallelize import parallelize, restore
from weft.doctor.suite import Check, CheckContext
from weft.run.measure.compare import TOLERANCE

NAME = "WanPipeline"
STEPS, TEXT_TOKENS, TEXT_DIM = 2, 17, 32
ROUNDING_RATIO = 2.0
"""Largest error that is allowed, relative to that of one process in the same dtype."""


def checks(ctx: CheckContext) -> Iterator[Check]:
    if find_spec("diffusers") is None:
        yield Check(name=NAME, status="skipped", note="it needs diffusers (the extra 'models' of weft).")
        return
    # Weights are cast to the dtype under test first: then one process differs from float32 by rounding alone.
    pipe = _pipeline(ctx)
    exact = copy.deepcopy(pipe)
    exact.transformer.float()
    expected, unsharded = _latents(exact, ctx), _latents(pipe, ctx)
    largest = expected.abs().max()
    rounding = float((unsharded - expected).abs().max() / largest)
    allowed = max(TOLERANCE[ctx.dtype], ROUNDING_RATIO * rounding)
    note = f"one process is off by {rounding:.1e} from float32"
    for cfg, what in (("off", "tokens split"), ("on", "guidance branches and tokens split")):
        name = f"{NAME}, {what}"
        if (cfg == "off" or ctx.ranks % 2 == 0) and ctx.begins(name):
            try:
                actual = _parallel_latents(pipe, cfg, ctx)
            except CommError as error:  # of check="first": an attention is wrong
                yield Check(name=name, status="wrong", note=str(error))
            else:
                yield ctx.judged(name, actual / largest, expected / largest, allowed=allowed, note=note)


def _parallel_latents(pipe: Any, cfg: str, ctx: CheckContext) -> Tensor:
    parallelize(pipe, cfg=cfg, check="first")
    try:
        return _latents(pipe, ctx)
    finally:
        restore(pipe)


def _pipeline(ctx: CheckContext) -> Any:
    """Return a pipeline without text encoder and VAE: it takes embeddings and returns latents."""
    diffusers: Any = import_module("diffusers")
    sizes = {"num_attention_heads": 3, "attention_head_dim": 12 if ctx.is_rehearsal else 64, "num_layers": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = diffusers.WanTransformer3DModel(
            **sizes, ffn_dim=64, text_dim=TEXT_DIM, freq_dim=16, rope_max_seq_len=64
        )
        # With the default weights attention would hardly change the result.
        for parameter in transformer.parameters():
            torch.nn.init.normal_(parameter, std=1.0 / max(1, parameter.shape[-1]) ** 0.5)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    transformer = _cast(transformer, getattr(torch, ctx.dtype)).eval()
    pipe = diffusers.WanPipeline(None, None, None, scheduler, transformer)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(ctx.device)


def _cast(transformer: Any, dtype: torch.dtype) -> Any:
    """Cast as `from_pretrained` does: some modules stay in float32."""
    for name, parameter in transformer.named_parameters():
        if not any(module in name.split(".") for module in transformer._keep_in_fp32_modules or ()):
            parameter.data = parameter.data.to(dtype)
    return transformer


@torch.no_grad()
def _latents(pipe: Any, ctx: CheckContext) -> Tensor:
    """Run the pipeline from fixed noise and text embeddings; return the latents in float32."""
    random = torch.Generator().manual_seed(1)
    dtype = pipe.transformer.dtype
    texts = [torch.randn(1, TEXT_TOKENS, TEXT_DIM, generator=random).to(ctx.device, dtype) for _ in range(2)]
    side = 48 if ctx.is_rehearsal else 240
    return pipe(
        prompt_embeds=texts[0], negative_prompt_embeds=texts[1], guidance_scale=3.0, height=side,
        width=side + 32, num_frames=9, num_inference_steps=STEPS, output_type="latent", return_dict=False,
        generator=torch.Generator().manual_seed(2),
    )[0].float()  # fmt: skip
