"""Ask a running server for a video and save it, with nothing but the standard library.

weft serve                                              # in another terminal
python examples/client.py http://127.0.0.1:8000 "a red circle moving left" ball.mp4
"""

import json
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

server, prompt, output = sys.argv[1:4]


def call(path: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(f"{server}/v1{path}", data, {"Content-Type": "application/json"})) as response:
        return json.load(response)


job = call("/videos", {"prompt": prompt, "seed": 7})
while job["status"] in ("queued", "in_progress"):
    time.sleep(0.5)
    job = call(f"/videos/{job['id']}")
    print(f"{job['status']}: {job['progress']} %", flush=True)
if job["status"] != "completed":
    sys.exit(f"{job['error']['code']}: {job['error']['message']}")
with urlopen(f"{server}/v1/videos/{job['id']}/content") as video:
    Path(output).write_bytes(video.read())
print(f"{output}: {Path(output).stat().st_size:,} bytes")
