"""Adapter: how the tokens of one class of models are sharded. Data; the model's code stays as it is.

    Adapter(
        "WanTransformer3DModel",
        inputs={"blocks.0": {"hidden_states": Shard("video", 1)}},
        outputs={"rope": Shard("video", 1)},
        gather={"proj_out": Shard("video", 1)},
        attention={"blocks.*.attn1": "video"},
        local=("blocks.*.attn2",),
    )

A *stream* is a sequence of tokens that is split over the ranks: "video" (or an image), "text". In names of
modules * is any one component; "" is the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import nn
from torch.utils._pytree import PyTree

from weft.core.voxels import Extent
from weft.diffusers.grids import patches
from weft.hooks.module_tree import named, no_module
from weft.hooks.wrap import Target


class Shard(NamedTuple):
    """The placement of a tensor whose dim `dim` is the tokens of a stream; of a list or tuple, of each item.

    stream   several, as "text video", are one after another.
    dim      None for an int: the number of tokens from the first one on.
    ndim     tensors of any other number of dims are replicated.
    last     of an int: the number of tokens before the end.

    >>> Shard("video", 1)
    Shard(stream='video', dim=1, ndim=0, last=False)
    """

    stream: str
    dim: int | None
    ndim: int = 0
    last: bool = False


class Whole(NamedTuple):
    """An argument that is gathered, for a module that runs on all tokens of a stream on every rank."""

    stream: str
    dim: int


ShardSpec = Shard | Whole | tuple[Shard | None, ...] | None
"""Of each item of a tuple, where they differ; None: replicated."""
GatherSpec = Shard | tuple[Shard | None, ...]


@dataclass(frozen=True)
class Adapter:
    """How the tokens of one class of models are sharded.

    inputs, outputs   arguments and results of modules that are split; without gather, besides those of
                      Diffusers' `_cp_plan`.
    streams           with `_cp_plan`: the names in it that are of another stream than "video".
    gather            outputs that are gathered again; of a tuple, each item.
    attention         attention modules with the streams of their tokens in order; "video text?" where the
                      module itself leaves out padded text tokens; "video <- audio" where video attends to
                      audio, "video <- * video" to keys that are whole on every rank before its own; "local;
                      video" where the first of two attentions has whole keys alone; "whole" where the module
                      runs on all tokens, which `inputs` gather.
    local             attention modules whose keys are replicated, such as text: left alone.
    grid              the (frames, rows, columns) of the video tokens, from the model and its arguments.
    replicated        arguments of the model that need not be split; others than those raise an error.
                      None: all that are not split.

    >>> video = Shard("video", 1)  # dim 1 is its tokens
    >>> adapter = Adapter(
    ...     "Painter",
    ...     inputs={"blocks.0": {"x": video}},
    ...     attention={"blocks.*.attn": "video"},
    ...     gather={"head": video},
    ... )
    >>> adapter.kind
    'self + cross'
    """

    model: str
    attention: Mapping[str, str]
    inputs: Mapping[str, Mapping[str, ShardSpec]] = field(default_factory=dict)
    outputs: Mapping[str, ShardSpec] = field(default_factory=dict)
    gather: Mapping[str, GatherSpec] = field(default_factory=dict)
    streams: Mapping[str, str] = field(default_factory=dict)
    local: tuple[str, ...] = ()
    grid: Callable[[Target, Mapping[str, PyTree]], Extent] | None = None
    note: str = ""
    replicated: frozenset[str] | None = None

    @property
    def kind(self) -> str:
        if not self.attention:
            return "switching"
        joint = any(streams != "video" for streams in self.attention.values())
        return "joint" if joint else "self + cross"

    def for_model(self, model: nn.Module) -> Adapter:
        """Return the adapter of one configuration: with Diffusers' `_cp_plan`, without modules that it lacks.

        A pattern under attention or local may match nothing, but a model must have attention that is named.
        """
        attention = {key: streams for key, streams in self.attention.items() if any(named(model, key))}
        if not attention:
            raise no_module(model, " or ".join(map(repr, self.attention)))
        local = tuple(key for key in self.local if any(named(model, key)))
        adapter = replace(self, attention=attention, local=local)
        return adapter if self.gather else adapter._with_plan(getattr(model, "_cp_plan", None) or {})

    def _with_plan(self, plan: Mapping[str, PyTree]) -> Adapter:
        """Add Diffusers' `_cp_plan`; inputs and outputs of the adapter take precedence."""
        inputs: dict[str, Mapping[str, ShardSpec]] = {}
        outputs: dict[str, ShardSpec] = {}
        gather: dict[str, GatherSpec] = {}
        for module, planned in plan.items():
            if not isinstance(planned, Mapping):
                gather[module] = Shard("video", planned.gather_dim)
                continue
            shards = {
                name: Shard(self._stream(module, name), each.split_dim, each.expected_dims or 0)
                for name, each in planned.items()
            }
            if all(isinstance(name, int) for name in shards):
                outputs[module] = tuple(shards.get(i) for i in range(max(shards) + 1))
            else:
                inputs[module] = shards
        inputs, outputs = {**inputs, **self.inputs}, {**outputs, **self.outputs}
        return replace(self, inputs=inputs, outputs=outputs, gather=gather)

    def _stream(self, module: str, name: str | int) -> str:
        return self.streams.get(f"{module}.{name}", self.streams.get(str(name), "video"))


# What most models have.
VIDEO, TEXT = Shard("video", 1), Shard("text", 1)
ROPE = Shard("video", 0)
"""[tokens, …], without a batch."""
BLOCK = {"hidden_states": VIDEO, "encoder_hidden_states": TEXT}
CONTROL = {"controlnet_block_samples": VIDEO, "controlnet_single_block_samples": VIDEO}
END = {"proj_out": VIDEO}
SELF = Adapter(
    "",
    gather=END,
    attention={"transformer_blocks.*.attn1": "video"},
    local=("transformer_blocks.*.attn2",),
    grid=patches,
)
"""Of a model with self-attention and cross-attention."""
