"""`KVMemory.release_all` and budgets down to nothing; `test_shared_machine.py` mixes them with everything else."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from folio.vmem import (
    AddressRange,
    BudgetError,
    DevicePages,
    IntegrityError,
    LayoutKind,
    MapError,
    OutOfPages,
    PinError,
)
from tests.processes import until
from tests.vmem.conftest import Make
from tests.vmem.sequences import begin, run, serve
from tests.vmem.small_memory import (
    BLOCK_TOKENS,
    DOCUMENTS,
    MAX_TOKENS,
    PAGE_BYTES,
    FlakyCuda,
    FlakyHost,
    FlakyMirror,
    make_memory,
)

DOCUMENT = DOCUMENTS[0][:100]
CAPACITY = 200 * PAGE_BYTES


@pytest.fixture
def pages() -> Iterator[DevicePages]:
    pages = DevicePages(CAPACITY)
    yield pages
    pages.check_integrity()
    pages.close()  # raises if a test left a backend open


@pytest.fixture
def shared(pages: DevicePages, make: Make) -> Make:
    """`make`, over the pages of one device."""

    def make_shared(backend: type[FlakyHost] | type[FlakyCuda] = FlakyHost, **settings: Any) -> Any:
        return make(device=backend(CAPACITY, pages), pages=pages, **settings)

    return make_shared


@pytest.mark.parametrize(
    ("backend", "kind", "windowed", "stateful", "options"),
    [
        (FlakyHost, "interleaved", False, False, {}),
        (FlakyHost, "per_layer", True, False, {}),
        (FlakyHost, "interleaved", True, True, {}),
        (FlakyHost, "sliced", False, False, {}),
        (FlakyHost, "interleaved", False, False, {"eager_allocation": True, "idle_release_s": 10.0}),
        (FlakyHost, "interleaved", False, False, {"deferred_reclamation": False}),
        (FlakyCuda, "interleaved", False, False, {}),
        (FlakyCuda, "sliced", False, False, {}),
        (FlakyMirror, "per_layer", True, False, {}),
    ],
)
def test_everything_goes_and_the_memory_works_again(
    make: Make, backend: type, kind: LayoutKind, windowed: bool, stateful: bool, options: dict[str, Any]
) -> None:
    """Free, parked, cached and pinned pages, in every layout; only the anchor page stays."""
    memory = make(backend, kind=kind, windowed=windowed, stateful=stateful, num_pages=120, num_regions=8, **options)
    for _ in range(2):
        sequences = [run(memory, document[:97], policy="auto") for document in DOCUMENTS]
        if not stateful:
            memory.pin("system", sequences[0], 64)
        for sequence in sequences:
            memory.free(sequence)
        assert memory.held_bytes > 0
        pinned = memory.release_all()
        assert memory.held_bytes == 0
        memory.check_idle()
        report = memory.report()
        assert (report.physical_bytes, report.pins, report.cached_prefixes) == (0, (), 0)
        assert report.mapped_bytes == memory.backend.num_mappings * memory.pages.handle_bytes
        if not stateful:
            [prefix] = pinned
            assert (prefix.pin_name, prefix.keys) == ("system", ())
            assert list(prefix.token_ids) == DOCUMENTS[0][:64]
    memory.wait_for_progress(0.02)  # the mapper expects no prompt: it takes nothing by itself
    assert memory.held_bytes == 0
    run(memory, DOCUMENT, found=0)


def test_an_open_sequence_is_refused(shared: Make) -> None:
    memory = shared()
    run(memory, DOCUMENT)
    with pytest.raises(IntegrityError, match="released with 1 sequences open"):
        memory.release_all()


@pytest.mark.parametrize("backend", [FlakyHost, FlakyCuda])
def test_each_call_that_fails_can_be_repeated(shared: Make, backend: type, pages: DevicePages) -> None:
    """Whichever call of the device fails, the accounting holds, and the second answer has the pins of the first."""
    memory = shared(backend, kind="per_layer", num_pages=120, background=False)
    device = memory.backend
    for number in itertools.count(1):
        sequence = run(memory, DOCUMENT, policy="auto")
        memory.map_home(sequence)
        memory.pin("system", sequence, 64)
        memory.free(sequence)
        device.fail_at = device.num_calls + number
        try:
            pinned = memory.release_all()
        except MapError:
            memory.check_integrity()
            pages.check_integrity()
            device.fail_at = -1
            pinned = memory.release_all()
        done = device.fail_at >= device.num_calls
        device.fail_at = -1
        memory.check_idle()
        assert (memory.held_bytes, pages.used_bytes) == (0, PAGE_BYTES)  # the anchor page
        assert [prefix.pin_name for prefix in pinned] == ["system"]
        if done:
            break
    assert number > 5


def test_work_of_the_mapper_in_hand_is_waited_for(make: Make) -> None:
    """Its blocks and pages are in no list meanwhile."""
    entered, go_on = threading.Event(), threading.Event()

    class Slow(FlakyHost):
        def unmap(self, mapped: AddressRange) -> None:
            if threading.current_thread().name == "folio-mapper":
                entered.set()
                assert go_on.wait(30)
            super().unmap(mapped)

    memory = make(Slow, num_pages=60, prefix_cache=False, idle_release_s=0.0)
    memory.free(begin(memory, 100, "block_table"))
    assert entered.wait(30)
    with ThreadPoolExecutor(1) as pool:
        releasing = pool.submit(memory.release_all)
        assert not wait([releasing], 0.05).done
        go_on.set()
        assert releasing.result(30) == []
    assert memory.held_bytes == 0


def test_the_floor_is_filled_again(make: Make) -> None:
    memory = make(floor_pages=12)
    serve(memory, DOCUMENT)
    memory.release_all()
    until(lambda: memory.held_bytes == 12 * PAGE_BYTES)


def test_a_budget_of_nothing(shared: Make) -> None:
    """Cached pages go, pinned ones stay, and no call breaks; the longest sequence is no bound."""
    memory = shared(num_pages=60)
    serve(memory, DOCUMENT)
    assert memory.least_budget_bytes == 0
    assert memory.set_budget(0, 1) == "deferred"
    until(lambda: not memory.held_bytes)
    assert memory.num_free_pages == 0
    sequence = memory.create_sequence()
    assert memory.share_prefix(sequence, memory.prefixes.chain(), DOCUMENT) == 0
    with pytest.raises(OutOfPages):
        memory.append(sequence, 1)
    memory.plan([])
    memory.ensure([])
    assert memory.fit_together([MAX_TOKENS])  # one day
    memory.free(sequence)
    assert memory.set_budget(memory.most_budget_bytes, 2) == "applied"
    sequence = run(memory, DOCUMENT)
    memory.pin("system", sequence, 64)
    assert memory.least_budget_bytes == 4 * PAGE_BYTES
    with pytest.raises(BudgetError, match=f"must be between {4 * PAGE_BYTES}"):
        memory.set_budget(3 * PAGE_BYTES, 3)
    assert memory.set_budget(4 * PAGE_BYTES, 3) == "deferred"
    assert memory.num_free_pages == -3
    memory.pins.check_pin("other", memory.prefixes.chain(), DOCUMENTS[1][:32])  # may be pinned later
    memory.free(sequence)
    assert [prefix.pin_name for prefix in memory.release_all()] == ["system"]
    assert memory.set_budget(0, 4) == "applied"


def test_bounds_beside_the_longest_sequence(shared: Make, pages: DevicePages) -> None:
    """The start and pins leave room for the longest sequence all the same, and the floor is a bound."""
    device = FlakyHost(CAPACITY, pages)
    with pytest.raises(BudgetError, match=f"between {10 * PAGE_BYTES}"):
        make_memory(device=device, pages=pages, num_pages=9)
    device.close()
    memory = shared(num_pages=12, floor_pages=3, pin_quota=1.0)
    assert memory.least_budget_bytes == 3 * PAGE_BYTES
    sequence = run(memory, DOCUMENT)
    with pytest.raises(PinError, match=f"of the {2 * PAGE_BYTES} that may be pinned"):
        memory.pin("system", sequence, 3 * BLOCK_TOKENS)
    memory.pin("system", sequence, 2 * BLOCK_TOKENS)


def test_memories_share_the_limit_of_mappings(shared: Make, pages: DevicePages) -> None:
    """vm.max_map_count holds for a process. What one memory has mapped the other may not map; it is not divided before
    it is used."""
    limit = 60
    memory, other = (shared(num_pages=60, max_mappings=limit, num_regions=8, prefix_cache=False) for _ in range(2))
    left = memory.policy.mappings_left
    assert left == other.policy.mappings_left < limit
    first = [begin(memory, 100, "auto") for _ in range(3)]
    assert memory.policy.mappings_left == other.policy.mappings_left < left - 3 * 7
    second = [begin(other, 100, "auto") for _ in range(3)]
    assert memory.report().demotions + other.report().demotions > 0
    assert pages.mappings.total <= limit + 3 * 7  # home mappings of sequences without a region
    for each, sequences in ((memory, first), (other, second)):
        for sequence in sequences:
            each.free(sequence)
    memory.release_all()
    assert other.release_all() == []
    assert other.policy.mappings_left == limit - other.backend.num_mappings - memory.backend.num_mappings
    assert all(begin(other, 100, "auto").view == "region" for _ in range(2))
