"""Decode the tiles of a VAE on different ranks.

    handle = parallelize_vae(pipe.vae, world)
    pipe.vae.enable_tiling()        # by the user: without tiles there is nothing to split
    pipe.vae.decode(latents)        # the whole video, on every rank, bit for bit that of one process
    handle.remove()

A VAE that tiles calls its decoder once for each tile, or, where frames depend on those before them, once
for each few frames of it. Its own code runs twice, with a proxy in place of the decoder: first to record
the calls, and in the end, with the results of all ranks, to blend them. Between these, every rank makes the
calls of its share. So no VAE's tiling is implemented here.

Tiles in space and, where the VAE has them, in time (HunyuanVideo, LTX) are distributed, and the videos of a
batch after `vae.enable_slicing()`. A decode of one tile is left as it is, and so is one that needs gradients.
A rank waits for the slowest: the timeout of the world must be longer than one tile takes.

Not supported are AutoencoderKLMagvit, AutoencoderVidTok (the caches of a tile are inside their convolutions),
AutoencoderKLCosmos, AutoencoderKLTemporalDecoder (they do not tile), AutoencoderKLLTXVideo and
AutoencoderKLLTX2Video if their decoders draw noise (its order is that of the tiles), and others.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, zip_longest
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from weft.core.codec import digest
from weft.core.errors import CommError
from weft.hooks.wrap import (
    WRAPPER,
    Args,
    Forward,
    ForwardWrapper,
    Kwargs,
    Target,
    unwrap_module,
    wrap_module,
)
from weft.plan.heads import Groups, refined
from weft.run.agree import abort, agree, gather_facts
from weft.run.world import World

TILED_VAES = {
    "AutoencoderDC", "AutoencoderKL", "AutoencoderKLAllegro", "AutoencoderKLCogVideoX", "AutoencoderKLFlux2",
    "AutoencoderKLHunyuanImage", "AutoencoderKLHunyuanImageRefiner", "AutoencoderKLHunyuanVideo",
    "AutoencoderKLHunyuanVideo15", "AutoencoderKLKVAE", "AutoencoderKLLTX2Video", "AutoencoderKLLTXVideo",
    "AutoencoderKLMochi", "AutoencoderKLQwenImage", "AutoencoderKLQwenImage21", "AutoencoderKLWan",
    "AutoencoderTiny",
}  # fmt: skip
PAIRS = {"AutoencoderKLCogVideoX", "AutoencoderKLMochi"}  # their decoders return (frames, cache)

TAG = 2 * int(digest("decoded tiles")[:6], 16)


def parallelize_vae(vae: nn.Module, world: World) -> DecodeHook:
    """Let `vae.decode` decode this rank's share of the tiles only, and return the whole.

    Tiling is the user's choice, before or after: `vae.enable_tiling()`. A VAE that is not supported is left
    alone; `reason` is why.
    """
    hook = DecodeHook(vae, world)
    if not hook.reason:
        wrap_module(vae, hook)
    return hook


def _obstacle(vae: Target, world: World) -> str:
    name = type(vae).__name__
    if world.comm.size == 1:
        return "There is one rank."
    if name not in TILED_VAES:
        return f"The dependencies between the tiles of {name} are not known."
    if "decode" in vars(vae) or WRAPPER in vars(vae):
        return "Its decode has been replaced already."
    noise = vae.config.get("decoder_inject_noise", False)
    if any(noise) if isinstance(noise, list | tuple) else noise:
        return "Its decoder draws noise, tile after tile."
    return ""


class DecoderCall(NamedTuple):
    """A call of the decoder."""

    args: Args
    kwargs: Kwargs

    @property
    def tile(self) -> Tensor:
        return self.args[0]

    @property
    def cache(self) -> PyTree:
        """The state that it shares with the call before: a list that both fill, or what that one returned."""
        return self.kwargs.get("feat_cache", self.kwargs.get("conv_cache"))


Tile = list[DecoderCall]
"""Calls to be made in turn, by one rank."""


class DecoderProxy(nn.Module):
    """Replaces the decoder, which it contains: some VAEs count its modules."""

    def __init__(self, decoder: nn.Module, answer: Callable[[DecoderCall], PyTree]) -> None:
        super().__init__()
        self.decoder, self.answer = decoder, answer

    def forward(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self.answer(DecoderCall(args, kwargs))


class DecodeHook(ForwardWrapper):
    """Runs `vae.decode` on all ranks, unless there is a reason not to."""

    method, opaque = "decode", True

    def __init__(self, vae: Target, world: World) -> None:
        self.vae, self.comm, self.reason = vae, world.comm, _obstacle(vae, world)
        self.pairs = type(vae).__name__ in PAIRS

    def remove(self) -> None:
        if not self.reason:
            unwrap_module(self.vae)

    def around(self, forward: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        leaves = chain(args, kwargs.values(), self.vae.parameters())
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
            return forward(*args, **kwargs)
        tiles = self._record(partial(forward, *args, **kwargs))
        if len(tiles) < 2:
            return forward(*args, **kwargs)
        results = deque(chain(*self._results(tiles)))
        with self._replaced(lambda _: results.popleft()):
            return forward(*args, **kwargs)

    @contextmanager
    def _replaced(self, answer: Callable[[DecoderCall], Tensor]) -> Iterator[None]:
        """Replace the decoder by `answer`."""
        decoder = self.vae.decoder
        self.vae.decoder = DecoderProxy(
            decoder, (lambda call: (answer(call), "cache")) if self.pairs else answer
        )
        try:
            yield
        finally:
            self.vae.decoder = decoder

    def _record(self, decode: Callable[[], PyTree]) -> list[Tile]:
        """Return the tiles of a decode; none of them is computed."""
        tiles: list[Tile] = []
        channels = self.vae.config.get("out_channels", 1)

        def answer(call: DecoderCall) -> Tensor:
            if call.cache is not None and (self.pairs or (tiles and call.cache is tiles[-1][-1].cache)):
                tiles[-1].append(call)
            else:
                tiles.append([call])
            # One pixel: it can be blended and cropped, and be spread over what has a fixed size.
            return call.tile.new_zeros(call.tile.shape[0], channels, *[1] * (call.tile.dim() - 2))

        with self._replaced(answer):
            decode()
        return tiles

    def _results(self, tiles: list[Tile]) -> list[list[Tensor]]:
        """Return the decoder's outputs for each tile, call by call, from whichever rank has it."""
        loads = [sum(call.tile.numel() for call in tile) for tile in tiles]
        facts = {"tiles": str(len(tiles)), "latents": f"{sum(loads)} {tiles[0][0].tile.dtype}"}
        agree(self.comm, facts, what="decodes")
        shares = refined(loads, self.comm.size)
        try:
            outs = {tile: self._compute(tiles[tile]) for tile in shares[self.comm.rank]}
        except Exception as error:
            abort(self.comm, CommError(f"it failed to decode its tiles: {error}"))
            raise
        return self._exchange(outs, tiles, shares)

    def _compute(self, tile: Tile) -> list[Tensor]:
        outs, cache = [], None
        for call in tile:
            later = {"conv_cache": cache} if self.pairs and call.cache is not None else {}
            out = self.vae.decoder(*call.args, **call.kwargs | later)
            out, cache = out if self.pairs else (out, None)
            outs.append(out)
        tile[:] = [DecoderCall(call.args, {}) for call in tile]  # caches are as large as what is decoded
        return outs

    def _exchange(
        self, outs: dict[int, list[Tensor]], tiles: list[Tile], shares: Groups
    ) -> list[list[Tensor]]:
        """Gather the results. A tile has memory of its own, which is freed when it has been blended."""
        outputs = self._outputs(outs)
        results: list[list[Tensor]] = [[] for _ in tiles]
        for turn in zip_longest(*shares):
            flat: dict[int, Tensor] = {}
            for rank, tile in enumerate(turn):
                if tile is None:
                    continue
                (dtype, shapes), device = outputs[tile], tiles[tile][0].tile.device
                sizes = [prod(shape) for shape in shapes]
                if rank == self.comm.rank:
                    flat[rank] = torch.cat([out.flatten() for out in outs.pop(tile)])
                else:
                    flat[rank] = torch.empty(sum(sizes), dtype=dtype, device=device)
                views = zip(flat[rank].split(sizes), shapes, strict=True)
                results[tile] = [x.view(shape) for x, shape in views]
            self._broadcast(flat)
        return results

    def _outputs(self, outs: dict[int, list[Tensor]]) -> dict[int, tuple[torch.dtype, list[list[int]]]]:
        """Gather the dtype and the shapes of the outputs of each tile; all ranks raise if one failed."""
        own = {
            str(tile): json.dumps([str(xs[0].dtype)[6:], [list(x.shape) for x in xs]])
            for tile, xs in outs.items()
        }
        by_tile = chain(*(theirs.items() for theirs in gather_facts(self.comm, own)))
        described = {int(tile): json.loads(text) for tile, text in by_tile}
        return {tile: (getattr(torch, dtype), shapes) for tile, (dtype, shapes) in described.items()}

    def _broadcast(self, flat: dict[int, Tensor]) -> None:
        """Send this rank's tile to all others, and receive theirs."""
        # By the group: memory that is shared with peers would stay as large as a video for good.
        comm = getattr(self.comm, "base", self.comm)
        messages = {rank: x.view(torch.uint8) for rank, x in flat.items()}
        own = messages.pop(comm.rank, None)
        sends = [] if own is None else [(peer, own) for peer in range(comm.size) if peer != comm.rank]
        comm.warm_up(next(iter(flat.values())).device)
        comm.post(sends, list(messages.items()), "decoded tiles", TAG).finish()
