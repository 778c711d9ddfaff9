"""The memory's lock: free while the device works; calls that change ownership take turns."""

from __future__ import annotations

import itertools
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from folio.vmem import CHANGE_BYTES, NO_KEYS, LocalContents, MapError, StepDemand
from tests.processes import until
from tests.vmem.conftest import Make
from tests.vmem.sequences import begin, serve
from tests.vmem.small_memory import (
    MAX_TOKENS,
    PAGE_BYTES,
    FlakyCuda,
    FlakyHost,
    FlakyMirror,
    make_memory,
)

DEADLINE_S = 10
NUM_PAGES = 40
DEVICE_CALLS = ("create", "destroy", "map", "unmap", "fence", "wait")
COPIES = ("copy", "save", "restore", "discard")


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """Another thread, such as a server's event loop."""
    with ThreadPoolExecutor(1) as thread:
        yield thread


Watch = Callable[[object, tuple[str, ...], Callable[[str], None]], None]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """`watch(owner, names, note)`: have `note` called before each call of these methods of an object or class."""

    def watched(name: str, real: Callable[..., object], note: Callable[[str], None]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            note(name)
            return real(*args, **kwargs)

        return call

    def watch_all(owner: object, names: tuple[str, ...], note: Callable[[str], None]) -> None:
        for name in names:
            monkeypatch.setattr(owner, name, watched(name, getattr(owner, name), note))

    return watch_all


@pytest.mark.parametrize("backend", [FlakyHost, FlakyCuda, FlakyMirror])
def test_others_read_and_set_while_the_device_works(backend: type, other: ThreadPoolExecutor, watch: Watch) -> None:
    """Regression: the lock was held over copies, mapping and fences, and an event loop waited for a report."""
    memory, device = make_memory(
        backend, num_pages=NUM_PAGES, swap_pages=20, deferred_reclamation=False, background=False
    )
    seen: set[str] = set()
    revision = 0

    def ask(name: str) -> None:
        nonlocal revision
        seen.add(name)
        revision += 1
        other.submit(memory.set_budget, NUM_PAGES * PAGE_BYTES, revision).result(DEADLINE_S)
        assert other.submit(memory.report).result(DEADLINE_S).budget_revision == revision

    watch(device, DEVICE_CALLS, ask)
    watch(LocalContents, COPIES, ask)
    first = begin(memory, 40)
    memory.launched()
    fork = memory.fork(first, 40, "region")
    memory.append(fork, 41)
    memory.ensure([StepDemand(fork, 40, 41)])
    if isinstance(device, FlakyCuda):
        device.fake.finish_work()
    for sequence in (first, *memory.swap_in(memory.swap_out([fork]))):
        memory.free(sequence)
    memory.close()
    assert seen == {*DEVICE_CALLS, *COPIES}


def test_reports_are_read_while_the_lock_is_held(make: Make, other: ThreadPoolExecutor) -> None:
    """Regression: `report` and `cached_keys` waited for the lock without a limit."""
    memory = make()
    with memory.lock:
        assert other.submit(memory.prefixes.cached_keys, 100).result(DEADLINE_S) == NO_KEYS  # not known yet
    serve(memory, list(range(40)))
    report, keys = memory.report(), memory.prefixes.cached_keys(100)
    assert len(keys.keys) == 12
    with memory.lock:
        assert other.submit(memory.report).result(DEADLINE_S) == report
        assert other.submit(memory.prefixes.cached_keys, 100).result(DEADLINE_S) == keys
    serve(memory, list(range(100, 140)))
    with memory.lock:
        assert (
            other.submit(memory.prefixes.cached_keys, 100).result(DEADLINE_S) == keys
        )  # the last ones that were returned
    assert len(memory.prefixes.cached_keys(100).changes) == 2 * CHANGE_BYTES


def test_calls_of_the_engine_publish_a_report(make: Make, other: ThreadPoolExecutor) -> None:
    """Else a reader without the lock gets the figures of the last reader with it."""
    memory = make(clock=itertools.count().__next__)  # a report is made anew once it is 50 ms old
    sequence = memory.create_sequence("block_table")
    memory.append(sequence, 40)
    with memory.lock:
        assert other.submit(memory.report).result(DEADLINE_S).active_bytes == 3 * PAGE_BYTES


def test_the_engine_reads_figures_after_its_last_call(make: Make, other: ThreadPoolExecutor) -> None:
    """Regression: the engine's thread got figures from before its last call, because the mapper held the lock."""
    memory = make()
    sequence = memory.create_sequence("block_table")
    memory.append(sequence, 40)
    other.submit(memory.lock.acquire).result(DEADLINE_S)
    release = threading.Timer(0.1, memory.lock.release)  # longer than others wait for the lock
    release.start()
    assert memory.report().active_bytes == 3 * PAGE_BYTES
    release.join()


def test_the_mapper_begins_nothing_beside_a_call_and_goes_on_after_it(
    make: Make, other: ThreadPoolExecutor, watch: Watch
) -> None:
    """The mapper might take blocks that the call has just checked."""
    memory = make(num_pages=NUM_PAGES)
    for i in range(3):  # more pages than the least budget has
        serve(memory, list(range(i * MAX_TOKENS, (i + 1) * MAX_TOKENS)))
    begun = threading.Event()

    def lower(_: str) -> None:
        assert other.submit(memory.set_budget, memory.least_budget_bytes, 1).result(DEADLINE_S) == "deferred"
        assert not begun.wait(0.1)  # a chance to begin

    sequence = begin(memory, 24)
    child = memory.fork(sequence, 24)
    memory.append(child, 25)
    watch(memory.backend, ("destroy", "unmap"), lambda _: begun.set())
    watch(LocalContents, ("copy",), lower)
    memory.ensure([])
    until(lambda: memory.report().physical_bytes <= memory.report().budget_bytes)


def test_calls_that_change_ownership_take_turns(make: Make, other: ThreadPoolExecutor, watch: Watch) -> None:
    """While blocks are restored no sequence owns them yet: an audit in between would fail."""
    memory = make(num_pages=NUM_PAGES, swap_pages=20)
    swapped = memory.swap_out([begin(memory, 40)])
    audits: list[Future[None]] = []

    def audit(_: str) -> None:
        audits.append(other.submit(memory.check_integrity))
        wait(audits, timeout=0.1)  # a chance to come between

    watch(LocalContents, ("restore",), audit)
    memory.swap_in(swapped)
    audits[0].result(DEADLINE_S)


def test_an_audit_runs_without_the_lock(make: Make, other: ThreadPoolExecutor, watch: Watch) -> None:
    memory = make(num_pages=NUM_PAGES)
    asked: list[str] = []

    def ask(name: str) -> None:
        asked.append(name)
        other.submit(memory.set_budget, NUM_PAGES * PAGE_BYTES, len(asked)).result(DEADLINE_S)

    watch(memory.tree, ("check_integrity",), ask)
    memory.check_integrity()
    assert asked


def test_a_device_without_an_event_is_waited_for_without_a_lock(
    make: Make, other: ThreadPoolExecutor, watch: Watch
) -> None:
    """Regression: the mapper, asking for a fence with the lock held, waited for the device, too."""
    memory = make(FlakyCuda)
    device = memory.backend
    synchronised = threading.Event()

    def ask(_: str) -> None:
        assert other.submit(device.completed, 0).result(DEADLINE_S)
        synchronised.set()

    watch(device.fake, ("cuStreamSynchronize",), ask)
    device.fail_at = device.num_calls + 1  # of the event
    memory.launched()
    assert synchronised.is_set()


def test_unused_regions_cost_nothing(make: Make) -> None:
    """Regression: `max_num_seqs: 10⁹` filled the machine's memory with a list of free slots."""
    tracemalloc.start()
    try:
        memory = make(num_regions=10**7)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
    first, second = begin(memory, 16), begin(memory, 16)
    assert [s.groups[0].region.slot for s in (first, second) if s.groups[0].region] == [1, 2]


@pytest.mark.parametrize("num_regions", [10**12, 10**30])
def test_more_regions_than_addresses_are_refused(num_regions: int) -> None:
    """Regression: the size's lowest 64 bits made a range too small, and mappings behind it replaced other memory."""
    with pytest.raises(MapError, match=r"reservation of|that can be addressed"):
        make_memory(num_regions=num_regions)
