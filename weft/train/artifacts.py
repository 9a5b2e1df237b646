"""Artifacts of a run, made with the EMA of its weights: samples, held-out loss, and the exported model.

All functions are collective, since the weights may be sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from weft.core.files import writing
from weft.generate import media
from weft.train.mesh import local
from weft.video.evaluation import eval_mode, held_out_loss
from weft.video.pipeline import VideoPipeline
from weft.video.transformer import VideoDiT
from weft.video.upscale import fit_upscaler

if TYPE_CHECKING:
    from weft.train.recipe import Recipe
    from weft.train.trainer import Trainer

SHEET_COLUMNS = 8
"""Frames of a clip on a sheet."""
STEPS, GUIDANCE = 20, 2.0
HINT = "Complete checkpoints are unaffected."
MAX_VALIDATION_CLIPS = 16
"""Each at eight timesteps."""


def export(trainer: Trainer) -> None:
    """Save the model as `weft generate` takes it."""
    with swapped_weights(trainer.model, trainer.ema):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(trainer.model, options=options)
    if trainer.mesh.rank:
        return
    seed, clips, target = trainer.recipe.train.seed, trainer.clips, trainer.folder / "model"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # each export of a run initializes the upscaler alike
        model = VideoDiT(trainer.config)
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
        pipe = _pipeline(trainer, model)
    if pipe.upscaler is not None and trainer.done == trainer.recipe.train.steps:
        error = fit_upscaler(pipe.upscaler, clips.source, clips=clips.num_trained, seed=seed)
        trainer.note(f"the upscaler was trained, to a squared error of {error:.4f}")
    with writing(target, hint=HINT):
        pipe.save(target, left_out=left_out(trainer.recipe))


def _pipeline(trainer: Trainer, model: VideoDiT) -> VideoPipeline:
    return VideoPipeline(model, getattr(trainer.clips.source, "vocabulary", None))


def left_out(recipe: Recipe) -> str:
    """Name what validation and samples use and an exported model lacks.

    A selection of keys is not named: it approximates attention to all keys.
    """
    return "a coarse branch ([sparse] coarse = true)" if recipe.sparse and recipe.sparse.coarse else ""


def held_out(trainer: Trainer) -> float:
    """Return the mean flow loss over held-out clips, at fixed timesteps with fixed noise."""
    clips = trainer.clips
    with swapped_weights(trainer.model, trainer.ema):
        count = min(MAX_VALIDATION_CLIPS, len(clips.held_out))
        losses = held_out_loss(trainer.model, clips.source, clips=count, downscale=clips.downscale)
    return float(losses.mean())


def samples(trainer: Trainer) -> str:
    """Generate the recipe's prompts as a sheet with a row of frames each; return the name of its file."""
    pipe = _pipeline(trainer, trainer.model)
    with swapped_weights(trainer.model, trainer.ema):
        clips = pipe(
            trainer.recipe.save.prompts, num_inference_steps=STEPS, guidance_scale=GUIDANCE,
            generator=torch.Generator().manual_seed(0), output_type="latent",
        ).frames  # fmt: skip
    file = trainer.folder / "samples" / f"{trainer.done:06d}.png"
    if trainer.mesh.rank == 0:
        with writing(file, hint=HINT):
            file.parent.mkdir(exist_ok=True)
            write_sheet(file, clips)
    return str(file.relative_to(trainer.folder))


def write_sheet(file: Path, clips: Tensor) -> None:
    """Write clips [B, T, C, H, W] from -1 to 1 as rows of frames."""
    from PIL import Image

    rgb = clips if clips.shape[2] == 3 else clips[:, :, :1].expand(-1, -1, 3, -1, -1)  # a latent's channel 0
    frames = rgb[:, media.spread(clips.shape[1], SHEET_COLUMNS)]
    pixels = frames.add(1).mul(127.5).clamp(0, 255).round().byte().permute(0, 1, 3, 4, 2).flatten(0, 1)
    Image.fromarray(media.sheet(pixels.cpu().numpy(), columns=frames.shape[1])).save(file)


@contextmanager
def swapped_weights(model: nn.Module, others: dict[str, Tensor]) -> Iterator[None]:
    """Swap the weights of a model with others, such as their EMA, in eval mode, and swap them back."""

    @torch.no_grad()
    def swap() -> None:
        for name, weight in model.named_parameters():
            own, other = local(weight), local(others[name])
            copy = own.clone()
            own.copy_(other)
            other.copy_(copy)

    with eval_mode(model):
        swap()
        try:
            yield
        finally:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # otherwise weights gathered in between would be used again
            swap()
