"""Floods of uploads and connections: what the server takes for them stays small, and nothing is left."""

from __future__ import annotations

import base64
import json
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from tests.serve.hosting import Process

MB = 10**6
FIELDS = {"prompt": "a", "num_inference_steps": "1", "size": "8x8"}


def noise() -> bytes:
    """A picture of 8 MB, which is 11 MB as a data URL."""
    out = BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (1660, 1660, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "png", compress_level=1)
    return out.getvalue()


class Meter:
    """The most memory that a server and its children had at a time, shared pages counted once."""

    def __init__(self, pid: int) -> None:
        self.server, self.total = 0, 0
        self._process, self._over = psutil.Process(pid), threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            own, children = self._process.memory_full_info().pss, 0
            for child in self._process.children(recursive=True):
                with suppress(psutil.Error):
                    children += child.memory_full_info().pss
            self.server, self.total = max(self.server, own), max(self.total, own + children)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def flood(folder: Path, uploads: int, pictures: int) -> tuple[Meter, list[int]]:
    """So many uploads of 11 MB at once, half of them in JSON; `pictures` of them are some."""
    good = noise()
    bad = b"x" * len(good)

    def body(at: int) -> dict[str, Any]:
        data = good if at < pictures else bad
        if at % 2:
            files = {**{k: (None, v) for k, v in FIELDS.items()}, "input_reference": ("a.png", data)}
            return {"files": files}
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        said = {**FIELDS, "num_inference_steps": 1, "input_reference": {"image_url": url}}
        return {"content": json.dumps(said), "headers": {"content-type": "application/json"}}

    words = ["--data", str(folder), "--max-queue", "100"]
    with Process(words, PACE="0.001") as server, ThreadPoolExecutor(uploads) as pool:
        url = server.url()
        with Meter(server.pid) as meter:
            sent = [
                pool.submit(httpx.post, f"{url}/v1/videos", timeout=500, **body(at)) for at in range(uploads)
            ]
            statuses = [each.result().status_code for each in sent]
        assert httpx.get(f"{url}/health").status_code == 200
        assert not list((folder / "jobs").glob(".*")), "an upload is left"
    return meter, statuses


def test_memory_does_not_grow_with_the_number_of_uploads(tmp_path: Path) -> None:
    meter, statuses = flood(tmp_path / "data", uploads=20, pictures=4)
    assert sorted(statuses) == [200] * 4 + [400] * 16
    assert meter.total < 300 * MB


def test_flood_of_idle_connections_leaves_descriptors_to_requests(tmp_path: Path) -> None:
    """More connections than the server may have descriptors, half of them with half of a head."""
    with Process(["--data", str(tmp_path / "data")]) as server, ExitStack() as stack:
        url = server.url()
        most = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (512, most))
        place = ("127.0.0.1", int(url.rpartition(":")[2]))
        for number in range(600):
            line = stack.enter_context(socket.create_connection(place))
            with suppress(OSError):  # closed already, as one of the oldest
                line.sendall(b"GET / HT" if number % 2 else b"")
            if number % 100 == 99:
                assert httpx.get(f"{url}/health", timeout=8).status_code == 200
        server.process.terminate()
        assert "out of system resource" not in server.ended(60)[1]


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_sixty_uploads_of_eleven_megabytes_take_less_than_three_hundred(tmp_path: Path) -> None:
    meter, statuses = flood(tmp_path / "data", uploads=60, pictures=60)
    assert statuses == [200] * 60
    assert meter.total < 300 * MB
