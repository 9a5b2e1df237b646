"""Execute: run a compiled schedule on this rank, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core.codec import digest
from weft.core.schedule import Schedule
from weft.run import trace
from weft.run.arena import Arena
from weft.run.comm import Comm
from weft.run.directions import compile_backward, compile_forward
from weft.run.kernels import Kernel
from weft.run.steps import Frame
from weft.schedule.reverse import reverse

trace.follow_environment()


class Executor:
    """One rank's compiled schedule. q, k, v are this rank's shards [B, H, rows, D]."""

    def __init__(
        self,
        schedule: Schedule,
        comm: Comm,
        kernel: Kernel,
        *,
        keep: str = "auto",
        device: str = "cpu",
        name: str = "",
        arena: Arena | None = None,
    ) -> None:
        """`name` is what all ranks agreed to run: messages of calls with different names never meet.

        Executors that share an arena must run one after another.
        """
        self.schedule, self.comm, self.kernel = schedule, comm, kernel
        self.arena = arena or Arena()
        compiler = compile_forward(schedule, comm.rank, tag=2 * int(digest(name or schedule.digest)[:6], 16))
        self.backward_schedule = reverse(schedule, keep=keep)
        self._backward = compile_backward(self.backward_schedule, compiler)
        self._forward = compiler.program
        for program in (self._forward, self._backward):
            program.to(torch.device(device))
        kept = set(self._forward.keep)
        self._regions = {s: r for s, r in self._forward.regions.items() if r.buffer in kept}
        self._narrow_is_wide = compiler.narrow == compiler.wide
        self._shapes = compiler.sum_shapes()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, *, keep: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """The output, and with `keep` what `backward` needs besides q, k, v and the output itself."""
        frame = Frame(self.comm, self.kernel, scale, q.device)
        frame.slots |= {"home q": (q,), "home kv": (k, v)}
        fresh = self._forward.prepare(frame, self.arena, keep=keep, device=q.device)
        trace.run(self._forward, self.schedule, frame)
        (out,) = frame.slots["home o"]
        if not keep:
            return out.contiguous(), []
        sums = [frame.slots[slot][0].contiguous() for slot in self._sums()]
        return out.contiguous(), [fresh[name] for name in self._forward.keep] + sums

    def saved_shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what `forward` keeps, for torch.compile."""
        buffers = [((self._forward.sizes[name],), torch.uint8) for name in self._forward.keep]
        return buffers + [self._shapes[slot] for slot in self._sums()]

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        saved: list[Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this rank's shards."""
        frame = Frame(self.comm, self.kernel, scale, grad.device)
        frame.slots |= {"home q": inputs[:1], "home kv": inputs[1:], "home do": (grad,)}
        names = self._forward.keep
        buffers = dict(zip(names, saved, strict=False))
        frame.slots |= {slot: r.bind(buffers[r.buffer]) for slot, r in self._regions.items()}
        frame.slots |= {slot: (x,) for slot, x in zip(self._sums(), saved[len(names) :], strict=True)}
        if self._out_is_sum():
            frame.slots[self._forward.sums[0]] = (out,)
        self._backward.prepare(frame, self.arena, keep=False, device=grad.device)
        trace.run(self._backward, self.backward_schedule, frame)
        (dq,), (dk, dv) = frame.slots["home dq"], frame.slots["home dkv"]
        return dq, dk, dv

    def _out_is_sum(self) -> bool:
        """In a ring the result is the sum itself; keeping it twice would alias and waste."""
        return self._narrow_is_wide and self._forward.direct.get("home o") in self._forward.sums

    def _sums(self) -> tuple[str, ...]:
        return self._forward.sums[1:] if self._out_is_sum() else self._forward.sums
