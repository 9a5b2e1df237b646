"""Results: what a run shows of its model, by the average of its weights: samples, held-out loss, the model.

All ranks take part, since each has a part of the weights.
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
from weft.models import media
from weft.models.dit import VideoDiT
from weft.models.video import VideoPipeline
from weft.train.edges import learn
from weft.train.evaluate import held_out_loss
from weft.train.ranks import local

if TYPE_CHECKING:
    from weft.train.recipe import Recipe
    from weft.train.trainer import Trainer

COLUMNS = 8
"""Frames of a clip that a sheet shows."""
STEPS, GUIDANCE = 20, 2.0
HINT = "Checkpoints that are complete are untouched."
VALIDATED = 16
"""Clips, of those that are held out, that a validation takes, at eight timesteps each."""


def export(trainer: Trainer) -> None:
    """The model as `weft generate` takes it."""
    with exchanged(trainer.model, trainer.average):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(trainer.model, options=options)
    if trainer.ranks.rank:
        return
    seed, clips, target = trainer.recipe.train.seed, trainer.clips, trainer.folder / "model"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # an upscaler begins alike however often a run was exported before
        model = VideoDiT(trainer.config)
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
        pipe = VideoPipeline(model, trainer.captions.own)
    if pipe.upscaler is not None and trainer.done == trainer.recipe.train.steps:
        error = learn(pipe.upscaler, clips.source, clips=clips.trained, seed=seed)
        trainer.note(f"the upscaler has learned its edges, to a squared error of {error:.4f}")
    with writing(target, hint=HINT):
        pipe.save(target, left_out=left_out(trainer.recipe))


def left_out(recipe: Recipe) -> str:
    """What validation and samples have that an exported model has not.

    A selection is left out in silence: attention to all keys is what it stands for.
    """
    return "a coarse branch ([sparse] coarse = true)" if recipe.sparse and recipe.sparse.coarse else ""


def held_out(trainer: Trainer) -> float:
    """The mean flow loss over clips that are never trained on, at fixed timesteps with fixed noise."""
    clips = trainer.clips
    with exchanged(trainer.model, trainer.average):
        losses = held_out_loss(
            trainer.model, clips.source, clips=min(VALIDATED, len(clips.held_out)), shrink=clips.shrink
        )
    return float(losses.mean())


def samples(trainer: Trainer) -> str:
    """The recipe's prompts, a row of frames each; the name of the sheet."""
    pipe = VideoPipeline(trainer.model, trainer.captions.own)
    with exchanged(trainer.model, trainer.average):
        made = pipe(
            trainer.recipe.save.prompts, num_inference_steps=STEPS, guidance_scale=GUIDANCE,
            generator=torch.Generator().manual_seed(0), output_type="latent",
        ).frames  # fmt: skip
    file = trainer.folder / "samples" / f"{trainer.done:06d}.png"
    if trainer.ranks.rank == 0:
        with writing(file, hint=HINT):
            file.parent.mkdir(exist_ok=True)
            write_sheet(file, made)
    return str(file.relative_to(trainer.folder))


def write_sheet(file: Path, clips: Tensor) -> None:
    """Clips [B, T, C, H, W] from -1 to 1 as rows of frames."""
    from PIL import Image

    shown = clips if clips.shape[2] == 3 else clips[:, :, :1].expand(-1, -1, 3, -1, -1)  # a latent's first
    some = shown[:, media.spread(clips.shape[1], COLUMNS)]
    pixels = some.add(1).mul(127.5).clamp(0, 255).round().byte().permute(0, 1, 3, 4, 2).flatten(0, 1)
    Image.fromarray(media.sheet(pixels.cpu().numpy(), columns=some.shape[1])).save(file)


@contextmanager
def exchanged(model: nn.Module, others: dict[str, Tensor]) -> Iterator[None]:
    """A model with other weights, such as their average, for a while."""

    @torch.no_grad()
    def exchange() -> None:
        for name, weight in model.named_parameters():
            mine, other = local(weight), local(others[name])
            kept = mine.clone()
            mine.copy_(other)
            other.copy_(kept)

    training = model.training
    model.eval()
    exchange()
    try:
        yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # else weights that were gathered for this while would be used again
        exchange()
        model.train(training)
