"""Stopping and going on: after any step, as bytes, on other ranks, to the bits of an undisturbed call."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save

import weft
from tests.diffusers.checkpoints import TINY, arguments, diffusers
from tests.diffusers.toys import seeded
from tests.worlds import world
from weft.core.errors import InputError
from weft.generate.prompts import remember_prompts
from weft.generate.resume import FinishedCall, PipelineState, StepInfo, run
from weft.generate.state import copied
from weft.video.captions import LENGTH, WORDS
from weft.video.pipeline import VideoPipeline
from weft.video.transformer import DiTConfig, VideoDiT

PROMPTS = ["a red circle moving left", "a green square", "a blue triangle moving up"]
SIZES: dict[str, Any] = {"video": (4, 16, 24), "patch": (2, 4, 4), "width": 48, "depth": 2, "heads": 3}


@cache
def own() -> VideoPipeline:
    model: Any = seeded(VideoDiT(DiTConfig(words=len(WORDS), length=LENGTH, **SIZES)), dtype=torch.float32)
    return VideoPipeline(model.eval())


def given(jobs: int = 1, first: int = 0, **more: Any) -> dict[str, Any]:
    seeds = range(first, first + jobs)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    prompts = [PROMPTS[seed] for seed in seeds]
    return {"prompt": prompts, "generator": generators, "num_inference_steps": 4, **more}


def of_diffusers(name: str) -> dict[str, Any]:
    return {
        **arguments(name),
        "return_dict": True,
        "output_type": "latent",
        "generator": torch.Generator().manual_seed(3),
    }


def whole(pipe: Any, arguments: dict[str, Any], start: PipelineState | None = None) -> np.ndarray:
    ended = run(pipe, arguments, start=start, on_step=lambda _: False)
    assert isinstance(ended, FinishedCall)
    return ended.frames


def stopped(
    pipe: Any, arguments: dict[str, Any], start: PipelineState | None = None, *, at: int
) -> PipelineState:
    """The state of a call that is stopped after a step."""
    states: list[PipelineState] = []

    def on_step(moment: StepInfo) -> bool:
        if moment.step == at:
            states.append(moment.state())
        return bool(states)

    assert run(pipe, arguments, start=start, on_step=on_step) is None
    return states[0]


def in_pieces(pipe: Any, fresh: Callable[[], dict[str, Any]], steps: int) -> np.ndarray:
    """Stopped after every step, and each time called anew with nothing but bytes."""
    data = b""
    for step in range(1, steps + 1):
        start = PipelineState.from_bytes(data) if data else None
        torch.manual_seed(step)  # what another job has left behind
        state = stopped(pipe, fresh(), start, at=step)
        assert state.step == step
        data = state.to_bytes()
    ended = run(
        pipe, fresh(), start=PipelineState.from_bytes(data), on_step=lambda _: pytest.fail("a step too many")
    )
    assert isinstance(ended, FinishedCall)
    return ended.frames


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_own_model_goes_on_exactly_alone_and_in_a_batch(guidance: float) -> None:
    pipe = own()
    batch = whole(pipe, given(3, guidance_scale=guidance))
    assert np.array_equal(in_pieces(pipe, lambda: given(3, guidance_scale=guidance), 4), batch)
    for job in range(3):
        alone = whole(pipe, given(1, job, guidance_scale=guidance))
        assert np.array_equal(alone[0], batch[job])


TOPK = "topk:0.6,block=8,tile=1x2x2,dense_steps=1,refresh=3"


def test_masks_that_are_kept_for_some_steps_go_on_with_the_run() -> None:
    """Stopped after every step: also between two steps of one mask, and where it is made anew."""
    pipe = weft.parallelize(own(), sparse=TOPK)
    try:
        expected = whole(pipe, given(2, num_inference_steps=8))
        found = in_pieces(pipe, lambda: given(2, num_inference_steps=8), 8)
        often = whole(
            weft.parallelize(weft.restore(pipe), sparse=TOPK[:-1] + "1"), given(2, num_inference_steps=8)
        )
    finally:
        weft.restore(pipe)
    assert np.array_equal(found, expected)
    assert not np.array_equal(often, expected)  # else it would not matter which mask is used


def scheduled(name: str, scheduler: Any = None) -> Any:
    pipe = TINY[name]()
    if scheduler is not None:
        pipe.scheduler = scheduler
    return pipe


CASES: dict[str, Callable[[], Any]] = {
    "wan": lambda: scheduled("wan"),
    "wan by unipc": lambda: scheduled(
        "wan", diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    ),
    "wan2.2": lambda: scheduled("wan2.2"),
    "flux": lambda: scheduled("flux"),
    "allegro": lambda: scheduled("allegro"),  # its scheduler draws noise
    "cogvideox by dpm": lambda: scheduled(  # which has the pipeline keep its last prediction
        "cogvideox",
        diffusers.CogVideoXDPMScheduler(prediction_type="v_prediction", timestep_spacing="trailing"),
    ),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Diffusers' own
@pytest.mark.parametrize("case", CASES)
def test_pipelines_of_diffusers_go_on_exactly(case: str) -> None:
    name, pipe = case.partition(" ")[0], CASES[case]()
    expected = pipe(**of_diffusers(name))
    expected = np.asarray(expected.frames if hasattr(expected, "frames") else expected.images[:, None])
    assert np.array_equal(in_pieces(pipe, lambda: of_diffusers(name), 4), expected)
    assert "forward" not in vars(pipe.transformer)
    assert "step" not in vars(pipe.scheduler)


def piece(kind: str, jobs: int, alone: bool, data: bytes, stop: bool) -> Any:  # noqa: FBT001
    """A segment on a rank of a real world, or on each of them alone: bytes, or frames at the end."""
    pipe = _wan() if kind == "wan" else own()
    mesh = dist.new_group([dist.get_rank()], use_local_synchronization=True) if alone else None
    mask = TOPK if kind == "masked" else None
    weft.parallelize(pipe, plan="ulysses", backend="exact", mesh=mesh, sparse=mask)
    arguments = of_diffusers("wan") if kind == "wan" else given(jobs)
    try:
        start = PipelineState.from_bytes(data) if data else None
        if stop:
            return stopped(pipe, arguments, start, at=start.step + 1 if start else 1).to_bytes()
        return whole(pipe, arguments, start)
    finally:
        weft.restore(pipe)


@cache
def _wan() -> Any:
    return CASES["wan by unipc"]()


@pytest.mark.parametrize(("kind", "jobs"), [("own", 1), ("own", 3), ("masked", 2), ("wan", 1)])
def test_goes_on_with_another_number_of_ranks(kind: str, jobs: int) -> None:
    expected = world(2).run(piece, kind, jobs, True, b"", False)[0]
    for ranks in (2, 3):
        data = b""
        for step in range(4):
            first, *_ = world(ranks if step % 2 else 2).run(piece, kind, jobs, step % 2 == 0, data, True)
            data = first
        for last in (b"", data):
            for frames in world(ranks).run(piece, kind, jobs, False, last, False):
                if kind != "wan":
                    assert np.array_equal(frames, expected)
                else:
                    assert np.abs(frames - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_moment_shows_what_was_computed() -> None:
    seen: list[StepInfo] = []
    ended = run(own(), given(2), on_step=lambda moment: bool(seen.append(moment)))
    assert isinstance(ended, FinishedCall)
    assert [moment.step for moment in seen] == [1, 2, 3, 4]
    assert seen[0].latents.shape == (2, 4, 3, 16, 24)
    assert seen[0].prediction.shape == (4, 4, 3, 16, 24)  # both branches
    assert set(ended.spent) == {"encode", "denoise", "decode"}
    assert ended.spent["denoise"] > 0


def test_steps_that_were_done_cost_no_transformer() -> None:
    pipe, calls = own(), []
    state = stopped(pipe, given(), at=3)
    hook = pipe.transformer.embed.register_forward_hook(lambda *_: calls.append(1))
    try:
        run(pipe, given(), start=state, on_step=lambda _: False)
        again = run(pipe, given(), start=state, on_step=lambda _: False)  # a state is not used up
    finally:
        hook.remove()
    assert len(calls) == 2
    assert isinstance(again, FinishedCall)
    assert np.array_equal(again.frames, whole(pipe, given()))


def test_generators_are_where_they_would_be() -> None:
    """Also those of which a transformer draws, in steps that are not computed again."""
    pipe, arguments = own(), given()

    def drawn(start: PipelineState | None, stop: int) -> Any:
        arguments["generator"][0].manual_seed(1)
        state = stopped(pipe, arguments, start, at=stop) if stop else whole(pipe, arguments, start)
        return state, arguments["generator"][0].get_state(), torch.get_rng_state()

    def draw(*_: Any) -> None:
        torch.randn(3, generator=arguments["generator"][0])
        torch.randn(5)

    hook = pipe.transformer.embed.register_forward_hook(draw)
    try:
        torch.manual_seed(3)
        _, *expected = drawn(None, 0)
        torch.manual_seed(3)
        state, *_ = drawn(None, 2)
        torch.manual_seed(4)
        _, *found = drawn(PipelineState.from_bytes(state.to_bytes()), 0)
    finally:
        hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_prompt_is_encoded_once() -> None:
    pipe, calls = TINY["flux"](), []
    pipe.text_encoder.register_forward_hook(lambda *_: calls.append(1))
    remember_prompts(pipe)
    first = whole(pipe, of_diffusers("flux"))
    before = len(calls)
    assert np.array_equal(whole(pipe, of_diffusers("flux")), first)
    assert before and len(calls) == before
    whole(pipe, {**of_diffusers("flux"), "prompt": "something else"})
    assert len(calls) > before


def test_pipelines_that_tell_of_no_steps_run_in_one_go() -> None:
    class Silent:
        components: dict[str, Any] = {}

        def __call__(self, prompt: str) -> Any:
            return type("Output", (), {"images": np.full((1, 2, 2, 3), len(prompt))})

    ended = run(Silent(), {"prompt": "four"}, on_step=lambda _: pytest.fail("there is no step"))
    assert isinstance(ended, FinishedCall)
    assert ended.frames.shape == (1, 1, 2, 2, 3)
    with pytest.raises(InputError, match="cannot resume"):
        run(Silent(), {"prompt": "four"}, start=PipelineState(1, {}), on_step=lambda _: False)


def test_errors_leave_the_pipeline_as_it_was() -> None:
    pipe = own()

    def fails(_: StepInfo) -> bool:
        raise RuntimeError("oops")

    with pytest.raises(RuntimeError, match="oops"):
        run(pipe, given(), on_step=fails)
    assert "forward" not in vars(pipe.transformer)


def test_other_arguments_cannot_go_on() -> None:
    state = stopped(own(), given(), at=3)
    for more in ({"height": 8}, {"num_inference_steps": 2}, {"generator": torch.Generator()}):
        (name,) = more
        with pytest.raises(InputError, match=f"A call with {name}.* cannot resume"):
            run(own(), {**given(), **more}, start=state, on_step=lambda _: False)


class Pair(NamedTuple):
    a: int
    b: str


def test_values_come_back_as_they_were() -> None:
    values = {
        "tensor": torch.arange(6.0).reshape(2, 3).t(),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "empty": torch.ones(0, 3),
        "array": np.arange(3),
        "number": np.float64(0.1),
        "rest": [None, True, 2**70, 0.1, "ä", (1, [2]), {"a": {}}],
        "shape": torch.Size([2, 3]),
        "pair": Pair(1, "b"),
    }
    state = PipelineState.from_bytes(PipelineState(5, copied(values)).to_bytes())
    assert state.step == 5
    assert state.values["shape"] == (2, 3)
    assert state.values["pair"] == (1, "b")
    assert torch.equal(state.values["tensor"], values["tensor"])
    assert state.values["half"].dtype == torch.bfloat16
    assert state.values["empty"].shape == (0, 3)
    assert np.array_equal(state.values["array"], np.arange(3))
    assert isinstance(state.values["number"], np.float64)
    assert state.values["rest"] == values["rest"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage" * 9,
        save({"x": torch.ones(1)}),
        save({}, {"format": "weft state 0", "state": "{}"}),
        save({}, {"format": "weft state 1", "state": "{}"}),
        save({}, {"format": "weft state 1", "state": json.dumps({"step": 1, "values": {"tensor": "9"}})}),
        PipelineState(1, {"x": torch.ones(50)}).to_bytes()[:-1],
    ],
)
def test_what_is_no_state_is_refused(data: bytes) -> None:
    with pytest.raises(InputError, match=f"{len(data)} bytes are not a state"):
        PipelineState.from_bytes(data)


def test_schedulers_with_secrets_are_refused() -> None:
    pipe = TINY["wan"]()
    pipe.scheduler.noise = object()
    with pytest.raises(InputError, match="object cannot be stored"):
        stopped(pipe, of_diffusers("wan"), at=1)
