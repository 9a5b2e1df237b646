"""A real Chromium, headless, spoken to over its own pipe: no driver to install.

Its DevTools protocol takes JSON on file descriptor 3 and answers on 4, each message ended by a zero.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECONDS = 60
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
)


class Browser:
    """One page of one browser; `requests` are the addresses it has asked for."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()

        def plug() -> None:
            # 3 and 4 may be what a pipe got already: move both out of the way first.
            read, write = os.dup2(theirs_in, 98), os.dup2(theirs_out, 99)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self._process = subprocess.Popen(  # noqa: S603
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=plug,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out, self._rest, self._count = ours_in, ours_out, b"", 0
        self._session = ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **words: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": words}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._count:
                assert "error" not in found, found
                return found["result"]

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Show a file as a window of so many pixels would."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 700,
        )
        self.requests.clear()
        self._loaded = False
        found = self.call("Page.navigate", url=path.resolve().as_uri())
        assert "errorText" not in found, f"{path}: {found}"
        while not self._loaded:
            self._receive()

    def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page, also what lies below the window."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(SECONDS)
        os.close(self._in)
        os.close(self._out)

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            assert data, f"chromium is silent (exit code {self._process.poll()})"
            self._rest += data
        raw, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(raw)
        method, words = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(words["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Log.entryAdded" and words["entry"]["level"] == "error":
            self.complaints.append(words["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(words["exceptionDetails"]["text"])
        return message
