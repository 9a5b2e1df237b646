"""The pictures of the page in the docs: `python -m tests.serve.pictures http://127.0.0.1:8000 docs/figures`.

Of a server that runs: it makes a few videos and an image there, and is on with another in each picture.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

MADE = (
    ("images/generations", "a purple star", 5),
    ("videos", "a yellow triangle moving up and a blue circle still", 4),
    ("videos", "a white square moving down", 3),
    ("videos", "a green star moving right", 2),
    ("videos", "a cyan circle moving down over a red square", 1),
)
ASKED = "a red circle moving left over a blue square"
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
PICTURES = {
    "serve-desktop": {"viewport": DESKTOP, "color_scheme": "light"},
    "serve-dark": {"viewport": DESKTOP, "color_scheme": "dark"},
    "serve-phone": {"viewport": PHONE, "color_scheme": "light", "is_mobile": True, "device_scale_factor": 2},
}


def post(url: str, path: str, **body: Any) -> None:
    request = Request(f"{url}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    urlopen(request).read()


def listed(url: str, kind: str) -> list[Any]:
    return json.load(urlopen(f"{url}/v1/{kind}"))["data"]


def take(browser: Any, url: str, path: Path, *, steps: int, **options: Any) -> None:
    page = browser.new_context(**options).new_page()
    page.goto(url)
    page.locator("#steps").wait_for()
    page.locator("#ranks .rank").first.wait_for()
    page.fill("#prompt", ASKED)
    page.fill("#steps", str(steps))
    page.fill("#seed", "7")
    page.click("#make")
    job = page.locator(".job", has_text=ASKED)
    while int(job.locator("[role=progressbar]").get_attribute("aria-valuenow") or 0) < 55:
        time.sleep(0.05)
    tall = {"full_page": True, "clip": {"x": 0, "y": 0, "width": 390, "height": 1240}}
    page.screenshot(path=path, **(tall if options["viewport"] is PHONE else {}))
    job.locator(".cancel").click()
    job.wait_for(state="detached")
    page.context.close()


def main() -> None:
    from playwright.sync_api import sync_playwright

    url, folder = sys.argv[1].rstrip("/"), Path(sys.argv[2])
    there = {each["prompt"] for kind in ("videos", "images") for each in listed(url, kind)}
    for path, prompt, seed in MADE:
        if prompt not in there:
            post(url, path, prompt=prompt, seed=seed)
    while any(video["status"] in ("queued", "in_progress") for video in listed(url, "videos")):
        time.sleep(1)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for name, options in PICTURES.items():
            take(browser, url, folder / f"{name}.png", steps=60, **options)
        browser.close()


if __name__ == "__main__":
    main()
