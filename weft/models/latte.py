"""Latte, as Diffusers has it (`LatteTransformer3DModel`): its frames and patches sharded over ranks.

    from weft.models import latte

    sharded = latte.shard(model)        # the model is called as before, with the same input on every rank
    sharded.remove()

B batch · T frames · S patches of a frame · C width
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.models.adapter import put
from weft.models.stages import Mixes, Stages, stages
from weft.models.wrap import SITE
from weft.run.world import World, world_of

BLOCKS = {
    "transformer_blocks.*": Mixes("space", dims="(batch time) space channel"),
    "temporal_transformer_blocks.*": Mixes("time", dims="(batch space) time channel"),
}


def shard(model: nn.Module, mesh: Any = None) -> Latte:
    """Shard a Latte from its first block to its last; mesh (of one axis), gradients: see `weft.stages`."""
    return Latte(model, world_of(mesh, 60.0))


class Latte:
    """The stages of a Latte, and what its blocks need besides: side inputs with as many rows as the shard."""

    def __init__(self, model: Any, world: World) -> None:
        self._model, self._world, self._frames = model, world, model.temp_pos_embed
        self._stages: dict[str, Stages] = {}
        self._batch = 0
        self._hook = model.register_forward_pre_hook(self._begin, with_kwargs=True)
        # The model adds the positions of all frames where it has only some of them: so it gets none to add,
        # and they are added in the first block through time, which has all frames.
        model.temp_pos_embed = torch.zeros_like(self._frames[:, :1])
        blocks = [*model.transformer_blocks, *model.temporal_transformer_blocks]
        self._undo: list[Callable[[], Any]] = []
        for block in blocks:
            first = block is model.temporal_transformer_blocks[0]
            fitted = self._fitted(block.forward, self._frames if first else None)
            self._undo.append(put(block, "forward", fitted))

    def remove(self) -> None:
        self._hook.remove()
        for handle in self._stages.values():
            handle.remove()
        self._model.temp_pos_embed = self._frames
        for undo in self._undo:
            undo()

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Declare the stages for a video."""
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
        self._batch = B
        self._stages[shard].sizes = {"batch": B, "time": T}

    def _fitted(self, forward: Callable[..., Tensor], frames: Tensor | None) -> Callable[..., Tensor]:
        """A block's forward that is given the text and the timestep of all frames, or patches."""

        def call(x: Tensor, mask: None, text: Any, text_mask: Any, timestep: Tensor, *rest: Any) -> Tensor:
            if text_mask is not None:
                raise InputError("A sharded Latte takes no encoder_attention_mask.")
            if frames is not None and x.shape[1] > 1:
                x = x + frames.to(x)
            text, timestep = (_rows(side, self._batch, len(x)) for side in (text, timestep))
            return forward(x, mask, text, None, timestep, *rest)

        return call


class Switching:
    """A Latte whose forward runs on whichever ranks it is given."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.forward = model, model.forward
        self._latte: Latte | None = None

    def run(self, mesh: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        world = world_of(mesh, 60.0)
        if self._latte is None or self._latte._world is not world:
            self.remove()
            self._latte = Latte(self.model, world)
        undo = put(self.model, SITE, None)
        try:
            return self.model(*args, **kwargs)  # not its forward alone: the stages have hooks
        finally:
            undo()

    def remove(self) -> None:
        if self._latte is not None:
            self._latte.remove()
        self._latte = None

    before_copy = remove


def _rows(side: Tensor | None, B: int, rows: int) -> Any:
    """[(B any), …] → [rows, …]: all rows of one sample are the same."""
    if side is None:
        return None
    return side.unflatten(0, (B, -1))[:, :1].expand(-1, rows // B, *side.shape[1:]).flatten(0, 1)
