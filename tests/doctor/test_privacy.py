"""Privacy: names of hosts and users, folders, addresses and the environment leave every text."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from weft.doctor import privacy
from weft.doctor.privacy import cleaned, private_words

WORDS = ["node17.lab.example", "node17", "zebulon", "/home/zebulon", "hf_abcdefghijk"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('File "/home/zebulon/v/lib/python3.12/site-packages/torch/a.py"', 'File "torch/a.py"'),
        ('File "/opt/conda/lib/python3.12/json/x.py"', 'File "python3.12/json/x.py"'),
        ('File "/srv/zebulon/src/weft/run/op.py", line 3', 'File "weft/run/op.py", line 3'),
        ("cannot open /scratch/project-7/data/x.bin", "cannot open …/x.bin"),
        ("cannot open '/home/zebulon/x'", "cannot open '…/x'"),
        ("connect to [node17.lab.example]:29500 failed", "connect to […]:29500 failed"),
        ("NODE17 node170 node17: late", "… node170 …: late"),
        ("user zebulon, zebulons", "user …, zebulons"),
        ("10.1.2.3:29500 and 192.168.0.9.", "ADDRESS:29500 and ADDRESS."),
        ("[fe80::1a2b:3c4d]:80 2001:db8::7 at", "[ADDRESS]:80 ADDRESS at"),
        ("token=xhf_abcdefghijkx", "token=x…x"),
    ],
)  # fmt: skip
def test_private_is_taken_out(text: str, expected: str) -> None:
    assert cleaned(text, WORDS) == expected


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:29500", "std::bad_alloc", "torch::add", "12:30:45", "1.5 GB/s", "forward/backward",
        "usp:2x4", "bfloat16 · D128 · sparse 64 · backward", "2.13.0+cu130", "0→1", "a = b / c",
        "error ≤ 1e-2.",
    ],
)  # fmt: skip
def test_ordinary_text_stays(text: str) -> None:
    assert cleaned(text, WORDS) == text


def test_numbers_that_json_lacks_become_strings_at_any_depth() -> None:
    report = {"parts": [{"numbers": {"a": math.inf, "b": math.nan, "c": 1.5, "d": -math.inf}, "n": None}]}
    found = cleaned(report, ())
    assert found == {"parts": [{"numbers": {"a": "inf", "b": "nan", "c": 1.5, "d": "-inf"}, "n": None}]}
    json.dumps(found, allow_nan=False)


def test_private_words_are_names_and_long_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy.socket, "gethostname", lambda: "node17.lab.example")
    for name, value in {
        "HOME": "/home/zebulon", "USER": "zebulon", "LOGNAME": "root", "HF_TOKEN": "hf_abcdefghijk",
        "SHORT": "yes", "NUMBERS": "0,1,2,3,4,5,6,7",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    words = private_words()
    assert set(WORDS) <= set(words)
    assert {"yes", "root", "0,1,2,3,4,5,6,7", ""}.isdisjoint(words)


def test_home_is_known_even_where_no_variable_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy.Path, "home", lambda: Path("/users/zed-home"))
    assert "/users/zed-home" in private_words()
