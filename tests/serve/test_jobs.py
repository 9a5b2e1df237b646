"""Jobs: JSON both ways, ids that sort by time and nothing else passes for, progress that never lies."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import InputError
from weft.serve.job_store import _to_job, _to_row
from weft.serve.jobs import (
    FORMATS,
    STATUSES,
    GenerationParams,
    Job,
    JobFailure,
    checked_id,
    created_ms,
    is_id,
    new_id,
)

TEXT = st.text(st.characters())  # with halves of surrogate pairs, NUL and all
SIZE = st.integers(1, 5000)
ASKED = st.builds(
    GenerationParams, kind=st.just("video"), model=TEXT, prompt=TEXT, negative=st.none() | TEXT, frames=SIZE,
    height=SIZE, width=SIZE, steps=SIZE, seed=st.integers(0, 2**64), guidance=st.none() | st.floats(0, 20),
    fps=st.floats(1, 60), image=st.none() | TEXT, format=st.sampled_from(FORMATS),
    more=st.dictionaries(TEXT, st.none() | SIZE | TEXT, max_size=3),
)  # fmt: skip
TIME = st.floats(0, 1e10)
JOBS = st.builds(
    Job, id=st.builds(new_id, st.just("video"), SIZE), params=ASKED, status=st.sampled_from(STATUSES),
    step=SIZE, created=TIME, started=st.none() | TIME, completed=st.none() | TIME, expires=st.none() | TIME,
    deadline=TIME,
    failure=st.none() | st.builds(JobFailure, code=TEXT, message=TEXT), timings=st.dictionaries(TEXT, TIME),
    output=st.none() | TEXT, size=st.integers(0),
)  # fmt: skip


def params(**more: Any) -> GenerationParams:
    usual = {
        "kind": "video",
        "model": "shapes",
        "prompt": "a red ball",
        "frames": 17,
        "height": 64,
        "width": 96,
    }
    return GenerationParams(**{**usual, "steps": 7, "seed": 3, "format": "mp4", **more})


@given(JOBS)
def test_a_row_brings_every_job_back(job: Job) -> None:
    assert _to_job(_to_row(job)) == job


def test_a_row_may_have_more_parameters_than_are_known() -> None:
    job = Job(id=new_id("video", 1), params=params(), created=0.0, deadline=1.0)
    row = [*_to_row(job)]
    row[1] = json.dumps({**json.loads(row[1]), "added_later": 1})
    assert _to_job(tuple(row)) == job


@pytest.mark.parametrize(
    "wrong",
    [{"kind": "audio"}, {"format": "exe"}, {"frames": 0}, {"steps": -1}, {"height": 0}, {"kind": "image"}],
)
def test_what_cannot_be_made_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=str(next(iter(wrong.values())) if wrong != {"kind": "image"} else 17)
    ):
        params(**wrong)


def test_shapes_are_equal_where_the_cost_is() -> None:
    one, other = params(prompt="x", seed=1, guidance=2.0), params(prompt="y", seed=2, guidance=3.5)
    assert len({one.shape, other.shape}) == 1
    assert params(guidance=1.0).shape == params().shape != one.shape
    assert params(steps=8).shape != params().shape


@pytest.mark.parametrize(
    ("status", "step", "progress"),
    [
        ("queued", 0, 0),
        ("in_progress", 3, 42),
        ("in_progress", 7, 99),
        ("completed", 7, 100),
        ("failed", 7, 99),
    ],
)
def test_progress_is_full_only_with_the_result(status: Any, step: int, progress: int) -> None:
    job = Job(id=new_id("video", 1), params=params(), status=status, step=step, created=0.0, deadline=1.0)
    assert job.progress == progress
    assert replace(job, step=10**6).progress <= 100


@given(st.lists(st.integers(0, 2**48 - 1), min_size=1))
def test_ids_sort_by_time_and_remember_it(times: list[int]) -> None:
    ids = [new_id("image", time) for time in times]
    assert [created_ms(id) for id in ids] == times
    assert [created_ms(id) for id in sorted(ids)] == sorted(times)
    assert all(is_id(id) and len(id) == 32 for id in ids)


def test_ids_of_one_moment_share_no_part_that_could_be_guessed() -> None:
    ends = [new_id("video", 5)[-16:] for _ in range(500)]
    assert len(set(ends)) == 500
    assert all(len({end[place] for end in ends}) == 32 for place in range(16))


@pytest.mark.parametrize(
    "text",
    [
        "", "video_", "video", "../video", "video_../../etc/passwd", "audio_" + "0" * 26, "video_" + "0" * 25,
        "video_" + "0" * 27, "video_" + "0" * 26 + "\n", "video_" + "0" * 25 + "\0", "VIDEO_" + "0" * 26,
        "video_" + "0" * 25 + "U", "video_" + "8" + "0" * 25, "video_" + "\u0663" * 26,
        "video_" + "\ud800" * 26,
        "video_" + "0" * 25 + "/", "image_" + "0" * 24 + "..", ".ideo_" + "0" * 26,
    ],
)  # fmt: skip
def test_nothing_else_is_an_id(text: str) -> None:
    assert not is_id(text)
    with pytest.raises(ValueError, match="is not the id of a job"):
        checked_id(text)
