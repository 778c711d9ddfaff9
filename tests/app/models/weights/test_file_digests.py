"""Digests of files: a file is read again unless the system proves that it is unchanged."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from folio.app.models.weights import file_digests
from folio.app.models.weights.file_digests import FileDigests

# One minute after the files are written.
Digests = partial(FileDigests, clock=lambda: time.time_ns() + 60 * 10**9)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each file that is read."""
    read: list[int] = []
    real = file_digests._digest
    monkeypatch.setattr(file_digests, "_digest", lambda fd, size: read.append(size) or real(fd, size))
    return read


def replaced(path: Path) -> None:
    """As by `rsync -t`: another file with the size and time of the old one."""
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


def rewritten(path: Path) -> None:
    """In place, with one byte changed, and its old time set again."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_ino == before.st_ino


@pytest.mark.parametrize("change", [replaced, rewritten])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_another_content_of_the_same_size_and_time_has_another_digest(
    change: Callable[[Path], None], is_restarted: bool, tmp_path: Path, read: list[int]
) -> None:
    """The old weights were served, also after a restart."""
    path, size = tmp_path / "a.safetensors", 3 * (8 << 20) + 5  # of several pieces
    path.write_bytes(os.urandom(size))
    digests = Digests(tmp_path)
    first, state = digests.of(path), path.stat()
    assert digests.of(path) == first
    assert Digests(tmp_path).of(path) == first
    assert read == [size], "it is read once, by one process"
    change(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (state.st_size, state.st_mtime_ns)
    assert (Digests(tmp_path) if is_restarted else digests).of(path) != first
    assert read == [size, size]


def test_the_same_content_elsewhere_has_the_same_digest(tmp_path: Path, read: list[int]) -> None:
    """A copy on another machine, or a layer that is unpacked again."""
    path, size = tmp_path / "a", 1000
    path.write_bytes(os.urandom(size))
    first = Digests(tmp_path).of(path)
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    copy.replace(path)
    assert Digests(tmp_path).of(path) == first
    assert read == [size, size]
    path.write_bytes(path.read_bytes() + b"\0")
    assert Digests(tmp_path).of(path) != first


def test_what_is_no_proof_is_read_again(tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has just changed, and one whose file system has no time of the last change."""
    path = tmp_path / "a"
    path.write_bytes(b"1234")
    digests = FileDigests(tmp_path, clock=lambda: path.stat().st_ctime_ns + 2 * 10**9 - 1)
    for _ in range(2):
        digests.of(path)
    assert read == [4, 4]
    real = file_digests._state
    monkeypatch.setattr(file_digests, "_state", lambda fd: (*real(fd)[:3], real(fd)[3] // 10**9 * 10**9))
    for _ in range(2):
        digests = Digests(tmp_path)
        digests.of(path)
        digests.of(path)
    assert read == [4, 4, 4, 4], "once by each process"


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "a", os.pread
    changes = iter([lambda: rewritten(path), lambda: os.truncate(path, 2)])

    def pread(fd: int, size: int, offset: int) -> bytes:
        next(changes, lambda: None)()
        return real(fd, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    for _ in range(2):
        path.write_bytes(b"1234")
        with pytest.raises(OSError, match="while it is read"):
            Digests().of(path)


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"x": 1}', b'{"x": [1, 2, 3]}', b"\xff", b"[" * 100_000])
def test_damaged_digests_are_computed_again(content: bytes, tmp_path: Path, read: list[int]) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1234")
    first = Digests(tmp_path).of(path)
    (tmp_path / "digests.json").chmod(0o600)
    (tmp_path / "digests.json").write_bytes(content)
    assert Digests(tmp_path).of(path) == first
    assert Digests(tmp_path).of(path) == first
    assert read == [4, 4]


def test_stored_digests_are_bounded(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "a"):
        (tmp_path / name).write_bytes(b"1234")
        Digests(tmp_path, most_stored=2).of(tmp_path / name)
    assert [Path(name).name for name in json.loads((tmp_path / "digests.json").read_bytes())] == ["c", "a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "digests.json"]


def test_a_folder_that_cannot_be_written(tmp_path: Path, read: list[int]) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    digests = Digests(tmp_path / "missing")
    assert digests.of(tmp_path / "a") == digests.of(tmp_path / "a")
    assert read == [4]
