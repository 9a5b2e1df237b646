"""Rows of the table in `around`: what wraps models for training, and checkpointing."""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.diffusers.around import Run, descend, first, row, weighted
from tests.diffusers.around_copies import blocks

OTHER: dict[str, Any] = {"grid": (2, 3, 5)}
"""A second size."""


@row()
def ddp_after(run: Run) -> None:
    model = run.split(run.model())
    _ddp_step(run, _ddp(run, model), model)


@row()
def ddp_before(run: Run) -> None:
    model = run.model()
    outer = _ddp(run, model)
    run.split(model)
    _ddp_step(run, outer, model)


@row()
def ddp_of_a_copy(run: Run) -> None:
    model = copy.deepcopy(run.split(run.model()))
    _ddp_step(run, _ddp(run, model), model)


def _ddp(run: Run, model: Any) -> Any:
    return DistributedDataParallel(model, find_unused_parameters=True) if run.ranks > 1 else model


def _ddp_step(run: Run, outer: Any, model: Any) -> None:
    out = first(outer(**run.inputs()))
    weighted(out).backward()
    run.keep("ddp out", out)
    run.gradients("ddp", model, averaged=True)


def _fully_sharded(run: Run, model: Any, **options: Any) -> Any:
    for module in [*blocks(model), model] if run.ranks > 1 else []:
        fully_shard(module, **options)
    return model


@row()
def fsdp_before(run: Run) -> None:
    run.step("fsdp", run.split(_fully_sharded(run, run.model())), averaged=True)


@row()
def fsdp_after(run: Run) -> None:
    model = _fully_sharded(run, run.split(run.model()))
    run.step("fsdp", model, averaged=True)
    descend(model) if run.ranks == 1 else _descend_shards(model)
    run.step("again", model, averaged=True)


def _descend_shards(model: nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.grad is not None:
                largest: Any = weight.grad.full_tensor().abs().max()  # pyright: ignore
                weight -= weight.grad * (0.02 / (float(largest) + 1e-30))


@row("wan", "flux", ranks=(4,))
def data_by_sequence_parallel(run: Run) -> None:
    """Two samples on two pairs of ranks; DDP averages over all."""
    model = run.model()
    inputs = [run.inputs(batch=1), {**run.inputs(batch=1), "timestep": run.inputs(batch=1)["timestep"] * 0.5}]
    if run.ranks == 1:
        losses = [weighted(first(model(**each))) for each in inputs]
        (torch.stack(losses).sum() / 2).backward()
        run.gradients("all", model)
        return
    mesh = init_device_mesh("cpu", (2, run.ranks // 2), mesh_dim_names=("data", "sequence"))
    outer = DistributedDataParallel(run.split(model, mesh=mesh["sequence"]), find_unused_parameters=True)
    weighted(first(outer(**inputs[mesh.get_local_rank("data")]))).backward()
    run.gradients("all", model, averaged=True)


@row()
def accelerator_prepare(run: Run) -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState, PartialState

    model = run.split(run.model())
    if run.ranks == 1:
        run.step("prepared", model)
        return
    launched = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "RANK": run.rank, "WORLD_SIZE": run.ranks}
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    with patch.dict(os.environ, {key: str(value) for key, value in launched.items()}):
        try:
            accelerator = Accelerator(cpu=True, kwargs_handlers=[unused])
            outer = accelerator.prepare(model)
            assert isinstance(outer, DistributedDataParallel)
            out = first(outer(**run.inputs()))
            accelerator.backward(weighted(out))
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            PartialState._reset_state()
    run.keep("prepared out", out)
    run.gradients("prepared", model, averaged=True)


# Checkpointing


def _wrapped(model: Any) -> Any:
    """Each block in a checkpoint_wrapper."""
    own = blocks(model)
    apply_activation_checkpointing(model, check_fn=lambda module: any(module is block for block in own))
    return model


@row()
def checkpoint_wrapper_before(run: Run) -> None:
    model = run.split(_wrapped(run.model().train()))
    run.step("wrapped", model)
    run.step("copy", copy.deepcopy(model))


@row()
def checkpoint_wrapper_after(run: Run) -> None:
    run.step("wrapped", _wrapped(run.split(run.model().train())))


@row()
def checkpoint_wrapper_of_the_model(run: Run) -> None:
    run.step("wrapped", checkpoint_wrapper(run.split(run.model().train())))


@row()
def checkpoint_wrapper_and_restore(run: Run) -> None:
    model = _wrapped(run.split(run.model().train()))
    run.out("split", model)
    run.out("restored", run.restore(model))
    run.step("again", run.split(model))


@row()
def checkpoint_wrapper_with_two_sizes(run: Run) -> None:
    _two_sizes(run, _wrapped(run.split(run.model().train())))


@row()
def gradient_checkpointing_before(run: Run) -> None:
    model = run.model().train()
    model.enable_gradient_checkpointing()
    run.step("again", run.split(model))
    _two_sizes(run, model)


@row()
def gradient_checkpointing_after(run: Run) -> None:
    model = run.split(run.model().train())
    model.enable_gradient_checkpointing()
    run.step("again", model)
    _two_sizes(run, model)
    model.disable_gradient_checkpointing()
    run.step("off", model)


def _two_sizes(run: Run, model: Any) -> None:
    """Two forwards of other sizes before one backward."""
    model.zero_grad()
    outs = [first(model(**run.inputs(**sizes))) for sizes in ({}, OTHER)]
    torch.stack([weighted(out) for out in outs]).sum().backward()
    run.keep("two sizes out", *outs)
    run.gradients("two sizes", model)


@row()
def the_model_is_checkpointed(run: Run) -> None:
    model = run.split(run.model())

    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(model, *args, use_reentrant=False, **kwargs)

    out = first(again(**run.inputs()))
    weighted(out).backward()
    run.keep("out", out)
    run.gradients("again", model)
