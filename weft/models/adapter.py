"""Adapter: what weft must know of a model to shard its tokens. Data; the model's own code stays as it is.

    Adapter(
        "WanTransformer3DModel",
        inputs={"blocks.0": {"hidden_states": Cut("video", 1)}},
        outputs={"rope": Cut("video", 1)},
        gather={"proj_out": Cut("video", 1)},
        attention={"blocks.*.attn1": "video"},
        local=("blocks.*.attn2",),
    )

A *stream* is a sequence of tokens that is split over the ranks: "video" (or an image), "text". In names of
modules * is any one part; "" is the model itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from weft.core.errors import InputError


class Cut(NamedTuple):
    """A tensor whose dim `dim` is the tokens of a stream; in a list or tuple, all of them.

    ndim   tensors of any other number of dims are left whole.
    dim    None for an int: how many tokens from the first one on.
    """

    stream: str
    dim: int | None
    ndim: int = 0


Cuts = Cut | tuple["Cut | None", ...] | None
"""Of each item of a tuple, where they differ."""


@dataclass(frozen=True)
class Adapter:
    """How the tokens of one class of models are sharded.

    inputs, outputs   arguments and results of modules that are cut; without gather, besides those of
                      Diffusers' `_cp_plan`.
    streams           with `_cp_plan`: the names in it that are of another stream than "video".
    gather            outputs that are put together again.
    attention         attention modules with the streams of their tokens in order; "video text?" where the
                      module itself leaves out padded text tokens. Masks may leave out tokens of all streams
                      but "video".
    local             attention modules whose keys are whole on each rank, such as text: left alone.
    grid              the (frames, rows, columns) of the video tokens, from the model and its arguments.
    whole             arguments of the model that need not be cut; others than those, if given, are refused.
                      None: all that are not cut.
    """

    model: str
    attention: Mapping[str, str]
    inputs: Mapping[str, Mapping[str, Cuts]] = field(default_factory=dict)
    outputs: Mapping[str, Cuts] = field(default_factory=dict)
    gather: Mapping[str, Cut] = field(default_factory=dict)
    streams: Mapping[str, str] = field(default_factory=dict)
    local: tuple[str, ...] = ()
    grid: Callable[[Any, Mapping[str, Any]], tuple[int, int, int]] | None = None
    note: str = ""
    whole: frozenset[str] | None = None

    @property
    def kind(self) -> str:
        if not self.attention:
            return "switching"
        joint = any(streams != "video" for streams in self.attention.values())
        return "joint" if joint else "self + cross"

    def for_model(self, model: nn.Module) -> Adapter:
        """For one configuration: with the cuts of Diffusers' own plan, without attention that it has not.

        A pattern under attention or local may name nothing: a model has no attention that is not named.
        """
        attention = {key: streams for key, streams in self.attention.items() if any(named(model, key))}
        if not attention:
            raise _nothing(model, " or ".join(map(repr, self.attention)))
        local = tuple(key for key in self.local if any(named(model, key)))
        cuts = {} if self.gather else self._planned(model)
        return replace(self, attention=attention, local=local, **cuts)

    def _planned(self, model: nn.Module) -> dict[str, Any]:
        """Diffusers' cuts and gather, and what this says besides or instead."""
        inputs: dict[str, Mapping[str, Cuts]] = {}
        outputs: dict[str, Cuts] = {}
        gather: dict[str, Cut] = {}
        plan: Mapping[str, Any] = getattr(model, "_cp_plan", None) or {}
        for module, said in plan.items():
            if not isinstance(said, Mapping):
                gather[module] = Cut("video", said.gather_dim)
                continue
            cuts = {
                name: Cut(self._stream(module, name), cut.split_dim, cut.expected_dims or 0)
                for name, cut in said.items()
            }
            if all(isinstance(name, int) for name in cuts):
                outputs[module] = tuple(cuts.get(i) for i in range(max(cuts) + 1))  # pyright: ignore
            else:
                inputs[module] = cuts
        return {"inputs": {**inputs, **self.inputs}, "outputs": {**outputs, **self.outputs}, "gather": gather}

    def _stream(self, module: str, name: str | int) -> str:
        return self.streams.get(f"{module}.{name}", self.streams.get(str(name), "video"))


# What most models have.
VIDEO, TEXT = Cut("video", 1), Cut("text", 1)
ROPE = Cut("video", 0)
"""[tokens, …], without a batch."""
BLOCK = {"hidden_states": VIDEO, "encoder_hidden_states": TEXT}
CONTROL = {"controlnet_block_samples": VIDEO, "controlnet_single_block_samples": VIDEO}
END = {"proj_out": VIDEO}


WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What torch.compile and checkpoint_wrapper were given: these parts of names count for nothing."""
LAYER = "base_layer"
"""What an adapter of peft's has taken the place of."""


def unwrapped(model: Any) -> Any:
    """The module that torch.compile or checkpoint_wrapper was given."""
    children = vars(model).get("_modules") or {} if isinstance(model, nn.Module) else {}
    inner = next((children[name] for name in WRAPPERS if name in children), None)
    return model if inner is None else unwrapped(inner)


def put(owner: Any, name: str, value: Any) -> Callable[[], Any]:
    """Give an object an attribute of its own; what is returned takes it off, or puts back what was there."""
    own = vars(owner)
    undo = partial(own.__setitem__, name, own[name]) if name in own else partial(own.pop, name, None)
    own[name] = value
    return undo


def parameters(module: Any) -> list[str]:
    """The names of a forward's arguments."""
    return list(inspect.signature(type(unwrapped(module)).forward).parameters)[1:]


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """By name: wrapped ones by the name of what wraps them, layers with an adapter of peft's as one."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        plain = ".".join(part for part in parts if part not in (*WRAPPERS, LAYER))
        if plain not in found or parts[-1] != LAYER:
            found[plain] = module
    return found


def module_at(model: nn.Module, name: str) -> nn.Module | None:
    """The module that now has a name of `modules`."""
    for part in name.split("."):
        children = model._modules
        if part not in children and LAYER in children:
            children = unwrapped(children[LAYER])._modules
        if children.get(part) is None:
            return None
        model = unwrapped(children[part])
    return model


def matching(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The modules that a pattern names, in the model's order; it must name one."""
    found = list(named(model, pattern))
    if not found:
        raise _nothing(model, repr(pattern))
    return found


def named(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a pattern names, in which * is any one part of a name; perhaps none."""
    wanted = pattern.split(".")
    for name, module in modules(model).items():
        parts = name.split(".")
        if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            yield name, module


def _nothing(model: nn.Module, what: str) -> InputError:
    return InputError(
        f"A {type(unwrapped(model)).__name__} has no module {what}, which its adapter names.",
        hint="In a pattern * is any one part of a name; print(model) shows them.",
    )
