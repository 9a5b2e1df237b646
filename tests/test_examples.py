"""Each script of examples/ runs as its first lines say, on persistent ranks and on small inputs."""

from __future__ import annotations

import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from PIL import Image

from tests.diffusers.checkpoints import tiny_wan
from tests.serve.fake import made, serving
from tests.worlds import world

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SIZE = ("9", "128", "128")


def run(name: str, *args: str) -> str:
    """Run a script as __main__ in this process; return what it prints."""
    argv, sys.argv = sys.argv, [name, *args]
    try:
        with redirect_stdout(StringIO()) as printed:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv = argv
    return printed.getvalue()


def on_ranks(ranks: int, name: str, *args: str) -> list[str]:
    return world(ranks).run(run, name, *args)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("wan")
    tiny_wan(folder)
    return str(folder)


def test_pipeline_writes_the_frames_of_one_process(checkpoint: str, tmp_path: Path) -> None:
    outputs = [tmp_path / "one.gif", tmp_path / "two.gif"]
    run("pipeline.py", checkpoint, "a loom", str(outputs[0]), *SIZE)
    first, second = on_ranks(2, "pipeline.py", checkpoint, "a loom", str(outputs[1]), *SIZE)
    assert first and not second
    frames = []
    for output in outputs:
        with Image.open(output) as image:
            frames.append((image.n_frames, image.size, image.convert("RGB").tobytes()))
    assert frames[0][:2] == (9, (128, 128))
    assert frames[0] == frames[1]


def test_sparse_pipeline_explains_its_plans(checkpoint: str) -> None:
    printed, nothing = on_ranks(2, "sparse_pipeline.py", checkpoint, "a loom", *SIZE)
    assert "layer" in printed and not nothing


def test_own_model_is_exact_on_three_ranks() -> None:
    printed = on_ranks(3, "own_model.py")
    assert "switch space → time" in printed[0] and "largest difference" in printed[0]


def test_training_loop_has_the_losses_of_one_process() -> None:
    losses = [
        [float(line.split()[-1]) for line in text.splitlines()]
        for text in (run("train.py"), on_ranks(2, "train.py")[0])
    ]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_plan_ranks_the_strategies_without_torch() -> None:
    printed = run("plan_cluster.py")
    assert "8xh100" in printed and "ulysses" in printed and "ring" in printed


def test_client_saves_the_video(tmp_path: Path) -> None:
    with made(tmp_path / "jobs") as engine, serving(engine) as url:
        printed = run("client.py", url, "a red circle moving left", str(tmp_path / "ball.mp4"))
    assert (tmp_path / "ball.mp4").read_bytes()[4:8] == b"ftyp"
    assert "bytes" in printed.splitlines()[-1]


def test_every_example_says_how_to_start_it_and_is_in_its_list() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert f"examples/{path.name}" in text.split('"""')[1]
        assert f"({path.name})" in listed
        assert text.count("\n") <= 65
