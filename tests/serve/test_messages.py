"""Messages: every type comes back from JSON and payload, and what is not of this protocol is named."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from weft.serve.jobs import GenerationParams
from weft.serve.messages import (
    MESSAGES,
    AttentionSpan,
    AttentionTimeline,
    BatchDecoded,
    BatchDone,
    BatchFailed,
    BatchStopped,
    Beat,
    ContinueBatch,
    FromRank,
    Hello,
    Join,
    PreviewMade,
    ProtocolError,
    RankFailed,
    Ready,
    ResultMade,
    RunBatch,
    Shutdown,
    StepDone,
    StopBatch,
    ToRank,
    decode,
    encode,
)
from weft.serve.model_facts import ModelFacts, WarmupPace

PARAMS = GenerationParams(
    kind="video", model="toy", prompt="a \ud800 loom", frames=4, height=8, width=8, steps=2, seed=2**52,
    format="mp4", more={"a": [1, None]},
)  # fmt: skip
FACTS = ModelFacts(
    model="toy", patch=(1, 8, 8), heads=2, head_dim=8, depth=1, text_tokens=0, params=9, kinds=("image",),
    paces=(WarmupPace(shape=PARAMS.shape, ranks=2, seconds=0.5),),
)  # fmt: skip
PREVIEW = {"type": "PreviewMade", "batch": "a", "job": "b", "step": 1}
EXAMPLES = [
    Hello(rank=1, world=2, pid=3, host="here", store_port=4),
    RankFailed(rank=None, message="No GPU."),
    Ready(facts=FACTS),
    Beat(memory=1, limit=2, busy=0.5),
    StepDone(batch="a", step=2, seconds=0.5, imbalance=1.5, attend=(0.1, 0.2), sent=(1, 2), state=b"state"),
    StepDone(batch="a", step=2, seconds=1, plan="ring"),
    PreviewMade(batch="a", job="b", step=1, png=b"png"),
    AttentionTimeline(batch="a", label="ring", spans=(AttentionSpan(0, "send", "k", 0.0, 0.5),)),
    BatchStopped(batch="a"),
    BatchDecoded(batch="a"),
    ResultMade(batch="a", job="b", name="video.mp4", timings={"decode": 0.5}, data=b"data"),
    BatchDone(batch="a"),
    BatchFailed(batch="a", code="refused", message="No."),
    Join(generation=1, store="/tmp/store"),
    RunBatch(
        batch="a", ids=("a", "b"), jobs=(PARAMS, PARAMS), ranks=(0, 1), step=1, previews=True,
        images=(b"", b"image"), state=b"state",
    ),
    StopBatch(batch="a"),
    ContinueBatch(batch="a"),
    Shutdown(),
]  # fmt: skip


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back(message: FromRank | ToRank) -> None:
    header, payload = encode(message)
    assert decode(json.loads(json.dumps(header)), payload) == message


def test_examples_are_all_messages() -> None:
    assert {type(message) for message in EXAMPLES} == {*MESSAGES.values()}
    assert all(dataclasses.is_dataclass(kind) for kind in MESSAGES.values())


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({}, "version 0 of the protocol, this server has 2"),
        ({"type": "Hello", "version": 3, "anything": 1}, "version 3 of the protocol"),
        ({"type": "Greeting"}, "Unknown type of message 'Greeting'"),
        ({"type": ["Hello"]}, "Unknown type of message"),
        ({"type": "StopBatch"}, "StopBatch: missing required key 'batch'"),
        ({"type": "StopBatch", "batch": 3}, "StopBatch: batch"),
        ({"type": "StopBatch", "batch": "a", "why": ""}, "StopBatch: .*'why'"),
        ({"type": "StepDone", "batch": "a", "step": 1, "seconds": "long"}, "StepDone: seconds"),
        (PREVIEW, "PreviewMade: missing required key 'png'"),
        (PREVIEW | {"png": [9]}, "PreviewMade: png must be sizes"),
        (PREVIEW | {"png": [-1]}, "PreviewMade: png must be sizes"),
        (PREVIEW | {"png": "no"}, "PreviewMade: png must be sizes"),
        ({"type": "RunBatch", "batch": "a", "ids": ["a"], "jobs": [{"kind": "video"}]}, r"RunBatch \[\[jobs"),
    ],
)
def test_anything_else_is_refused_by_name(header: dict[str, Any], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        decode(header, b"12345678")


def test_parameters_in_a_message_are_checked() -> None:
    header, payload = encode(RunBatch(batch="a", ids=("a",), jobs=(PARAMS,)))
    header["jobs"][0]["frames"] = 0
    with pytest.raises(ProtocolError, match="frames must be >= 1, got 0"):
        decode(header, payload)
