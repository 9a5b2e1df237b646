"""The report in a real browser: everything there, to scale, at every width, and nothing asked of the net."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.browser import CHROMIUM, Browser
from tests.report.toys import schedule, topology, two_ranks
from weft.report.cases import MEANINGS, show
from weft.report.sources import measured, simulated
from weft.report.write import write_report

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    write_report([simulated(schedule(), topology(), ["ring", "ulysses", "gather"])], folder)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """A measured run without a schedule against a simulated one whose names want to be HTML."""
    folder = tmp_path_factory.mktemp("two")
    traced = measured(two_ranks(name="<b>traced & odd</b>", measured=True))
    write_report([traced, simulated(schedule("ring"), topology())], folder)
    return folder


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


def boxes(browser: Browser, selector: str) -> np.ndarray:
    """[elements, (x, y, width, height)] in the units of the figure."""
    found = f"[...document.querySelectorAll('{selector}')].map(e => e.getBBox())"
    return np.array(browser.ask(f"{found}.map(b => [b.x, b.y, b.width, b.height])")).reshape(-1, 4)


def test_the_folder_has_everything(one, two):
    for folder, trace in ((one, "trace.json"), (two, "trace-a.json"), (two, "trace-b.json")):
        assert (folder / "index.html").stat().st_size < 2_000_000
        assert json.loads((folder / trace).read_text())["traceEvents"]
        names = sorted(report(folder)["figures"])
        assert sorted(p.stem for p in (folder / "figures").glob("*.svg")) == names
    wanted = {"timeline", "loads", "traffic", "memory", "scaling", "roofline"}
    assert wanted < set(report(one)["figures"]) and not report(one)["missing"]
    assert any("schedule.json" in text for text in report(two)["missing"])


def test_the_page_asks_nothing_of_the_net(browser, one, two):
    for folder in (one, two):
        browser.open(folder / "index.html")
        asked = [address for address in browser.requests if not address.startswith("data:")]
        assert asked == [(folder / "index.html").resolve().as_uri()]
        assert browser.complaints == []
        # Names of files and of namespaces aside, no address is in it at all.
        text = (folder / "index.html").read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import", text)


def test_every_figure_is_there_and_not_empty(browser, one, two):
    for folder in (one, two):
        browser.open(folder / "index.html")
        for name in report(folder)["figures"]:
            element = f"document.getElementById('{name}')"
            shapes = browser.ask(f"{element}.querySelectorAll('rect,polyline,circle,image').length")
            words = browser.ask(f"{element}.querySelectorAll('text').length")
            hidden = not browser.ask(f"{element}.checkVisibility()")
            assert shapes > 3 and words > 2, name
            box = browser.ask(f"(b => [b.width, b.height])({element}.getBoundingClientRect())")
            assert hidden or min(box) > 100, name


def test_the_first_table_says_what_report_json_says(browser, one, two):
    for folder in (one, two):
        browser.open(folder / "index.html")
        assert browser.ask("document.querySelector('table').id") == "summary"
        cases = report(folder)["cases"]
        for name in MEANINGS:
            cells = browser.ask(
                f"[...document.querySelectorAll('#summary [data-name={name}]')].map(e => e.textContent)"
            )
            shown = [show(name, case["summary"][name]) for case in cases]
            assert cells[: len(cases)] == shown and len(cells) == (3 if len(cases) == 2 else 1)


def test_bars_have_the_lengths_of_the_numbers(browser, one):
    browser.open(one / "index.html")
    [case] = report(one)["cases"]
    loads = case["loads"]
    before, after = (boxes(browser, f"#loads .load-{w}")[:, 3] for w in ("before", "after"))
    # Coordinates in the file have two decimals.
    assert after / after.max() == pytest.approx(np.array(loads["after"]) / max(loads["after"]), abs=1e-3)
    assert before / after.max() == pytest.approx(np.array(loads["before"]) / max(loads["after"]), abs=1e-3)
    memory = boxes(browser, "#memory .memory")[:, 3]
    peaks = np.array(case["per_rank"]["memory"])
    assert memory / memory.max() == pytest.approx(peaks / peaks.max(), abs=1e-3)


def test_the_timeline_is_to_scale(browser, one):
    browser.open(one / "index.html")
    [case] = report(one)["cases"]
    scale = (948 - 64) / case["summary"]["seconds"]
    for kinds, name in (("attend,#timeline .copy", "compute"), ("wait,#timeline .barrier", "exposed")):
        found = boxes(browser, f"#timeline .{kinds}")
        drawn = sum(found[:, 2]) / scale
        assert drawn == pytest.approx(sum(case["per_rank"][name]), rel=0.02)
    path = boxes(browser, "#timeline .path")
    assert len(path) and path[:, 0].min() >= 63.9 and (path[:, 0] + path[:, 2]).max() <= 948.6
    hatched = browser.ask("getComputedStyle(document.querySelector('#timeline .wait')).fill")
    assert "hatch" in hatched


def test_matrix_curve_and_roofline_have_their_points(browser, one):
    browser.open(one / "index.html")
    [case] = report(one)["cases"]
    assert len(boxes(browser, "#traffic .traffic")) == np.count_nonzero(case["traffic"])
    assert len(boxes(browser, "#traffic .machine")) == 2 * (case["machines"] + 1)
    times = [(p["gpus"], p["seconds"]) for p in case["scaling"]]
    best = [min(time for n, time in times if n == gpus) for gpus in sorted({gpus for gpus, _ in times})]
    heights = boxes(browser, "#scaling .scaling")
    centres = heights[:, 1] + heights[:, 3] / 2
    steps = np.diff(centres) / np.diff(np.log(best))  # a logarithmic axis: the same for all
    assert steps == pytest.approx(steps[0], rel=1e-2)
    assert len(boxes(browser, "#roofline .plan")) == len(case["plans"]) == 4


def test_masks_are_pictures_and_the_slider_shows_the_next(browser, one):
    browser.open(one / "index.html")
    masks = [name for name in report(one)["figures"] if name.startswith("mask-")]
    assert len(masks) > 1
    opaque = browser.ask(
        """(async () => {
          const picture = new Image();
          picture.src = document.querySelector('image.mask').getAttribute('href');
          await picture.decode();
          const canvas = document.createElement('canvas');
          canvas.width = picture.width; canvas.height = picture.height;
          const pen = canvas.getContext('2d'); pen.drawImage(picture, 0, 0);
          const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
          let filled = 0; for (let i = 3; i < data.length; i += 4) filled += data[i] > 0;
          return filled / (data.length / 4) })()"""
    )
    mask = schedule().mask
    head = int(masks[0].rpartition("-")[2])
    assert opaque == pytest.approx(mask.patterns[mask.pattern_of[head]].mean())
    shown = f"[...{json.dumps(masks)}].map(n => document.getElementById(n).checkVisibility())"
    assert browser.ask(shown) == [True] + [False] * (len(masks) - 1)
    browser.ask(
        "(s => { s.value = 1; s.dispatchEvent(new Event('input')) })(document.querySelector('input'))"
    )
    assert browser.ask(shown)[:2] == [False, True]


@pytest.mark.parametrize("width", [360, 390, 768, 1200])
def test_nothing_is_cut_off_at_any_width(browser, one, two, width):
    for folder in (one, two):
        browser.open(folder / "index.html", width=width, height=844)
        assert browser.ask("document.documentElement.scrollWidth") <= width
        hidden = "(e => e.scrollWidth - e.clientWidth)(document.querySelector('#summary').parentElement)"
        assert width < 390 or browser.ask(hidden) == 0
        outside = browser.ask(
            """[...document.querySelectorAll('figure text')].filter(t => {
              const box = t.getBBox(), view = t.ownerSVGElement.viewBox.baseVal;
              return t.checkVisibility() && (box.x < -0.5 || box.x + box.width > view.width + 0.5
                || box.y < -0.5 || box.y + box.height > view.height + 2) }).map(t => t.textContent)"""
        )
        assert outside == []
        small = browser.ask(
            """Math.min(...[...document.querySelectorAll('figure text')].filter(t => t.checkVisibility())
              .map(t => t.getScreenCTM().a * parseFloat(t.getAttribute('font-size'))))"""
        )
        assert small >= 6


def test_light_and_dark_follow_the_reader(browser, one):
    def brightness(what: str) -> float:
        return float(np.mean([int(n) for n in re.findall(r"\d+", browser.ask(what))][:3]))

    paper = "getComputedStyle(document.body).backgroundColor"
    word = "getComputedStyle(document.querySelector('figure text')).fill"
    for dark in (False, True):
        browser.open(one / "index.html", dark=dark)
        assert (brightness(paper) < 60) == dark
        assert abs(brightness(paper) - brightness(word)) > 90


def test_names_are_text_and_not_markup(browser, two):
    browser.open(two / "index.html")
    assert browser.ask("document.querySelectorAll('b').length") == 0
    assert "<b>traced & odd</b>" in browser.ask("document.querySelector('h1').textContent")


def test_single_figures_open_by_themselves(browser, one):
    for path in sorted((one / "figures").glob("*.svg")):
        browser.open(path)
        assert browser.ask("document.documentElement.tagName") == "svg", path
        assert browser.ask("document.querySelectorAll('parsererror').length") == 0
