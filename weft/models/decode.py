"""The tiles of a VAE, each decoded by one rank.

    handle = spread(pipe.vae, world)
    pipe.vae.enable_tiling()        # the user's part: what is not tiled has nothing to be split
    pipe.vae.decode(latents)        # the whole video, on every rank, bit for bit that of one process
    handle.remove()

A VAE that tiles calls its decoder once for each tile, or, where frames depend on those before them, once
for each few frames of it. Its own code runs twice, with a stand-in for the decoder: first to see which
calls it makes, and in the end, given the results of all ranks, to blend them. Between these, every rank
makes the calls of its share. So nothing of any VAE's way of tiling is repeated here.

Tiles in space and, where the VAE has them, in time (HunyuanVideo, LTX) are shared out, and the videos of a
batch after `vae.enable_slicing()`. A decode of one tile is left as it is, and so is one that needs gradients.
A rank waits for the slowest: the time-out of the world must be longer than one tile takes.

Not spread are AutoencoderKLMagvit, AutoencoderVidTok (the caches of a tile are inside their convolutions),
AutoencoderKLCosmos, AutoencoderKLTemporalDecoder (they do not tile), AutoencoderKLLTXVideo and
AutoencoderKLLTX2Video if their decoders draw noise (its order is that of the tiles), and unknown ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice, zip_longest
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.core.codec import digest
from weft.core.errors import CommError
from weft.core.problem import ITEM_BYTES
from weft.models.wrap import SITE, Around, Method, unwrap_module, wrap_module
from weft.plan.heads import Groups, refined
from weft.run.agree import agree
from weft.run.world import World

KNOWN = {
    "AutoencoderDC", "AutoencoderKL", "AutoencoderKLAllegro", "AutoencoderKLCogVideoX", "AutoencoderKLFlux2",
    "AutoencoderKLHunyuanImage", "AutoencoderKLHunyuanImageRefiner", "AutoencoderKLHunyuanVideo",
    "AutoencoderKLHunyuanVideo15", "AutoencoderKLKVAE", "AutoencoderKLLTX2Video", "AutoencoderKLLTXVideo",
    "AutoencoderKLMochi", "AutoencoderKLQwenImage", "AutoencoderKLQwenImage21", "AutoencoderKLWan",
    "AutoencoderTiny",
}  # fmt: skip
PAIRS = {"AutoencoderKLCogVideoX", "AutoencoderKLMochi"}  # their decoders return (frames, cache)

DTYPES = [getattr(torch, name) for name in ITEM_BYTES]
NOTHING, FAILED = -1, -2  # in place of a dtype
TAG = 2 * int(digest("decoded tiles")[:6], 16)


def spread(vae: Any, world: World) -> Spread:
    """From now on `vae.decode` decodes this rank's share of the tiles only, and returns the whole.

    Tiling is the user's choice, before or after: `vae.enable_tiling()`. Where nothing can be done the VAE
    is left alone, and `reason` says why.
    """
    if not (reason := _obstacle(vae, world)):
        wrap_module(vae, _Decode(vae, world))
    return Spread(vae, reason)


class Spread:
    """What has been done to a VAE; nothing, if there is a reason."""

    def __init__(self, vae: Any, reason: str) -> None:
        self._vae, self.reason = vae, reason

    def remove(self) -> None:
        if not self.reason:
            unwrap_module(self._vae)


def _obstacle(vae: Any, world: World) -> str:
    name = type(vae).__name__
    if world.comm.size == 1:
        return "There is one rank."
    if name not in KNOWN:
        return f"It is not known how the tiles of {name} depend on each other."
    if "decode" in vars(vae) or SITE in vars(vae):
        return "Its decode has been replaced already."
    noise = vae.config.get("decoder_inject_noise", False)
    if any(noise) if isinstance(noise, list | tuple) else noise:
        return "Its decoder draws noise, tile after tile."
    return ""


class Call(NamedTuple):
    """A call of the decoder."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tile(self) -> Tensor:
        return self.args[0]

    @property
    def cache(self) -> Any:
        """What ties it to the call before: a list that both fill, or what that one returned."""
        return self.kwargs.get("feat_cache", self.kwargs.get("conv_cache"))


Tile = list[Call]
"""Calls to be made in turn, by one rank."""


class _StandIn(nn.Module):
    """In the decoder's place, with the decoder inside: some VAEs count its modules."""

    def __init__(self, decoder: nn.Module, answer: Callable[[Call], Any]) -> None:
        super().__init__()
        self.decoder, self.answer = decoder, answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer(Call(args, kwargs))


class _Decode(Around):
    """`vae.decode`, shared by the ranks."""

    method, opaque = "decode", True

    def __init__(self, vae: Any, world: World) -> None:
        self.vae, self.comm = vae, world.comm
        self.pairs = type(vae).__name__ in PAIRS

    def around(self, forward: Method, args: Any, kwargs: Any) -> Any:
        given = chain(args, kwargs.values(), self.vae.parameters())
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given):
            return forward(*args, **kwargs)
        tiles = self._survey(partial(forward, *args, **kwargs))
        if len(tiles) < 2:
            return forward(*args, **kwargs)
        results = deque(chain(*self._results(tiles)))
        with self._instead(lambda _: results.popleft()):
            return forward(*args, **kwargs)

    @contextmanager
    def _instead(self, answer: Callable[[Call], Tensor]) -> Iterator[None]:
        """For a while the decoder's results are `answer`'s."""
        decoder = self.vae.decoder
        self.vae.decoder = _StandIn(decoder, (lambda call: (answer(call), "cache")) if self.pairs else answer)
        try:
            yield
        finally:
            self.vae.decoder = decoder

    def _survey(self, decode: Callable[[], Any]) -> list[Tile]:
        """The tiles that a decode makes; none of them is computed."""
        tiles: list[Tile] = []
        channels = self.vae.config.get("out_channels", 1)

        def answer(call: Call) -> Tensor:
            if call.cache is not None and (self.pairs or (tiles and call.cache is tiles[-1][-1].cache)):
                tiles[-1].append(call)
            else:
                tiles.append([call])
            # One pixel: it can be blended and cropped, and be spread over what has a fixed size.
            return call.tile.new_zeros(call.tile.shape[0], channels, *[1] * (call.tile.dim() - 2))

        with self._instead(answer):
            decode()
        return tiles

    def _results(self, tiles: list[Tile]) -> list[list[Tensor]]:
        """What the decoder makes of each tile, call by call, whichever rank has it."""
        loads = [sum(call.tile.numel() for call in tile) for tile in tiles]
        facts = {"tiles": str(len(tiles)), "latents": f"{sum(loads)} {tiles[0][0].tile.dtype}"}
        agree(self.comm, facts, what="decodes")
        deal = refined(loads, self.comm.size)
        try:
            outs = {tile: self._compute(tiles[tile]) for tile in deal[self.comm.rank]}
        except Exception:
            with suppress(CommError):
                self._shapes(None, tiles, deal)
            raise
        return self._exchange(outs, tiles, deal)

    def _compute(self, tile: Tile) -> list[Tensor]:
        outs, cache = [], None
        for call in tile:
            later = {"conv_cache": cache} if self.pairs and call.cache is not None else {}
            out = self.vae.decoder(*call.args, **call.kwargs | later)
            out, cache = out if self.pairs else (out, None)
            outs.append(out)
        tile[:] = [Call(call.args, {}) for call in tile]  # caches are as large as what is decoded
        return outs

    def _exchange(self, outs: dict[int, list[Tensor]], tiles: list[Tile], deal: Groups) -> list[list[Tensor]]:
        """Everyone's results. A tile has memory of its own, which is free again when it has been blended."""
        shapes, dtype = self._shapes(outs, tiles, deal)
        results: list[list[Tensor]] = [[] for _ in tiles]
        for turn in zip_longest(*deal):
            flat: dict[int, Tensor] = {}
            for rank, tile in enumerate(turn):
                if tile is None:
                    continue
                sizes, device = [prod(shape) for shape in shapes[tile]], tiles[tile][0].tile.device
                if rank == self.comm.rank:
                    flat[rank] = torch.cat([out.flatten() for out in outs.pop(tile)])
                else:
                    flat[rank] = torch.empty(sum(sizes), dtype=dtype, device=device)
                views = zip(flat[rank].split(sizes), shapes[tile], strict=True)
                results[tile] = [x.view(shape) for x, shape in views]
            self._move(flat)
        return results

    def _shapes(
        self, outs: dict[int, list[Tensor]] | None, tiles: list[Tile], deal: Groups
    ) -> tuple[list[list[list[int]]], torch.dtype]:
        """Of the results of each tile. A rank that has none to tell of because it failed ends it for all."""
        made = list(chain(*(outs or {}).values()))
        kind = FAILED if outs is None else DTYPES.index(made[0].dtype) if made else NOTHING
        numbers = [kind, *(size for out in made for size in out.shape)]
        dims, calls = tiles[0][0].tile.dim(), [len(tile) for tile in tiles]
        room = 1 + dims * max(sum(calls[tile] for tile in share) for share in deal)
        rows = self.comm.gather_numbers(numbers + [0] * (room - len(numbers)))
        kinds = [row[0] for row in rows]
        if FAILED in kinds:
            rank = kinds.index(FAILED)
            raise CommError(f"Rank {rank} failed to decode its tiles.", hint="Look at its own error first.")
        shapes: list[list[list[int]]] = [[] for _ in tiles]
        for row, share in zip(rows, deal, strict=True):
            told = (row[at : at + dims] for at in range(1, room, dims))
            for tile in share:
                shapes[tile] = list(islice(told, calls[tile]))
        return shapes, DTYPES[max(kinds)]

    def _move(self, flat: dict[int, Tensor]) -> None:
        """What is mine goes to everyone, what is theirs comes."""
        # By the group: memory that is shared with peers would stay as large as a video for good.
        comm = getattr(self.comm, "base", self.comm)
        messages = {rank: x.view(torch.uint8) for rank, x in flat.items()}
        mine = messages.pop(comm.rank, None)
        sends = [] if mine is None else [(peer, mine) for peer in range(comm.size) if peer != comm.rank]
        comm.warm_up(next(iter(flat.values())).device)
        comm.post(sends, list(messages.items()), "decoded tiles", TAG).finish()
