"""Models by name: the sizes of their attention, which is all that a plan needs to know of them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from weft.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Model:
    """A DiT with full attention over a video (or an image, with one frame) and maybe text beside it."""

    name: str
    layers: int
    heads: int
    head_dim: int
    text: int = 0
    """Text tokens in the same attention; cross-attention to text is not counted."""
    frames_per_latent: int = 4
    pixels_per_token: int = 16
    """Side of the square of pixels behind one token: the VAE's factor × the patch."""
    steps: int = 50
    width: int = 1280
    height: int = 720
    frames: int = 81

    def grid(self, width: int = 0, height: int = 0, frames: int = 0) -> tuple[int, int, int]:
        """(t, h, w) of the latent tokens; what is left out is the model's own size."""
        width, height, frames = width or self.width, height or self.height, frames or self.frames
        if min(width, height) < self.pixels_per_token or frames < 1:
            raise InputError(
                f"{width}x{height} with {frames} frames is less than one token of {self.name}.",
                hint=f"A token covers {self.pixels_per_token}×{self.pixels_per_token} pixels.",
            )
        latents = (frames - 1) // self.frames_per_latent + 1
        return latents, height // self.pixels_per_token, width // self.pixels_per_token


MODELS = {
    model.name: model
    for model in (
        Model(name="wan2.1-1.3b", layers=30, heads=12, head_dim=128, width=832, height=480),
        Model(name="wan2.1-14b", layers=40, heads=40, head_dim=128),
        Model(name="hunyuanvideo", layers=60, heads=24, head_dim=128, text=256, frames=129),
        Model(
            name="cogvideox1.5-5b",
            layers=42,
            heads=48,
            head_dim=64,
            text=226,
            width=1360,
            height=768,
            frames=161,
        ),
        Model(
            name="flux",
            layers=57,
            heads=24,
            head_dim=128,
            text=512,
            width=1024,
            height=1024,
            frames=1,
            steps=28,
        ),
    )
}


def model(name: str) -> Model:
    """A model by its name."""
    if name not in MODELS:
        near = difflib.get_close_matches(name.lower(), MODELS, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(MODELS)}."
        raise InputError(f"There is no model {name!r}.", hint=hint)
    return MODELS[name]
