"""The page in a real browser, against the real routes and a stand-in for the engine."""

from __future__ import annotations

import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "weft" / "serve" / "page"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROMPT = "a red circle moving left over a blue square"
KEY = "a-key-of-this-test-0001"
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the path")


class Site:
    """A server on a port of its own, which can be stopped and started while its engine goes on."""

    def __init__(self, folder: Path, *, pace: float, key: str | None = None, limit: int = 64) -> None:
        for name in ("fastapi", "uvicorn", "sse_starlette", "prometheus_client", "av", "PIL"):
            pytest.importorskip(name, reason=f"the server needs {name}")
        from tests.serve.fake import Fake

        self.engine, self.key = Fake(folder, pace=pace, limit=limit), key
        self.engine.start()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        import uvicorn

        from weft.serve.api.app import create_app
        from weft.serve.api.limits import RequestLimits
        from weft.serve.api.server import server_config

        app = create_app(self.engine, key=self.key, limits=RequestLimits())
        config = server_config(app, host="127.0.0.1", port=self.port)
        config.timeout_graceful_shutdown = 0  # as if it were killed: streams end in the middle
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        until(lambda: self.server.started)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()

    def close(self) -> None:
        self.stop()
        self.engine.close()

    def make(self, kind: Any = "video", *, seed: int = 1, steps: int = 1, prompt: str = PROMPT) -> str:
        from weft.serve.jobs import GenerationParams

        frames, format = (8, "mp4") if kind == "video" else (1, "png")
        params = GenerationParams(
            kind=kind, model="shapes", prompt=prompt, frames=frames, height=32, width=32, steps=steps,
            seed=seed, fps=8.0, format=format,
        )  # fmt: skip
        return self.engine.submit(params).id

    def made(self, *args: Any, **options: Any) -> str:
        id = self.make(*args, **options)
        until(lambda: not self.job(id).active)
        return id

    def job(self, id: str) -> Any:
        return self.engine.store.get(id)


def until(done: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What `done` says once it says something; playwright's own waiting needs eval, which is forbidden."""
    end = time.monotonic() + seconds
    while not (said := done()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)
    return said


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
    with playwright.sync_playwright() as found:
        one = found.chromium.launch(executable_path=CHROMIUM)
        yield one
        one.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    one = Site(tmp_path_factory.mktemp("site"), pace=0.05)
    yield one
    one.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a site; whatever goes wrong in it fails the test."""
    contexts, wrong = [], []

    def open_page(site: Site, *, quiet: bool = True, **options: Any) -> Any:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        if quiet:  # a server that is away, or locked, is in the console too; so is a job that has just gone
            gone = lambda said: "404" in said.text and "/v1/" in said.location["url"]  # noqa: E731
            page.on(
                "console", lambda said: said.type == "error" and not gone(said) and wrong.append(said.text)
            )
        page.goto(site.url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def ask(page: Any, prompt: str = PROMPT, steps: int = 12) -> Any:
    """Fills in the form and sends it; the new card of a job in progress."""
    until(lambda: page.input_value("#steps"))
    page.fill("#prompt", prompt)
    page.fill("#steps", str(steps))
    page.click("#make")
    return page.locator(".job", has_text=prompt).first


def result(page: Any, id: str) -> Any:
    found = page.locator(f'.result[data-id="{id}"]')
    found.wait_for()
    return found


@in_browser
def test_a_video_is_asked_for_watched_played_and_deleted(site: Site, visit: Callable[..., Any]) -> None:
    page = visit(site)
    site.engine.pace = 0.25  # slow enough to be seen by a slow machine
    job = ask(page, steps=24)
    job.wait_for()
    id = job.get_attribute("data-id")
    steps, pictures, cloth = set(), set(), set()
    while len(pictures) < 5 and page.locator(f'.job[data-id="{id}"]').count():
        seen = page.evaluate(
            """(id) => { const job = document.querySelector(`.job[data-id="${id}"]`);
            const [canvas, bar] = job?.querySelectorAll("canvas, [role=progressbar]") ?? [];
            const threads = bar?.querySelectorAll("g").length;
            return job && [canvas.dataset.step, canvas.toDataURL(), +bar.ariaValueNow, threads]; }""",
            id,
        )
        if seen:
            steps.add(seen[0])
            pictures.add(seen[1])
            cloth.add((seen[2], seen[3]))
    site.engine.pace = 0.05
    assert len(steps) > 3 and len(pictures) > 3, "the preview changes"
    assert sorted(cloth) == sorted(cloth, key=lambda seen: seen[1]) and len(cloth) > 3, (
        "a thread for each step"
    )
    card = result(page, id)
    video = card.locator("video")
    video.wait_for()
    until(lambda: video.evaluate("video => !video.paused && video.currentTime > 0"))  # without a click
    assert card.locator(".prompt").inner_text() == PROMPT
    assert f"seed {site.job(id).params.seed}" in card.locator(".facts").inner_text()
    assert "denoise" in card.locator(".timings").inner_text()
    with page.expect_download() as saved:
        card.locator(".download").click()
    assert saved.value.suggested_filename == f"{id}.mp4"
    card.locator(".delete").click()
    assert site.job(id) is not None, "the first press only asks"
    card.locator(".delete").click()
    card.wait_for(state="detached")
    assert site.job(id) is None


@in_browser
def test_an_image_is_made_by_the_keyboard_alone(site: Site, visit: Callable[..., Any]) -> None:
    page = visit(site)
    until(lambda: page.input_value("#steps"))

    def tab_to(name: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            here = page.evaluate(
                """() => { const at = document.activeElement;
                const shown = at.matches("[type=radio]") ? at.nextElementSibling : at;
                return [at.id || at.value || at.className, getComputedStyle(shown).outlineStyle]; }"""
            )
            assert here[1] != "none", f"{here[0]} has the focus and does not show it"
            if here[0] == name:
                return
        raise AssertionError(f"{name} is not reached")

    tab_to("video")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#make") == "Make image"
    tab_to("prompt")
    page.keyboard.type("a star by keys")
    tab_to("dice")
    page.keyboard.press("Enter")
    seed = int(page.input_value("#seed"))
    tab_to("make")
    page.keyboard.press("Enter")
    card = page.locator(".result", has_text="a star by keys")
    card.locator("img").wait_for()
    assert f"seed {seed}" in card.locator(".facts").inner_text()
    id = card.get_attribute("data-id")
    page.focus("#prompt")
    tab_to("delete")  # the newest is the first
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    card.wait_for(state="detached")
    assert site.job(id) is None
    assert page.evaluate("document.activeElement !== document.body"), "the focus is not lost"


@in_browser
def test_jobs_in_progress_can_be_cancelled_and_results_be_used_again(
    site: Site, visit: Callable[..., Any]
) -> None:
    old = site.made(prompt="a green triangle still", seed=77, steps=3)
    page = visit(site)
    job = ask(page, "never to be finished", steps=1000)
    job.locator(".pick").first.wait_for(state="attached")
    id = job.get_attribute("data-id")
    job.locator(".cancel").click()
    job.wait_for(state="detached")
    until(lambda: site.job(id) is None)
    result(page, old).locator(".again").click()
    said = [page.input_value(f"#{name}") for name in ("prompt", "width", "height", "frames", "steps", "seed")]
    assert said == ["a green triangle still", "32", "32", "8", "3", "77"]


@in_browser
def test_a_picture_can_be_the_first_frame(site: Site, visit: Callable[..., Any], tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.png")
    page = visit(site)
    until(lambda: page.input_value("#steps"))
    page.set_input_files("#image", str(tmp_path / "red.png"))
    id = ask(page, "it begins with red", steps=3).get_attribute("data-id")
    assert site.job(id).params.image == "reference.png"
    page.check("[name=kind][value=image]", force=True)
    assert not page.is_visible("#image")


@in_browser
def test_markup_in_a_prompt_is_text(site: Site, visit: Callable[..., Any]) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\"><script>alert(1)</script>'\"&lt;b"
    done = site.made(prompt=evil)
    page = visit(site)
    job = ask(page, evil, steps=1000)
    job.locator(".pick").first.wait_for(state="attached")
    assert job.locator(".prompt").inner_text() == evil
    assert result(page, done).locator(".prompt").inner_text() == evil
    assert (
        page.locator(".job img, .job script, .result img, #results script").count()
        == page.locator("img[alt]").count()
    )
    assert "owned" not in page.title()
    job.locator(".cancel").click()
    job.wait_for(state="detached")


@in_browser
def test_errors_stand_where_they_belong(tmp_path: Path, visit: Callable[..., Any]) -> None:
    full = Site(tmp_path, pace=5.0, limit=1)
    try:
        page = visit(full, quiet=False)
        until(lambda: page.input_value("#steps"))
        page.click("#make")
        assert page.evaluate("document.activeElement.id") == "prompt"
        assert page.inner_text("#prompt-error") == "Enter a prompt."
        page.fill("#width", "65")  # the plan is asked for as it is typed
        until(lambda: "multiple of 8" in page.inner_text("#size-error"))
        assert page.get_attribute("#width", "aria-invalid") == "true"
        assert page.get_attribute("#width", "aria-describedby") == "size-error"
        assert page.inner_text("body").count("multiple of 8") == 1, "one place for one message"
        page.fill("#frames", "3")
        page.fill("#width", "64")
        until(lambda: "Nearest: 4" in page.inner_text("#frames-error"))
        assert page.inner_text("#size-error") == ""
        page.fill("#frames", "4")
        ask(page, "one").wait_for()
        ask(page, "two", steps=13)
        until(lambda: "1 jobs wait already" in page.inner_text("#ask-error"))
        failed = full.engine.store.active()[0].id
        full.engine.cancel(failed)
        assert result(page, failed).locator(".error").inner_text() == "Cancelled."
    finally:
        full.close()


@in_browser
def test_examples_and_words_of_the_model_are_offered_and_others_refused_in_the_form(
    tmp_path: Path, visit: Callable[..., Any]
) -> None:
    from weft.serve.facts import EXAMPLES
    from weft.video.captions import WORDS

    closed = Site(tmp_path, pace=0.01)
    words = {"vocabulary": WORDS[1:], "closed_vocabulary": True, "examples": EXAMPLES}
    closed.engine.facts = replace(closed.engine.facts, **words)
    try:
        page = visit(closed, quiet=False)
        until(lambda: page.get_attribute("#prompt", "placeholder") == EXAMPLES[0])
        page.fill("#prompt", "a blu square")
        page.click("#make")
        until(lambda: "Near ones for blu: blue" in page.inner_text("#prompt-error"))
        assert page.evaluate("document.activeElement.id") == "prompt"
        assert closed.engine.store.page("video", limit=1) == ([], False)
        assert page.locator(".result, .job").count() == 0
        page.click("#vocabulary summary")
        page.fill("#prompt", "a")
        for word in ("green", "star"):
            page.get_by_role("button", name=word, exact=True).click()
        assert page.input_value("#prompt") == "a green star"
        page.get_by_role("button", name=EXAMPLES[1]).click()
        assert page.inner_text("#prompt-error") == ""
        page.click("#make")
        page.locator(".result", has_text=EXAMPLES[1]).wait_for()
    finally:
        closed.close()


@in_browser
def test_guidance_negative_prompt_and_frame_rate_are_sent_and_used_again(
    site: Site, visit: Callable[..., Any]
) -> None:
    page = visit(site, quiet=False)
    until(lambda: page.input_value("#steps"))
    page.click("#options summary")
    values = {"negative": "shaking", "guidance": "1.5", "fps": "4"}
    for name, value in values.items():
        page.fill(f"#{name}", value)
    until(lambda: page.inner_text("#seconds") == "4 s")
    id = ask(page, "with options", steps=2).get_attribute("data-id")
    params = site.job(id).params
    assert (params.negative, params.guidance, params.fps) == ("shaking", 1.5, 4.0)
    card = result(page, id)
    assert "guidance 1.5 " in card.locator(".facts").inner_text()
    assert "without: shaking" in card.locator(".facts").inner_text()
    for name in values:
        page.fill(f"#{name}", "")
    card.locator(".again").click()
    assert {name: page.input_value(f"#{name}") for name in values} == values
    page.fill("#guidance", "200")
    page.click("#make")
    until(lambda: "less than or equal to 100" in page.inner_text("#guidance-error"))


@in_browser
def test_what_the_plan_refuses_is_an_error_of_its_field(
    tmp_path: Path, visit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Site(tmp_path, pace=0.01)
    plan = small.engine.explain
    refusal = "That would take too long."
    monkeypatch.setattr(
        small.engine,
        "explain",
        lambda params: plan(params) | {"refusal": refusal if params.width > 64 else None},
    )
    try:
        page = visit(small)
        until(lambda: page.input_value("#steps"))
        page.fill("#width", "640")
        until(lambda: page.inner_text("#size-error") == refusal)
        assert page.inner_text("body").count(refusal) == 1
        page.fill("#width", "64")
        until(lambda: page.inner_text("#size-error") == "" and page.inner_text("#plan-reason"))
        page.close()
    finally:
        small.close()


@in_browser
def test_reference_lists_all_operations(site: Site, tmp_path: Path, visit: Callable[..., Any]) -> None:
    page = visit(site)
    page.get_by_role("link", name="API").click()
    page.locator("h3").first.wait_for()
    shown = set(page.locator("h3").all_inner_texts())
    assert {"POST /v1/videos", "POST /v1/images/generations", "GET /v1/plan", "GET /health"} <= shown
    body = page.locator("section", has_text="POST /v1/videos").first
    assert "prompt\tstring\trequired" in body.inner_text()
    assert "object or file" in body.inner_text()
    page.set_viewport_size({"width": 390, "height": 780})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    locked = Site(tmp_path, pace=0.01, key=KEY)
    try:
        page = visit(locked, quiet=False)
        page.goto(f"{locked.url}docs")
        until(lambda: "Enter it on the page of the server" in page.inner_text("#problem"))
    finally:
        locked.close()


@in_browser
def test_a_server_that_restarts_is_found_again(tmp_path: Path, visit: Callable[..., Any]) -> None:
    one = Site(tmp_path, pace=0.1)
    try:
        page = visit(one, quiet=False)
        job = ask(page, steps=1000)
        job.locator(".pick").first.wait_for(state="attached")
        one.stop()
        until(lambda: "does not answer" in page.inner_text("#notice"))
        until(lambda: page.get_attribute("#health", "data-state") == "down")
        seen = job.locator("canvas").get_attribute("data-step")
        one.start()
        until(lambda: "answers again" in page.inner_text("#notice"))
        until(lambda: page.get_attribute("#health", "data-state") == "ok")
        until(lambda: job.locator("canvas").get_attribute("data-step") != seen)
        job.locator(".cancel").click()
        job.wait_for(state="detached")
    finally:
        one.close()


@in_browser
def test_a_key_is_asked_for_kept_for_the_tab_and_sent_with_everything(
    tmp_path: Path, visit: Callable[..., Any]
) -> None:
    locked = Site(tmp_path, pace=0.01, key=KEY)
    try:
        done = locked.made()
        page = visit(locked, quiet=False)
        page.locator("#key").wait_for()
        page.fill("#key-value", "not the key of this server")
        page.keyboard.press("Enter")
        until(lambda: page.inner_text("#key-error"))
        page.fill("#key-value", KEY)
        page.keyboard.press("Enter")
        page.locator("#key").wait_for(state="hidden")
        video = result(page, done).locator("video")
        assert video.evaluate("video => video.src").startswith("blob:")
        until(lambda: video.evaluate("video => video.readyState >= 2 && !video.paused"))
        until(lambda: page.get_attribute("#health", "data-state") == "ok")
        ask(page, "with a key", steps=3)
        page.locator(".result", has_text="with a key").wait_for()
        page.reload()
        result(page, done)
        assert page.locator("#key").is_hidden()
        assert page.evaluate("localStorage.length") == 0 and KEY not in page.url
    finally:
        locked.close()


@in_browser
def test_older_results_come_by_the_page_videos_and_images_together(
    tmp_path: Path, visit: Callable[..., Any]
) -> None:
    one = Site(tmp_path, pace=0.001)
    try:
        made = [one.made("video" if i % 3 else "image", seed=i) for i in range(17)]
        page = visit(one)
        shown = lambda: page.eval_on_selector_all(".result", "cards => cards.map(card => card.dataset.id)")  # noqa: E731
        until(lambda: len(shown()) == 12)
        page.click("#more")
        until(lambda: len(shown()) == 17)
        assert shown() == sorted(made, key=lambda id: id[6:], reverse=True)
        assert page.locator("#more").is_hidden()
        page.close()  # before its server: it would miss it, in the console
    finally:
        one.close()


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it_without_scrolling_sideways_and_it_can_be_read(
    site: Site, visit: Callable[..., Any], scheme: str
) -> None:
    for kind, prompt in (("video", "x" * 400), ("image", PROMPT), ("video", "fail " + "y" * 300)):
        site.made(kind, prompt=prompt, steps=4)
    page = visit(
        site, viewport={"width": 360, "height": 780}, color_scheme=scheme, has_touch=True, is_mobile=True,
        reduced_motion="reduce",
    )  # fmt: skip
    job = ask(page, "z" * 300, steps=1000)
    job.locator(".pick").first.wait_for(state="attached")
    page.locator("#timeline rect.compute").first.wait_for(state="attached")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate(CUT_OFF) == []
    assert page.evaluate(FAINT) == []
    assert page.evaluate("getComputedStyle(document.querySelector('.pick')).animationName") == "none"
    job.locator(".cancel").click()
    job.wait_for(state="detached")


@in_browser
def test_everything_has_a_name_and_a_role(site: Site, visit: Callable[..., Any]) -> None:
    site.made()
    site.made("image")
    page = visit(site)
    job = ask(page, "named", steps=1000)
    job.locator(".pick").first.wait_for(state="attached")
    page.locator("#timeline rect.compute").first.wait_for(state="attached")
    tree = page.locator("body").aria_snapshot()
    for role in (
        "button",
        "link",
        "textbox",
        "spinbutton",
        "radio",
        "progressbar",
        "img",
        "meter",
        "heading",
        "list",
    ):
        lines = re.findall(rf"^ *- '?{role}\b.*$", tree, re.M)
        assert lines, f"there is no {role}"
        nameless = [line for line in lines if '"' not in line]
        assert role == "list" or not nameless, nameless
    for name in ("In progress", "Results", "Ranks", "Random seed", "Width in pixels", "load of rank 3"):
        assert f'"{name}"' in tree
    assert re.search(
        r"step \d+ of 1000.* left", job.locator("[role=progressbar]").get_attribute("aria-valuetext"), re.I
    )
    assert page.get_attribute("#spoken", "aria-live") == "polite"
    ids = page.eval_on_selector_all("[id]", "all => all.map(each => each.id)")
    assert len(ids) == len(set(ids))
    job.locator(".cancel").click()
    job.wait_for(state="detached")
    until(lambda: page.inner_text("#spoken") == "Cancelled.")


def test_the_page_needs_nothing_from_elsewhere_and_no_markup_from_strings() -> None:
    texts = {path.name: path.read_text() for path in PAGE.iterdir()}
    assert {"index.html", "style.css", "page.js"} <= set(texts)
    for name, text in texts.items():
        assert len(text.splitlines()) < 300, name
        away = set(re.findall(r"https?://[^\s\"']+", text)) - {"http://www.w3.org/2000/svg"}
        assert away == set(), name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        ), name
        assert not re.search(r"@import|url\((?!#)", text), name
    for html in (texts["index.html"], texts["docs.html"]):
        assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?![^>]*\ssrc=)", html)
        for address in re.findall(r'(?:src|href)="([^"#]+)"', html):
            assert address in ("openapi.json", "docs", ".") or address.removeprefix("page/") in texts


CUT_OFF = """() => [...document.querySelectorAll("body *")].filter((e) => {
  const { left, right, width } = e.getBoundingClientRect();
  const meant = e.closest("svg, .unseen, .skip, #model") || !e.checkVisibility();
  const hidden = e.clientWidth && e.scrollWidth > e.clientWidth + 1;
  return width && !meant && (right > innerWidth + 0.5 || left < -0.5 || hidden);
}).map((e) => e.outerHTML.slice(0, 120))"""

# Of every piece of text, against the nearest background that is not transparent.
FAINT = """() => {
  const part = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return a < 255 ? null : 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const faint = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode()); ) {
    const at = node.parentElement;
    if (!node.data.trim() || !at.checkVisibility() || at.closest(".unseen, .skip")) continue;
    const ink = light(at.closest("svg") ? getComputedStyle(at).fill : getComputedStyle(at).color);
    let under = null;
    for (let e = at; under === null; e = e.parentElement) under = light(getComputedStyle(e).backgroundColor);
    const ratio = (Math.max(ink, under) + 0.05) / (Math.min(ink, under) + 0.05);
    if (ratio < 4.5) faint.push(`${node.data.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return faint;
}"""
