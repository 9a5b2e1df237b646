"""parallelize: the backend of every attention, and the devices that models are on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import weft
from tests.diffusers.toys import on_ranks
from tests.video.test_transformer import inputs, model
from weft.core.errors import InputError
from weft.diffusers import parallelize as room
from weft.run.world import World

MASK = "topk:0.4,tile=1x3x1,block=4,dense_steps=0"


class Own:
    """Sparse attention of a user's own, here dense, with something to add."""

    def mask(self, *_: Any) -> None:
        return None

    def finish(self, ctx: Any, q: Any, k: Any, v: Any, out: Any) -> Any:  # noqa: ARG002 - the protocol's
        return out + v


@pytest.mark.parametrize("options", [{}, {"check": "first"}, {"sparse": MASK}, {"sparse": Own()}])
@pytest.mark.parametrize("backend", ["reference", "exact"])
def test_the_backend_reaches_every_attention(options: Any, backend: str) -> None:
    def job(world: World) -> set[str]:
        weft.parallelize(model(), mesh=world, backend=backend, **options)(*inputs())
        return {call[0].backend for call in world.executors}

    assert on_ranks(2, job) == [{backend}] * 2


def test_an_unknown_backend_is_refused_before_anything_else() -> None:
    with pytest.raises(InputError, match="backend='fa5' is unknown. Use one of auto, exact, flash"):
        weft.parallelize(model(), backend="fa5")


def test_ranks_on_one_gpu_are_refused_and_the_model_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(comm: Any, device: torch.device) -> None:
        assert device == torch.device("cpu")
        raise InputError(f"Ranks 0 and 1 are both on GPU 0, says {comm.rank}.")

    def job(world: World) -> bool:
        own = model()
        with pytest.raises(InputError, match=f"says {world.comm.rank}"):
            weft.parallelize(own, mesh=world)
        return hasattr(own, "_weft")

    monkeypatch.setattr(room, "check_devices", refuses)
    assert on_ranks(2, job) == [False, False]


@pytest.mark.parametrize("offloaded", ["", "_hf_hook", "_diffusers_hook"])
def test_a_model_on_the_cpu_of_a_machine_with_gpus_is_warned_of_once(
    offloaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(world: World) -> None:
        own = model()
        if offloaded:
            setattr(own, offloaded, object())
        weft.parallelize(own, mesh=world)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        on_ranks(2, job)
        assert told == [], "no GPUs, no warning"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        on_ranks(2, job)
    expected = () if offloaded else ("VideoDiT is on the CPU", "pipe.to(weft.device())")
    assert len(told) == bool(expected)
    assert all(words in str(told[0].message) for words in expected)
