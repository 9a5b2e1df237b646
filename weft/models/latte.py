"""Latte, as Diffusers has it (`LatteTransformer3DModel`): its frames and patches sharded over ranks.

    from weft.models import latte

    sharded = latte.shard(model)        # the model is called as before, with the same input on every rank
    sharded.remove()

B batch · T frames · S patches of a frame · C width
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.core.errors import InputError
from weft.models.adapter import put, unwrapped
from weft.models.stages import Mixes, Stages, stages
from weft.models.wrap import Around, Method, is_wrapped, unwrap_module, wrap_module
from weft.run.world import World, world_of

BLOCKS = {
    "transformer_blocks.*": Mixes("space", dims="(batch time) space channel"),
    "temporal_transformer_blocks.*": Mixes("time", dims="(batch space) time channel"),
}


HOOKS = [f"_forward_{kind}" for kind in ("hooks", "hooks_with_kwargs", "hooks_always_called")]
HOOKS += ["_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"]


def shard(model: nn.Module, mesh: Any = None) -> Latte:
    """Shard a Latte from its first block to its last; mesh (of one axis), gradients: see `weft.stages`."""
    sharded = Latte(model, world_of(mesh, 60.0))
    sharded.hooks = [
        model.register_forward_pre_hook(lambda _, *given: sharded.begin(*given), with_kwargs=True),
        model.register_forward_hook(lambda *_: sharded.end(), always_call=True),
    ]
    return sharded


class Latte:
    """The stages of a Latte, and what its blocks need besides: side inputs with as many rows as the shard."""

    def __init__(self, model: Any, world: World) -> None:
        self._model, self._world = model, world
        self._stages: dict[str, Stages] = {}
        self.hooks: list[RemovableHandle] = []
        self.batch = 0
        self.frames: Tensor | None = None
        self._blocks = [(block, BlockHook(self, first=first)) for block, first in self._listed()]
        for block, hook in self._blocks:
            wrap_module(block, hook)

    def _listed(self) -> list[tuple[nn.Module, bool]]:
        """The blocks, and which one is the first through time."""
        in_time = self._model.temporal_transformer_blocks
        blocks = [*self._model.transformer_blocks, *in_time]
        return [(unwrapped(block), block is in_time[0]) for block in blocks]

    def is_whole(self) -> bool:
        """Whether it is still on all blocks that the model has."""
        there = [block for block, _ in self._listed()]
        known = [block for block, hook in self._blocks if is_wrapped(block, hook)]
        return len(there) == len(known) and all(map(lambda a, b: a is b, there, known))

    @property
    def handles(self) -> list[RemovableHandle]:
        """The hooks of the stages."""
        return [hook for each in self._stages.values() for hook in each._hooks]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
        for handle in self._stages.values():
            handle.remove()
        for block, _ in self._blocks:
            unwrap_module(block)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Declare the stages for a video.

        The model adds the positions of all frames where it has only some of them: so it gets none to add,
        and they are added in the first block through time, which has all frames.
        """
        B, _, T, H, W = (args[0] if args else kwargs["hidden_states"]).shape
        patches, ranks = H * W // self._model.config.patch_size**2, self._world.comm.size
        if patches < ranks:
            raise InputError(f"Frames of {patches} patches cannot be sharded over {ranks} ranks.")
        # A rank without a frame could not pass it on through Diffusers' code; then each one has all frames.
        shard = "time space" if ranks <= T else "space"
        if shard not in self._stages:
            while self._stages:
                self._stages.popitem()[1].remove()
            self._stages[shard] = stages(
                self._model, BLOCKS, dims="batch time space channel", shard=shard, mesh=self._world
            )
        self.batch = B
        self._stages[shard].sizes = {"batch": B, "time": T}
        frames = self.frames = self._model.temp_pos_embed
        self._model.temp_pos_embed = torch.zeros_like(frames[:, :1])

    def end(self) -> None:
        """Give the model its positions back: others read and copy them."""
        self._model.temp_pos_embed = self.frames


class BlockHook(Around):
    """A block's forward that is given the text and the timestep of all frames, or patches."""

    def __init__(self, latte: Latte, *, first: bool) -> None:
        self.latte, self.first = latte, first

    def around(self, forward: Method, args: Any, kwargs: Any) -> Tensor:
        latte, (x, mask, text, text_mask, timestep, *rest) = self.latte, args
        if text_mask is not None:
            raise InputError("A sharded Latte takes no encoder_attention_mask.")
        if self.first and x.shape[1] > 1:
            assert latte.frames is not None
            x = x + latte.frames.to(x)
        text, timestep = (_rows(side, latte.batch, len(x)) for side in (text, timestep))
        return forward(x, mask, text, None, timestep, *rest, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Around:
        return self  # for what it does next: the copy of a block has the hooks of the stages too

    def after_copy(self, new: Any) -> None:
        for name in HOOKS:
            for handle in self.latte.handles:
                vars(new)[name].pop(handle.id, None)


class Switching:
    """A Latte whose forward runs on whichever ranks it is given."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.forward = model, model.forward
        self._latte: Latte | None = None
        self._hooks: dict[str, dict[int, Any]] = {}
        """Of the stages on the model itself, which has them while it runs inside of those of others."""

    def run(self, mesh: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        world = world_of(mesh, 60.0)
        if self._latte is None or self._latte._world is not world or not self._latte.is_whole():
            self.remove()
            self._latte = Latte(self.model, world)
        latte = self._latte
        latte.begin(args, kwargs)
        undo = put(self.model, "forward", self.forward)
        try:
            with self._own_hooks({handle.id for handle in latte.handles}):
                return self.model._call_impl(*args, **kwargs)
        finally:
            undo()
            latte.end()

    @contextmanager
    def _own_hooks(self, ids: set[int]) -> Iterator[None]:
        own = vars(self.model)
        others = {name: own[name] for name in HOOKS}
        for name, hooks in others.items():
            known = self._hooks.get(name, {}) | {key: hooks.pop(key) for key in ids & hooks.keys()}
            # In the order in which they were registered.
            self._hooks[name] = OrderedDict((key, known[key]) for key in sorted(ids & known.keys()))
        own.update(self._hooks)
        try:
            yield
        finally:
            own.update(others)

    def remove(self) -> None:
        if self._latte is not None:
            self._latte.remove()
        self._latte, self._hooks = None, {}


def _rows(side: Tensor | None, B: int, rows: int) -> Any:
    """[(B any), …] → [rows, …]: all rows of one sample are the same."""
    if side is None:
        return None
    return side.unflatten(0, (B, -1))[:, :1].expand(-1, rows // B, *side.shape[1:]).flatten(0, 1)
