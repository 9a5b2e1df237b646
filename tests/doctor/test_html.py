"""The page of a report: what stands first, what is shown as wrong, and that reports in docs can be read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from weft.doctor.figures import figures
from weft.doctor.html import page, verdict
from weft.doctor.suites import NOT_COVERED, SUITES

FOLDER = Path(__file__).parents[2] / "docs" / "gpus"
REPORTS = sorted(FOLDER.glob("*.json"))


@pytest.fixture
def report() -> dict[str, Any]:
    return json.loads((FOLDER / "example.json").read_text())


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_every_report_in_the_docs_has_a_page_and_a_row(path: Path) -> None:
    text = page(json.loads(path.read_text()))
    assert text.startswith("<!doctype html>") and "$" not in text
    assert f"[{path.name}]({path.name})" in (FOLDER / "README.md").read_text()


def test_the_example_is_marked_as_made_up_and_has_every_part(report: dict[str, Any]) -> None:
    assert report["made_up"] and "made-up example" in page(report)
    assert [suite["name"] for suite in report["parts"]] == [suite.name for suite in SUITES]
    assert report["never_ran"] == [*(claim for suite in SUITES for claim in suite.claims), *NOT_COVERED]
    assert page(report).count("not checked") == len(NOT_COVERED)


def test_what_never_ran_stands_before_everything_that_was_asked(report: dict[str, Any]) -> None:
    text = page(report)
    places = [text.index(claim.split("'")[0]) for claim in report["never_ran"]]
    assert max(places) < text.index("What was checked")


def test_nothing_counts_as_run_on_a_gpu_in_a_rehearsal(report: dict[str, Any]) -> None:
    report |= {"is_rehearsal": True, "made_up": False}
    text = page(report)
    assert "A rehearsal on CPUs." in text
    claims = text[text.index("What had never run") : text.index("What was checked")]
    assert claims.count("not run on a GPU") == len(report["never_ran"]) and "holds" not in claims


def test_the_verdict_names_what_is_wrong_and_where(report: dict[str, Any]) -> None:
    told = verdict(report)
    assert told.startswith("12 of 15 parts hold.")
    assert "kernel-triton has wrong numbers in bfloat16 · D256 · ragged · backward" in told
    assert "graph hung in replay" in told


def test_a_part_that_is_wrong_is_open_and_its_words_are_escaped(report: dict[str, Any]) -> None:
    changed = copy.deepcopy(report)
    suite = changed["parts"][0]
    suite |= {"status": "crashed", "message": "<script>", "traceback": "a < b", "checks": []}
    text = page(changed)
    assert '<details id="nccl" open>' in text and "&lt;script&gt;" in text and "a &lt; b" in text
    assert '<details id="links">' in text


def test_infinite_errors_are_shown_and_not_drawn(report: dict[str, Any]) -> None:
    suite = next(suite for suite in report["parts"] if suite["name"] == "kernel-triton")
    suite["checks"][0] |= {"status": "wrong", "numbers": {"error": "inf", "allowed": 1e-2}}
    assert "✗ inf" in page(report)


def test_figures_are_drawn_of_what_there_is(report: dict[str, Any]) -> None:
    assert [figure.name for figure in figures(report)] == ["links", "wan", "kernels"]
    for suite in report["parts"]:
        suite["checks"] = []
    assert figures(report) == []
