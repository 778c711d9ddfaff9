"""Weight guard: a mapped file that another process changes is copied into memory first."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from app.engine.model.weight_store import WeightStore
from tests.app.engine.model.test_weight_store import KEY, is_right, moved, tensors

CHANGES: dict[str, str] = {
    "truncated": "os.truncate(path, 100)",
    "overwritten": "open(path, 'r+b').write(os.urandom(20 << 20))",  # as `cp` over it
    "only opened": "open(path, 'r+b').close()",
}


@pytest.mark.processes
@pytest.mark.parametrize("change", CHANGES)
def test_a_mapped_file_that_another_process_changes_is_copied_first(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the process, with all its models (SIGBUS), or changed the model's answers."""
    store = WeightStore(tmp_path)
    model, arena = moved(store, again=tensors)
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
    arena.close()


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
