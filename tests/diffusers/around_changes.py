"""Rows of the table in `around`: a model's modules are exchanged, cast, offloaded, pruned, called alone."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from tests.diffusers.around import Run, descend, first, row, weighted
from tests.diffusers.around_copies import blocks
from tests.diffusers.around_lora import TARGETS
from tests.diffusers.around_pipes import made
from tests.diffusers.checkpoints import diffusers
from tests.diffusers.toys import seeded


def _exchange(model: Any, block: nn.Module, other: nn.Module) -> None:
    """Put another block in a block's place."""
    for part in model.children():
        if isinstance(part, nn.ModuleList) and any(each is block for each in part):
            part[[*part].index(block)] = other


@row()
def block_is_exchanged(run: Run) -> None:
    """By a plain one, and by a copy of one that is wrapped."""
    model, other = run.split(run.model()), run.model()
    _exchange(model, blocks(model)[0], seeded(blocks(other)[0], seed=9))
    run.step("plain", model)
    _exchange(model, blocks(model)[-1], copy.deepcopy(blocks(model)[-1]))
    run.step("copy", model)


@row()
def block_is_called_alone(run: Run) -> None:
    """A module of a parallelized model that the user calls himself sees whole tokens."""
    model = run.split(run.model())
    run.out("model", model)
    linear = next(module for name, module in model.named_modules() if name.endswith("proj_out"))
    x = torch.linspace(-1, 1, 45 * linear.in_features, dtype=run.dtype).view(1, 45, -1)
    run.keep("alone", linear(x))
    run.step("again", model)


@row("wan", "flux", "sd3", "cogvideox-rotary")
def fused_qkv_after(run: Run) -> None:
    model = run.split(run.model())
    run.out("plain", model)
    model.fuse_qkv_projections()
    run.step("fused", model)
    if run.name != "wan":  # which has nothing of the kind
        model.unfuse_qkv_projections()
        run.step("unfused", model)


@row("wan", "flux", "sd3", "cogvideox-rotary")
def fused_qkv_before(run: Run) -> None:
    model = run.model()
    model.fuse_qkv_projections()
    run.step("fused", run.split(model))


@row()
def layerwise_casting(run: Run) -> None:
    """Weights are kept in fewer bits than they are computed in."""
    for at in ("before", "after"):
        model = run.model() if at == "before" else run.split(run.model())
        model.enable_layerwise_casting(storage_dtype=torch.float32, compute_dtype=torch.float64)
        run.out(at, run.split(model) if at == "before" else model)


@row()
def group_offloading(run: Run) -> None:
    cpu = torch.device("cpu")
    for at in ("before", "after"):
        model = run.model() if at == "before" else run.split(run.model())
        model.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
        run.out(at, run.split(model) if at == "before" else model)


@row()
def pruned(run: Run) -> None:
    for at in ("before", "after"):
        model = run.model() if at == "before" else run.split(run.model())
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        for module in linear:
            prune.l1_unstructured(module, "weight", amount=0.3)
        run.step(at, run.split(model) if at == "before" else model)
        for module in linear:
            prune.remove(module, "weight")
        run.step(f"{at}, removed", model)


@row()
def functional_call(run: Run) -> None:
    """Other weights for one call."""
    model = run.split(run.model())
    weights = {name: weight.detach() * 0.8 for name, weight in model.named_parameters()}
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    out = first(torch.func.functional_call(model, weights, (), run.inputs()))
    grads = torch.autograd.grad(weighted(out), [*weights.values()], allow_unused=True, materialize_grads=True)
    run.keep("out", out)
    for name, grad in zip(weights, grads, strict=True):
        run.keep(f"all grad {name}", run.mean(grad))


@row()
def beside_its_copy(run: Run) -> None:
    """Two forwards before one backward, blocks computed again."""
    model = run.model().train()
    model.enable_gradient_checkpointing()
    other = copy.deepcopy(run.split(model))
    outs = [
        first(each(**run.inputs(grid=grid))) for each in (model, other) for grid in ((3, 3, 5), (2, 3, 5))
    ]
    torch.stack([weighted(out) for out in outs]).sum().backward()
    run.keep("outs", *outs)
    run.gradients("original", model)
    run.gradients("copy", other)


@row()
def accumulated_gradients(run: Run) -> None:
    model = run.split(run.model())
    for sizes in ({}, {"grid": (2, 3, 5)}, {"batch": 1}):
        (weighted(first(model(**run.inputs(**sizes)))) / 3).backward()
    run.gradients("three", model)


@row()
def diffusers_ema(run: Run) -> None:
    model = run.split(run.model())
    ema = diffusers.training_utils.EMAModel(model.parameters(), decay=0.5)
    for at in range(2):
        run.step(f"step {at}", model)
        descend(model)
        ema.step(model.parameters())
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    run.out("averaged", model)
    ema.restore(model.parameters())
    run.step("trained", model)


def _peft(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    config = LoraConfig(r=2, target_modules=[name for name in names if name.endswith(TARGETS)])
    outer = get_peft_model(model, config)
    for name, weight in outer.named_parameters():
        if "lora" in name:
            weight.data = torch.sin(torch.arange(weight.numel()) + len(name)).view_as(weight).to(model.dtype)
    return outer


@row()
def peft_model(run: Run) -> None:
    """peft's own wrapper, its copy, and what is left when LoRA is merged."""
    outer = _peft(run.split(run.model()))
    run.step("peft", outer)
    other = copy.deepcopy(outer)
    assert type(other) is type(outer)
    run.step("copy", other)
    with other.disable_adapter():
        run.out("disabled", other)
    run.step("merged", outer.merge_and_unload().requires_grad_())


@row()
def peft_model_before(run: Run) -> None:
    outer = _peft(run.model())
    run.split(outer.get_base_model())
    run.step("peft", outer)
    run.out("merged", outer.merge_and_unload())


@row("wan", "flux", "sd3", splits=False)
def pipeline_is_saved(run: Run) -> None:
    """What is written is what a plain pipeline writes."""
    pipe = run.split(made(run.name))
    with tempfile.TemporaryDirectory() as directory:
        pipe.save_pretrained(directory)
        index = json.loads((Path(directory) / "model_index.json").read_text())
        config = json.loads((Path(directory) / "transformer" / "config.json").read_text())
    text = json.dumps([index, {key: value for key, value in config.items() if key != "_name_or_path"}])
    run.keep("index", torch.tensor([*text.encode()]))
