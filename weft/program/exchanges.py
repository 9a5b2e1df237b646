"""Exchanges: lower what moves: pieces packed, sent as they lie, received in place, or by one collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter

from weft.core.schedule import Piece
from weft.program.lowering import ALIGN, Lowering, Messages
from weft.program.pieces import Message, cover
from weft.program.slots import Slot
from weft.program.steps import Copy, CopySegment, Post

Received = tuple[Slot, list[Slot]]
"""A message and the slot in it of each piece."""


def exchange(lowering: Lowering, index: int, op: Messages) -> None:
    """Add the steps of one rank's messages of an exchange to its program."""
    if not lowering.schedule.problem.row_elements:
        return  # shards of another mesh axis are empty, so there is nothing to send
    if op.collective and lowering.target.collective:
        _collective(lowering, index, op)
        return
    sends = _as_they_lie(lowering, op)
    _settle(lowering)
    if len(sends) < len(op.sends):
        packed = {peer: pieces for peer, pieces in op.sends.items() if peer not in sends}
        sends |= _stage(lowering, index, packed)
    receives = {peer: _receive(lowering, index, peer, pieces) for peer, pieces in op.receives.items()}
    if len(receives) > 1 and all([lowering.is_copied(pieces) for pieces in op.receives.values()]):
        _lay_side_by_side(f"in {index}", [receives[peer][0] for peer in sorted(receives)])
    _post(lowering, index, op, sends, receives)


def _collective(lowering: Lowering, index: int, op: Messages) -> None:
    """Lower an exchange of all ranks to one collective: each end is one buffer, a part for each rank.

    Where the input or the result is such a buffer itself, what stays at home goes through it too.
    """
    _settle(lowering)
    own = lowering.own_piece(op)
    sends = _in_order(lowering.rank, op.sends, own, lowering.cut)
    landed = _in_order(lowering.rank, op.receives, own, lowering.landing)
    at_home = {lowering.rank: lowering.pieces.message([own])} if own is not None and (sends or landed) else {}
    if sends is None:
        sends = _stage(lowering, index, op.sends | at_home, align=1)
    if landed is None:
        coming = sorted((op.receives | at_home).items(), key=itemgetter(0))
        receives = {peer: _receive(lowering, index, peer, pieces, land=False) for peer, pieces in coming}
        _lay_side_by_side(f"in {index}", [message for message, _ in receives.values()], align=1)
    else:
        receives = {peer: (slot, [slot]) for peer, slot in landed.items()}
    outgoing = op.sends | at_home if lowering.rank in sends else op.sends
    ordered = {peer: outgoing[peer] for peer in sorted(outgoing)}
    op = op._replace(sends=ordered, receives=op.receives | at_home)
    _post(lowering, index, op, sends, receives, collective=True)


def _in_order(
    rank: int, messages: Mapping[int, list[Piece]], own: Piece | None, place: Callable[[Piece], Slot | None]
) -> dict[int, Slot] | None:
    """Messages that lie in a tensor of the caller in the order of ranks, and are all of it."""
    pieces = {**messages, **({rank: [own]} if own is not None else {})}
    slots: dict[int, Slot] = {}
    at = 0
    for peer in sorted(pieces):
        slot = place(pieces[peer][0]) if len(pieces[peer]) == 1 else None
        if slot is None or slot.parent is None or slot.offset != at:
            return None
        slots[peer] = slot
        at += slot.num_bytes
    tensor = next(iter(slots.values())).root
    return slots if at == tensor.num_bytes else None


def _settle(lowering: Lowering) -> None:
    """Consume arrived messages and release sent buffers, before another exchange needs them."""
    lowering.consume()
    for op, post in list(lowering.posted.items()) if lowering.posted else ():
        if not post.receives:
            if op != lowering.last:  # it has no message to wait for
                lowering.release(post)
        elif lowering.awaited[op] < len(
            post.receives
        ):  # partly arrived: waiting for the rest frees its buffer
            for _, message in post.receives:
                lowering.wait_for(message)


def _post(  # noqa: PLR0913 - both ends of an exchange
    lowering: Lowering,
    index: int,
    op: Messages,
    sends: dict[int, Slot],
    receives: dict[int, Received],
    *,
    collective: bool = False,
) -> None:
    label = op.label or "exchange"
    outgoing = tuple([(peer, sends[peer]) for peer in op.sends])
    incoming = tuple([(peer, message) for peer, (message, _) in receives.items()])
    post = Post(index, label, outgoing, incoming, collective)
    lowering.steps.append(post)
    lowering.posted[index], lowering.awaited[index], lowering.last = post, len(incoming), index
    # After the post: data that an exchange delivers cannot be forwarded in the same exchange.
    for peer, (message, slots) in receives.items():
        pieces = op.receives[peer]
        lowering.unwaited[message] = index, label, peer
        lowering.whole.setdefault(pieces.numbers, message)
        for number, slot, piece in zip(pieces.numbers, slots, pieces, strict=True):
            lowering.exact.setdefault(number, slot)
            tensor = piece.tensor
            lowering.arrived[tensor].append(slot)
            if tensor == "kv" and label != "scatter":
                lowering.brought.append((piece, label))
                lowering.labels[number] = label


def _as_they_lie(lowering: Lowering, op: Messages) -> dict[int, Slot]:
    """Messages that need no packing: equal to a received message or to an operand."""
    sends: dict[int, Slot] = {}
    for peer, pieces in op.sends.items():
        slot = lowering.whole.get(pieces.numbers)
        if slot is None and len(pieces) == 1:
            slot = lowering.lying(pieces[0], pieces.numbers[0])
        if slot is not None:
            if lowering.unwaited:
                lowering.wait_at(slot)
            sends[peer] = slot
    return sends


def _receive(
    lowering: Lowering, index: int, peer: int, pieces: list[Piece], *, land: bool = True
) -> Received:
    name, near = f"in {index} from {peer}", peer in lowering.target.near
    if len(pieces) == 1 and not near:
        slot = lowering.landing(pieces[0]) if land else None
        slot = slot or lowering.slot(name, lowering.buffer_memory, pieces[0])
        return slot, [slot]
    return lowering.message(name, "peer" if near else lowering.buffer_memory, pieces)


def _stage(lowering: Lowering, index: int, packed: dict[int, Message], *, align: int = 0) -> dict[int, Slot]:
    """Write messages side by side, so that equal parts of a tensor leave it in one copy."""
    messages: dict[int, Slot] = {}
    segments: list[CopySegment] = []
    for peer, pieces in packed.items():
        messages[peer], slots = lowering.message(f"out {index} to {peer}", lowering.buffer_memory, pieces)
        for slot, piece, number in zip(slots, pieces, pieces.numbers, strict=True):
            arrived = lowering.exact.get(number)
            places = lowering.sources(piece) if arrived is None else (arrived,)
            segments += lowering.collect(index, slot, cover(piece, places, slot))
    _lay_side_by_side(f"out {index}", [messages[peer] for peer in sorted(messages)], align=align)
    if segments:
        lowering.steps.append(Copy(index, tuple(segments)))
    return messages


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
