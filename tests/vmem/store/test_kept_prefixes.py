"""Prefixes outlive a release of all memory in the host's, and give that up for others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from folio.vmem import DevicePages, KVMemory, MapError, OutOfSwap
from folio.vmem.prefix.store import kept_prefixes
from folio.vmem.prefix.store.kept_prefixes import KeptPrefixes
from folio.vmem.prefix.store.prefix_store import PrefixStore
from folio.vmem.prefix.store.records import Records
from tests.vmem.sequences import begin, prompt, run, serve
from tests.vmem.small_memory import BLOCK_TOKENS, PAGE_BYTES, FlakyCuda, FlakyHost, make_memory
from tests.vmem.store.stores import FINGERPRINT, IDS, MOST_BYTES, SHAPES, fetch, hold, release, settle

OTHER = prompt(6 * BLOCK_TOKENS, 1)


@contextmanager
def opened(
    backend: type[FlakyHost | FlakyCuda] = FlakyHost, pages: DevicePages | None = None, **settings: Any
) -> Iterator[tuple[KVMemory, KeptPrefixes]]:
    """A memory and its kept prefixes. Nothing may be left at the end."""
    device = None if pages is None else FlakyHost(int(pages.capacity_bytes), pages)
    memory, _ = make_memory(backend, device=device, pages=pages, **({"swap_pages": 40} | settings))
    kept = KeptPrefixes(memory, Records(memory))
    yield memory, kept
    check(memory, kept)
    kept.close()
    assert memory.report().kept_bytes == memory.swapping.space.used_bytes == 0
    memory.check_idle()
    memory.close()


def check(memory: KVMemory, kept: KeptPrefixes) -> None:
    if isinstance(memory.backend, FlakyCuda):
        memory.backend.fake.finish_work()
    memory.check_integrity()
    kept.check_integrity()


def sleep(memory: KVMemory, kept: KeptPrefixes) -> None:
    if isinstance(memory.backend, FlakyCuda):
        memory.backend.fake.finish_work()
    kept.keep()
    memory.release_all()
    check(memory, kept)
    assert memory.held_bytes == 0


def wake(memory: KVMemory, kept: KeptPrefixes, ids: list[int] = IDS, keys: tuple[str, ...] = ()) -> int:
    """Install what is kept of these tokens, with another behind them; returns the units that were found."""
    prefix = kept.find(memory.prefixes.chain(keys), [*ids, 1], 1 << 30)
    if prefix is None:
        return 0
    kept.read(prefix)
    assert kept.install(prefix)
    check(memory, kept)
    return prefix.num_units - prefix.first_units


@pytest.mark.parametrize("backend", [FlakyHost, FlakyCuda])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prefix_comes_back(backend: type[FlakyHost | FlakyCuda], shape: dict[str, Any]) -> None:
    with opened(backend, **shape) as (memory, kept):
        serve(memory, IDS, 0)
        for _ in range(2):
            sleep(memory, kept)
            assert 0 < memory.report().kept_bytes <= 40 * PAGE_BYTES
            assert wake(memory, kept) == 6
            memory.free(run(memory, [*IDS, 1], 6 * BLOCK_TOKENS))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pin_comes_back(shape: dict[str, Any]) -> None:
    with opened(num_pages=80, **shape) as (memory, kept):
        sequence = run(memory, IDS, 0)
        memory.pin("rules", sequence, 6 * BLOCK_TOKENS)
        memory.free(sequence)
        for _ in range(2):
            kept.keep()
            [pinned] = memory.release_all()
            before = memory.report().pinned_bytes
            assert kept.pin(pinned)
            [pin] = memory.report().pins
            assert (pin.name, pin.num_tokens, before) == ("rules", 6 * BLOCK_TOKENS, 0)
            memory.free(run(memory, [*IDS, 1], 6 * BLOCK_TOKENS))
            check(memory, kept)
        memory.unpin("rules")


def test_a_pin_without_room_or_copy_is_left_to_its_request() -> None:
    with opened(num_pages=20) as (memory, kept):
        sequence = run(memory, prompt(4 * BLOCK_TOKENS), 0)
        memory.pin("rules", sequence, 4 * BLOCK_TOKENS)
        memory.free(sequence)
        kept.keep()
        [pinned] = memory.release_all()
        filler = begin(memory, 10 * BLOCK_TOKENS), begin(memory, 9 * BLOCK_TOKENS)
        assert not kept.pin(pinned)
        for sequence in filler:
            memory.free(sequence)
        assert kept.pin(pinned)
        memory.unpin("rules")
        memory.release_all()
        kept.close()
        assert not kept.pin(pinned)
        assert memory.report().pins == ()


def test_swapped_sequences_take_the_room_of_what_is_worth_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_prefixes, "_COPY_BYTES", PAGE_BYTES)
    with opened(swap_pages=16) as (memory, kept):
        for _ in range(3):
            serve(memory, [*IDS, 5])
        serve(memory, OTHER, 0)
        sleep(memory, kept)
        assert memory.report().kept_bytes == 12 * PAGE_BYTES
        swapped = memory.swap_out([begin(memory, 8 * BLOCK_TOKENS)])
        assert memory.report().kept_bytes == 8 * PAGE_BYTES
        assert (wake(memory, kept), wake(memory, kept, OTHER)) == (6, 2)
        with pytest.raises(OutOfSwap, match=rf"{9 * PAGE_BYTES} bytes to swap out, {8 * PAGE_BYTES} of"):
            memory.swap_out([begin(memory, 9 * BLOCK_TOKENS)])
        check(memory, kept)
        memory.swapping.discard_swapped(swapped)
        memory.free(next(iter(memory.tables.sequences)))
        sleep(memory, kept)
        assert memory.report().kept_bytes == 8 * PAGE_BYTES


def test_nothing_is_copied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as (memory, kept):
        serve(memory, IDS, 0)
        sleep(memory, kept)
        wake(memory, kept)
        serve(memory, OTHER, 0)
        copied: list[tuple[Any, ...]] = []
        real = kept._records.copy_into
        monkeypatch.setattr(kept._records, "copy_into", lambda *args: (copied.append(args), real(*args)))
        sleep(memory, kept)
        assert len(copied) == 6
        assert (wake(memory, kept), wake(memory, kept, OTHER)) == (6, 6)


def test_what_swapped_sequences_have_is_not_copied() -> None:
    with opened() as (memory, kept):
        swapped = memory.swap_out([run(memory, IDS, 0)])
        serve(memory, OTHER, 0)
        sleep(memory, kept)
        assert (wake(memory, kept), wake(memory, kept, OTHER)) == (0, 6)
        memory.swapping.discard_swapped(swapped)


def test_the_memory_that_slept_first_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_prefixes, "_COPY_BYTES", PAGE_BYTES)
    pages = DevicePages(400 * PAGE_BYTES, swap_bytes=14 * PAGE_BYTES)
    with opened(pages=pages) as (first, of_first), opened(pages=pages) as (second, of_second):
        for memory, kept in ((first, of_first), (second, of_second), (first, of_first)):
            serve(memory, IDS)
            serve(memory, OTHER)
            sleep(memory, kept)
            assert memory.report().kept_bytes == 12 * PAGE_BYTES
        of_second.check_integrity()
        assert pages.swap_space.used_bytes == pages.swap_space.most_bytes
        assert second.report().kept_bytes == 2 * PAGE_BYTES
    pages.close()


def test_what_is_not_worth_it_is_not_kept() -> None:
    with opened(swap_pages=0) as (memory, kept):
        serve(memory, IDS, 0)
        sleep(memory, kept)
        assert memory.report().kept_bytes == 0
    with opened() as (memory, _):
        asked: list[tuple[int, int]] = []
        kept = KeptPrefixes(memory, Records(memory), lambda *sizes: bool(asked.append(sizes)))
        serve(memory, IDS, 0)
        sleep(memory, kept)
        assert (asked, memory.report().kept_bytes) == ([(6 * PAGE_BYTES, 6 * BLOCK_TOKENS)], 0)
        kept = KeptPrefixes(memory, Records(memory), keeps=lambda keys: not keys)
        serve(memory, IDS, 0, ("warm-up",))
        serve(memory, IDS[:BLOCK_TOKENS], 0)
        sleep(memory, kept)
        assert memory.report().kept_bytes == PAGE_BYTES
        kept.close()


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_prefixes, "_COPY_BYTES", PAGE_BYTES)
    monkeypatch.setattr(kept_prefixes, "_MOST_S", 0.0)
    with opened() as (memory, kept):
        serve(memory, IDS, 0)
        sleep(memory, kept)
        assert wake(memory, kept) == 1


def test_collisions_of_hashes_are_misses() -> None:
    """Every unit with the same first token has the same hash."""

    def weak(parent: bytes, content: bytes) -> bytes:
        return content[:4] * 4

    with opened(hash=weak) as (memory, kept):
        serve(memory, IDS[:BLOCK_TOKENS], 0)
        sleep(memory, kept)
        other = [*IDS[:8], *(token + 5 for token in IDS[8:BLOCK_TOKENS])]
        assert wake(memory, kept, other) == 0
        memory.free(run(memory, other, 0))


def test_a_refused_mapping_keeps_what_was_copied_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_prefixes, "_COPY_BYTES", PAGE_BYTES)
    with opened() as (memory, kept):
        memory.free(run(memory, IDS, 0, policy="region"))
        real, calls = memory.regions.map_homes, []

        def map_homes(*args: Any) -> None:
            calls.append(args)
            if len(calls) > 2:
                raise MapError("injected")
            real(*args)

        monkeypatch.setattr(memory.regions, "map_homes", map_homes)
        sleep(memory, kept)
        assert memory.report().kept_bytes == 2 * PAGE_BYTES
        monkeypatch.undo()
        assert wake(memory, kept) == 2


def test_what_is_not_on_disk_is_written_from_its_copy(tmp_path: Path) -> None:
    with opened() as (memory, kept):
        store = PrefixStore(memory, tmp_path, MOST_BYTES, FINGERPRINT, kept=kept)
        hold(store)
        serve(memory, IDS, 0)
        sleep(memory, kept)
        release(store)
        settle(store)
        assert (store.counts.written, store.counts.dropped) == (6, 0)
        kept.close()
        assert fetch(memory, store) == 6
        memory.free(run(memory, [*IDS, 1], 6 * BLOCK_TOKENS))
        store.close()


def test_a_flush_writes_what_is_due(tmp_path: Path) -> None:
    with opened() as (memory, kept):
        store = PrefixStore(memory, tmp_path, MOST_BYTES, FINGERPRINT, kept=kept)
        hold(store)
        serve(memory, IDS, 0)
        sleep(memory, kept)
        serve(memory, OTHER, 0)
        store.flush()
        assert (store.counts.written, store.counts.dropped) == (12, 0)
        store.close()
        store.flush()


@pytest.mark.parametrize("shape", [{}, {"windowed": True}])
def test_random_prompts_find_their_own_content(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two memories with too little swap space for both: what is found is compared with what was computed."""
    monkeypatch.setattr(kept_prefixes, "_COPY_BYTES", 2 * PAGE_BYTES)
    random, num_found, num_swapped = Random(1), 0, 0
    pages = DevicePages(400 * PAGE_BYTES, swap_bytes=24 * PAGE_BYTES)
    with opened(pages=pages, swap_pages=20, **shape) as first, opened(pages=pages, swap_pages=20, **shape) as second:
        for _ in range(120):
            memory, kept = random.choice((first, second))
            ids = prompt(BLOCK_TOKENS * random.randint(1, 6), random.randrange(3))[: random.randint(20, 96)]
            ids += [random.randrange(3)] * random.randint(1, 30)
            keys = ("tenant:a",)[: random.randrange(2)]
            num_found += wake(memory, kept, ids, keys)
            sequence = run(memory, ids, keys=keys)
            if random.random() < 0.3:
                try:
                    swapped = memory.swap_out([sequence])
                except OutOfSwap:
                    memory.free(sequence)
                else:
                    num_swapped += 1
                    sleep(memory, kept)
                    [sequence] = memory.swap_in(swapped)
                    memory.free(sequence)
            else:
                memory.free(sequence)
            if random.random() < 0.4:
                sleep(memory, kept)
        assert min(num_found, num_swapped) > 10
        space = pages.swap_space
        assert space.used_bytes == space.kept_bytes <= space.most_bytes
    pages.close()
