"""Rows of the table in `around`: LoRA, put on and taken off before and after."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from tests.diffusers.around import REGIONS, Run, descend, row
from tests.diffusers.toys import normal

TARGETS = ("to_q", "to_v", "to_out.0", "proj_out", "context_embedder", "x_embedder", "proj_in")
"""Attention, and where models cut and gather tokens."""


def lora(model: Any, name: str = "default", *, dropout: float = 0.0, seed: int = 0) -> Any:
    from peft import LoraConfig

    linear = [key.removesuffix(".base_layer") for key, x in model.named_modules() if isinstance(x, nn.Linear)]
    targets = [key for key in linear if key.endswith(TARGETS)]
    config = LoraConfig(r=2, lora_alpha=3, target_modules=targets, lora_dropout=dropout)
    model.add_adapter(config, adapter_name=name)
    for key, weight in model.named_parameters():
        if f".{name}." in key:
            weight.data = normal(*weight.shape, seed=seed + len(key), dtype=model.dtype) / 3
    return model


def fuse(model: Any) -> None:
    model.fuse_lora(lora_scale=0.7)


def unfuse(model: Any) -> None:
    model.unfuse_lora()


def unload(model: Any) -> None:
    model.unload_lora()


def disable(model: Any) -> None:
    model.disable_adapters()


def enable(model: Any) -> None:
    model.enable_adapters()


def second(model: Any) -> None:
    lora(model, "second", seed=50)
    model.set_adapters(["default", "second"], [0.6, 1.7])


def only_second(model: Any) -> None:
    model.set_adapters(["second"], [0.8])


def delete(model: Any) -> None:
    model.delete_adapters(["default"])


def frozen(model: Any) -> None:
    """LoRA alone is trained."""
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora" in name)


Acts = tuple[Callable[[Any], Any], ...]


def _through(run: Run, before: Acts, after: Acts) -> Any:
    """The outputs after each change that follows parallelize, and the gradients after the last."""
    model = run.model()
    for act in before:
        act(model)
    run.split(model)
    if before:
        run.out("split", model)
    for at, act in enumerate(after):
        act(model)
        run.out(f"{at} {act.__name__}", model)
    if frozen not in before:
        model.requires_grad_()
    run.step("end", model)
    return model


for _name, _before, _after in [
    ("lora_before", (lora,), ()),
    ("lora_after", (), (lora,)),
    ("lora_alone_is_trained", (lora, frozen), ()),
    ("lora_before_unloaded_after", (lora,), (unload,)),
    ("lora_after_unloaded", (), (lora, unload)),
    ("lora_unloaded_and_put_on_again", (lora,), (unload, lora, unload, lora)),
    ("lora_before_fused_after", (lora,), (fuse, unfuse)),
    ("lora_after_fused", (), (lora, fuse, unfuse, unload)),
    ("lora_fused_before", (lora, fuse), (unfuse,)),
    ("lora_fused_and_unloaded", (lora,), (fuse, unload)),
    ("lora_switched_off_and_on", (lora,), (disable, enable)),
    ("two_adapters_before", (lora, second), (only_second,)),
    ("two_adapters_after", (), (lora, second, only_second, delete)),
    ("second_adapter_after", (lora,), (second, only_second, fuse, unfuse)),
]:
    _act = partial(_through, before=_before, after=_after)
    _act.__name__ = _name  # type: ignore[attr-defined]
    row(*REGIONS)(_act)  # pyright: ignore


@row(*REGIONS)
def lora_and_restore(run: Run) -> None:
    """What was put on after stays when the model is restored, and can be split again."""
    model = lora(run.split(run.model()))
    run.step("split", model)
    run.out("restored", run.restore(model))
    unload(model)
    run.out("unloaded", model)
    run.step("again", run.split(lora(model)))


@row(*REGIONS)
def lora_on_a_copy(run: Run) -> None:
    model = run.split(run.model())
    other = lora(copy.deepcopy(model))
    run.step("copy", other)
    run.step("original", model)
    third = copy.deepcopy(other)
    unload(other)
    run.step("unloaded", other.requires_grad_())
    run.step("copy of it", third)


@row(*REGIONS)
def lora_dropout_before(run: Run) -> None:
    model = run.split(lora(run.model(), dropout=0.3).train())
    run.seed()
    run.step("trained", model)
    run.step("again", model)
    run.out("eval", model.eval())


@row(*REGIONS)
def lora_dropout_after(run: Run) -> None:
    model = lora(run.split(run.model()), dropout=0.3).train()
    run.seed()
    run.step("trained", model)
    descend(model)
    run.step("again", model)
    run.out("eval", model.eval())


@row("wan", "flux", "ltx")
def lora_dropout_with_checkpointing(run: Run) -> None:
    model = lora(run.split(run.model()), dropout=0.3).train()
    model.enable_gradient_checkpointing()
    run.seed()
    run.step("trained", model)
