"""The arena: one block for each stream, which no program views any more once it is another one."""

import gc
from weakref import ref

import torch

from weft.run.arena import SHRINK_RATIO, Arena

CPU = torch.device("cpu")


class Tenant:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.unbound = num_bytes, 0

    def unbind(self) -> None:
        self.unbound += 1


def test_programs_of_one_stream_share_a_block_as_large_as_the_largest() -> None:
    arena, small, large = Arena(), Tenant(10), Tenant(1000)
    block = arena.block(CPU, 0, large)
    assert arena.block(CPU, 0, small) is block and block.numel() == arena.num_bytes() == 1000
    assert small.unbound == 0


def test_programs_are_unbound_before_a_block_grows() -> None:
    arena, small, large = Arena(), Tenant(10), Tenant(1000)
    old = ref(arena.block(CPU, 0, small))
    arena.block(CPU, 0, large)
    assert small.unbound == 2  # also when it first asked: it had no block yet
    gc.collect()
    assert old() is None


def test_streams_never_share_a_block() -> None:
    arena, tenants = Arena(), [Tenant(64), Tenant(64)]
    blocks = [arena.block(CPU, stream, tenant) for stream, tenant in enumerate(tenants)]
    assert blocks[0].data_ptr() != blocks[1].data_ptr()


def test_memory_of_programs_that_are_gone_is_given_back() -> None:
    arena, small, large = Arena(), Tenant(10), Tenant(11 * SHRINK_RATIO)
    arena.block(CPU, 0, large)
    del large
    gc.collect()
    arena.block(CPU, 0, small)
    assert arena.num_bytes() == 10
    arena.clear()
    assert arena.num_bytes() == 0
