"""Cached prefixes on disk: an engine finds those of the one before, and tokens are the same with and without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from folio.app.config.engine import KVStore
from folio.app.engine.engine import Engine
from folio.app.engine.llm import LLM
from folio.app.engine.schedule import read_ahead
from folio.app.engine.schedule.preemption import PreemptionCostModel
from folio.app.errors import ConfigError
from tests.app.engine.engines import broken_layer, engine_of, folder_of, greedy, run, tokens_of
from tests.conftest import MakeCheckpoint, tokens

ROOT = Path(__file__).parents[3]
PROMPT = tokens(200)
_DEADLINE_S = 60.0


@contextmanager
def engine(model: Path | str, folder: Path | None, **settings: Any) -> Iterator[Engine]:
    """An engine whose prefixes are all on disk at the end."""
    store = None if folder is None else KVStore(dir=str(folder), bytes=64 << 20)
    made = engine_of(model, **({"kv_store": store, "block_tokens": 16, "dtype": "float32"} | settings))
    try:
        yield made
        settle(made)
        made.check_integrity()
    finally:
        made.close()


def settle(engine: Engine) -> None:
    """Wait until nothing waits to be written."""
    deadline = time.monotonic() + _DEADLINE_S
    while engine.store is not None and not engine.store.is_idle:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def ask(engine: Engine, prompt: list[int] = PROMPT, **options: Any) -> tuple[int, list[int]]:
    """The request's cached tokens, and its tokens."""
    engine.submit("a", prompt, greedy(8), **options)
    deltas = run(engine)["a"]
    return deltas[-1].num_cached_tokens, tokens_of(deltas)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llama", {}),
        ("llama", {"kv_view": "block_table"}),
        ("llama", {"kv_dtype": "int8"}),
        ("llama", {"kv_dtype": "fp8_e4m3", "attention": "reference"}),
        ("llama", {"async_scheduling": "on"}),
        ("llama", {"kv_layout": "per_layer"}),
        ("gemma2", {}),
        ("mistral", {}),
        ("gpt_oss", {}),
        ("bamba", {"block_tokens": None}),
    ],
)
def test_the_next_engine_finds_the_prefix(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, model: str, settings: dict[str, Any]
) -> None:
    folder = folder_of(make_checkpoint, model)
    with engine(folder, None, **settings) as plain:
        _, expected = ask(plain)
    with engine(folder, tmp_path, **settings) as first:
        assert ask(first) == (0, expected)
    with engine(folder, tmp_path, **settings) as second:
        cached, found = ask(second)
        unit = second.memory.prefixes.unit_tokens
        assert (cached, found) == (199 // unit * unit, expected)
        assert second.store is not None
        assert second.store.counts.read
        assert not second.store.counts.refused


def test_tenants_and_salts_stay_apart(llama: Path, tmp_path: Path) -> None:
    with engine(llama, tmp_path) as first:
        ask(first, tenant="a", cache_salt="x")
    with engine(llama, tmp_path) as second:
        for options in ({}, {"tenant": "b", "cache_salt": "x"}, {"tenant": "a"}, {"tenant": "a", "cache_salt": "y"}):
            assert ask(second, **options)[0] == 0
        assert ask(second, tenant="a", cache_salt="x")[0] == 192


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"kv_dtype": "int8"},
        {"block_tokens": 32},
        {"quantization": "int8"},
        {"batch_invariant": True},
    ],
)
def test_other_settings_find_nothing(llama: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    with engine(llama, tmp_path) as first:
        ask(first)
    with engine(llama, tmp_path, **settings) as second:
        assert ask(second)[0] == 0


def test_other_weights_find_nothing(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """They have the same name and the same size."""
    folder = folder_of(make_checkpoint, "llama")
    model = tmp_path / "model"
    model.mkdir()
    for path in folder.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    with engine(model, tmp_path / "store") as first:
        ask(first)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\0" * 8)
    with engine(model, tmp_path / "store") as second:
        assert ask(second)[0] == 0


def test_damaged_files_change_no_token(llama: Path, tmp_path: Path) -> None:
    with engine(llama, tmp_path) as first:
        _, expected = ask(first)
    [path] = tmp_path.glob("*/*.kv")
    content, random = path.read_bytes(), Random(0)
    for _ in range(10):
        with path.open("r+b") as file:
            file.write(content)
            for _ in range(20):
                file.seek(random.randrange(len(content) // 2))
                file.write(random.randbytes(random.randint(1, 64)))
        with engine(llama, tmp_path) as second:
            assert ask(second)[1] == expected


def test_a_full_disk_is_no_error(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with engine(llama, tmp_path) as first:
        _, expected = ask(first)
        assert first.store is not None
        while not first.store.counts.dropped:
            time.sleep(0.001)
        assert ask(first)[1] == expected
        first.store._writer._ended.clear()  # they wait for the disk


def test_what_is_computed_sooner_is_not_read(llama: Path, tmp_path: Path) -> None:
    with engine(llama, tmp_path) as first:
        ask(first)
    with engine(llama, tmp_path) as second:
        second.recovery.observe_step(16, 1000, 1e-6)
        second.recovery.observe_read("disk", 1 << 10, 100.0)
        assert ask(second)[0] == 0
        assert second.store is not None
        assert second.store.counts.read == 0


def test_a_request_does_not_wait_for_a_disk_that_hangs(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(llama, tmp_path) as first:
        _, expected = ask(first)
    with engine(llama, tmp_path) as second:
        assert second.store is not None
        with monkeypatch.context() as patched:
            patched.setattr(second.store, "read", lambda prefix: None)
            patched.setattr(read_ahead, "_MOST_WAIT_S", 0.1)
            assert ask(second) == (0, expected)


def test_a_cancelled_request_ends_its_read(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(llama, tmp_path) as first:
        ask(first)
    with engine(llama, tmp_path) as second:
        assert second.store is not None
        reads: list[Any] = []
        with monkeypatch.context() as patched:
            patched.setattr(second.store, "read", reads.append)
            second.submit("b", PROMPT, greedy(8))
            second.step()
            second.cancel("b")
        [read] = reads
        assert ask(second)[0] == 192
        assert read.is_cancelled


def test_many_requests_wait_for_one_prefix(llama: Path, tmp_path: Path) -> None:
    with engine(llama, tmp_path) as first:
        _, expected = ask(first)
    with engine(llama, tmp_path) as second:
        for i in range(8):
            second.submit(str(i), PROMPT, greedy(8))
        assert {tuple(tokens_of(deltas)) for deltas in run(second).values()} == {tuple(expected)}
        assert second.store is not None
        assert second.store.counts.read >= 12


def test_prefixes_are_read_part_by_part(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_PART_BYTES", 1 << 16)
    with engine(llama, tmp_path) as first:
        _, expected = ask(first)
    with engine(llama, tmp_path) as second:
        assert second.store is not None
        sizes: list[int] = []
        real = second.store.read
        monkeypatch.setattr(second.recovery, "read_s", lambda *_: 0.0)
        monkeypatch.setattr(second.store, "read", lambda prefix: (sizes.append(prefix.num_units), real(prefix)))
        assert ask(second) == (192, expected)
        assert len(sizes) > 1
        assert sizes == sorted(set(sizes))


def test_a_prefix_that_does_not_stay_is_computed(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read again and again, where memory is missing or evicts each part for the next one."""
    with engine(llama, tmp_path) as first:
        _, expected = ask(first)
    with engine(llama, tmp_path) as second:
        assert second.store is not None
        monkeypatch.setattr(second.store.prefixes, "install", lambda prefix: False)
        assert ask(second) == (0, expected)
        monkeypatch.setattr(read_ahead, "_PART_BYTES", 1 << 16)
        monkeypatch.setattr(second.store.prefixes, "install", lambda prefix: True)
        second.memory.release_all()
        assert ask(second) == (0, expected)


@pytest.mark.parametrize("async_scheduling", ["on", "off"])
def test_what_a_failed_step_computed_is_not_written(llama: Path, tmp_path: Path, async_scheduling: str) -> None:
    with engine(llama, tmp_path, async_scheduling=async_scheduling) as only:
        only.submit("a", PROMPT, greedy(8))
        with broken_layer(only, RuntimeError("broken")), pytest.raises(RuntimeError, match="broken"):
            run(only)
        settle(only)
        assert only.store is not None
        assert only.store.counts.written == 0
        only.cancel("a")
        _, expected = ask(only)
    with engine(llama, tmp_path) as second:
        assert ask(second) == (192, expected)


def test_prefixes_outlive_a_sleep(llama: Path, tmp_path: Path) -> None:
    with engine(llama, tmp_path) as only:
        _, expected = ask(only)
        settle(only)
        only.memory.release_all()
        assert ask(only) == (192, expected)


def test_a_close_writes_what_waits_for_its_turn(llama: Path, tmp_path: Path) -> None:
    settings: Any = {"kv_store": KVStore(dir=str(tmp_path), bytes=64 << 20), "block_tokens": 16, "dtype": "float32"}
    settings["skip_tokenizer_init"] = True
    with LLM(llama, **settings) as first:
        assert first.engine.store is not None
        first.engine.store._writer._next_at = time.monotonic() + 1e6
        first.generate([PROMPT], greedy(8))
        assert first.engine.store.counts.written == 0
    with engine(llama, tmp_path) as second:
        assert ask(second)[0] == 192


def test_nothing_is_left(llama: Path, tmp_path: Path) -> None:
    def state() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), sum(t.name == "folio-store" for t in threading.enumerate())

    with engine(llama, tmp_path) as first:
        ask(first)
    before = state()
    with engine(llama, tmp_path) as second:
        ask(second)
    assert state() == before


@pytest.mark.parametrize(
    ("folder", "num_bytes", "fault"),
    [
        ("/proc/nowhere", 1 << 30, "kv_store cannot be used: "),
        ("", 4096, "kv_store cannot be used: a file of each kin"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(
    llama: Path, tmp_path: Path, folder: str, num_bytes: int, fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        engine_of(llama, kv_store=KVStore(dir=folder or str(tmp_path), bytes=num_bytes))


def test_a_folder_of_others_is_refused(llama: Path, tmp_path: Path) -> None:
    """Its digests of weights would be theirs."""
    tmp_path.chmod(0o770)
    with pytest.raises(ConfigError, match=r"others can write to it; give it to this user alone \(mode 0700\)"):
        engine_of(llama, kv_store=KVStore(dir=str(tmp_path), bytes=1 << 30))


def test_reads_are_compared_with_computing() -> None:
    costs = PreemptionCostModel(1024)
    assert costs.read_s("disk", 1 << 20) == 0  # tried once
    costs.observe_read("disk", 1 << 20, 0.5)
    assert costs.read_s("disk", 1 << 20) == pytest.approx(0.5, rel=1e-3)
    assert costs.cost([(100, 0)], 0).recompute_s == costs.compute_s(100, 0)


@pytest.mark.processes
def test_an_engine_that_is_killed_leaves_whole_prefixes(llama: Path, tmp_path: Path) -> None:
    """Kills at random times of writing; each time tokens are those of an engine without a store."""
    prompts = [tokens(150, seed) for seed in range(6)]
    with engine(llama, None) as plain:
        expected = [ask(plain, prompt)[1] for prompt in prompts]
    code = """
import sys
from pathlib import Path
from tests.app.engine.test_kv_store import ask, engine, tokens
with engine(Path(sys.argv[1]), Path(sys.argv[2])) as killed:
    for seed in range(6):
        ask(killed, tokens(150, seed))
        print(seed, flush=True)
    sys.stdin.read()
"""
    for killed_at in (1, 4):
        command = [sys.executable, "-c", code, str(llama), str(tmp_path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            while int(process.stdout.readline()) < killed_at:
                pass
            process.send_signal(signal.SIGKILL)
        with engine(llama, tmp_path) as second:
            assert [ask(second, prompt)[1] for prompt in prompts] == expected
            assert second.store is not None
            assert not second.store.counts.refused
