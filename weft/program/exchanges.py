"""Exchanges of a program: what is packed, sent as it lies, received in place, and done by one collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter

from weft.core.schedule import Piece
from weft.program.lowering import ALIGN, Lowering
from weft.program.pieces import Message, Messages
from weft.program.places import cover
from weft.program.slots import Slot
from weft.program.steps import Copy, Fill, Post, Segment


class Exchanges(Lowering):
    """Lowers the operations that move pieces."""

    def exchange(self, index: int, op: Messages) -> None:
        if op.collective and self.target.collective:
            self.bulk(index, op)
            return
        sends = self.lie(op)
        self.settle()
        if len(sends) < len(op.sends):
            packed = {peer: pieces for peer, pieces in op.sends.items() if peer not in sends}
            sends |= self.stage(index, packed)
        receives = {peer: self.receive(index, peer, pieces) for peer, pieces in op.receives.items()}
        if len(receives) > 1 and all([self.is_copied(pieces) for pieces in op.receives.values()]):
            _lay_side_by_side(f"in {index}", [receives[peer][0] for peer in sorted(receives)])
        self.post(index, op, sends, receives)

    def bulk(self, index: int, op: Messages) -> None:
        """Lower an exchange of all ranks to one collective: each end is one buffer, a part for each rank.

        Where the input or the result is such a buffer itself, what stays at home goes through it too.
        """
        self.settle()
        own = self.own_piece(op)
        sends = self._in_order(op.sends, own, self.cut)
        landed = self._in_order(op.receives, own, self.landing)
        mine = {self.rank: self.pieces.message([own])} if own is not None and (sends or landed) else {}
        if sends is None:
            sends = self.stage(index, op.sends | mine, align=1)
        if landed is None:
            coming = sorted((op.receives | mine).items(), key=itemgetter(0))
            receives = {peer: self.receive(index, peer, pieces, land=False) for peer, pieces in coming}
            _lay_side_by_side(f"in {index}", [message for message, _ in receives.values()], align=1)
        else:
            receives = {peer: (slot, [slot]) for peer, slot in landed.items()}
        everything = op.sends | mine if self.rank in sends else op.sends
        ordered = {peer: everything[peer] for peer in sorted(everything)}
        self.post(
            index, op._replace(sends=ordered, receives=op.receives | mine), sends, receives, collective=True
        )

    def _in_order(
        self, messages: Mapping[int, list[Piece]], own: Piece | None, place: Callable[[Piece], Slot | None]
    ) -> dict[int, Slot] | None:
        """Messages that lie in a tensor of the caller in the order of ranks, and are all of it."""
        everything = {**messages, **({self.rank: [own]} if own is not None else {})}
        slots: dict[int, Slot] = {}
        at = 0
        for peer in sorted(everything):
            slot = place(everything[peer][0]) if len(everything[peer]) == 1 else None
            if slot is None or slot.parent is None or slot.offset != at:
                return None
            slots[peer] = slot
            at += slot.num_bytes
        whole = next(iter(slots.values())).root
        return slots if at == whole.num_bytes else None

    def settle(self) -> None:
        """Use up what has come and free what has gone, before another exchange needs its buffers."""
        self.consume()
        for op, post in list(self.posted.items()) if self.posted else ():
            if not post.receives:
                if op != self.last:  # it brought nothing to wait for
                    self.release(post)
            elif self.awaited[op] < len(post.receives):  # some of it is here: the rest is not worth a buffer
                for _, message in post.receives:
                    self.wait_for(message)

    def post(
        self,
        index: int,
        op: Messages,
        sends: dict[int, Slot],
        receives: dict[int, tuple[Slot, list[Slot]]],
        *,
        collective: bool = False,
    ) -> None:
        label = op.label or "exchange"
        going = tuple([(peer, sends[peer]) for peer in op.sends])
        coming = tuple([(peer, message) for peer, (message, _) in receives.items()])
        post = Post(index, label, going, coming, True, collective)  # noqa: FBT003 - by far the fastest
        self.steps.append(post)
        self.posted[index], self.awaited[index], self.last = post, len(coming), index
        # Only now: what an exchange brings cannot go on in the same exchange.
        for peer, (message, slots) in receives.items():
            pieces = op.receives[peer]
            self.unwaited[message] = index, label, peer
            self.whole.setdefault(pieces.numbers, message)
            for number, slot, piece in zip(pieces.numbers, slots, pieces, strict=True):
                self.exact.setdefault(number, slot)
                tensor = piece.tensor
                self.arrived[tensor].append(slot)
                if tensor == "kv" and label != "scatter":
                    self.brought.append((piece, label))
                    self.labels[number] = label

    def lie(self, op: Messages) -> dict[int, Slot]:
        """Messages that are sent as they lie: equal to one that came, or to an operand."""
        sends: dict[int, Slot] = {}
        for peer, pieces in op.sends.items():
            slot = self.whole.get(pieces.numbers)
            if slot is None and len(pieces) == 1:
                slot = self.lying(pieces[0], pieces.numbers[0])
            if slot is not None:
                if self.unwaited:
                    self.wait_at(slot)
                sends[peer] = slot
        return sends

    def receive(
        self, index: int, peer: int, pieces: list[Piece], *, land: bool = True
    ) -> tuple[Slot, list[Slot]]:
        name, near = f"in {index} from {peer}", peer in self.target.near
        if len(pieces) == 1 and not near:
            slot = self.landing(pieces[0]) if land else None
            slot = slot or self.slot(name, self.buffer_memory, pieces[0])
            return slot, [slot]
        return self.message(name, "peer" if near else self.buffer_memory, pieces)

    def stage(self, index: int, packed: dict[int, Message], *, align: int = 0) -> dict[int, Slot]:
        """Write messages side by side, so that equal parts of a tensor leave it in one copy."""
        messages: dict[int, Slot] = {}
        segments: list[Segment] = []
        for peer, pieces in packed.items():
            messages[peer], slots = self.message(f"out {index} to {peer}", self.buffer_memory, pieces)
            for slot, piece in zip(slots, pieces, strict=True):
                segments += self.collect(index, slot, self.find(piece, slot))
        _lay_side_by_side(f"out {index}", [messages[peer] for peer in sorted(messages)], align=align)
        if segments:
            self.steps.append(Copy(index, tuple(segments)))
        return messages

    def find(self, piece: Piece, target: Slot) -> list[Segment]:
        exact = self.exact.get(self.pieces.number(piece))
        return (
            [Segment(exact, target, piece)]
            if exact is not None
            else cover(piece, self.sources(piece), target)
        )

    def collect(self, index: int, target: Slot, segments: list[Segment]) -> list[Segment]:
        """Wait for the parts of a slot; fill it first where they leave something out."""
        piece = target.piece
        assert piece is not None
        for segment in segments:
            self.wait_at(segment.source)
        cells = sum(segment.piece.heads.size * segment.piece.tokens.size for segment in segments)
        if cells < piece.heads.size * piece.tokens.size:
            self.steps.append(Fill(index, target))
        return segments


def _lay_side_by_side(name: str, messages: list[Slot], *, align: int = 0) -> None:
    """Put messages into one buffer; without `align` only if they are alike, so that one copy reaches all."""
    first = messages[0]
    alike = all([m.num_bytes == first.num_bytes and m.memory == first.memory for m in messages])
    free = first.memory != "peer" and all([m.parent is None for m in messages])
    if not align and (len(messages) < 2 or not alike or not free):
        return
    at, buffer = 0, Slot(name, first.memory, 0)
    for message in messages:
        message.parent, message.offset = buffer, at
        at += -(-message.num_bytes // (align or ALIGN)) * (align or ALIGN)
    buffer.num_bytes = at
