"""`weft verify`: mistakes are one sentence, whoever finds them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from weft.cli import verify
from weft.cli.main import main
from weft.core.errors import InputError
from weft.run.measure.compare import Trial, TrialResult
from weft.run.spawn.pool import CallFailure, Pool, RankFailure


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *words])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--plan", "nosuch"), "There is no strategy 'nosuch'."),
        (("--plan", "usp:1x2", "--ranks", "2,3"), "usp:1x2 needs 2 ranks; there are 3."),
        (("--dtype", "int8"), "dtype 'int8' is not supported."),
        (("--backend", "fa5"), "backend='fa5' is unknown."),
        (("--device", "tpu"), "--device must be cuda or cpu, got 'tpu'."),
        (("--tokens", "0"), "Sizes must be >= 1, got tokens=0."),
        (("--ranks", "two"), "ranks='two' is not a list of counts."),
    ],
)
def test_mistakes_are_told_before_ranks_are_started(words, says, capsys, monkeypatch):
    monkeypatch.setattr(Pool, "__init__", lambda *_: pytest.fail("started ranks"))
    assert call(*words) == 2
    assert capsys.readouterr().err.startswith(f"weft: {says}")


def test_what_all_ranks_refuse_is_told_once(capsys, monkeypatch):
    refused = CallFailure.of(InputError("6 heads cannot share 4.", hint="Use 3."))

    def run(*_: object) -> None:
        raise RankFailure({0: refused, 1: refused}, 2)

    monkeypatch.setattr(Pool, "_fresh_ranks", lambda _: None)
    monkeypatch.setattr(Pool, "run", run)
    assert call("--ranks", "2") == 2
    assert capsys.readouterr().err.endswith("weft: 6 heads cannot share 4.\nUse 3.\n")


def test_programs_that_can_race_are_told_before_they_run(capsys, monkeypatch):
    """Slots whose messages nothing waits for: their bytes are used again too early."""
    monkeypatch.setattr(Pool, "_fresh_ranks", lambda _: None)
    monkeypatch.setattr(Pool, "run", lambda *_: pytest.fail("ran"))
    monkeypatch.setattr("weft.program.workspace.Wait", ())
    assert call("--ranks", "2", "--plan", "ring") != 0
    assert re.match(r"weft: Rank \d, step \d+ \(\w+ of op .*\); Rank \d, step", capsys.readouterr().err)


@pytest.mark.parametrize(("gpus", "hint"), [(2, "Use --ranks 2, or --device cpu."), (0, "Use --device cpu.")])
def test_more_ranks_than_gpus_are_refused_before_they_are_started(gpus, hint, capsys, monkeypatch):
    monkeypatch.setattr(Pool, "__init__", lambda *_: pytest.fail("started ranks"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert call("--ranks", "2,3", "--device", "cuda") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith(f"weft: 3 ranks need as many GPUs; {gpus} are visible. {hint}")


def test_the_backend_is_that_of_the_ranks(capsys):
    assert call("--ranks", "2", "--plan", "ring", "--device", "cpu", "--backend", "flash") == 2
    assert "weft: backend='flash' cannot serve: it computes on a GPU, not on cpu." in capsys.readouterr().err


@pytest.mark.parametrize(("device", "worlds"), [("cuda", [8]), ("", [8]), ("cpu", [2, 3])])
def test_all_gpus_are_tried_where_there_are_any(device, worlds, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert verify._place(device, []) == (device or "cuda", worlds)
    assert verify._place(device, [2]) == (device or "cuda", [2])


def test_gpus_are_tried_in_bfloat16_and_blocks_that_their_kernels_have(monkeypatch):
    asked: list[Trial] = []

    def check(ranks: Pool, trial: Trial) -> TrialResult:
        asked.append(trial)
        sizes = {"output_error": 0.0, "gradient_error": 0.0, "seconds": 1.0, "bytes_sent": 1}
        return TrialResult(plan="ring", proved_steps=1, tolerance=1.0, **sizes)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(Pool, "_fresh_ranks", lambda _: None)
    monkeypatch.setattr("weft.run.measure.compare.check", check)
    assert call("--plan", "ring") == 0
    assert {(trial.device, trial.dtype, trial.block) for trial in asked} == {("cuda", "bfloat16", 64)}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [0.0, 1.0])
def test_under_a_launcher_one_rank_tells_and_all_end_alike(rank, error, capsys, monkeypatch):
    sizes = {"gradient_error": 0.0, "seconds": 1.0, "bytes_sent": 1, "proved_steps": 0}
    outcome = TrialResult(plan="ring", output_error=error, tolerance=1e-6, **sizes)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    world = SimpleNamespace(comm=SimpleNamespace(rank=rank, size=2))
    monkeypatch.setattr("weft.run.world.world_of", lambda *_: world)
    monkeypatch.setattr("weft.run.measure.compare.compare", lambda _: outcome)
    monkeypatch.setattr(Pool, "__init__", lambda *_: pytest.fail("started ranks"))
    assert bool(call("--plan", "ring", "--device", "cpu", "--json")) == bool(error)
    said = capsys.readouterr()
    assert bool(said.out) == (rank == 0)
    assert bool(said.err) == (rank == 0 and bool(error))
