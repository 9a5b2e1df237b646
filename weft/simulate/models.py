"""Models by name: the sizes of their attention, which is all that a plan needs, and of what is around it.

Sizes follow the models' public configurations; none has been checked against a checkpoint. Where a paper is
named, its numbers are used (`docs/papers.md`).
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.errors import InputError, nearest_of


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """A DiT with full attention over a video (or an image, with one frame) and possibly text beside it.

    With two `attentions` a layer attends within frames and then along time (an ST-DiT).
    """

    name: str
    layers: int
    heads: int
    head_dim: int
    text: int = 0
    """Text tokens in the same attention."""
    cross: int = 0
    """Text tokens that a cross-attention of its own reads; 0: there is none."""
    mlp: float = 4.0
    """The width of the MLP over the hidden size."""
    gated: bool = False
    """Three matrices in an MLP instead of two."""
    attentions: int = 1
    mlps: int = 1
    frames_per_latent: int = 4
    pixels_per_token: int = 16
    """Side of the square of pixels behind one token: the VAE's factor × the patch."""
    steps: int = 50
    width: int = 1280
    height: int = 720
    frames: int = 81

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def weights(self) -> float:
        """Weights of one layer that each video token is multiplied by; cross-attended text has 2·hidden²."""
        of_mlps = self.mlps * self.mlp * (3 if self.gated else 2)
        return (4 * self.attentions + of_mlps + 2 * (self.cross > 0)) * self.hidden**2

    def grid(self, width: int = 0, height: int = 0, frames: int = 0) -> tuple[int, int, int]:
        """Return (t, h, w) of the latent tokens; 0 stands for the model's own size."""
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
        ModelSizes(
            name="wan2.1-1.3b", layers=30, heads=12, head_dim=128, cross=512, mlp=8960 / 1536,
            width=832, height=480,
        ),
        # Layers, heads, size and steps as in the db-SP paper.
        ModelSizes(name="wan2.1-14b", layers=40, heads=40, head_dim=128, cross=512, mlp=13824 / 5120),
        # 20 double-stream and 40 single-stream blocks, which cost a token the same.
        ModelSizes(name="hunyuanvideo", layers=60, heads=24, head_dim=128, text=256, frames=129),
        # Layers, heads, size and text as in the db-SP paper; its patch is two latent frames deep.
        ModelSizes(
            name="cogvideox1.5-5b", layers=42, heads=48, head_dim=64, text=226, frames_per_latent=8,
            width=1360, height=768, frames=161,
        ),
        # Patches of one latent frame; 161 frames are 20 s in the StreamFusion paper.
        ModelSizes(
            name="cogvideox-5b", layers=42, heads=48, head_dim=64, text=226,
            width=1360, height=768, frames=161,
        ),
        # 19 double-stream and 38 single-stream blocks.
        ModelSizes(
            name="flux", layers=57, heads=24, head_dim=128, text=512,
            width=1024, height=1024, frames=1, steps=28,
        ),
        # Pairs of a spatial and a temporal block, each with an MLP; frames are not compressed.
        ModelSizes(
            name="latte-1", layers=28, heads=16, head_dim=72, cross=120, attentions=2, mlps=2,
            frames_per_latent=1, width=512, height=512, frames=16,
        ),
        # STDiT-XL/2 of Open-Sora 1.0: both attentions, one cross-attention and one MLP in a block.
        ModelSizes(
            name="open-sora", layers=28, heads=16, head_dim=72, cross=120, attentions=2,
            frames_per_latent=1, width=512, height=512, frames=80, steps=100,
        ),
        # Layers, heads, dims, kinds of MLP, 120 text tokens and a VAE of 8 × 8 pixels: the DSV paper. That a
        # token is one latent follows from its 40 × 56 × 56 = 125k; the MLP ratio of 4 from 2.7B parameters.
        ModelSizes(
            name="dsv-0.8b", layers=28, heads=12, head_dim=96, cross=120, gated=True,
            frames_per_latent=1, pixels_per_token=8, width=128, height=128, frames=16,
        ),
        ModelSizes(
            name="dsv-2.7b", layers=32, heads=16, head_dim=128, cross=120, gated=True,
            frames_per_latent=1, pixels_per_token=8, width=256, height=256, frames=32,
        ),
        ModelSizes(
            name="dsv-30b", layers=42, heads=24, head_dim=256, cross=120,
            frames_per_latent=1, pixels_per_token=8, width=256, height=256, frames=32,
        ),
    )
}  # fmt: skip


def model(name: str) -> ModelSizes:
    """Return a model by its name."""
    if name not in MODELS:
        raise InputError(f"There is no model {name!r}.", hint=nearest_of(name.lower(), MODELS))
    return MODELS[name]
