"""Latte, as Diffusers has it (`LatteTransformer3DModel`): its frames and patches sharded over ranks.

    from weft.diffusers import latte

    sharded = latte.shard(model)        # the model is called as before, with the same input on every rank
    sharded.remove()

B batch · T frames · S patches of a frame · C width
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from weft.core.errors import InputError
from weft.hooks.wrap import Args, Forward, ForwardWrapper, Kwargs, Target, unwrap_module, wrap_module
from weft.run.world import MeshLike, World, world_of
from weft.switching.stages import Mixes, Stages

IN_SPACE, IN_TIME = "transformer_blocks", "temporal_transformer_blocks"
BLOCKS = {
    f"{IN_SPACE}.*": Mixes("space", dims="(batch time) space channel"),
    f"{IN_TIME}.*": Mixes("time", dims="(batch space) time channel"),
}


def shard(model: nn.Module, mesh: MeshLike = None) -> ShardedLatte:
    """Shard a Latte from its first block to its last; mesh (of one axis), gradients: see `weft.stages`."""
    latte = ShardedLatte(model, mesh)
    wrap_module(model, latte)
    return latte


class ShardedLatte(ForwardWrapper):
    """A Latte as stages; its blocks get side inputs with as many rows as the shard."""

    def __init__(self, model: Target, mesh: MeshLike = None) -> None:
        self.model, self.mesh = model, mesh
        self.forward: Forward = model.forward
        self._stages: Stages | None = None
        self._key: tuple[World, int] | None = None
        """What the stages are for: the ranks, the number of blocks."""
        self._frames = torch.empty(0)

    def around(self, forward: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        self.forward = forward
        return self.run(self.mesh, args, kwargs)

    def run(self, mesh: MeshLike, args: Args, kwargs: Kwargs) -> PyTree:
        """Run the model's forward on the ranks of a mesh.

        The model adds the positions of all frames where it has only some of them: so it gets zeros to add,
        and they are added in the first block through time, which has all frames.
        """
        world, model = world_of(mesh, 60.0), self.model
        B, _, T, H, W = (args[0] if args else kwargs["hidden_states"]).shape
        patches, ranks = H * W // model.config.patch_size**2, world.comm.size
        if patches < ranks:
            raise InputError(f"Frames of {patches} patches cannot be sharded over {ranks} ranks.")
        stages = self._stages_for(world)
        # Diffusers' code cannot pass on a shard without a frame; with few frames, each rank has all of them.
        stages.shard = ("time", "space") if ranks <= T else ("space",)
        stages.sizes = {"batch": B, "time": T}
        frames = self._frames = model.temp_pos_embed
        model.temp_pos_embed = torch.zeros_like(frames[:, :1])
        try:
            return stages.around(self.forward, args, kwargs)
        finally:
            model.temp_pos_embed = frames

    def _stages_for(self, world: World) -> Stages:
        key = world, len(getattr(self.model, IN_SPACE)) + len(getattr(self.model, IN_TIME))
        if self._stages is None or key != self._key or not self._stages.is_current():
            self._remove_stages()
            self._key = key
            self._stages = Stages(self.model, BLOCKS, dims="batch time space channel", shard="", mesh=world)
            for name, hook in self._stages.hooks.items():
                hook.inner = partial(self._run_block, self._stages, name == f"{IN_TIME}.0")
        return self._stages

    def _run_block(
        self,
        stages: Stages,
        is_first: bool,  # noqa: FBT001
        forward: Forward,
        *args: PyTree,
        **kwargs: PyTree,
    ) -> Tensor:
        """Run a block with the text and the timestep of all frames, or patches."""
        x, mask, text, text_mask, timestep, *rest = args
        if text_mask is not None:
            raise InputError("A sharded Latte takes no encoder_attention_mask.")
        if is_first and x.shape[1] > 1:
            x = x + self._frames.to(x)
        batch = stages.activation.sizes["batch"]
        text, timestep = (_rows(side, batch, len(x)) for side in (text, timestep))
        return forward(x, mask, text, None, timestep, *rest, **kwargs)

    def remove(self) -> None:
        self._remove_stages()
        unwrap_module(self.model)

    def _remove_stages(self) -> None:
        if self._stages is not None:
            self._stages.remove()
        self._stages = None


def _rows(side: Tensor | None, B: int, rows: int) -> Tensor | None:
    """[(B any), …] → [rows, …]: all rows of one sample are the same."""
    if side is None:
        return None
    return side.unflatten(0, (B, -1))[:, :1].expand(-1, rows // B, *side.shape[1:]).flatten(0, 1)
