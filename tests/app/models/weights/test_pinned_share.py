"""Host memory that processes pin together: the bound, and what a process leaves that ends."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from folio.app.errors import ConfigError
from folio.app.models.weights.pinned_share import PinnedShare
from folio.vmem import IntegrityError


def test_shares_of_one_bound(tmp_path: Path) -> None:
    """Regression: each replica pinned up to a quarter of the machine's memory, and eight of them all of it."""
    folder = tmp_path / "pinned"
    one, other = PinnedShare(100, folder), PinnedShare(100, folder)
    assert one.take(60)
    assert not other.take(41)
    assert other.take(40)
    assert not one.take(1)
    one.give_back(30)
    assert other.take(30)
    with pytest.raises(IntegrityError, match="31 pinned bytes given back, 30 are taken"):
        one.give_back(31)
    one.close()  # with what it has
    assert other.take(30)
    other.close()
    assert [path.name for path in folder.iterdir()] == ["lock"]


@pytest.mark.processes
def test_a_killed_process_has_nothing(tmp_path: Path) -> None:
    folder, context = tmp_path / "pinned", multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=_take, args=(folder, its))
    process.start()
    assert mine.recv()
    share = PinnedShare(100, folder)
    assert not share.take(1)
    process.kill()
    process.join()
    assert share.take(100)
    share.close()


def _take(folder: Path, pipe: Connection) -> None:
    share = PinnedShare(100, folder)
    pipe.send(share.take(100))
    pipe.recv()


def test_a_file_system_may_be_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: `/dev/shm` filled up before a process noted its first bytes, and its models could not wake. Now the
    note has its place from the start."""
    folder = tmp_path / "pinned"
    share = PinnedShare(100, folder)
    [path] = folder.glob("*-*")
    assert path.stat().st_size == 20
    assert share.take(60)
    assert path.stat().st_size == 20

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\): set host_memory_bytes"):
        PinnedShare(100, folder)
    assert [*folder.glob("*-*")] == [path]
    monkeypatch.undo()
    share.close()


@pytest.mark.parametrize("lost", ["folder", "file descriptors"])
def test_what_others_have_can_no_longer_be_read(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: where the system had removed a user's files from /dev/shm, as systemd does when a session ends, a
    model's next wake was a FileNotFoundError, and so was closing one."""
    folder = tmp_path / "pinned"
    share = PinnedShare(100, folder)
    assert share.take(60)
    with monkeypatch.context() as without:
        if lost == "folder":
            shutil.rmtree(folder)
            reason = "No such file or directory"
        else:
            reason = os.strerror(errno.EMFILE)

            def no_more(*_: object) -> int:
                raise OSError(errno.EMFILE, reason)

            without.setattr(os, "open", no_more)
        assert not share.take(1)
        assert not share.take(1)
        share.give_back(60)
    [record] = caplog.records
    assert f"{reason}: no more weights are copied to pinned memory" in record.getMessage()
    assert share.take(100) == (lost != "folder")
    other = PinnedShare(100, folder)
    assert other.take(100) == (lost == "folder")
    other.close()
    share.close()


@pytest.mark.parametrize("made", ["link", "file", "open to others", "no parent"])
def test_the_folder_must_be_private(tmp_path: Path, made: str) -> None:
    folder = tmp_path / "pinned"
    if made == "link":
        folder.symlink_to(tmp_path)
    elif made == "file":
        folder.write_text("")
    elif made == "no parent":
        folder /= "below"
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"remove it|set host_memory_bytes"):
        PinnedShare(100, folder)
