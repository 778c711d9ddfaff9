"""Weight guard: a mapped file that another process changes is copied into memory first."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from folio.app.models.weights.arena import WeightArena
from folio.app.models.weights.store import WeightStore
from tests.app.models.weights.stored import KEY, is_right, moved, tensors

CHANGES: dict[str, str] = {
    "truncated": "os.truncate(path, 100)",
    "overwritten": "open(path, 'r+b').write(os.urandom(20 << 20))",  # as `cp` over it
    "only opened": "open(path, 'r+b').close()",
}


@pytest.fixture
def arenas() -> Iterator[list[WeightArena]]:
    """Closed after the test, also one that fails: later ones look at this process's mappings."""
    opened: list[WeightArena] = []
    yield opened
    for arena in opened:
        arena.close()


@pytest.mark.processes
@pytest.mark.parametrize("change", CHANGES)
def test_a_mapped_file_that_another_process_changes_is_copied_first(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, arenas: list[WeightArena]
) -> None:
    """It ended the process, with all its models (SIGBUS), or changed the model's answers."""
    store = WeightStore(tmp_path)
    model, arena = moved(store, again=tensors)
    arenas.append(arena)
    path, address = tmp_path / KEY.file_name, model.weight.data_ptr()
    code = f"import os; path = {str(path)!r}; os.chmod(path, 0o600); {CHANGES[change]}"
    for _ in range(2):  # a model that has been asleep is protected, too
        begin = time.monotonic()
        process = subprocess.Popen([sys.executable, "-c", code])
        while process.poll() is None:
            assert is_right(model)
            assert time.monotonic() - begin < 30, "the lease should be given back"
        assert process.returncode == 0
        assert is_right(model)
        assert model.weight.data_ptr() == address
        assert "another process writes to the weights of 'some/model'" in caplog.text
        caplog.clear()
        arena.unmap()
        arena.map()
        assert is_right(model)
        (path,) = tmp_path.glob("*.weights")


def test_a_file_that_is_open_for_writing_is_copied_as_it_is_mapped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arenas: list[WeightArena]
) -> None:
    """Its writer, which has waited for the lease once, waits no second time."""
    model, arena = moved(WeightStore(tmp_path))
    arenas.append(arena)
    path = tmp_path / KEY.file_name
    path.chmod(0o600)
    with path.open("r+b") as file:
        arena.unmap()
        arena.map()
        assert caplog.text.count("another process writes to the weights of 'some/model'") == 2
        assert KEY.file_name not in Path("/proc/self/maps").read_text()
        file.truncate(100)
        assert is_right(model)


def test_a_file_system_without_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Models are served, and what ends the process is said once."""

    def refuse(fd: int, command: int, *_: object) -> int:
        assert command == fcntl.F_SETSIG
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    store = WeightStore(tmp_path)
    for name in "ab":
        model, arena = moved(store, replace(KEY, name=name))
        assert is_right(model)
        arena.close()
    assert caplog.text.count("file system without leases (Invalid argument)") == 1
