"""VideoPipeline: text to video by a VideoDiT, called like a Diffusers pipeline, without Diffusers.

    pipe = VideoPipeline.load(shipped())
    frames = pipe("a red circle moving left", generator=torch.Generator().manual_seed(0)).frames

A saved pipeline is a directory with model.safetensors and config.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from weft.core import tables
from weft.core.errors import InputError
from weft.core.files import read_json, whole
from weft.video import flow
from weft.video.captions import SCENE_VOCABULARY
from weft.video.saved_model import CLASS_NAME, CONFIG, LEFT_OUT, WEIGHTS, check_complete
from weft.video.transformer import DiTConfig, VideoDiT
from weft.video.upscale import Upscaler
from weft.video.vocabulary import Vocabulary

if TYPE_CHECKING:
    from PIL.Image import Image

UPSCALER_PREFIX = "upscaler."
OUTPUT_TYPES = ("np", "pil", "latent")


@dataclass(frozen=True)
class VideoOutput:
    """`frames` has a video for each prompt."""

    frames: Any


class VideoPipeline:
    """A VideoDiT with its vocabulary and upscaler; there is no text encoder and no VAE."""

    def __init__(
        self, transformer: VideoDiT, vocabulary: Vocabulary | None = None, upscaler: Upscaler | None = None
    ) -> None:
        """Without a vocabulary, words are those of `captions`; without an upscaler, it is untrained."""
        self.transformer, config = transformer, transformer.config
        self.upscaler = upscaler
        if config.upscale > 1 and upscaler is None:
            self.upscaler = Upscaler(config.upscale, config.channels).eval()
        self.vocabulary, self.num_timesteps = vocabulary, 0
        self._tokenizer = vocabulary or SCENE_VOCABULARY
        words, length = len(self._tokenizer.words), self._tokenizer.length
        if (config.words, config.length) != (words, length):
            raise InputError(
                f"This model knows {config.words} words, {config.length} in a prompt; "
                f"{'its vocabulary' if vocabulary else 'this weft'} has {words} and {length}.",
                hint="Use the vocabulary that it was trained with.",
            )

    @property
    def components(self) -> dict[str, nn.Module]:
        return {"transformer": self.transformer}

    def set_progress_bar_config(self, **_: bool) -> None:
        """There is no progress bar."""

    def to(self, target: torch.device | torch.dtype | str) -> VideoPipeline:
        for module in self._modules().values():
            module.to(target)
        return self

    def _modules(self) -> Mapping[str, nn.Module]:
        """The modules with weights, by the prefix of their names in the file."""
        return {"": self.transformer} | ({UPSCALER_PREFIX: self.upscaler} if self.upscaler else {})

    def save(self, directory: Path | str, dtype: torch.dtype = torch.float16, *, left_out: str = "") -> None:
        """Store the weights in 16 bits, which does not change samples visibly.

        left_out   parts of the trained model that are not saved: only another run can start from it.
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        with whole(folder / WEIGHTS) as file:
            weights = {
                prefix + name: x.to(dtype).contiguous()
                for prefix, module in self._modules().items()
                for name, x in module.state_dict().items()
            }
            # safetensors' own writer makes files that only their owner can read.
            file.write_bytes(to_bytes(weights))
        config = {"_class_name": CLASS_NAME, **asdict(self.transformer.config)}
        config |= {"vocabulary": asdict(self.vocabulary)} if self.vocabulary else {}
        config |= {LEFT_OUT: left_out} if left_out else {}
        with whole(folder / CONFIG) as file:
            file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def load(
        directory: Path | str, dtype: torch.dtype = torch.float32, *, complete: bool = True
    ) -> VideoPipeline:
        """`complete`: refuse a model that was saved with something left out."""
        folder = Path(directory)
        if complete:
            check_complete(folder)
        saved, vocabulary = read_json(folder / CONFIG), None
        if "vocabulary" in saved:
            vocabulary = tables.read(Vocabulary, saved["vocabulary"], "The model's vocabulary")
        if not (folder / WEIGHTS).is_file():  # opening a pipe would block
            raise InputError(f"{folder} has no file {WEIGHTS}.", hint="Copy it again.")
        try:
            weights = load_file(folder / WEIGHTS)
            names = [field.name for field in fields(DiTConfig) if field.name in saved]
            config = tables.read(DiTConfig, {name: saved[name] for name in names}, "The model's config")
            _check_size(config, weights, folder)
            pipe = VideoPipeline(VideoDiT(config).eval(), vocabulary)
            if pipe.upscaler is not None:
                own = [name for name in weights if name.startswith(UPSCALER_PREFIX)]
                pipe.upscaler.load_state_dict(
                    {name.removeprefix(UPSCALER_PREFIX): weights.pop(name) for name in own}
                )
            pipe.transformer.load_state_dict(weights)
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{folder / WEIGHTS} is damaged or incomplete: {error}", hint="Copy it again."
            ) from error
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]  # torch names every weight, in lines
            raise InputError(f"The weights in {folder} do not match its {CONFIG}: {reason}") from error
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
        """Return frames of each prompt: np is [B, T, H, W, 3] from 0 to 1, pil a list of images for each.

        latent is [B, T, 3, H, W] from -1 to 1, before upscaling.
        """
        if output_type not in OUTPUT_TYPES:
            raise InputError(f"output_type must be one of {', '.join(OUTPUT_TYPES)}, got {output_type!r}.")
        config, self.num_timesteps = self.transformer.config, num_inference_steps
        if not config.pixels and output_type != "latent":
            raise InputError(
                "This model makes latents, and weft has no decoder for them.",
                hint='Call the pipeline with output_type="latent".',
            )
        sizes = zip((num_frames, height, width), config.video, strict=True)
        T, H, W = (default if size is None else size for size, default in sizes)
        config.grid((T, H, W))
        words = self._encode(prompt)

        def on_step(index: int, timestep: Tensor, video: Tensor) -> Tensor:
            if callback_on_step_end is None:
                return video
            return callback_on_step_end(self, index, timestep, {"latents": video}).get("latents", video)

        video = flow.sample(
            self.transformer, words, (T, config.channels, H // config.upscale, W // config.upscale),
            on_step=on_step, generator=generator,
            negative=None if negative_prompt is None else self._encode(negative_prompt, len(words)),
            steps=num_inference_steps, guidance=guidance_scale, shift=config.shift,
            pixels=config.pixels,
        )  # fmt: skip
        if self.upscaler is not None and output_type != "latent":
            video = self.upscaler.videos(video)
        frames = video if output_type == "latent" else _to_frames(video, output_type)
        return VideoOutput(frames) if return_dict else (frames,)

    def _encode(self, prompt: str | Sequence[str], samples: int = 1) -> Tensor:
        prompts = [prompt] * samples if isinstance(prompt, str) else prompt
        ids = [self._tokenizer.encode(text) for text in prompts]
        return torch.tensor(ids, device=next(self.transformer.parameters()).device)


def _check_size(config: DiTConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse a config whose model is far larger than its weights, before memory is allocated for it.

    Smaller differences are found, by name, when the weights are loaded.
    """
    blocks = f"blocks.{config.depth - 1}."
    if any(name.startswith(blocks) for name in weights):
        with torch.device("meta"):
            needed = sum(x.numel() for x in VideoDiT(config).state_dict().values())
        if needed <= 2 * sum(x.numel() for x in weights.values()) + (1 << 20):
            return
    raise InputError(
        f"The weights in {folder} do not match its {CONFIG}.", hint="Copy both files from the same model."
    )


def _to_frames(video: Tensor, output_type: str) -> np.ndarray | list[list[Image]]:
    frames = video.add(1).div(2).clamp(0, 1).float().permute(0, 1, 3, 4, 2).cpu().numpy()
    if output_type == "np":
        return frames
    from PIL import Image

    return [[Image.fromarray((frame * 255).round().astype("uint8")) for frame in clip] for clip in frames]
