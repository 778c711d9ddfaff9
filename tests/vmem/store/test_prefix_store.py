"""Prefixes outlive their memory, and nothing else is taken for one."""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from folio.vmem.prefix.store import write_behind
from folio.vmem.prefix.store.prefix_store import PrefixStore
from folio.vmem.prefix.store.segment import ALIGNMENT
from tests.vmem.sequences import begin, compute, prompt, run, serve, submit
from tests.vmem.small_memory import BLOCK_TOKENS, PAGE_BYTES, FlakyCuda, FlakyHost, Tokens
from tests.vmem.store.stores import IDS, SHAPES, fetch, hold, opened, release, settle, wait_for


@pytest.mark.parametrize("backend", [FlakyHost, FlakyCuda])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prefix_is_there_after_a_restart(
    tmp_path: Path, backend: type[FlakyHost | FlakyCuda], shape: dict[str, Any]
) -> None:
    with opened(tmp_path, backend, **shape) as (memory, store):
        serve(memory, IDS, 0)
    assert store.counts.written
    assert not store.counts.dropped
    with opened(tmp_path, backend, **shape) as (memory, store):
        assert fetch(memory, store) == 6
        run(memory, [*IDS, 1], 6 * BLOCK_TOKENS)
    assert store.counts.read
    assert not store.counts.written


def test_what_a_step_may_still_write_is_not_copied(tmp_path: Path) -> None:
    with opened(tmp_path, FlakyCuda) as (memory, store):
        serve(memory, IDS, 0)
        time.sleep(0.05)  # the thread could have
        assert not store.is_idle
        assert not store.counts.written
    assert store.counts.written == 6


def test_a_longer_prompt_shares_the_stored_part(tmp_path: Path) -> None:
    with opened(tmp_path) as (memory, _):
        serve(memory, IDS, 0)
    with opened(tmp_path) as (memory, store):
        ids = IDS[: 4 * BLOCK_TOKENS] + [7] * 40
        assert fetch(memory, store, ids) == 4
        serve(memory, ids, 4 * BLOCK_TOKENS)
    with opened(tmp_path) as (memory, store):
        assert fetch(memory, store, ids) == 6
        assert fetch(memory, store, IDS) == 2  # the first four are cached now
        run(memory, [*IDS, 1], 6 * BLOCK_TOKENS)


def test_a_prefix_is_read_in_parts(tmp_path: Path) -> None:
    with opened(tmp_path) as (memory, _):
        serve(memory, IDS, 0)
    with opened(tmp_path) as (memory, store):
        assert [fetch(memory, store, most_bytes=2 * PAGE_BYTES) for _ in range(4)] == [2, 2, 2, 0]
        run(memory, [*IDS, 1], 6 * BLOCK_TOKENS)


def test_keys_keep_prefixes_apart(tmp_path: Path) -> None:
    with opened(tmp_path) as (memory, _):
        serve(memory, IDS, 0, ("tenant:a",))
    with opened(tmp_path) as (memory, store):
        for keys in ((), ("tenant:b",), ("tenant:a", "salt:x")):
            assert fetch(memory, store, keys=keys) == 0
        assert fetch(memory, store, keys=("tenant:a",)) == 6
        serve(memory, IDS, 0)
        run(memory, [*IDS, 1], 6 * BLOCK_TOKENS, ("tenant:a",))
    assert b"tenant" not in b"".join(path.read_bytes() for path in tmp_path.glob("*/*"))


def test_another_fingerprint_finds_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as (memory, _):
        serve(memory, IDS, 0)
    with opened(tmp_path, fingerprint=bytes(16)) as (memory, store):
        assert fetch(memory, store) == 0


def test_prefixes_with_some_keys_are_not_stored(tmp_path: Path) -> None:
    with opened(tmp_path, keeps=lambda keys: not keys) as (memory, store):
        serve(memory, IDS, 0, ("adapter:a",))
        serve(memory, IDS[:BLOCK_TOKENS], 0)
    assert store.counts.written == 1


def test_collisions_of_hashes_are_misses(tmp_path: Path) -> None:
    """Every unit with the same first token has the same hash."""

    def weak(parent: bytes, content: bytes) -> bytes:
        return content[:4] * 4

    other = [*IDS[:8], *(token + 5 for token in IDS[8:BLOCK_TOKENS])]
    with opened(tmp_path, hash=weak) as (memory, _):
        serve(memory, IDS[:BLOCK_TOKENS], 0)
    with opened(tmp_path, hash=weak) as (memory, store):
        assert fetch(memory, store, other) == 0
        assert store.counts.refused == 1
        run(memory, other, 0)


def test_a_prefix_ends_where_it_is_damaged(tmp_path: Path) -> None:
    with opened(tmp_path) as (memory, _):
        serve(memory, IDS, 0)
    with opened(tmp_path) as (memory, store):
        prefix = store.prefixes.find(memory.prefixes.chain(), [*IDS, 1], 1 << 30)
        assert prefix is not None
        segment, slot = prefix.items[3].place
        with segment.path.open("r+b") as file:
            file.seek(ALIGNMENT + segment.shape.index_bytes + slot * segment.shape.record_bytes + 100)
            file.write(b"x")
        assert fetch(memory, store) == 3
        assert fetch(memory, store) == 0
        assert store.counts.refused == 1
        serve(memory, IDS, 3 * BLOCK_TOKENS)  # the others are written again
    with opened(tmp_path) as (memory, store):
        assert fetch(memory, store) == 6


def test_what_is_evicted_before_its_turn_is_dropped(tmp_path: Path) -> None:
    with opened(tmp_path) as (memory, store):
        hold(store)
        serve(memory, IDS, 0)
        memory.prefixes.evict_prefixes(())
        release(store)
    assert (store.counts.written, store.counts.dropped) == (0, 6)


def test_a_full_queue_drops_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "_MOST_ENDED", 2)
    with opened(tmp_path) as (memory, store):
        hold(store)
        for seed in range(1, 5):
            serve(memory, prompt(2 * BLOCK_TOKENS, seed), 0)
        release(store)
        settle(store)
        assert (store.counts.written, store.counts.dropped) == (4, 4)
        serve(memory, prompt(2 * BLOCK_TOKENS + 1, 1), 2 * BLOCK_TOKENS)
    assert (store.counts.written, store.counts.dropped) == (6, 4)


def test_hot_prefixes_are_written_once_there_is_time(tmp_path: Path) -> None:
    with opened(tmp_path) as (memory, store):
        memory.prefixes.on_release = None
        for _ in range(2):
            serve(memory, IDS)
        assert store.is_idle
        store._writer._hot_at = 0.0
        store._wake.set()
    assert store.counts.written == 5


def test_a_full_disk_is_no_error_of_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    with opened(tmp_path) as (memory, store):
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwritev", full)
            serve(memory, IDS, 0)
            settle_dropped(store, 6)
        assert fetch(memory, store, IDS) == 0
        run(memory, [*IDS, 1], 6 * BLOCK_TOKENS)
        release(store)
        memory.free(next(iter(memory.tables.sequences)))
    assert store.counts.written == 6


def test_without_pages_nothing_is_installed(tmp_path: Path) -> None:
    with opened(tmp_path) as (memory, _):
        serve(memory, IDS, 0)
    with opened(tmp_path, num_pages=12) as (memory, store):
        sequence = begin(memory, 9 * BLOCK_TOKENS)
        assert fetch(memory, store) == 6  # read
        assert memory.report().cached_bytes == 0
        memory.free(sequence)
        fetch(memory, store)
        run(memory, [*IDS, 1], 6 * BLOCK_TOKENS)


def test_what_another_sequence_computes_is_not_installed(tmp_path: Path) -> None:
    with opened(tmp_path) as (memory, _):
        serve(memory, IDS, 0)
    with opened(tmp_path) as (memory, store):
        prefix = store.prefixes.find(memory.prefixes.chain(), [*IDS, 1], 1 << 30)
        assert prefix is not None
        store.read(prefix)
        wait_for(lambda: prefix.is_done)
        tokens = Tokens(memory.prefixes.chain(), IDS)
        sequence = submit(memory, tokens, 0)
        store.prefixes.install(prefix)
        assert store.prefixes.find(memory.prefixes.chain(), [*IDS, 1], 1 << 30) is None
        compute(memory, (sequence, tokens, 0))
        memory.check_integrity()


def test_a_thread_that_dies_ends_all_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as (memory, store):
        serve(memory, IDS, 0)
        settle(store)
        memory.prefixes.evict_prefixes(())
        monkeypatch.setattr(store.prefixes, "read", lambda prefix: 1 / 0)
        assert fetch(memory, store) == 0
        assert fetch(memory, store) == 0
        serve(memory, IDS, 0)
    assert "the prefix store's thread has died" in caplog.text


@pytest.mark.parametrize("shape", [{}, {"windowed": True}])
def test_random_prompts_find_their_own_content(tmp_path: Path, shape: dict[str, Any]) -> None:
    """Memory for two prompts, and a disk for a few: what is read is compared with what was computed."""
    random = Random(1)
    num_read = 0
    for _ in range(3):
        with opened(tmp_path, num_pages=28, most_bytes=40 * PAGE_BYTES, **shape) as (memory, store):
            for _ in range(40):
                ids = prompt(BLOCK_TOKENS * random.randint(1, 6), random.randrange(3))[: random.randint(20, 96)]
                ids += [random.randrange(3)] * random.randint(1, 30)
                keys = ("tenant:a",)[: random.randrange(2)]
                fetch(memory, store, ids, keys)
                serve(memory, ids, keys=keys)
                if random.random() < 0.3:
                    memory.prefixes.evict_prefixes(keys)
                memory.check_integrity()
        num_read += store.counts.read
        assert not store.counts.refused
    assert num_read > 40


def settle_dropped(store: PrefixStore, count: int) -> None:
    wait_for(lambda: store.counts.dropped == count)
