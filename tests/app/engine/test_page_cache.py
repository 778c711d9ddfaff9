"""Files are read from disk once, by one process at a time, and only if there is room for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from app.config.machine import Machine
from app.engine import page_cache
from app.engine.page_cache import missing_runs, read_once, weight_files

PAGE = os.sysconf("SC_PAGE_SIZE")
DEADLINE_S = 60

# Prints what it has read, as it says and as the system says. It need not import the whole engine for that.
LOADER = f"""
import importlib.util, json, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("page_cache", {page_cache.__file__!r})
sys.modules["page_cache"] = page_cache = importlib.util.module_from_spec(spec)
spec.loader.exec_module(page_cache)
def io():
    return int(dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())["read_bytes"])
print("ready", flush=True)
sys.stdin.readline()
before = io()
read = page_cache.read_once([Path(path) for path in sys.argv[1:]])
print(json.dumps({{"said": read.read_bytes, "size": read.num_bytes, "disk": io() - before}}))
"""


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files of a checkpoint, none of it in the page cache."""
    paths = [tmp_path / f"model-{i}.safetensors" for i in range(2)]
    for path in paths:
        path.write_bytes(os.urandom(8 << 20) + b"an end within a page")
        drop(path)
    if not missing_runs(paths[0]):
        pytest.skip("this file system keeps everything in memory")
    return paths


def drop(path: Path, start: int = 0, num_bytes: int = 0) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), start, num_bytes, os.POSIX_FADV_DONTNEED)


def test_only_what_is_missing_is_read(files: list[Path]) -> None:
    size = sum(path.stat().st_size for path in files)
    assert read_once(files).read_bytes == size
    assert not missing_runs(files[0])
    assert not missing_runs(files[1])
    assert read_once(files).read_bytes == 0
    drop(files[0], PAGE, 3 * PAGE)
    assert missing_runs(files[0]) == [(PAGE, 4 * PAGE)]
    again = read_once(files)
    assert (again.read_bytes, again.num_bytes) == (3 * PAGE, size)


@pytest.mark.processes
def test_of_two_loaders_that_start_together_one_reads(files: list[Path]) -> None:
    loaders = [
        subprocess.Popen(
            [sys.executable, "-c", LOADER, *map(str, files)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for loader in loaders:
        assert loader.stdout is not None
        assert loader.stdout.readline() == "ready\n"
    for loader in loaders:
        assert loader.stdin is not None
        loader.stdin.write("\n")
        loader.stdin.flush()
    told = [json.loads(loader.communicate(timeout=DEADLINE_S)[0]) for loader in loaders]
    size = sum(path.stat().st_size for path in files)
    assert sorted(loader["said"] for loader in told) == [0, size]
    assert sorted(loader["disk"] >= size for loader in told) == [False, True]
    assert min(loader["disk"] for loader in told) < size / 100


@pytest.mark.processes
def test_who_comes_second_waits_for_the_first(files: list[Path]) -> None:
    with page_cache._turn(files):
        loader = subprocess.Popen(
            [sys.executable, "-c", LOADER, *map(str, files)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert loader.stdout is not None
        assert loader.stdout.readline() == "ready\n"
        assert loader.stdin is not None
        loader.stdin.write("\n")
        loader.stdin.flush()
        deadline = time.monotonic() + DEADLINE_S
        while "-> FLOCK" not in waiting_locks():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert missing_runs(files[0])
    assert json.loads(loader.communicate(timeout=DEADLINE_S)[0])["said"] > 0


def waiting_locks() -> str:
    return Path("/proc/locks").read_text()


def test_nothing_is_read_without_room_for_it(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = replace(Machine.read(), available_bytes=files[0].stat().st_size)
    monkeypatch.setattr(Machine, "read", lambda: machine)
    assert read_once(files).read_bytes == 0
    assert missing_runs(files[0])
    assert "memory has room for" in caplog.text


def test_where_it_does_not_work_the_start_goes_on(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/nowhere")
    assert read_once(files).read_bytes == 0
    assert "not read ahead" in caplog.text
    monkeypatch.undo()
    assert read_once([*files, Path("/nowhere/model.safetensors")]).read_bytes == 0


def test_of_other_peoples_files_everything_is_read(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would say that all of it is there."""
    monkeypatch.setattr("os.geteuid", lambda: files[0].stat().st_uid + 1)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert missing_runs(files[0]) == [(0, files[0].stat().st_size)]


def test_which_files_are_weights(tmp_path: Path) -> None:
    assert weight_files(str(tmp_path)) == []
    for name in ("config.json", "pytorch_model-00001-of-00001.bin"):
        (tmp_path / name).write_text("")
    assert [path.name for path in weight_files(str(tmp_path))] == ["pytorch_model-00001-of-00001.bin"]
    (tmp_path / "model.safetensors").write_text("")
    assert [path.name for path in weight_files(str(tmp_path))] == ["model.safetensors"]
    assert missing_runs(tmp_path / "model.safetensors") == []
    assert weight_files("nobody/nothing-that-was-downloaded") == []


def test_files_beside_the_weights_are_not_read(tmp_path: Path) -> None:
    """Regression: Mistral's checkpoints have everything twice, and others have variants and adapters beside them."""

    def weights() -> list[str]:
        return [path.name for path in weight_files(str(tmp_path))]

    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in (*shards, "consolidated.safetensors", "adapter_model.safetensors"):
        (tmp_path / name).write_text("")
    assert len(weights()) == 4
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": shards[1], "a": shards[0], "c": shards[1], "d": "missing"}}))
    assert weights() == shards
    for broken in ("{", "[]", '{"weight_map": []}', '{"weight_map": {"a": [1], "b": 2}}', '{"weight_map": {"b": 2}}'):
        index.write_text(broken)
        assert len(weights()) == 4
    (tmp_path / "model.safetensors").write_text("")
    assert weights() == ["model.safetensors"]
