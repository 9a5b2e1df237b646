"""The arena: buffers that do not overlap, a block that only grows, and programs that notice."""

import torch

from weft.run.arena import ALIGN, Arena

CPU = torch.device("cpu")


def test_buffers_are_aligned_and_apart():
    block, lent = Arena().lend({"a": 5, "b": 64, "c": 0, "d": 7}, CPU)
    starts = {name: x.storage_offset() for name, x in lent.items()}
    assert [x.numel() for x in lent.values()] == [5, 64, 0, 7]
    assert all(start % ALIGN == 0 for start in starts.values())
    for mark, x in enumerate(lent.values(), start=1):
        x.fill_(mark)
    assert [int(x.sum()) for x in lent.values()] == [5, 128, 0, 28]
    assert block.numel() >= starts["d"] + 7


def test_programs_share_one_block_until_a_larger_one_is_needed():
    arena = Arena()
    large, _ = arena.lend({"a": 1000}, CPU)
    small, _ = arena.lend({"b": 10}, CPU)
    assert small is large and arena.has(large)
    larger, _ = arena.lend({"c": 5000}, CPU)
    assert larger is not large
    assert not arena.has(large) and arena.has(larger)


def test_nothing_takes_nothing():
    block, lent = Arena().lend({}, CPU)
    assert (block.numel(), lent) == (0, {})
