"""A vocabulary of somebody's captions: what it counts, how it encodes, and a pipeline that has one."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.core import tables
from weft.core.errors import InputError
from weft.video.pipeline import VideoPipeline
from weft.video.transformer import DiTConfig, VideoDiT
from weft.video.vocabulary import Vocabulary

CAPTIONS = ["A cat, a Hat & a mat.", "the cat_sat", "öl auf der MATTE", "", "mat!"]


def test_words_are_by_count_then_by_alphabet() -> None:
    vocabulary = Vocabulary.of(CAPTIONS, most=7, length=5)
    assert vocabulary.words == ("", "?", "a", "cat", "mat", "auf", "der")
    assert vocabulary.encode("Mat, CAT; dog?") == [4, 3, 1, 0, 0]
    assert vocabulary.encode("a a a a a a cat") == [2] * 5
    assert vocabulary.encode(" ?! ") == [0] * 5


@given(st.lists(st.text(), max_size=5), st.text(), st.integers(1, 7))
def test_any_text_has_ids_of_the_vocabulary_that_json_keeps(captions, text, length) -> None:
    vocabulary = Vocabulary.of(captions, most=9, length=length)
    again = tables.read(Vocabulary, json.loads(json.dumps(asdict(vocabulary))), "It")
    assert again == vocabulary and again.encode(text) == vocabulary.encode(text)
    ids = vocabulary.encode(text)
    assert len(ids) == length and all(0 <= i < len(vocabulary.words) <= 9 for i in ids)
    known = [vocabulary.words[i] for i in vocabulary.encode(" ".join(vocabulary.words[2:])) if i > 1]
    assert known == list(vocabulary.words[2 : 2 + length])


def test_what_is_no_vocabulary_is_refused() -> None:
    for words, length in ((("",), 4), (("", "?", "a", "a"), 4), (("", "?"), 0)):
        with pytest.raises(InputError, match="A vocabulary needs"):
            Vocabulary(words, length)


def test_a_pipeline_keeps_its_vocabulary_on_disk(tmp_path) -> None:
    vocabulary = Vocabulary.of(CAPTIONS, length=5)
    sizes = {"video": (2, 4, 6), "patch": (2, 2, 2), "width": 12, "depth": 1, "heads": 1}
    config = DiTConfig(words=len(vocabulary.words), length=5, **sizes)
    pipe = VideoPipeline(VideoDiT(config).eval(), vocabulary)
    pipe.save(tmp_path)
    again = VideoPipeline.load(tmp_path)
    assert again.vocabulary == vocabulary
    seen = list[torch.Tensor]()
    again.transformer.register_forward_pre_hook(lambda _, given: seen.append(given[2]))
    again("der cat öl", num_inference_steps=1, guidance_scale=1)
    assert seen[0].tolist() == [vocabulary.encode("der cat öl")]
    with pytest.raises(InputError, match=r"knows 12 words, 5 in a prompt; this weft has 22 and 8"):
        VideoPipeline(again.transformer)
    with pytest.raises(InputError, match=r"its vocabulary has 12 and 6"):
        VideoPipeline(again.transformer, Vocabulary.of(CAPTIONS, length=6))
