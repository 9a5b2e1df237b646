"""Gradients of sharded transformers in ranks that are processes, and what else people do to their models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, update_wrapper
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import weft  # noqa: E402
from tests.diffusers.checkpoints import TINY  # noqa: E402
from tests.diffusers.encoders import TEXT  # noqa: E402
from tests.diffusers.toys import normal, seeded  # noqa: E402
from tests.diffusers.zoo import ZOO  # noqa: E402
from tests.distributed.jobs import Worlds  # noqa: E402
from tests.distributed.pipelines import changes, look_at  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:CPU Autocast", "ignore:In CPU autocast")

Step = tuple[Tensor, list[Tensor]]
MODELS = (
    "wan", "wan-i2v", "hunyuan", "cogvideox-rotary", "flux", "sd3-dual", "ltx", "mochi", "allegro",
    "qwen-padded", "latte",
)  # fmt: skip


class Low(nn.Module):
    """A Linear with two small matrices beside it, as peft has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down, self.up = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )
        seeded(self.down, 1, torch.float32)
        seeded(self.up, 2, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def by_hand(model: Any) -> None:
    """Small matrices beside those of every attention."""
    model.requires_grad_(requires_grad=False)
    for module in [each for each in model.modules() if hasattr(each, "to_q")]:
        for name in ("to_q", "to_v"):
            setattr(module, name, Low(getattr(module, name)))


def by_peft(model: Any) -> None:
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v", "to_out.0"]))
    for name, weight in model.named_parameters():
        if "lora" in name:
            weight.data = normal(*weight.shape, seed=len(name), dtype=torch.float32) / 4


def hooked(model: Any) -> None:
    """As accelerate hooks each module: by a forward of its own, that calls the old one."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        module.calls.append(len(args))
        return module._old_forward(*args, **kwargs)

    for module in model.modules():
        module.calls, module._old_forward = [], module.forward
        module.forward = update_wrapper(partial(forward, module), module._old_forward)


def offloaded(model: Any) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=torch.device("cpu"))


def blocks(model: Any) -> list[nn.ModuleList]:
    return [part for part in model.children() if isinstance(part, nn.ModuleList)]


def compiled(model: Any) -> None:
    for block in [block for part in blocks(model) for block in part]:
        block.compile(backend="eager", fullgraph=True)


def wrapped(model: Any) -> None:
    for part in blocks(model):
        for at, block in enumerate(part):
            part[at] = cast(nn.Module, torch.compile(block, backend="eager", fullgraph=True))


def repeated(model: Any) -> None:
    model.compile_repeated_blocks(backend="eager", fullgraph=True)


def checkpointed(model: Any) -> None:
    model.enable_gradient_checkpointing()


def dropping(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1


def nothing(_: Any) -> None:
    """A model as it is made."""


Change = Callable[[Any], None]


def made(name: str, dtype: torch.dtype) -> Any:
    return TINY["latte"]().transformer.to(dtype) if name == "latte" else ZOO[name].make(dtype)


def inputs(name: str, dtype: torch.dtype) -> dict[str, Any]:
    if name != "latte":
        return ZOO[name].inputs(dtype=dtype)
    shapes = {"hidden_states": (2, 4, 5, 2, 2), "encoder_hidden_states": (2, 7, TEXT)}
    given = {key: normal(*shape, dtype=dtype) for key, shape in shapes.items()}
    return {**given, "timestep": torch.tensor([3, 500]), "return_dict": False}


def sharded(name: str, before: Change, after: Change, dtype: torch.dtype = torch.float32) -> Any:
    """A model that is changed before and after it is parallelized, if there are ranks."""
    model = made(name, dtype).train()
    before(model)
    if dist.is_initialized():
        weft.parallelize(model)
    after(model)
    torch.manual_seed(5 + 7 * (dist.get_rank() if dist.is_initialized() else 0))
    return model


def step(name: str, before: Change, after: Change = nothing, dtype: torch.dtype = torch.float32) -> Step:
    """The output and the gradients."""
    model = sharded(name, before, after, dtype)
    out = model(**inputs(name, dtype))[0]
    loss = (out * normal(*out.shape, seed=7, dtype=dtype)).sum()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    grads = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    return out.detach().float(), [grad.float() for grad in grads]


def check(expected: Step, answers: list[Step], limit: float) -> None:
    """Each output and the mean of the gradients. Some, as of a key's bias, are 0 but for rounding."""
    out, grads = expected
    least = 1e-2 * max(float(grad.abs().max()) for grad in grads)
    assert all((found - out).abs().max() <= limit * out.abs().max() for found, _ in answers)
    for by_rank, grad in zip(zip(*(g for _, g in answers), strict=True), grads, strict=True):
        off = (torch.stack(by_rank).mean(0) - grad).abs().max()
        assert off <= limit * max(float(grad.abs().max()), least)


@cache
def alone(name: str, change: Change = nothing, dtype: torch.dtype = torch.float32) -> Step:
    return step(name, change, dtype=dtype)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_process(worlds: Worlds, name: str, size: int) -> None:
    change = checkpointed if size == 2 else nothing
    check(alone(name, change), worlds(size).run(step, name, change), 1e-4)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("again", [nothing, checkpointed])
def test_dropout_is_that_of_one_process(worlds: Worlds, again: Change, size: int) -> None:
    name = "cogvideox-rotary"
    assert (alone(name)[0] - alone(name, dropping)[0]).abs().max() > 1e-2
    check(alone(name, dropping), worlds(size).run(step, name, dropping, again), 1e-4)


@pytest.mark.parametrize("name", ["wan", "flux", "mochi"])
def test_bfloat16(worlds: Worlds, name: str) -> None:
    found = worlds(2).run(step, name, nothing, nothing, torch.bfloat16)
    check(alone(name, nothing, torch.bfloat16), found, 0.05)


@pytest.mark.parametrize(
    "how",
    [(hooked,), (compiled,), (nothing, compiled), (wrapped,), (repeated,), (nothing, repeated)],
    ids=["hooks", "compiled", "compiled after", "wrapped", "repeated", "repeated after"],
)
@pytest.mark.parametrize("name", ["wan", "flux", "cogvideox-rotary", "latte"])
def test_changed_models(worlds: Worlds, name: str, how: tuple[Change, ...]) -> None:
    if name == "latte" and how != (hooked,):
        pytest.skip("stages cannot be compiled as a whole graph")
    if repeated in how and not made(name, torch.float32)._repeated_blocks:
        pytest.skip("Diffusers does not know its repeated blocks")
    check(alone(name), worlds(2).run(step, name, *how), 1e-4)


@pytest.mark.parametrize("change", [by_hand, by_peft])
@pytest.mark.parametrize("name", ["wan", "flux"])
def test_small_matrices_beside_the_weights(worlds: Worlds, name: str, change: Change) -> None:
    check(alone(name, change), worlds(2).run(step, name, change), 1e-4)


@torch.no_grad()
def answered(name: str, change: Change) -> Tensor:
    return sharded(name, change, nothing)(**inputs(name, torch.float32))[0]


@pytest.mark.parametrize("name", ["wan", "flux"])
def test_weights_that_accelerate_brings_when_they_are_needed(worlds: Worlds, name: str) -> None:
    pytest.importorskip("accelerate")
    want = answered(name, nothing)
    for found in worlds(2).run(answered, name, offloaded):
        torch.testing.assert_close(found, want, rtol=0, atol=2e-5)


def left(name: str, change: Change) -> list[str]:
    """What a restored model has that it had not."""
    model = made(name, torch.float32)
    change(model)
    before = look_at(model)
    for _ in range(2):
        weft.parallelize(model)
        model(**inputs(name, torch.float32))
        weft.restore(model)
    return changes(before, look_at(model))


@pytest.mark.parametrize("change", [hooked, by_hand, dropping])
@pytest.mark.parametrize("name", ["wan", "flux", "latte"])
def test_what_others_changed_stays(worlds: Worlds, name: str, change: Change) -> None:
    assert worlds(2).run(left, name, change) == [[]] * 2
