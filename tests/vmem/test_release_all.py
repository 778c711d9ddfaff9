"""`KVMemory.release_all` and budgets down to nothing."""

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
    KVMemory,
    LayoutKind,
    MapError,
    OutOfPages,
    PinError,
    SequenceMemory,
    StepDemand,
)
from tests.vmem.small_memory import (
    BLOCK_TOKENS,
    DOCUMENTS,
    MAX_TOKENS,
    PAGE_BYTES,
    FlakyBackend,
    FlakyCuda,
    FlakyHost,
    FlakyMirror,
    Tokens,
    cache,
    make_memory,
    pages_read,
    read,
    write,
)

DOCUMENT = DOCUMENTS[0][:100]
CAPACITY = 200 * PAGE_BYTES


@pytest.fixture
def pages() -> Iterator[DevicePages]:
    pages = DevicePages(CAPACITY)
    yield pages
    pages.check_integrity()
    pages.close()  # raises if a test left a backend open


def shared(
    pages: DevicePages, backend: type[FlakyHost] | type[FlakyCuda] = FlakyHost, **settings: Any
) -> tuple[KVMemory, FlakyBackend]:
    return make_memory(device=backend(CAPACITY, pages), pages=pages, **settings)


def begin(memory: KVMemory, token_ids: list[int], policy: str = "auto") -> tuple[SequenceMemory, Tokens]:
    """A sequence that has computed and cached these tokens."""
    tokens = Tokens(memory.prefixes.chain(), list(token_ids))
    sequence = memory.create_sequence(policy, expected_tokens=len(token_ids))  # type: ignore[arg-type]
    found = memory.share_prefix(sequence, tokens.chain, token_ids)
    memory.append(sequence, len(token_ids))
    memory.prefixes.stage_prefix(sequence, token_ids, found, len(token_ids))
    demand = StepDemand(sequence, found, len(token_ids))
    memory.ensure([demand])
    if isinstance(memory.backend, FlakyCuda):
        memory.backend.fake.launch(pages_read(memory, [demand]))
    write(memory, demand, tokens.contents[found:], "home")
    memory.launched()
    memory.prefixes.commit_prefixes()
    return sequence, tokens


def check(memory: KVMemory, sequence: SequenceMemory, tokens: Tokens) -> None:
    demand = StepDemand(sequence, 0, len(tokens.ids))
    for group in memory.groups:
        for layer in group.layers:
            table = sequence.groups[memory.tensors.group_of(layer)]
            assert read(memory, demand, layer, "home") == tokens.contents[table.first * group.layout.block_tokens :]


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
    backend: type[FlakyHost] | type[FlakyCuda] | type[FlakyMirror],
    kind: LayoutKind,
    windowed: bool,
    stateful: bool,
    options: dict[str, Any],
) -> None:
    """Free, parked, cached and pinned pages, in every layout; only the anchor page stays."""
    memory, device = make_memory(
        backend, kind=kind, windowed=windowed, stateful=stateful, num_pages=120, num_regions=8, **options
    )
    for _ in range(2):
        sequences = [begin(memory, document[:97])[0] for document in DOCUMENTS]
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
        assert report.mapped_bytes == device.num_mappings * memory.pages.handle_bytes
        if not stateful:
            [prefix] = pinned
            assert (prefix.pin_name, prefix.keys) == ("system", ())
            assert list(prefix.token_ids) == DOCUMENTS[0][:64]
    memory.wait_for_progress(0.02)  # the mapper expects no prompt: it takes nothing by itself
    assert memory.held_bytes == 0
    sequence, tokens = begin(memory, DOCUMENT)
    assert memory.report().hit_tokens == 0
    check(memory, sequence, tokens)
    memory.free(sequence)
    memory.close()
    if isinstance(device, FlakyCuda):
        assert (device.fake.leftovers, device.fake.violations) == ((0, 0, 0, 0, 0), [])


def test_pins_can_be_made_again(pages: DevicePages) -> None:
    """In the order of the first pins, from what the call returned."""
    memory, _ = shared(pages, num_pages=100)
    for name, num_tokens in (("long", 96), ("short", 40)):
        sequence, _ = begin(memory, DOCUMENTS[len(name) % 2][:100])
        memory.pin(name, sequence, num_tokens)
        memory.free(sequence)
    before = memory.report().pins
    pinned = memory.release_all()
    assert [(p.pin_name, len(p.token_ids)) for p in pinned] == [("long", 96), ("short", 32)]  # whole units
    assert memory.release_all() == []
    for prefix in pinned:
        sequence, _ = begin(memory, list(prefix.token_ids))
        memory.pin(prefix.pin_name or "", sequence, len(prefix.token_ids))
        memory.free(sequence)
    assert [pin.name for pin in memory.report().pins] == [pin.name for pin in before]
    memory.check_idle()
    memory.close()


def test_swapped_sequences_survive(pages: DevicePages) -> None:
    """Their copies are in host memory; they come back with their contents while another memory had the pages."""
    memory, _ = shared(pages, swap_pages=40, num_pages=100)
    other, _ = shared(pages, num_pages=100)
    kept = [begin(memory, document[:90]) for document in DOCUMENTS]
    swapped = memory.swap_out([sequence for sequence, _ in kept])
    memory.release_all()
    memory.check_integrity()
    assert memory.set_budget(0, 1) == "applied"
    sequence, _ = begin(other, list(range(500, 500 + MAX_TOKENS)))
    with pytest.raises(OutOfPages):
        memory.swap_in(swapped)
    other.free(sequence)
    other.release_all()
    memory.set_budget(memory.most_budget_bytes, 2)
    back = memory.swap_in(swapped)
    for sequence, (_, tokens) in zip(back, kept, strict=True):
        check(memory, sequence, tokens)
        memory.free(sequence)
    memory.release_all()
    memory.close()
    other.close()


def test_an_open_sequence_is_refused(pages: DevicePages) -> None:
    memory, _ = shared(pages)
    sequence, tokens = begin(memory, DOCUMENT)
    with pytest.raises(IntegrityError, match="released with 1 sequences open"):
        memory.release_all()
    check(memory, sequence, tokens)
    memory.free(sequence)
    memory.close()


@pytest.mark.parametrize("policy", ["region", "block_table"])
def test_running_steps_are_waited_for(policy: str, pages: DevicePages) -> None:
    """The device may still read what an ended sequence had."""
    memory, device = shared(pages, FlakyCuda)
    assert isinstance(device, FlakyCuda)
    sequence, _ = begin(memory, DOCUMENT, policy)
    assert device.fake.num_running == 1
    memory.free(sequence)
    memory.release_all()
    assert (device.fake.num_running, device.fake.violations) == (0, [])
    assert (memory.held_bytes, pages.used_bytes) == (0, PAGE_BYTES)  # the anchor page
    memory.close()
    assert device.fake.leftovers == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("backend", [FlakyHost, FlakyCuda])
def test_each_call_that_fails_can_be_repeated(backend: type[FlakyHost] | type[FlakyCuda], pages: DevicePages) -> None:
    """Whichever call of the device fails, the accounting holds, and the second answer has the pins of the first."""
    memory, device = shared(pages, backend, kind="per_layer", num_pages=120, background=False)
    for number in itertools.count(1):
        sequence, _ = begin(memory, DOCUMENT)
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
        assert (memory.held_bytes, pages.used_bytes) == (0, PAGE_BYTES)
        assert [prefix.pin_name for prefix in pinned] == ["system"]
        if done:
            break
    assert number > 5
    memory.close()


def test_work_of_the_mapper_in_hand_is_waited_for(pages: DevicePages) -> None:
    """Its blocks and pages are in no list meanwhile."""
    entered, go_on = threading.Event(), threading.Event()

    class Slow(FlakyHost):
        def unmap(self, mapped: AddressRange) -> None:
            if threading.current_thread().name == "folio-mapper":
                entered.set()
                assert go_on.wait(30)
            super().unmap(mapped)

    memory, _ = make_memory(device=Slow(CAPACITY, pages), pages=pages, num_pages=60, prefix_cache=False)
    sequence, _ = begin(memory, DOCUMENT, "block_table")
    memory.free(sequence)
    memory.set_budget(0, 1)
    assert entered.wait(30)
    with ThreadPoolExecutor(1) as pool:
        releasing = pool.submit(memory.release_all)
        assert not wait([releasing], 0.05).done
        go_on.set()
        assert releasing.result(30) == []
    assert memory.held_bytes == 0
    memory.check_idle()
    memory.close()


def test_the_floor_is_filled_again() -> None:
    memory, _ = make_memory(floor_pages=12)
    sequence, _ = begin(memory, DOCUMENT)
    memory.free(sequence)
    memory.release_all()
    for _ in range(500):
        memory.wait_for_progress(0.01)
        if memory.held_bytes == 12 * PAGE_BYTES:
            break
    assert memory.held_bytes == 12 * PAGE_BYTES
    memory.close()


def test_a_budget_of_nothing(pages: DevicePages) -> None:
    """Cached pages go, pinned ones stay, and no call breaks; the longest sequence is no bound."""
    memory, _ = shared(pages, num_pages=60)
    cache(memory, DOCUMENT)
    assert memory.least_budget_bytes == 0
    assert memory.set_budget(0, 1) == "deferred"
    for _ in range(500):
        if not memory.held_bytes:
            break
        memory.wait_for_progress(0.01)
    assert (memory.held_bytes, memory.num_free_pages) == (0, 0)
    sequence = memory.create_sequence()
    assert memory.share_prefix(sequence, memory.prefixes.chain(), DOCUMENT) == 0
    with pytest.raises(OutOfPages):
        memory.append(sequence, 1)
    memory.plan([])
    memory.ensure([])
    assert memory.fit_together([MAX_TOKENS])  # one day
    memory.free(sequence)
    assert memory.set_budget(memory.most_budget_bytes, 2) == "applied"
    sequence, _ = begin(memory, DOCUMENT)
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
    memory.check_idle()
    memory.close()


def test_bounds_beside_the_longest_sequence(pages: DevicePages) -> None:
    """The start and pins leave room for the longest sequence all the same, and the floor is a bound."""
    device = FlakyHost(CAPACITY, pages)
    with pytest.raises(BudgetError, match=f"between {10 * PAGE_BYTES}"):
        make_memory(device=device, pages=pages, num_pages=9)
    device.close()
    memory, _ = shared(pages, num_pages=12, floor_pages=3, pin_quota=1.0)
    assert memory.least_budget_bytes == 3 * PAGE_BYTES
    sequence, _ = begin(memory, DOCUMENT)
    with pytest.raises(PinError, match=f"of the {2 * PAGE_BYTES} that may be pinned"):
        memory.pin("system", sequence, 3 * BLOCK_TOKENS)
    memory.pin("system", sequence, 2 * BLOCK_TOKENS)
    memory.free(sequence)
    memory.close()


def test_memories_share_the_limit_of_mappings(pages: DevicePages) -> None:
    """vm.max_map_count holds for a process. What one memory has mapped the other may not map; it is not divided before
    it is used."""
    limit = 60
    memory, _ = shared(pages, num_pages=60, max_mappings=limit, num_regions=8, prefix_cache=False)
    other, _ = shared(pages, num_pages=60, max_mappings=limit, num_regions=8, prefix_cache=False)
    left = memory.policy.mappings_left
    assert left == other.policy.mappings_left < limit
    first = [begin(memory, DOCUMENT)[0] for _ in range(3)]
    assert memory.policy.mappings_left == other.policy.mappings_left < left - 3 * 7
    second = [begin(other, DOCUMENT)[0] for _ in range(3)]
    assert memory.report().demotions + other.report().demotions > 0
    assert pages.mappings.total <= limit + 3 * 7  # home mappings of sequences without a region
    for each, sequences in ((memory, first), (other, second)):
        for sequence in sequences:
            each.free(sequence)
    memory.close()
    assert other.release_all() == []
    assert other.policy.mappings_left == limit - other.backend.num_mappings
    alone = [begin(other, DOCUMENT)[0] for _ in range(2)]
    assert all(sequence.view == "region" for sequence in alone)
    for sequence in alone:
        other.free(sequence)
    other.close()
