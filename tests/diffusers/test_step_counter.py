"""The clock: which step a call belongs to, whatever timesteps a model is given."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.diffusers.step_counter import StepCounter


def ticks(step_counter: StepCounter, times: list[Any], prompt: Tensor) -> list[tuple[int, int]]:
    seen = []
    for time in times:
        step_counter.tick({"timestep": time, "encoder_hidden_states": prompt})
        seen.append(step_counter.now)
    return seen


def test_a_step_begins_when_the_timestep_changes_and_a_run_when_it_rises() -> None:
    step_counter, prompt = StepCounter(), torch.zeros(2)
    times = [torch.tensor([900.0]), torch.tensor([900.0]), 500, torch.tensor([100]), torch.tensor([900.0])]
    assert ticks(step_counter, times, prompt) == [(0, 0), (0, 0), (1, 0), (2, 0), (0, 0)]


def test_tokens_that_are_given_do_not_hold_the_clock() -> None:
    """Of a video that begins with an image, the first frame's timestep is 0 in every step."""
    times = [torch.tensor([[0.0, 0.0, t, t]]) for t in (900, 500, 100)]
    assert ticks(StepCounter(), times, torch.zeros(2)) == [(0, 0), (1, 0), (2, 0)]


def test_a_run_that_is_announced_may_have_rising_timesteps() -> None:
    step_counter, prompt = StepCounter(), torch.zeros(2)
    step_counter.reset(3, announced=True)
    assert ticks(step_counter, [0, 300, 600], prompt) == [(0, 0), (1, 0), (2, 0)]
    step_counter.reset()
    assert (step_counter.steps, ticks(step_counter, [300, 600], prompt)) == (None, [(0, 0), (0, 0)])


def test_a_new_run_of_one_step_has_prompts_of_its_own() -> None:
    step_counter, prompts = StepCounter(), [torch.zeros(2), torch.ones(2)]
    for prompt in prompts:
        step_counter.reset(1, announced=True)
        assert ticks(step_counter, [1000], prompt) == [(0, 0)]


@pytest.mark.filterwarnings("ignore:CPU Autocast", "ignore:In CPU autocast")
def test_masks_of_mochi_whose_timesteps_rise() -> None:
    """One step of three is dense."""
    checkpoints = pytest.importorskip("tests.diffusers.checkpoints")
    pipe = weft.parallelize(checkpoints.TINY["mochi"](), sparse="random:density=0.3,block=4,dense_steps=1")
    given = {**checkpoints.arguments("mochi", branches=1), "num_inference_steps": 3}
    with redirect_stderr(StringIO()) as said:
        pipe(**given)
    sparse, dense = [int(word) for word in said.getvalue().split() if word.isdecimal()][:2]
    assert sparse == 2 * dense


class Scheduler:
    def step(self, x: int) -> int:
        return x + 1


def test_steps_of_a_scheduler_are_counted_and_timesteps_not_read() -> None:
    step_counter, scheduler, prompts = StepCounter(), Scheduler(), [torch.zeros(2), torch.ones(2)]
    step_counter.reset(3, announced=True)
    step_counter.follow(scheduler)
    seen = []
    for _ in range(3):
        for prompt in prompts:
            step_counter.tick({"timestep": torch.empty(1, device="meta"), "encoder_hidden_states": prompt})
            seen.append(step_counter.now)
        assert [scheduler.step(1), scheduler.step(2)] == [2, 3]  # two of one step
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    step_counter.reset()
    assert "step" not in vars(scheduler), "left as it was"
    vars(scheduler)["step"] = "somebody else's"
    step_counter.reset()
    assert vars(scheduler)["step"] == "somebody else's"
    assert ticks(step_counter, [900, 500], prompts[0]) == [(0, 0), (1, 0)]


def test_a_timestep_that_is_the_same_tensor_is_read_once() -> None:
    step_counter, time = StepCounter(), torch.tensor([900.0])
    assert ticks(step_counter, [time, time], torch.zeros(2)) == [(0, 0), (0, 0)]
    time.fill_(500.0)
    assert ticks(step_counter, [time], torch.zeros(2))[0][0] == 1
