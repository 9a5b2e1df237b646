"""Rows of the table in `around`: pipelines. Ranks have different seeds, of which the first one's counts."""

from __future__ import annotations

import copy
import tempfile
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.diffusers.around import Run, row
from tests.diffusers.around_lora import lora
from tests.diffusers.checkpoints import TINY, arguments, diffusers

PIPES = ("wan", "flux", "sd3", "cogvideox")


@cache
def _made(name: str) -> Any:
    return TINY[name]()


def made(name: str) -> Any:
    """A new one, with the same weights each time."""
    return copy.deepcopy(_made(name))


def call(run: Run, key: str, pipe: Any, name: str = "", *, branches: int = 2, **more: Any) -> Tensor:
    """Record the latents of a call."""
    run.seed()
    pipe.set_progress_bar_config(disable=True)
    name = name or run.name
    out = pipe(**{**arguments(name, branches=branches), "num_inference_steps": 3, **more})[0]
    run.keep(f"{key} out", out)
    return out


def same() -> dict[str, Any]:
    """What a pipeline takes that shares nothing with other ranks."""
    return {"generator": torch.Generator().manual_seed(3)}


def image() -> dict[str, Any]:
    """What a pipeline from an image to an image takes besides."""
    return {"image": torch.linspace(0, 1, 3 * 48 * 80).view(1, 3, 48, 80), "strength": 0.9}


@row(*PIPES)
def pipeline_is_copied(run: Run) -> None:
    pipe = run.split(made(run.name))
    other = copy.deepcopy(pipe)
    call(run, "original", pipe)
    with torch.no_grad():
        for weight in pipe.transformer.parameters():
            weight.mul_(1.1)
    call(run, "copy", other)
    call(run, "original moved", pipe)
    call(run, "original restored", run.restore(pipe), **same())
    call(run, "copy again", other)


@row(*PIPES)
def from_pipe(run: Run) -> None:
    pipe = run.split(made(run.name))
    other = type(_made(run.name)).from_pipe(pipe)
    call(run, "from_pipe", other)
    call(run, "original", pipe)
    call(run, "after", other)


@row(*PIPES)
def pipeline_of_components(run: Run) -> None:
    pipe = run.split(made(run.name))
    call(run, "made", type(_made(run.name))(**pipe.components))


@row(*PIPES)
def pipeline_around_a_split_transformer(run: Run) -> None:
    pipe = made(run.name)
    run.split(pipe.transformer)
    call(run, "made", type(pipe)(**pipe.components))


@row("flux", "sd3")
def another_pipeline_of_the_parts(run: Run) -> None:
    pipe = run.split(made(run.name))
    other = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
    call(run, "from image", other, **image())
    again = diffusers.AutoPipelineForText2Image.from_pipe(other)
    call(run, "and back", again)


@row(*PIPES)
def from_pipe_and_restore(run: Run) -> None:
    """A pipeline that shares the parts of one that is restored is plain as well."""
    pipe = run.split(made(run.name))
    other = type(_made(run.name)).from_pipe(pipe)
    call(run, "split", other)
    run.restore(pipe)
    call(run, "restored", pipe, **same())
    for rank in range(run.ranks):  # one after another: none waits for the others
        if rank == run.rank:
            call(run, "alone", other, **same())
        run.mean(torch.zeros(1))


@row("wan", "flux", "sd3")
def lora_of_a_checkpoint(run: Run) -> None:
    from peft.utils import get_peft_model_state_dict

    pipe, source = run.split(made(run.name)), lora(made(run.name).transformer)
    with tempfile.TemporaryDirectory() as directory:
        layers = get_peft_model_state_dict(source)
        type(_made(run.name)).save_lora_weights(directory, transformer_lora_layers=layers)
        pipe.load_lora_weights(directory, adapter_name="one")
        call(run, "loaded", pipe)
        pipe.set_adapters(["one"], [0.5])
        call(run, "scaled", pipe)
        pipe.fuse_lora(lora_scale=0.9)
        call(run, "fused", pipe)
        pipe.unfuse_lora()
        pipe.unload_lora_weights()
        call(run, "unloaded", pipe)
        pipe.load_lora_weights(directory, adapter_name="two")
        call(run, "loaded again", pipe)


@row("wan", "flux", "sd3")
def lora_of_a_checkpoint_before(run: Run) -> None:
    pipe = made(run.name)
    lora(pipe.transformer, "one")
    call(run, "split", run.split(pipe))
    pipe.unload_lora_weights()
    call(run, "unloaded", pipe)


@row(*PIPES)
def callbacks(run: Run) -> None:
    """They change latents and the model's weights."""
    pipe = run.split(made(run.name))

    def each(pipe: Any, at: int, _: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            next(pipe.transformer.parameters()).mul_(1.01)
        return {"latents": tensors["latents"] * (1 + at / 10)}

    call(run, "changed", pipe, callback_on_step_end=each)
    call(run, "after", pipe)


@row("wan", "sd3")
def guidance_that_ends(run: Run) -> None:
    def each(pipe: Any, at: int, _: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if at == 1:
            pipe._guidance_scale = 1.0
            if run.name == "sd3":  # both prompts are one batch, of which half is left
                return {name: x if name == "latents" else x.chunk(2)[-1] for name, x in tensors.items()}
        return tensors

    names = ["latents", "prompt_embeds", "pooled_prompt_embeds"][: 3 if run.name == "sd3" else 1]
    more = {"num_inference_steps": 4, "callback_on_step_end_tensor_inputs": names}
    call(run, "ends", run.split(made(run.name)), callback_on_step_end=each, **more)


@row("wan", "flux", "sd3", "cogvideox", "ltx")
def guidance_on_and_off(run: Run) -> None:
    pipe = run.split(made(run.name))
    for branches in (2, 1, 2):
        call(run, f"{len(run.seen)} of {branches}", pipe, branches=branches)


@row("wan", "flux", "sd3", "cogvideox")
def guidance_without_halves(run: Run) -> None:
    call(run, "off", run.split(made(run.name), cfg="off"))


@row("wan2.2")
def two_transformers(run: Run) -> None:
    pipe = run.split(made(run.name))
    call(run, "split", pipe, guidance_scale_2=1.5)
    call(run, "copy", copy.deepcopy(pipe), guidance_scale_2=1.5)
    lora(pipe.transformer_2)
    call(run, "lora", pipe)
    call(run, "restored", run.restore(pipe), **same())


@row(*PIPES)
def another_scheduler(run: Run) -> None:
    pipe = run.split(made(run.name))
    call(run, "first", pipe)
    pipe.scheduler = type(pipe.scheduler).from_config({**pipe.scheduler.config, "shift": 2.0})
    call(run, "second", pipe)


@row(*PIPES)
def another_transformer(run: Run) -> None:
    """A plain one in place of the one that was split, and back."""
    pipe, other = run.split(made(run.name)), made(run.name).transformer
    own, pipe.transformer = pipe.transformer, other
    call(run, "plain", pipe)
    pipe.transformer = own
    call(run, "split", pipe)
