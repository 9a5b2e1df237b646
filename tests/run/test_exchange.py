"""JSON between ranks: every rank gets the same values, and what is no JSON is an error, not code."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.worlds import world
from weft.core.errors import CommError
from weft.run import exchange
from weft.run.exchange import all_gather_json, broadcast_json
from weft.run.spawn.pool import RankFailure

VALUES = [None, 1 / 3, "ä" * 1000, {"a": [1, {"b": None}]}, 0, [], float("inf")]


def exchange_values() -> list[object]:
    rank = dist.get_rank()
    found = [broadcast_json(VALUES[i] if rank == i % 2 else "other", src=i % 2) for i in range(len(VALUES))]
    return [found, all_gather_json({"rank": rank, "text": "x" * 1000 * rank})]


def test_values_arrive_unchanged_on_every_rank() -> None:
    gathered = [{"rank": 0, "text": ""}, {"rank": 1, "text": "x" * 1000}]
    assert world(2).run(exchange_values) == [[VALUES, gathered]] * 2


def test_without_a_group_a_value_is_its_own() -> None:
    assert broadcast_json((1, 2)) == (1, 2)
    assert all_gather_json("a") == ["a"]


def send_too_much() -> None:
    exchange.MAX_BYTES, before = 1000, exchange.MAX_BYTES
    try:
        all_gather_json("x" * (2000 if dist.get_rank() == 1 else 1))
    finally:
        exchange.MAX_BYTES = before


def test_a_value_that_is_too_large_is_refused_on_every_rank() -> None:
    with pytest.raises(RankFailure) as caught:
        world(2).run(send_too_much)
    assert {rank: failure.kind for rank, failure in caught.value.failures.items()} == {
        0: "CommError", 1: "CommError",
    }  # fmt: skip
    assert all("Rank 1 sends 2,002 bytes" in failure.message for failure in caught.value.failures.values())


@pytest.mark.parametrize("data", [b"\x80\x04.", b"[" * 100_000, b"\xff\xfe", b"{" + b"9" * 9999, b"\0" * 8])
def test_bytes_that_are_no_json_are_an_error(data: bytes) -> None:
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with pytest.raises(CommError, match="message of rank 3 is"):
        exchange._decode(buffer, len(data), 3)


@pytest.mark.parametrize("size", [-1, 0, 1 << 60])
def test_a_length_is_checked_before_memory_is_taken(size: int) -> None:
    with pytest.raises(CommError, match="at most"):
        exchange._checked(size, 0)
