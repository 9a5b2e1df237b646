"""Rows of the table in `around`: copies and states."""

from __future__ import annotations

import copy
import io
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.diffusers.around import Run, descend, row, weighted


def blocks(model: Any) -> list[nn.Module]:
    return [block for part in model.children() if isinstance(part, nn.ModuleList) for block in part]


def has_gradients(model: nn.Module) -> bool:
    return any(weight.grad is not None for weight in model.parameters())


# Copies


@row()
def deepcopy_before_a_step(run: Run) -> None:
    model = run.split(run.model())
    other = copy.deepcopy(model)
    run.step("original", model)
    assert not has_gradients(other)
    descend(model)
    run.step("copy", other)
    model.zero_grad()
    run.step("copy again", other)
    assert not has_gradients(model)
    descend(other, -0.02)
    run.out("moved", model)
    run.step("copy moved", other)


@row()
def deepcopy_after_a_step(run: Run) -> None:
    model = run.split(run.model())
    run.step("first", model)
    descend(model)
    other = copy.deepcopy(model)
    descend(model)
    run.step("moved", model)
    run.step("copy", other)


@row()
def copy_of_a_copy(run: Run) -> None:
    model = run.split(run.model())
    run.out("original", model)
    other = copy.deepcopy(copy.deepcopy(model))
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    run.step("copy", other)


@row()
def shallow_copy(run: Run) -> None:
    model = run.split(run.model())
    other = copy.copy(model)
    run.step("copy", other)
    run.step("original", model)


@row()
def copy_outlives_the_original(run: Run) -> None:
    model = run.split(run.model())
    other = copy.deepcopy(model)
    run.restore(model)
    run.out("restored", model)
    del model
    run.step("copy", other)


@row(splits=False)
def copy_is_restored_alone(run: Run) -> None:
    model = run.split(run.model())
    other = copy.deepcopy(model)
    run.restore(other)
    run.step("original", model)
    assert run.ranks == 1 or run.split_steps == [True]
    run.step("copy", other)
    run.out("original after", model)


@row()
def copy_is_parallelized_again(run: Run) -> None:
    other = run.restore(copy.deepcopy(run.split(run.model())))
    run.step("copy", run.split(other))


@row()
def copy_with_checkpointing(run: Run) -> None:
    model = run.model().train()
    model.enable_gradient_checkpointing()
    other = copy.deepcopy(run.split(model))
    run.step("copy", other)
    run.step("original", model)


@row()
def ema_by_averaged_model(run: Run) -> None:
    model = run.split(run.model())
    ema: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for at in range(3):
        run.step(f"step {at}", model)
        descend(model)
        ema.update_parameters(model)
    run.out("averaged", ema)
    run.out("trained", model)


@row()
def dpo_reference(run: Run) -> None:
    model = run.split(run.model())
    reference = copy.deepcopy(model).requires_grad_(requires_grad=False)
    for at in range(2):
        known = run.out(f"reference {at}", reference)

        def loss(out: Tensor, known: Tensor = known) -> Tensor:
            return -F.logsigmoid(0.1 * weighted(out - known) - 0.3)

        run.step(f"step {at}", model, loss=loss)
        descend(model)
    assert not has_gradients(reference)


# States


@row()
def state_dict_is_saved_and_loaded(run: Run) -> None:
    model, plain = run.split(run.model()), run.model()
    assert list(model.state_dict()) == list(plain.state_dict())
    run.step("first", model)
    descend(model)
    torch.save(model.state_dict(), file := io.BytesIO())
    file.seek(0)
    run.keep("loads", *(len(keys) for keys in plain.load_state_dict(torch.load(file))))
    run.out("plain", plain)
    state = {name: value * 0.7 for name, value in plain.state_dict().items()}
    model.load_state_dict(state)
    run.step("loaded", model)
    model.load_state_dict(plain.state_dict(), assign=True)
    run.step("assigned", model)


@row()
def save_pretrained(run: Run) -> None:
    model = run.split(run.model())
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        again = type(run.model()).from_pretrained(directory, torch_dtype=run.dtype)
    again.to(run.dtype)  # Diffusers keeps some of it in float32
    run.out("loaded", again)
    run.step("split", run.split(again))


@row()
def another_dtype_after(run: Run) -> None:
    model = run.split(run.model()).to(torch.float32)
    run.step("float32", model, dtype=torch.float32)
    run.step("float64", model.to(torch.float64))


@row("cogvideox-rotary", "ltx", "mochi", "wan")
def train_and_eval(run: Run) -> None:
    model = run.model()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    run.split(model)
    run.seed()
    for at, mode in enumerate((False, True, False, True)):
        run.step(f"train={mode} {at}", model.train(mode))


@row()
def split_restored_and_split(run: Run) -> None:
    model = run.model()
    run.step("first", run.split(model))
    run.out("restored", run.restore(model))
    run.step("again", run.split(model))


@row()
def parametrized_before(run: Run) -> None:
    model = run.model()
    run.step("on", run.split(_normed(model)))
    run.step("copy", copy.deepcopy(model))
    run.out("restored", run.restore(model))


@row()
def parametrized_after(run: Run) -> None:
    model = run.split(run.model())
    run.step("on", _normed(model))
    run.step("copy", copy.deepcopy(model))
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")
    run.step("off", model)


@row(splits=False)
def parametrized_after_and_restored(run: Run) -> None:
    model = _normed(run.split(run.model()))
    run.step("on", model)
    run.step("restored", run.restore(model))


def _normed(model: Any) -> Any:
    """Weight norm of all projections, those where tokens are cut and gathered included."""
    for module in [each for each in model.modules() if isinstance(each, nn.Linear)]:
        parametrizations.weight_norm(module)
    return model
