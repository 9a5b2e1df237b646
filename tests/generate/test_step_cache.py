"""--cache: its names, what it is refused with, and calls that cannot be stopped."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")

from tests.diffusers.checkpoints import TINY, arguments  # noqa: E402
from weft.core.errors import InputError  # noqa: E402
from weft.generate.cache_spec import CACHES, parse_cache  # noqa: E402
from weft.generate.resume import FinishedCall, PipelineState, StepInfo, run  # noqa: E402
from weft.generate.step_cache import CONFIGS, disable_cache, enable_cache, has_cache  # noqa: E402


def test_names_of_caches() -> None:
    assert parse_cache("first-block:0.08") == ("first-block", 0.08)
    assert parse_cache("pab") == ("pab", 2)
    assert CONFIGS.keys() == CACHES.keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tea", r"no cache 'tea'; there are first-block, pab, taylorseer"),
        ("first-block:much", "a number > 0, got 'much'"),
        ("pab:2.5", "an integer > 0, got '2.5'"),
        ("first-block:-1", "> 0"),
    ],
)
def test_other_names_and_numbers_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_cache(text)


def test_a_call_with_a_cache_runs_to_its_end() -> None:
    """It is asked to stop after each step; its result is that of a plain call."""
    pipe, kwargs = TINY["wan"](), {**arguments("wan"), "output_type": "np", "return_dict": True}
    enable_cache(pipe, "first-block:0.5")

    def call() -> object:
        return run(pipe, {**kwargs, "generator": torch.Generator().manual_seed(0)}, on_step=lambda _: True)

    once, again = call(), call()
    assert isinstance(once, FinishedCall) and isinstance(again, FinishedCall)
    assert (once.frames == again.frames).all()
    disable_cache(pipe)
    assert not has_cache(pipe)


def test_a_call_with_a_cache_cannot_resume() -> None:
    pipe, kwargs = TINY["wan"](), {**arguments("wan"), "output_type": "np", "return_dict": True}
    states: list[PipelineState] = []

    def stop(info: StepInfo) -> bool:
        states.append(info.state())
        return True

    run(pipe, kwargs, on_step=stop)
    enable_cache(pipe, "first-block:0.5")
    with pytest.raises(InputError, match="step cache cannot resume"):
        run(pipe, kwargs, start=states[0], on_step=lambda _: True)


def test_a_cache_without_modules_is_refused() -> None:
    with pytest.raises(InputError, match="taylorseer finds none of its modules in a WanTransformer3DModel"):
        enable_cache(TINY["wan"](), "taylorseer:2")
