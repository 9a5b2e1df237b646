"""The doctor: every row stands alone, and what is missing comes with what adds it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.cli import doctor
from weft.cli.doctor_gpu import GpuOptions
from weft.cli.main import main
from weft.cli.packages import PACKAGES
from weft.core.install import install_command
from weft.run.spawn.nodes import LaunchOutcome

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def rows() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine()}


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    find = doctor.find_spec
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "torch" else find(name))


def test_the_report_covers_the_machine() -> None:
    found = rows()
    expected = {"python", "torch", "CPU kernels", "backends", "cores", "memory", "C compiler"}
    assert expected | set(PACKAGES) <= set(found)
    assert "gloo" in found["backends"].value


def test_json_holds_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.run(GpuOptions(as_json=True))
    shown = json.loads(capsys.readouterr().out)["findings"]
    assert [row["name"] for row in shown] == list(rows())
    assert {row["status"] for row in shown} <= {"ok", "limited", "missing"}


def test_without_torch_it_still_reports(without_torch: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows()
    assert found["torch"].status == "missing"
    assert found["torch"].add == install_command("torch")
    doctor.run(GpuOptions())
    shown = capsys.readouterr().out
    assert install_command("torch") in shown
    assert shown.endswith("weft can plan here, but run nothing.\n")
    assert "\x1b" not in shown


def test_a_torch_that_does_not_import_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert rows()["torch"].status == "limited"


def test_a_check_that_fails_costs_its_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[doctor.Finding]:
        raise OSError("no /proc here")

    monkeypatch.setattr(doctor, "_cores", broken)
    found = rows()
    assert found["cores"].status == "limited"
    assert "no /proc here" in found["cores"].note
    assert found["memory"].status == "ok"


def test_every_missing_package_has_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    found = rows()
    assert all(found[name].status == "missing" and found[name].add for name in PACKAGES)


def test_every_extra_that_is_recommended_exists() -> None:
    named = {extra for package in PACKAGES.values() for extra in re.findall(r"\[(\w+)\]", package.add)}
    extras = PYPROJECT.read_text().split("[project.optional-dependencies]")[1]
    assert named <= set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE))


def test_no_compiler_is_a_row_with_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    assert rows()["C compiler"].add == "apt install gcc"


def test_ranks_that_cannot_share_memory_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.run.comm.shm.unavailable_reason", lambda: "no C compiler")
    shared = rows()["shared memory"]
    assert shared.status == "limited" and "no C compiler" in shared.note


def test_gpus_are_named_with_memory_and_peers() -> None:
    about = SimpleNamespace(name="H100", total_memory=80 * 2**30, major=9, minor=0)
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_properties=lambda _: about,
        can_device_access_peer=lambda a, b: a != b,
    )
    found = list(doctor._gpus(SimpleNamespace(cuda=cuda)))
    assert [row.name for row in found] == ["GPU 0", "GPU 1"]
    assert found[0].value == "H100, 80 GiB, sm 9.0"
    assert found[0].note == "reaches 1 peer directly"


def test_a_gpu_that_torch_does_not_see_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_lines", lambda *_: ["GPU 0: NVIDIA L40S", "GPU 1: NVIDIA L40S"])
    [found] = doctor._gpus(None)
    assert (found.status, found.value) == ("limited", "2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--only nccl,lniks --device cpu", "Did you mean 'links'?"),
        ("--device tpu", "one of cuda, cpu"),
        ("--device cpu --minutes 0", "--minutes must be > 0"),
        ("", "weft doctor --gpu --device cpu"),
        ("--ranks 3", "At most 2."),
    ],
)
def test_gpu_is_refused_before_anything_starts(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = 2 if "3" in words else 0
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("weft.cli.ranks.launch", lambda *_, **__: pytest.fail("launched"))
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--gpu", *words.split()])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_gpu_starts_a_rank_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def launch(command: list[str], ranks: int, *_: object, **__: object) -> LaunchOutcome:
        started.append(ranks)
        return LaunchOutcome(code=1, rank=0, reason="ended with code 1")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("weft.cli.ranks.launch", launch)
    for words in ([], ["--ranks", "3"]):
        with pytest.raises(SystemExit) as end:
            main(["doctor", "--gpu", *words])
        assert end.value.code == 1
    assert started == [8, 3]


def test_last_line_is_the_next_command() -> None:
    def finding(name: str) -> doctor.Finding:
        return doctor.Finding(name=name, status="ok", value="2 of 2")

    rows = [finding("torch"), finding("cores")]
    assert doctor._verdict(rows).endswith("Next: weft verify")
    assert doctor._verdict([*rows, finding("GPU 0")]).endswith("1 GPU. Next: weft doctor --gpu")


def test_read_writes_the_page_beside_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = PYPROJECT.parent / "docs" / "gpus" / "example.json"
    copy = tmp_path / "example.json"
    copy.write_text(example.read_text())
    main_ends(["doctor", "--read", str(copy)], 0)
    assert capsys.readouterr().out.strip() == str(tmp_path / "example.html")
    assert "made-up" in (tmp_path / "example.html").read_text()
    copy.write_text('{"parts": [{}]}')
    main_ends(["doctor", "--read", str(copy)], 2)
    assert "is no report of a doctor" in capsys.readouterr().err


def main_ends(words: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code
