"""VideoPipeline: words to video by a VideoDiT, called as a Diffusers pipeline is, without Diffusers.

    pipe = VideoPipeline.load(shipped())
    frames = pipe("a red circle moving left", generator=torch.Generator().manual_seed(0)).frames

A directory has model.safetensors and config.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.core.files import read_json, whole
from weft.models import flow
from weft.models.checkpoint import CONFIG, LEFT_OUT, OWN, WEIGHTS, check_whole
from weft.models.dit import DiTConfig, VideoDiT
from weft.models.upscale import Upscaler
from weft.models.vocabulary import Vocabulary
from weft.models.words import LENGTH, WORDS, encode

UPSCALER = "upscaler."
OUTPUTS = ("np", "pil", "latent")


@dataclass(frozen=True)
class VideoOutput:
    """`frames` has a video for each prompt."""

    frames: Any


class VideoPipeline:
    """One model, which makes pixels; there is no text encoder and no VAE."""

    def __init__(
        self, transformer: VideoDiT, vocabulary: Vocabulary | None = None, upscaler: Upscaler | None = None
    ) -> None:
        """Without a vocabulary, words are weft's own; without an upscaler, one that has learned nothing."""
        self.transformer, config = transformer, transformer.config
        self.upscaler = upscaler
        if config.upscale > 1 and upscaler is None:
            self.upscaler = Upscaler(config.upscale, config.channels).eval()
        self.vocabulary, self.num_timesteps = vocabulary, 0
        known = (len(vocabulary.words), vocabulary.length) if vocabulary else (len(WORDS), LENGTH)
        if (config.words, config.length) != known:
            raise InputError(
                f"This model knows {config.words} words, {config.length} in a prompt; "
                f"{'its vocabulary' if vocabulary else 'this weft'} has {known[0]} and {known[1]}.",
                hint="Use the one that it was trained with.",
            )

    @property
    def components(self) -> dict[str, Any]:
        return {"transformer": self.transformer}

    def set_progress_bar_config(self, **_: Any) -> None:
        """It has no bar."""

    def to(self, *where: Any) -> VideoPipeline:
        for part in self._parts().values():
            part.to(*where)
        return self

    def _parts(self) -> Mapping[str, nn.Module]:
        return {"": self.transformer} | ({UPSCALER: self.upscaler} if self.upscaler else {})

    def save(self, directory: Path | str, dtype: torch.dtype = torch.float16, *, left_out: str = "") -> None:
        """Weights are stored in 16 bits, which is more than sampling can tell.

        left_out   what else the model was trained with: such a one is only to begin another run with.
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        with whole(folder / WEIGHTS) as file:
            weights = {
                prefix + name: x.to(dtype).contiguous()
                for prefix, part in self._parts().items()
                for name, x in part.state_dict().items()
            }
            # By ourselves: safetensors would keep it from all other users, and has errors of its own.
            file.write_bytes(to_bytes(weights))
        own = {} if self.vocabulary is None else {"vocabulary": self.vocabulary.to_json()}
        config = {"_class_name": OWN, **self.transformer.config.to_json(), **own}
        config |= {LEFT_OUT: left_out} if left_out else {}
        with whole(folder / CONFIG) as file:
            file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def load(
        directory: Path | str, dtype: torch.dtype = torch.float32, *, whole: bool = True
    ) -> VideoPipeline:
        """`whole`: refuse one that was saved with something left out."""
        folder = Path(directory)
        if whole:
            check_whole(folder)
        saved = read_json(folder / CONFIG)
        own = Vocabulary.from_json(saved["vocabulary"]) if "vocabulary" in saved else None
        if not (folder / WEIGHTS).is_file():  # a pipe would block
            raise InputError(f"{folder} has no file {WEIGHTS}.", hint="Copy it again.")
        try:
            weights = load_file(folder / WEIGHTS)
            config = DiTConfig.from_json(saved)
            _check_size(config, weights, folder)
            pipe = VideoPipeline(VideoDiT(config).eval(), own)
            if pipe.upscaler is not None:
                own = [name for name in weights if name.startswith(UPSCALER)]
                pipe.upscaler.load_state_dict(
                    {name.removeprefix(UPSCALER): weights.pop(name) for name in own}
                )
            pipe.transformer.load_state_dict(weights)
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{folder / WEIGHTS} is no whole file: {error}", hint="Copy it again."
            ) from error
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]  # torch names every weight, in lines
            raise InputError(f"The weights in {folder} are not those of its {CONFIG}: {reason}") from error
        return pipe.to(dtype)

    @torch.no_grad()
    def __call__(  # noqa: PLR0913 - the arguments that pipelines have
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        *,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 30,
        guidance_scale: float | Sequence[float] = 2.0,
        generator: flow.Generators = None,
        output_type: str = "np",
        callback_on_step_end: Callable[..., Any] | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Frames of each prompt: np is [B, T, H, W, 3] from 0 to 1.

        latent is [B, T, 3, H, W] from -1 to 1, before it is enlarged.
        """
        if output_type not in OUTPUTS:
            raise InputError(f"output_type={output_type!r} is none of {', '.join(OUTPUTS)}.")
        config, self.num_timesteps = self.transformer.config, num_inference_steps
        if not config.pixels and output_type != "latent":
            raise InputError(
                "This model makes latents, and weft has no decoder for them.",
                hint='Call the pipeline with output_type="latent".',
            )
        asked = zip((num_frames, height, width), config.video, strict=True)
        T, H, W = (own if size is None else size for size, own in asked)
        config.grid((T, H, W))
        words = self._words(prompt)

        def on_step(index: int, timestep: Tensor, video: Tensor) -> Tensor:
            if callback_on_step_end is None:
                return video
            return callback_on_step_end(self, index, timestep, {"latents": video}).get("latents", video)

        video = flow.sample(
            self.transformer, words, (T, config.channels, H // config.upscale, W // config.upscale),
            on_step=on_step, generator=generator,
            negative=None if negative_prompt is None else self._words(negative_prompt, len(words)),
            steps=num_inference_steps, guidance=guidance_scale, shift=config.shift,
            pixels=config.pixels,
        )  # fmt: skip
        if self.upscaler is not None and output_type != "latent":
            video = self.upscaler.videos(video)
        frames = video if output_type == "latent" else _shown(video, output_type)
        return VideoOutput(frames) if return_dict else (frames,)

    def _words(self, prompt: str | Sequence[str], samples: int = 1) -> Tensor:
        texts = [prompt] * samples if isinstance(prompt, str) else list(prompt)
        device = next(self.transformer.parameters()).device
        own = encode if self.vocabulary is None else self.vocabulary.encode
        return torch.tensor([own(text) for text in texts], device=device)


def _check_size(config: DiTConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Before memory is taken: refuse a config whose model is far larger than its weights.

    What differs by less is told, by name, when weights are loaded into it.
    """
    blocks = f"blocks.{config.depth - 1}."
    if any(name.startswith(blocks) for name in weights):
        with torch.device("meta"):
            needed = sum(x.numel() for x in VideoDiT(config).state_dict().values())
        if needed <= 2 * sum(x.numel() for x in weights.values()) + (1 << 20):
            return
    raise InputError(
        f"The weights in {folder} are not those of its {CONFIG}.", hint="Copy both files from the same model."
    )


def _shown(video: Tensor, output_type: str) -> Any:
    frames = video.add(1).div(2).clamp(0, 1).float().permute(0, 1, 3, 4, 2).cpu().numpy()
    if output_type == "np":
        return frames
    from PIL import Image

    return [[Image.fromarray((frame * 255).round().astype("uint8")) for frame in clip] for clip in frames]
