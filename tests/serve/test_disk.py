"""The disk: nothing leaves a job's folder, nothing is half written, every byte is counted, states survive."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.test_jobs import params
from weft.core.errors import InputError
from weft.serve.disk import Disk, DiskFull, SavedState
from weft.serve.job_store import JobStore
from weft.serve.jobs import new_id

A, B, C = (new_id("video", time) for time in (1, 2, 3))


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path, quota=1000)


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("jobs.db")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def agree(disk: Disk, folder: Path) -> None:
    """The running sum is what is there, and nothing is left of any write."""
    there = files(folder)
    assert disk.used() == sum(map(len, there.values())) == Disk(folder, quota=1).used()
    assert not [name for name in there if "/." in name or name.startswith(".")]


HOSTILE = [
    "", ".", "..", ".hidden", "../x", "a/b", "/etc/passwd", "a\\b", "a\0b", "a\nb", "video.mp4\n", "-rf",
    "a b", "\u2025", "caf\u00e9", "\ud800", "x" * 101, "%2e%2e", "C:x", "~",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_leaves_the_folder_of_its_job(disk: Disk, tmp_path: Path, name: str) -> None:
    for call in (lambda: disk.write(A, name, b"x"), lambda: disk.read(A, name), lambda: disk.path(A, name)):
        with pytest.raises(ValueError, match="is not a valid file name"):
            call()
    for call in (lambda: disk.of(name), lambda: disk.write(name, "x", b""), lambda: disk.remove(name)):
        with pytest.raises(ValueError, match="is not the id of a job"):
            call()
    with pytest.raises(ValueError, match="is not the id of a job"):
        disk.save_state([A, name], 1, b"")
    assert files(tmp_path) == {}
    assert disk.state(name) is None


def test_files_are_whole_private_and_counted(disk: Disk, tmp_path: Path) -> None:
    assert disk.write(A, "video.mp4", b"first") == tmp_path / A / "video.mp4"
    disk.write(A, "thumbnail.webp", b"x" * 10)
    disk.write(B, "image-1.png", b"")
    disk.write(A, "video.mp4", b"second")
    assert disk.read(A, "video.mp4") == b"second"
    assert disk.used() == 16
    assert (tmp_path / A).stat().st_mode & 0o77 == 0
    agree(disk, tmp_path)
    disk.remove(A)
    disk.remove(A)
    disk.remove(C)
    assert disk.used() == 0
    assert not disk.of(A).exists()
    assert [path.name for path in tmp_path.iterdir() if path.name[0] == "."] == []


def test_the_quota_holds_and_says_what_would_help(disk: Disk, tmp_path: Path) -> None:
    disk.write(A, "video.mp4", bytes(900))
    with pytest.raises(DiskFull, match="needs 101 B but 900 B of 1.00 kB are used. Delete some jobs"):
        disk.write(B, "video.mp4", bytes(101))
    agree(disk, tmp_path)
    disk.write(B, "video.mp4", bytes(100))
    disk.remove(A)
    disk.write(B, "video.mp4", bytes(900))
    with pytest.raises(DiskFull):
        disk.write(B, "video.mp4", bytes(101))  # the old file stays until the new one is whole
    agree(disk, tmp_path)
    with pytest.raises(InputError, match="got 0"):
        Disk(tmp_path, quota=0)


def test_a_disk_that_refuses_leaves_the_old_file(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.write(A, "video.mp4", b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("weft.serve.disk.os.fsync", full)
        with pytest.raises(InputError, match=r"video.mp4 cannot be written: No space left.*Delete some jobs"):
            disk.write(A, "video.mp4", b"newer")
    assert disk.read(A, "video.mp4") == b"old"
    agree(disk, tmp_path)


def test_a_job_removed_while_it_is_written_is_gone(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.write(A, "image.png", b"12")

    def remove(_: int) -> None:
        disk.remove(A)

    with monkeypatch.context() as patch:
        patch.setattr("weft.serve.disk.os.fsync", remove)
        with pytest.raises(InputError, match="cannot be written"):
            disk.write(A, "video.mp4", b"345")
    assert files(tmp_path) == {}
    agree(disk, tmp_path)


def test_what_is_written_is_synced_with_its_name(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    monkeypatch.setattr("weft.serve.disk.os.fsync", note)
    disk.write(A, "video.mp4", b"x")
    folder, file, name = synced
    assert folder == disk.of(A).parent.name
    assert file.startswith(".video.") and file.endswith(".mp4")
    assert name == A


def test_threads_are_all_counted(disk: Disk, tmp_path: Path) -> None:
    ids = [new_id("video", time) for time in range(12)]

    def life(id: str) -> None:
        for size in (7, 13, 11):
            disk.write(id, "video.mp4", bytes(size))
        disk.save_state([id], 1, b"12345")
        disk.drop_state(id)
        if id in ids[::2]:
            disk.remove(id)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(life, ids))
    assert disk.used() == 6 * 11
    agree(disk, tmp_path)


def test_a_state_is_for_all_jobs_of_its_batch(disk: Disk, tmp_path: Path) -> None:
    assert disk.state(A) is None
    disk.save_state([A, B, C], 3, b"three\nlatents")
    for opened in (disk, Disk(tmp_path, quota=1)):
        for id in (A, B, C):
            assert opened.state(id) == SavedState(jobs=(A, B, C), step=3, data=b"three\nlatents")
    disk.save_state([A, B, C], 4, b"four")
    disk.remove(A)  # cancelled; the others go on without it
    assert disk.state(A) is None
    state = disk.state(B)
    assert state and state.step == 4
    disk.save_state([B, C], 5, b"five")
    for opened in (disk, Disk(tmp_path, quota=1)):
        assert opened.state(C) == SavedState(jobs=(B, C), step=5, data=b"five")
    assert len(files(tmp_path)) == 1
    agree(disk, tmp_path)
    disk.drop_state(B)
    assert disk.state(C)
    disk.drop_state(C)
    assert files(tmp_path) == {}
    assert disk.used() == 0


def test_a_kill_between_two_names_leaves_the_later_state(disk: Disk, tmp_path: Path) -> None:
    disk.save_state([A, B], 4, b"four")
    old = (tmp_path / "states" / A).read_bytes()
    disk.save_state([B], 5, b"five")
    (tmp_path / "states" / A).write_bytes(old)
    again = Disk(tmp_path, quota=1)
    assert [state and state.step for state in map(again.state, (A, B))] == [4, 5]


def test_a_state_for_other_company_is_none(disk: Disk) -> None:
    disk.save_state([A, B], 4, b"four")
    disk.save_state([A, C], 1, b"one")
    assert disk.state(B) is None


def test_states_are_kept_over_quota(disk: Disk) -> None:
    disk.write(A, "video.mp4", bytes(1000))
    disk.save_state([B], 1, bytes(500))
    assert disk.state(B)
    assert disk.used() > 1500
    with pytest.raises(DiskFull):
        disk.write(B, "x", b"x")


@pytest.mark.parametrize("torn", [b"", b"{}", b'{"jobs"', b"\xff\n", b"[1]\nx", None])
def test_a_torn_state_is_none(disk: Disk, tmp_path: Path, torn: bytes | None) -> None:
    disk.save_state([A], 4, b"four")
    path = tmp_path / "states" / A
    path.write_bytes(path.read_bytes()[:-1] if torn is None else torn)
    assert disk.state(A) is None
    again = Disk(tmp_path, quota=1)
    assert again.state(A) is None
    assert again.used() == 0
    assert files(tmp_path) == {}


SAVING = """
import sys
from pathlib import Path
from weft.serve.disk import Disk
disk, ids = Disk(Path(sys.argv[1]), quota=10**9), sys.argv[2:]
for step in range(1, 10**6):
    disk.save_state(ids, step, step.to_bytes(4, "little") * 50_000)
    disk.write(ids[0], "preview.png", step.to_bytes(4, "little") * 50_000)
    print(step, flush=True)
"""


def test_a_kill_leaves_whole_files_and_the_last_state(tmp_path: Path) -> None:
    code = [sys.executable, "-c", SAVING, str(tmp_path), A, B]
    for _ in range(3):
        with subprocess.Popen(code, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout
            for _ in range(9):
                child.stdout.readline()
            child.send_signal(signal.SIGKILL)
            told = int(child.stdout.read().rpartition("\n")[0].rpartition("\n")[2] or 9)
        disk = Disk(tmp_path, quota=10**9)
        state = disk.state(B)
        assert state == disk.state(A)
        assert state and state.step in (told, told + 1)
        assert state.data == state.step.to_bytes(4, "little") * 50_000
        preview = disk.read(A, "preview.png")
        assert preview == preview[:4] * 50_000
        assert int.from_bytes(preview[:4], "little") in (told, told + 1)
        agree(disk, tmp_path)


def test_sweep_leaves_what_is_needed(tmp_path: Path) -> None:
    store, disk = JobStore(tmp_path), Disk(tmp_path, quota=10**6)
    queued, running, done = (store.create(params(), deadline=1.0).id for _ in range(3))
    for id in (running, done):
        store.begin(id)
    store.complete(done, "video.mp4", 3, {}, 50.0)
    for id in (queued, running, done, A):
        disk.write(id, "file", b"abc")
    disk.save_state([running, done], 2, b"two")
    disk.save_state([A], 1, b"one")
    (tmp_path / ".gone.7").mkdir()
    for left in (tmp_path / running / ".file.1.2", tmp_path / "states" / f".{running}.1.2"):
        left.write_bytes(b"half of a")
    (tmp_path / "not ours").mkdir()
    disk = Disk(tmp_path, quota=10**6)
    disk.sweep(store.get)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        queued, running, done, "states", "not ours"
    }  # fmt: skip
    agree(disk, tmp_path)
    assert disk.state(running) and not disk.state(done) and not disk.state(A)
    store.close()


def test_uploads_count_and_leave_room_for_results(disk: Disk, tmp_path: Path) -> None:
    with disk.spool() as first, disk.spool() as second:
        assert first.path.stat().st_mode & 0o777 == 0o600
        first.write(b"a" * 200)
        assert disk.used() == 200
        with pytest.raises(DiskFull, match="Too many uploads"):
            second.write(bytes(51))
        second.write(bytes(50))
        disk.move(A, "reference.png", first)
        second.write(bytes(200))  # what was moved is the job's
    assert disk.read(A, "reference.png") == b"a" * 200
    agree(disk, tmp_path)
    disk.write(A, "video.mp4", bytes(700))
    with disk.spool() as third, pytest.raises(DiskFull, match="needs 101 B"):
        third.write(bytes(101))
    agree(disk, tmp_path)


def test_uploads_of_a_server_that_was_killed_are_removed(disk: Disk, tmp_path: Path) -> None:
    with disk.spool() as upload:
        upload.write(b"half")
        assert Disk(tmp_path, quota=1000).used() == 0
        assert files(tmp_path) == {}
