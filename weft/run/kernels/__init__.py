"""Partial attention with log-sum-exp, forward and backward, over the active tiles of a mask.

One signature, several implementations; `choose` gives the one asked for or says why it cannot serve.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from weft.core.errors import InputError
from weft.run.kernels.tiles import Tiles


class Kernel(Protocol):
    """B batch · H heads · S query rows · T key rows · D head dim; lse is natural-log [B, H, S].

    Outputs are float32 or better, whatever the inputs are, so that partial results merge without
    loss. Rows with no active tile give 0 and lse = -inf.
    """

    name: str

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
        """(out [B, H, S, D], lse [B, H, S])."""
        ...

    def attend_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        done: tuple[Tensor, Tensor],
        tiles: Tiles,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of these tiles; `done` is the final (out, lse) over *all* tiles of the rows."""
        ...


IMPLEMENTATIONS = ("auto", "sdpa", "reference")


def choose(impl: str) -> Kernel:
    """The kernel by its name; auto is the fastest that serves here."""
    if impl == "reference":
        from weft.run.kernels.reference import Reference

        return Reference()
    if impl in ("auto", "sdpa"):
        from weft.run.kernels.sdpa import Sdpa

        return Sdpa()
    raise InputError(f"impl={impl!r} is unknown.", hint=f"Use one of {', '.join(IMPLEMENTATIONS)}.")
