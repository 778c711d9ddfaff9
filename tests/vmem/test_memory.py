"""KV memory, one behaviour at a time; `memory_machine.py` mixes them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest
import torch

from folio.vmem import (
    BudgetError,
    HostBackend,
    IntegrityError,
    KVMemory,
    LayerGroup,
    LayoutError,
    LayoutKind,
    MapError,
    MappingOptions,
    OutOfPages,
    OutOfSwap,
    StepDemand,
    ViewPolicy,
    VmemError,
    plan_layout,
)
from folio.vmem.budget import MemoryCounts
from folio.vmem.mapping.mapper_policy import PromptDemand
from tests.processes import until
from tests.vmem.conftest import Make
from tests.vmem.sequences import begin, launch, reads, run, step
from tests.vmem.small_memory import (
    BLOCK_TOKENS,
    MAX_TOKENS,
    PAGE_BYTES,
    WINDOW_TOKENS,
    FlakyCuda,
    FlakyHost,
    FlakyMirror,
    do_background,
    groups,
    layout,
    make_memory,
    read,
    refusing,
    write,
)

DEADLINE_S = 10
NUM_ANCHORS = 2  # mappings of the anchor page in a memory of one group with one slice: at home and before the regions


# ---- views ----


def test_pages_come_on_demand_and_only_for_blocks(make: Make) -> None:
    memory = make()
    assert memory.report().physical_bytes == 0
    begin(memory, 17, "block_table")
    report = memory.report()
    assert (report.physical_bytes, report.active_bytes) == (2 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert report.num_mappings == 2 + NUM_ANCHORS
    with pytest.raises(IntegrityError, match="1 sequences open"):
        memory.close()


def test_the_mapping_budget_turns_regions_into_block_tables(still: Make) -> None:
    """ "auto" has a region while mappings are left, and is demoted once even parked ones are used up."""
    memory = still(max_mappings=20 + NUM_ANCHORS)
    first = begin(memory, 5 * BLOCK_TOKENS, "auto")  # five at home, five in its region
    assert first.view == "region"
    memory.free(first)
    second = begin(memory, 4 * BLOCK_TOKENS, "auto")
    third = begin(memory, 4 * BLOCK_TOKENS, "auto")  # 9 at home, 5 parked by the first and adopted by the second, …
    assert (second.view, third.view) == ("region", "region")
    fourth = begin(memory, 3 * BLOCK_TOKENS, "auto")
    assert fourth.view == "block_table"
    assert memory.report().demotions == 1
    memory.append(third, 10 * BLOCK_TOKENS)
    step(memory, third, 4 * BLOCK_TOKENS, 10 * BLOCK_TOKENS)
    assert third.view == "block_table"
    assert reads(memory, third, 10 * BLOCK_TOKENS, "home")
    assert memory.report().num_mappings <= 25 + NUM_ANCHORS


def test_the_mapping_budget_counts_every_slice(still: Make) -> None:
    num_slices = still(kind="per_layer").group_memories[0].num_slices
    assert num_slices > 1
    memory = still(kind="per_layer", max_mappings=9 * num_slices + NUM_ANCHORS)
    assert begin(memory, 5 * BLOCK_TOKENS, "auto").view == "block_table"
    memory = still(kind="per_layer", max_mappings=20 * num_slices + NUM_ANCHORS)
    assert begin(memory, 5 * BLOCK_TOKENS, "auto").view == "region"


def test_a_growth_that_fails_leaves_the_last_block_shared(still: Make) -> None:
    memory = still(prefix_cache=False)
    parent = begin(memory, 40, "block_table")
    child = memory.fork(parent, 40, "block_table")
    memory.backend.fail_at = memory.backend.num_calls + 4  # of the last block's copy a page has been created and mapped
    with pytest.raises(MapError, match="injected"):
        memory.append(child, 10 * BLOCK_TOKENS)
    assert child.groups[0].block_ids == parent.groups[0].block_ids
    memory.check_integrity()
    memory.append(child, 48)
    step(memory, child, 40, 48)
    assert reads(memory, child, 48, "home")


# ---- parked, adopted, aliased ----


def test_the_next_sequence_adopts_a_parked_region(still: Make) -> None:
    memory = still()
    memory.free(begin(memory, 60))
    before = memory.report()
    assert before.parked_bytes == 4 * PAGE_BYTES
    begin(memory, 60)
    after = memory.report()
    assert (after.map_calls, after.create_calls) == (before.map_calls, before.create_calls)
    assert (after.adoptions, after.adopted_blocks, after.parked_bytes) == (1, 4, 0)


def test_adoption_takes_the_shortest_region_that_is_long_enough(still: Make) -> None:
    memory = still()
    sequences = [begin(memory, blocks * BLOCK_TOKENS) for blocks in (2, 7, 4)]
    slots = [sequence.groups[0].region.slot for sequence in sequences]
    for sequence in sequences:
        memory.free(sequence)
    adopted = begin(memory, 3 * BLOCK_TOKENS)
    assert adopted.groups[0].region.slot == slots[2]
    longest = begin(memory, 9 * BLOCK_TOKENS)
    assert longest.groups[0].region.slot == slots[1]


def test_a_fork_adopts_the_region_that_begins_with_its_prefix(still: Make) -> None:
    """The longest mapped prefix counts, and the rest of the prefix is mapped once more where it is."""
    memory = still(num_regions=5)
    parent = begin(memory, 64)
    child = memory.fork(parent, 48)
    step(memory, child, 47, 48)
    assert memory.report().alias_calls == 3
    region = child.groups[0].region
    memory.free(begin(memory, 100))
    memory.free(child)  # parked: it shows the parent's first three blocks
    again = memory.fork(parent, 64)
    assert again.groups[0].region is not None
    assert region is not None
    assert again.groups[0].region.slot == region.slot
    step(memory, again, 63, 64)
    assert memory.report().alias_calls == 4
    assert reads(memory, again, 64, "region")


# ---- copy-on-write ----


def test_of_two_owners_of_a_last_block_only_one_copies_it(still: Make) -> None:
    """The other one writes into the block itself, after the copy."""
    memory = still()
    first = begin(memory, 10)
    second = memory.fork(first, 10)
    [shared] = first.groups[0].block_ids
    memory.append(second, 12)
    memory.append(first, 11)
    assert first.groups[0].block_ids == [shared] != second.groups[0].block_ids
    memory.ensure([StepDemand(first, 10, 11), StepDemand(second, 10, 12)])
    write(memory, StepDemand(first, 10, 11), [100.0], "home")
    write(memory, StepDemand(second, 10, 12), [200.0, 201.0], "home")
    assert read(memory, StepDemand(first, 0, 11), 0, "home") == [*range(10), 100.0]
    assert read(memory, StepDemand(second, 0, 12), 0, "home") == [*range(10), 200.0, 201.0]


def test_a_copy_of_a_due_copy(still: Make) -> None:
    memory = still()
    first = begin(memory, 10)
    second = memory.fork(first, 10)
    memory.append(second, 11)  # its copy is made with the next step
    third = memory.fork(second, 10)
    memory.append(third, 12)
    memory.free(first)
    memory.free(second)
    step(memory, third, 10, 12)
    assert reads(memory, third, 12)


# ---- windows and groups ----


def test_blocks_that_leave_the_window_are_freed_and_unmapped(still: Make) -> None:
    memory = still(windowed=True)
    sequence = begin(memory, 150)
    memory.append(sequence, 151)
    demand = step(memory, sequence, 150, 151)
    do_background(memory)
    full, windowed = sequence.groups
    assert (full.first, windowed.first) == (0, (150 - WINDOW_TOKENS + 1) // BLOCK_TOKENS)
    assert windowed.region is not None
    assert windowed.region.mapped_blocks[: windowed.first] == [-1] * windowed.first
    assert memory.report().active_bytes == (10 + 10 - windowed.first) * PAGE_BYTES
    assert read(memory, demand, 1, "region") == list(range(windowed.first * BLOCK_TOKENS, 151))
    with pytest.raises(VmemError, match="left the window"):
        memory.truncate(sequence, 100)
    with pytest.raises(VmemError, match="left the window"):
        memory.fork(sequence, 100)
    assert memory.backend.num_mappings == memory.report().num_mappings


def test_blocks_before_the_window_make_room_for_the_next(still: Make) -> None:
    memory = still(windowed=True, num_pages=20)
    sequence = begin(memory, 96)  # six blocks in each group
    begin(memory, 48)  # and three
    with pytest.raises(OutOfPages, match="4 pages needed"):
        memory.append(sequence, 128)
    memory.append(sequence, 128, start=96)  # three blocks have left the window


def test_groups_share_one_budget(still: Make) -> None:
    """Pages of one group's freed blocks go to the other."""
    memory = still(num_pages=20, windowed=True, max_tokens=160)
    memory.free(begin(memory, 160))  # ten pages in each group
    pool = memory.group_memories[0].pool
    sequence = memory.create_sequence("region")
    memory.append(sequence, 16)
    assert pool.num_owned == 1
    with pytest.raises(OutOfPages, match="20 pages needed"):
        memory.append(memory.create_sequence("block_table"), 160)
    memory.check_integrity()
    for leftover in list(memory.tables.sequences):
        memory.free(leftover)


# ---- failures ----


@pytest.mark.thirds
@pytest.mark.parametrize("backend", [FlakyHost, FlakyCuda, FlakyMirror])
@pytest.mark.parametrize("fail_at", range(1, 60))
def test_a_failure_at_each_call_changes_nothing(backend: type, fail_at: int, still: Make) -> None:
    """Append, fork, copy, unmap and release with call k failing: the same calls succeed a moment later."""
    memory = still(backend, kind="per_layer", windowed=True, idle_release_s=0.0, num_pages=60)
    device = memory.backend
    parent = begin(memory, 40)
    device.fail_at = device.num_calls + fail_at
    sequences = [parent]
    for _ in range(2):  # the second time nothing fails
        try:
            if parent.num_tokens < 60:
                memory.append(parent, 60)
            memory.ensure([StepDemand(parent, 40, 60)])
            if len(sequences) == 1:
                sequences.append(memory.fork(parent, 60))
            memory.append(sequences[1], 70)
            memory.ensure([StepDemand(sequences[1], 60, 70)])
            memory.append(parent, 62)
            memory.ensure([StepDemand(parent, 60, 62)])
            do_background(memory)
            memory.truncate(sequences[1], 60)
            do_background(memory)
            break
        except (MapError, OutOfPages):
            memory.check_integrity()
    device.fail_at = -1
    memory.check_integrity()
    assert reads(memory, sequences[1], 40, "region")
    if backend is FlakyMirror:
        assert device.there.num_mappings == device.num_mappings


def test_a_page_that_cannot_be_destroyed_is_kept(still: Make) -> None:
    """Of a call that fails no page is left. If destroying the new pages fails, too, they are spare, and the next call
    uses them."""
    memory = still()
    sequence, reset = memory.create_sequence("block_table"), memory.backend.before
    memory.backend.fail_at = memory.backend.num_calls + 3
    with pytest.raises(MapError):
        memory.append(sequence, 64)
    assert memory.report().physical_bytes == 0
    created = memory.report().create_calls
    memory.backend.before = refusing("map", "destroy")
    with pytest.raises(MapError):
        memory.append(sequence, 20)
    memory.backend.before = reset
    memory.check_integrity()
    assert memory.report().physical_bytes == 2 * PAGE_BYTES
    memory.append(sequence, 20)
    assert memory.report().create_calls == created + 2


def test_out_of_pages_leaves_the_sequence_alone(make: Make) -> None:
    memory = make(num_pages=11)
    a, b = begin(memory, 96), begin(memory, 80, "block_table")
    with pytest.raises(OutOfPages, match="2 pages needed, 0 free"):
        memory.append(b, 7 * BLOCK_TOKENS)
    assert len(b.groups[0].block_ids) == 5
    memory.check_integrity()
    memory.free(a)
    memory.append(b, 7 * BLOCK_TOKENS)


def test_misuse_is_refused(make: Make) -> None:
    memory = make(num_regions=2)
    first, _, extra = begin(memory, 16), begin(memory, 16), memory.create_sequence("region")
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: memory.append(extra, 5), "are held by other sequences"),
        (lambda: memory.append(extra, MAX_TOKENS + 1), "exceed the 160"),
        (lambda: memory.fork(first, 17), "a fork of 17"),
        (lambda: memory.truncate(first, 17), "truncation to 17"),
    ]
    for call, message in wrong:
        with pytest.raises(VmemError, match=message):
            call()
    memory.free(first)
    for call in (lambda: memory.free(first), lambda: memory.append(first, 1), lambda: memory.fork(first, 0)):
        with pytest.raises(IntegrityError, match="not open"):
            call()


def test_a_failure_at_each_call_of_the_constructor_leaves_nothing() -> None:
    """With two layer groups and states, calls for the anchor page included."""
    fails_at = 0
    while True:
        fails_at += 1
        device = FlakyCuda(1 << 20)
        device.fail_at = device.num_calls + fails_at
        try:
            memory = KVMemory(
                device,
                groups("per_layer", windowed=True, stateful=True),
                budget_bytes=1 << 19,
                num_regions=2,
                max_tokens=160,
                options=MappingOptions(background=False),
            )
        except MapError:
            device.close()  # raises if anything were left
            assert device.fake.leftovers == (0, 0, 0, 0, 0)
        else:
            break
    assert fails_at > 25  # a page; two homes and two ranges of two groups, a home of states: reserve, map, access
    memory.close()
    assert device.fake.leftovers == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("kind", ["interleaved", "per_layer"])
def test_the_anchor_page_is_at_the_beginning_of_every_range(make: Make, kind: LayoutKind) -> None:
    """Triton refuses a tensor that begins with a hole; padding rows write to the anchor page."""
    memory = make(FlakyCuda, kind=kind, num_pages=80, windowed=True, stateful=True, idle_release_s=0.0)
    tensors = memory.tensors
    [state, *_] = tensors.state_view()
    state.fill_(7)  # all of block 0
    for layer in (0, 1):
        for view in (tensors.home_view(layer), tensors.region_view(layer)):
            for side in view:
                side[0, 0] = 3.0  # a token of slot 0, and of block 0
    sequence = begin(memory, 150)
    assert all(0 not in table.block_ids for table in sequence.groups)
    assert all(table.region is None or table.region.slot > 0 for table in sequence.groups)
    tensors.home_view(0)[0][0].fill_(5.0)
    assert reads(memory, sequence, 150, "region")
    report = memory.report()
    memory.free(sequence)
    memory.backend.fake.finish_work()
    until(lambda: memory.report().physical_bytes == 0)
    assert memory.report().anchor_bytes == report.anchor_bytes == PAGE_BYTES
    assert memory.backend.fake.leftovers[0] == 1


def test_groups_of_different_pages_are_refused() -> None:
    backend = HostBackend(1 << 20)
    other = plan_layout(layout().layers, torch.float32, granularity_bytes=8192, block_tokens=16)
    with pytest.raises(LayoutError, match="one page size"):
        KVMemory(backend, [*groups(), LayerGroup((1,), other)], budget_bytes=1 << 20, num_regions=1, max_tokens=160)
    backend.close()


# ---- fences ----


def test_windows_expire_under_a_running_step(still: Make) -> None:
    memory = still(FlakyCuda, windowed=True)
    sequence = begin(memory, 150)
    launch(memory, StepDemand(sequence, 0, 150))
    memory.append(sequence, 151)
    memory.ensure([StepDemand(sequence, 150, 151)])
    do_background(memory)
    memory.backend.fake.finish_work()
    before = memory.report().unmap_calls
    do_background(memory)
    assert memory.report().unmap_calls == before + sequence.groups[1].first


# ---- the mapper ----


def test_the_next_step_is_mapped_beside_this_one(make: Make) -> None:
    memory = make()
    sequences = [begin(memory, 16) for _ in range(3)]
    exposed = memory.report().num_exposed
    memory.plan([StepDemand(sequence, 16, 40) for sequence in sequences])
    until(lambda: memory.report().eager_bytes == 6 * PAGE_BYTES)
    for sequence in sequences:
        memory.append(sequence, 40)
    memory.ensure([StepDemand(sequence, 16, 40) for sequence in sequences])
    assert memory.report().num_exposed == exposed


def cached_regions(memory: KVMemory, count: int, num_tokens: int) -> None:
    """Leave parked regions whose blocks are all cached."""
    prompts = [list(range(i * num_tokens, (i + 1) * num_tokens)) for i in range(count)]
    for sequence in [run(memory, ids, policy="region") for ids in prompts]:
        memory.free(sequence)


@pytest.mark.parametrize(("num_pages", "in_region"), [(40, True), (18, True), (18, False)])
def test_what_an_earlier_sequence_has_left_is_replaced_beside_the_step(
    still: Make, num_pages: int, in_region: bool
) -> None:
    """The step of a long prompt once remapped every place of its region that mapped cached content, and a unit took
    the blocks that the one before had mapped ahead. With 18 pages the content is evicted."""
    memory = still(FlakyCuda, num_pages=num_pages, num_regions=1, max_tokens=256)
    memory.free(run(memory, list(range(256)), policy="region" if in_region else "block_table"))
    memory.policy.unit_pages = 4
    sequence = begin(memory, 64)
    launch(memory, StepDemand(sequence, 0, 64))
    region = sequence.groups[0].region
    region.fence = memory.mapper.fence  # as if the earlier sequence's last step were still running
    memory.plan([StepDemand(sequence, 64, 256)])
    do_background(memory)
    assert not memory.backend.fake.violations
    memory.backend.fake.finish_work()
    do_background(memory)
    memory.check_integrity()
    exposed = memory.report().num_exposed
    memory.append(sequence, 256)
    step(memory, sequence, 64, 256)
    assert memory.report().num_exposed == exposed


def test_what_a_sequence_will_need_evicts_nothing_while_other_regions_have_blocks(still: Make) -> None:
    memory = still(num_pages=12, num_regions=3, max_tokens=192)
    memory.free(run(memory, list(range(64))))
    memory.free(begin(memory, 128))
    begin(memory, 16)
    sequence = begin(memory, 16)  # in a region of its own
    memory.plan([StepDemand(sequence, 16, 48)])
    do_background(memory)
    assert memory.report().evicted_blocks == 0
    memory.append(sequence, 48)
    step(memory, sequence, 16, 48)
    assert reads(memory, sequence, 48, "region")


def test_a_unit_of_work_changes_few_pages(still: Make) -> None:
    memory = still(num_regions=1, max_tokens=256)
    memory.free(run(memory, list(range(256)), policy="region"))
    memory.policy.unit_pages = 4
    sequence = begin(memory, 64)
    memory.plan([StepDemand(sequence, 64, 256)])
    unmapped = [memory.report().unmap_calls]
    while do_background(memory, most=1):
        unmapped.append(memory.report().unmap_calls)
    assert {after - before for before, after in pairwise(unmapped)} == {0, 4}


def test_a_truncation_within_the_last_block_keeps_what_is_to_come(still: Make) -> None:
    memory = still()
    sequence = begin(memory, 64)
    memory.plan([StepDemand(sequence, 64, 128)])
    memory.truncate(sequence, 60)
    assert sequence.groups[0].region.wanted == 128 // BLOCK_TOKENS


@pytest.mark.parametrize(
    ("num_cached", "num_pages", "policy"),
    [(0, 40, "region"), (6, 40, "region"), (6, 24, "region"), (0, 40, "block_table")],
    ids=["empty", "no slot left", "nor a page", "home"],
)
def test_the_prompt_that_waits_finds_its_blocks(
    still: Make, num_cached: int, num_pages: int, policy: ViewPolicy
) -> None:
    memory = still(num_pages=num_pages, num_regions=6, max_tokens=128)
    cached_regions(memory, num_cached, 64)
    memory.plan([], 64, policy)
    do_background(memory)
    memory.check_integrity()
    assert memory.report().cached_bytes >= (num_cached - 1) * 4 * PAGE_BYTES
    exposed = memory.report().num_exposed
    begin(memory, 64, policy)
    assert memory.report().num_exposed == exposed
    memory.plan([], 128)
    assert do_background(memory) < 100


def test_steps_that_need_nothing_leave_the_mapper_asleep(still: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = still(num_pages=40)
    sequence = begin(memory, 16)
    do_background(memory)
    notified: list[bool] = []
    monkeypatch.setattr(memory.lock, "notify_all", lambda: notified.append(True))
    memory.plan([])
    assert notified.pop()  # a sequence has begun
    memory.plan([StepDemand(sequence, 8, 16)])
    assert not notified
    memory.plan([StepDemand(sequence, 16, 48)])
    assert notified.pop()


@pytest.mark.parametrize("idle_release_s", [0.0, 0.05])
def test_a_prompt_that_never_begins_keeps_no_memory(make: Make, idle_release_s: float) -> None:
    """Regression: a request that was cancelled after the last step was expected for ever. Its region was unmapped as
    idle and mapped again at once, without end."""
    memory = make(idle_release_s=idle_release_s)
    memory.plan([], 64)
    until(lambda: memory.report().num_hidden > 0)
    until(lambda: memory.report().physical_bytes == 0)
    num_hidden = memory.report().num_hidden
    begun = time.monotonic()
    memory.wait_for_progress(0.1)  # which nothing interrupts
    assert time.monotonic() - begun >= 0.1
    assert (memory.report().num_hidden, memory.report().physical_bytes) == (num_hidden, 0)


def test_the_region_of_a_prompt_that_goes_on_waiting_stays(still: Make) -> None:
    """A batch may be full for longer than `idle_release_s`."""
    memory = still(idle_release_s=100.0)
    memory.plan([], 64)
    do_background(memory)
    now = time.monotonic()
    for later in (now + 60, now + 120):
        memory.plan([], 64)
        with memory.lock:
            assert memory.policy.next_work(later) is None
    with memory.lock:
        work = memory.policy.next_work(now + 300)
        assert work is not None
        memory.mapper.run_now(work)


def test_no_region_stays_where_no_block_can_be_had(still: Make) -> None:
    """Regression: for each prompt that was announced while another layer group had all free blocks, a region without
    mappings was parked, until there was none left to map ahead."""
    memory = still(num_pages=24, windowed=True, reclaim_threshold=0.0)
    sequence = begin(memory, 160)
    memory.append(sequence, 160, start=159)
    memory.ensure([StepDemand(sequence, 159, 160)])
    begin(memory, 64, "block_table")
    for _ in range(3):
        memory.plan([], 16)
        do_background(memory)
        assert [len(group.parked) for group in memory.group_memories] == [0, 1]
        assert all(region.num_mapped for group in memory.group_memories for region in group.parked)


def test_blocks_for_the_next_step_are_attached_ahead(still: Make) -> None:
    """Where the home view reads them: as many as are missing."""
    memory = still()
    sequence = begin(memory, 32, "block_table")
    memory.plan([StepDemand(sequence, 32, 64)])
    do_background(memory)
    assert memory.report().physical_bytes == 4 * PAGE_BYTES


def test_blocks_whose_fence_is_open_are_looked_at_again_soon(still: Make) -> None:
    """No notification comes when the device passes the fence."""
    memory = still(FlakyCuda, idle_release_s=0.0)
    sequence = begin(memory, 32, "block_table")
    launch(memory, StepDemand(sequence, 0, 32))
    memory.free(sequence)
    assert do_background(memory) == 0
    assert (memory.policy.wait_s(time.monotonic() - 100.0) or math.inf) < 1.0
    memory.backend.fake.finish_work()
    do_background(memory)
    assert memory.report().physical_bytes == 0


def test_a_report_made_at_most_50_ms_ago_is_not_made_anew(make: Make) -> None:
    """Readers that cannot have the lock get the last one."""
    memory = make(clock=lambda: 0.0)
    begin(memory, 32)
    with memory.lock, ThreadPoolExecutor(1) as pool:
        report = pool.submit(memory.report).result()
    assert report.active_bytes == 0
    assert memory.report().active_bytes == 2 * PAGE_BYTES


def test_counts_begin_at_zero() -> None:
    assert not any(asdict(MemoryCounts()).values())


def test_prompts_find_regions_mapped_ahead(make: Make) -> None:
    memory = make(eager_allocation=True, deferred_reclamation=False, num_pages=80)
    begin(memory, 64)
    memory.plan([])
    until(lambda: memory.report().eager_bytes == 4 * PAGE_BYTES)
    exposed = memory.report().num_exposed
    begin(memory, 64)
    assert memory.report().num_exposed == exposed


@pytest.mark.parametrize(
    ("options", "num_prompts", "num_blocks"),
    [
        ({}, 1, 4),
        ({"num_pages": 80, "num_regions": 8}, 3, 12),  # as many as came at once
        ({"idle_release_s": 60.0}, 1, 4),
        ({"idle_release_s": 0.0, "floor_pages": 20}, 1, 0),  # no prompt lately
        ({"eager_allocation": False}, 1, 0),
        ({"num_pages": 10, "reclaim_threshold": 0.2}, 1, 4),  # of the 6 free pages, 2 are left
        ({"num_pages": 10, "reclaim_threshold": 0.3}, 1, 0),
        ({"max_mappings": 20 + NUM_ANCHORS}, 1, 4),  # the prompt has 8; 4 at home, and half of the rest in a region
        ({"max_mappings": 19 + NUM_ANCHORS}, 1, 0),
    ],
)
def test_eager_allocation_for_the_next_prompt(
    options: dict[str, Any], num_prompts: int, num_blocks: int, still: Make
) -> None:
    memory = still(**{"eager_allocation": True, **options})
    for _ in range(num_prompts):
        begin(memory, 64)
    do_background(memory)
    assert memory.report().eager_bytes == num_blocks * PAGE_BYTES


def test_the_depth_follows_the_prompts() -> None:
    demand = PromptDemand()
    assert (demand.depth, demand.num_regions) == (0, 0)
    for num_blocks in (4, 4, 4, 100):
        demand.note_prompt(num_blocks, 0.0)
    for _ in range(100):  # steps without a prompt change nothing
        demand.note_step()
    assert (demand.depth, demand.num_regions) == (4, 4)
    for _ in range(40):
        demand.note_prompt(9, 0.0)
        demand.note_step()
    assert (demand.depth, demand.num_regions) == (9, 1)


def test_low_memory_unmaps_parked_regions(still: Make) -> None:
    """Under the threshold the regions parked longest are unmapped; their blocks become free without a mapping call."""
    memory = still(num_pages=20, reclaim_threshold=0.5, num_regions=4)
    sequences = [begin(memory, 80) for _ in range(4)]
    for sequence in sequences:
        memory.free(sequence)
    assert memory.report().parked_bytes == 20 * PAGE_BYTES
    do_background(memory)
    assert memory.report().parked_bytes == 10 * PAGE_BYTES
    assert memory.report().physical_bytes == 20 * PAGE_BYTES


def test_failing_unmaps_are_retried(make: Make) -> None:
    """Requests go on meanwhile, and the report counts the failures."""
    memory = make(idle_release_s=0.0)
    sequence, reset = begin(memory, 64), memory.backend.before
    memory.backend.before = refusing("unmap")
    memory.truncate(sequence, 16)
    until(lambda: memory.report().mapper_failures >= 4)
    memory.ensure([StepDemand(sequence, 15, 16)])
    memory.backend.before = reset
    until(lambda: memory.report().physical_bytes == PAGE_BYTES)
    memory.ensure([StepDemand(sequence, 15, 16)])


def test_mapping_that_keeps_failing_is_raised(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The next step raises what the mapper failed at three times in a row; idle pages still go back."""
    memory = make(idle_release_s=0.01)
    sequence, idle = begin(memory, 16), begin(memory, 48)
    memory.free(idle)

    def is_raised() -> bool:
        memory.plan([StepDemand(sequence, 16, 40)])
        try:
            memory.ensure([StepDemand(sequence, 15, 16)])
        except MapError:
            return True
        return False

    caplog.set_level("WARNING", "folio.vmem.mapping.mapper")
    memory.backend.before = refusing("map")
    until(is_raised)
    assert "failure 2 in a row" in caplog.text
    assert "failure 3 in a row" not in caplog.text  # the first, and ever fewer of the next
    until(lambda: memory.report().physical_bytes == PAGE_BYTES)


def test_the_mapper_outlives_a_device_that_does_not_say_how_far_it_is(make: Make) -> None:
    memory = make(idle_release_s=0.0)
    sequence = begin(memory, 48)
    completed = memory.backend.completed

    def refuse(fence: int) -> bool:
        raise MapError("injected")

    memory.backend.completed = refuse  # type: ignore[method-assign]
    memory.free(sequence)
    until(lambda: memory.mapper.death is not None or memory.report().mapper_failures >= 2)
    assert memory.mapper.death is None
    memory.backend.completed = completed  # type: ignore[method-assign]
    until(lambda: memory.report().physical_bytes == 0)


def test_a_dead_mapper_is_noticed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make()
    sequence = begin(memory, 16)
    monkeypatch.setattr(memory.policy, "next_work", None)  # a bug
    memory.plan([])
    until(lambda: memory.mapper.death is not None)
    calls: list[Callable[[], object]] = [
        lambda: memory.ensure([StepDemand(sequence, 0, 16)]),
        lambda: memory.append(sequence, 17),
        lambda: memory.wait_for_progress(0.01),
        lambda: memory.mapper.paused().__enter__(),
    ]
    for call in calls:
        with pytest.raises(IntegrityError, match="mapper thread has died"):
            call()


def test_blocks_that_the_mapper_moves_count_as_free(still: Make) -> None:
    """Regression: blocks being mapped ahead counted as owned, and the only request was preempted."""
    memory = still(num_pages=10)
    sequence = begin(memory, 16)
    free = memory.num_free_pages
    memory.plan([StepDemand(sequence, 16, 60)])
    with memory.lock:
        for _ in range(2):  # pages first, then the places
            work = memory.policy.next_work(time.monotonic())
            assert work is not None
            assert memory.num_free_pages == free
            memory.mapper.run_now(work)
    assert memory.report().eager_bytes == 3 * PAGE_BYTES
    assert memory.num_free_pages == free


def test_a_busy_region_is_waited_for(make: Make) -> None:
    """Regression: a busy region, the only parked one, counted as none and failed every request in flight."""
    memory = make(num_regions=1)
    memory.free(begin(memory, 40))
    [region] = memory.group_memories[0].parked
    with memory.lock:
        region.busy = True

    def release() -> None:
        with memory.lock:
            region.busy = False
            memory.lock.notify_all()

    timer = threading.Timer(0.05, release)
    timer.start()
    begin(memory, 40)
    timer.join()


class PageByPage(FlakyHost):
    max_call_bytes = PAGE_BYTES


def test_a_step_waits_for_one_unit_of_work(make: Make) -> None:
    """Regression: the mapper went from unit to unit of a region, and a step that needed it waited for all."""
    memory = make(PageByPage)
    sequence = memory.create_sequence("region")
    memory.append(sequence, 80)
    gate, begun = threading.Event(), threading.Event()
    units: list[int] = []
    seen_by_the_step: list[int] = []

    def gated(call: str, count: int) -> None:
        if call != "map":
            return
        if threading.current_thread().name == "folio-mapper":
            units.append(count)
            begun.set()
            gate.wait(DEADLINE_S)
        else:
            seen_by_the_step.append(len(units))

    memory.backend.before = gated
    memory.plan([StepDemand(sequence, 0, 80)])
    assert begun.wait(DEADLINE_S)
    threading.Timer(0.05, gate.set).start()
    memory.ensure([StepDemand(sequence, 0, 80)])
    assert seen_by_the_step == [1]


def test_nothing_changes_while_the_mapper_is_paused(make: Make) -> None:
    """A CUDA graph is captured then. The pause begins with the end of the unit of work in hand."""
    memory = make(PageByPage, num_pages=20, idle_release_s=0.0, cache_release_s=0.0)
    device = memory.backend
    begun = threading.Event()

    def slow(call: str, count: int) -> None:
        if call == "destroy":
            begun.set()
            time.sleep(0.002)

    device.before = slow
    memory.free(begin(memory, 160))
    assert begun.wait(DEADLINE_S)
    with memory.mapper.paused():
        before = device.num_calls
        time.sleep(0.05)
        assert device.num_calls == before
        assert memory.report().physical_bytes > 0
    until(lambda: memory.report().physical_bytes == 0)
    assert device.num_calls > before


def test_a_refused_mapping_demotes_the_sequence(still: Make) -> None:
    """A device whose table of mappings is full: what parked regions give up makes room for the blocks at home."""
    memory = still()
    device = memory.backend
    automatic, forced, ended = begin(memory, 20, "auto"), begin(memory, 20, "region"), begin(memory, 16, "region")
    memory.free(ended)
    for sequence in (automatic, forced):
        memory.append(sequence, 40)
    most, reset = device.num_mappings, device.before

    def refuse_more(call: str, count: int) -> None:
        if call == "map" and device.num_mappings + count > most:
            raise MapError("injected")

    device.before = refuse_more
    memory.ensure([StepDemand(automatic, 20, 40)])
    with pytest.raises(MapError):
        memory.ensure([StepDemand(forced, 20, 40)])
    device.before = reset
    assert (automatic.view, forced.view) == ("block_table", "region")
    assert read(memory, StepDemand(automatic, 0, 20), 0, "own")[:20] == list(range(20))


def test_forced_regions_take_mappings_from_parked_ones(still: Make) -> None:
    """Regression: `max_mappings` was ignored, and useless parked regions stayed mapped for ever."""
    memory = still(num_pages=40, max_mappings=25, num_regions=8)
    for _ in range(3):
        sequences = [begin(memory, 32) for _ in range(4)]
        for sequence in sequences:
            memory.free(sequence)
        table = begin(memory, 100, "block_table")
        memory.free(table)
    memory.check_integrity()
    assert memory.report().num_mappings <= 25


def test_unneeded_copies_are_dropped(still: Make) -> None:
    """Regression: a copy whose both ends were freed held its pages for ever, and growing twice copied twice."""
    memory = still(num_pages=10)
    parent = begin(memory, 150, "block_table")
    memory.truncate(parent, 10)
    child = memory.fork(parent, 10)
    for num_tokens in (11, 12, 13):
        memory.append(child, num_tokens)
    assert memory.report().active_bytes == 2 * PAGE_BYTES
    memory.free(child)
    assert memory.report().active_bytes == PAGE_BYTES
    memory.free(parent)
    begin(memory, 160)


def test_the_pages_of_a_copy_stay_until_it_is_made(still: Make) -> None:
    """Regression: freed with the fence of the step before, they were unmapped while the copy ran."""
    memory = still(FlakyCuda, idle_release_s=0.0)
    parent = begin(memory, 10, "block_table")
    memory.backend.fake.finish_work()
    child = memory.fork(parent, 10)
    memory.append(child, 11)
    memory.free(parent)
    unmapped = memory.report().unmap_calls
    memory.ensure([StepDemand(child, 10, 11)])  # queues the copy
    do_background(memory)
    assert memory.report().unmap_calls == unmapped
    memory.backend.fake.finish_work()
    do_background(memory)
    assert memory.report().unmap_calls == unmapped + 1


def test_a_full_device_takes_pages_from_the_other_group(still: Make) -> None:
    """The device has less memory than the budget: pages of another group's free blocks are used instead."""
    memory = still(windowed=True, num_pages=40)
    sequence = begin(memory, 96, "block_table")
    memory.append(sequence, 97)
    memory.ensure([StepDemand(sequence, 96, 97)])  # the window's group has free blocks now
    free = memory.group_memories[1].pool.num_free
    assert free >= 2
    memory.backend.before = refusing("create", error=OutOfPages(1, 0))
    memory.append(sequence, 97 + 16)
    with pytest.raises(OutOfPages):
        memory.append(sequence, 160)


# ---- the elastic budget ----


def test_idle_memory_goes_back_to_the_machine(make: Make) -> None:
    memory = make(FlakyHost, idle_release_s=0.05, eager_allocation=True, num_pages=80)
    sequences = [begin(memory, 100, policy) for policy in ("region", "block_table", "auto")]
    assert memory.backend.memory_info().physical_bytes >= 21 * PAGE_BYTES
    for sequence in sequences:
        memory.free(sequence)
    until(lambda: memory.report().physical_bytes == 0)
    assert memory.backend.memory_info().physical_bytes == memory.report().anchor_bytes == PAGE_BYTES
    assert memory.report().num_mappings == NUM_ANCHORS
    begin(memory, 100)


def test_the_floor_is_there_at_once_and_stays(make: Make) -> None:
    memory = make(floor_pages=12, idle_release_s=0.0)
    until(lambda: memory.report().physical_bytes == 12 * PAGE_BYTES)
    sequences = [begin(memory, 160), begin(memory, 160, "block_table")]
    assert memory.report().physical_bytes == 20 * PAGE_BYTES
    for sequence in sequences:
        memory.free(sequence)
    until(lambda: memory.report().physical_bytes == 12 * PAGE_BYTES)
    memory.wait_for_progress(0.02)  # which nothing interrupts
    assert memory.report().physical_bytes == 12 * PAGE_BYTES


def test_a_lower_budget_takes_free_pages_first(make: Make) -> None:
    """Free pages are negative as long as sequences own more."""
    memory = make(num_pages=40)
    other, kept = begin(memory, 160), [begin(memory, 100, "block_table") for _ in range(2)]
    memory.free(other)
    assert memory.set_budget(10 * PAGE_BYTES, 1) == "deferred"
    assert memory.num_free_pages == -4
    memory.free(kept.pop())
    until(lambda: memory.report().physical_bytes <= 10 * PAGE_BYTES)
    assert memory.num_free_pages == 3
    assert reads(memory, kept[0], 100)
    with pytest.raises(OutOfPages):
        memory.append(memory.create_sequence("block_table"), 64)
    assert memory.set_budget(30 * PAGE_BYTES, 3) == "applied"
    assert memory.set_budget(10 * PAGE_BYTES, 2) == "stale"
    assert memory.report().budget_revision == 3


def test_bounds_of_the_budget(make: Make) -> None:
    memory = make(num_pages=40)
    assert (memory.least_budget_bytes, memory.most_budget_bytes) == (10 * PAGE_BYTES, 40 * PAGE_BYTES)
    for pages in (9, 41):
        with pytest.raises(BudgetError, match=f"must be between {10 * PAGE_BYTES}, .* and {40 * PAGE_BYTES}"):
            memory.set_budget(pages * PAGE_BYTES, 1)
    assert memory.report().budget_revision == 0
    with pytest.raises(BudgetError):
        make_memory(num_pages=9)
    for _ in range(4):
        begin(memory, 160, "block_table")
    assert memory.held_bytes == 40 * PAGE_BYTES
    assert memory.set_budget(memory.least_budget_bytes, 1) == "deferred"
    assert memory.set_budget(memory.most_budget_bytes, 2) == "applied"


@pytest.mark.parametrize(("kind", "num_pages"), [("interleaved", 40), ("per_layer", 80)])
def test_lengths_that_fit_together(make: Make, kind: LayoutKind, num_pages: int) -> None:
    """Sequences of four blocks; shared whole blocks count once, and pinned blocks are not available."""
    memory = make(kind=kind, num_pages=num_pages)
    assert memory.fit_together([64] * 10)
    assert not memory.fit_together([64] * 11)
    assert memory.fit_together([64] * 19, shared_tokens=47)
    assert not memory.fit_together([64] * 20, shared_tokens=47)
    pinned = begin(memory, 32)
    memory.pin("system", pinned, 32)
    assert memory.fit_together([64] * 9)
    assert not memory.fit_together([64] * 10)
    memory.unpin("system")


def test_the_time_for_mapping_calls_is_part_of_the_time(make: Make) -> None:
    began = time.perf_counter()
    memory = make()
    sequence = begin(memory, 40)
    memory.plan([StepDemand(sequence, 40, 90)])
    until(lambda: memory.report().num_hidden > 0)
    report, passed_us = memory.report(), (time.perf_counter() - began) * 1e6
    assert 0 < report.exposed_us <= passed_us
    assert 0 < report.hidden_us <= passed_us


@pytest.mark.parametrize("kind", ["interleaved", "per_layer"])
def test_pages_a_sequence_still_needs(make: Make, kind: LayoutKind) -> None:
    memory = make(kind=kind)
    slices = memory.groups[0].layout.num_slices
    sequence = begin(memory, 64)
    assert memory.pages_still_needed(None, 64) == 4 * slices
    assert memory.pages_still_needed(sequence, 96) == 2 * slices
    assert memory.pages_still_needed(sequence, 64) == memory.pages_still_needed(sequence, 16) == 0


# ---- homes ----


def test_blocks_of_regions_are_mapped_once(still: Make) -> None:
    """Regression: every block was mapped twice, at home and in its region, whether anything read it at home or not."""
    memory = still()
    backend = memory.backend
    sequence = begin(memory, 80)
    assert backend.num_mappings == NUM_ANCHORS + 5
    begin(memory, 40, "block_table")
    assert backend.num_mappings == NUM_ANCHORS + 5 + 3
    memory.map_home(sequence)
    assert backend.num_mappings == NUM_ANCHORS + 5 + 3 + 5
    memory.map_home(sequence)
    assert backend.num_mappings == NUM_ANCHORS + 5 + 3 + 5


def test_a_copied_block_is_read_at_home(still: Make) -> None:
    """Copy-on-write of a block that only a region mapped, into a block that only a region will map."""
    memory = still()
    parent = begin(memory, 40)
    child = memory.fork(parent, 40)
    memory.append(child, 41)
    memory.ensure([StepDemand(child, 40, 41)])
    assert memory.backend.num_mappings == NUM_ANCHORS + 3 + 3 + 2  # source and target of the copy
    write(memory, StepDemand(child, 40, 41), [40.0], "own")
    assert reads(memory, child, 41, "region")


@pytest.mark.parametrize("backend", [FlakyHost, FlakyCuda])
def test_a_swap_that_cannot_read_its_blocks_changes_nothing(still: Make, backend: type) -> None:
    """The engine then recomputes the sequence, as without swap space."""
    memory = still(backend, swap_pages=10)
    sequence = begin(memory, 40)
    memory.backend.fail_at = memory.backend.num_calls + 1
    with pytest.raises(OutOfSwap, match="cannot be copied"):
        memory.swap_out([sequence])
    assert memory.report().swapped_bytes == 0
    assert reads(memory, sequence, 40, "region")


# ---- handles that several blocks share ----


@pytest.mark.parametrize("backend", [FlakyHost, FlakyCuda])
def test_sequences_share_handles(still: Make, backend: type) -> None:
    """Two blocks of 16 tokens share a handle of 4 KiB in each of two slices: an extent is 8 KiB."""
    memory = still(backend, kind="sliced", num_pages=41, idle_release_s=0.0)
    assert memory.report().budget_bytes == 40 * PAGE_BYTES  # whole extents
    first, second = (begin(memory, 16, policy) for policy in ("region", "auto"))
    assert (first.view, second.view) == ("block_table", "block_table")
    assert memory.report().physical_bytes == 2 * PAGE_BYTES
    assert memory.report().active_bytes == 2 * PAGE_BYTES
    third = begin(memory, 17)
    report = memory.report()
    assert (report.physical_bytes, report.active_bytes) == (4 * PAGE_BYTES, 4 * PAGE_BYTES)
    assert report.num_mappings == memory.backend.num_mappings == 6  # with the anchor's extent
    for sequence, length in ((first, 16), (second, 16), (third, 17)):
        for layer in (0, 1):
            assert reads(memory, sequence, length, "own", layer)
    if backend is FlakyCuda:
        memory.backend.fake.finish_work()
    memory.free(first)
    do_background(memory)
    assert memory.report().physical_bytes == 4 * PAGE_BYTES  # the other block of its extent is owned
    memory.check_integrity()
    memory.free(second)
    do_background(memory)
    assert memory.report().physical_bytes == 2 * PAGE_BYTES


def test_a_block_in_a_used_extent_needs_no_page(still: Make) -> None:
    memory = still(kind="sliced", num_pages=20)
    begin(memory, 16)
    free = memory.num_free_pages
    assert free == 40 - 2  # pages of half a handle
    others = [begin(memory, 16) for _ in range(19)]
    assert memory.num_free_pages == 0
    others.append(memory.create_sequence())
    with pytest.raises(OutOfPages):
        memory.append(others[-1], 16)
    memory.free(others.pop(0))
    assert memory.num_free_pages == 2
    memory.append(others[-1], 16)


def test_a_budget_of_shared_handles_is_whole_extents(still: Make) -> None:
    memory = still(kind="sliced", num_pages=40, max_tokens=48, pin_quota=0.5)
    assert memory.least_budget_bytes == 2 * 2 * PAGE_BYTES  # three blocks, in two extents
    sequence = begin(memory, 16)
    memory.pin("one", sequence, 16)
    memory.free(sequence)
    assert memory.least_budget_bytes == 2 * 2 * PAGE_BYTES
    assert memory.set_budget(memory.least_budget_bytes, 1) == "applied"
    with pytest.raises(BudgetError):
        memory.set_budget(memory.least_budget_bytes - 1, 2)
    memory.free(begin(memory, 48))  # the longest sequence fits beside the pin
    memory.unpin("one")


def test_several_groups_share_no_handles() -> None:
    layouts = [layout("sliced", shares_handles=True)] * 2
    with pytest.raises(LayoutError, match="single layer group"):
        KVMemory(
            FlakyHost(1 << 20),
            [LayerGroup((0, 1), layouts[0]), LayerGroup((2, 3), layouts[1], 40)],
            budget_bytes=1 << 19,
            num_regions=2,
            max_tokens=64,
        )


# ---- launches ----


def test_driver_time_beside_launched_steps_is_counted(still: Make) -> None:
    memory = still(FlakyCuda)
    memory.backend.fake.finish_work()
    first = begin(memory, 16)
    assert memory.report().in_flight_us == 0
    launch(memory, StepDemand(first, 0, 16))
    begin(memory, 16)
    counted = memory.report().in_flight_us
    assert 0 < counted <= memory.report().exposed_us
    memory.backend.fake.finish_work()
    begin(memory, 16)
    assert memory.report().in_flight_us == counted


def test_the_mapper_counts_its_time_beside_launched_steps(make: Make) -> None:
    memory = make(FlakyCuda)
    sequence = begin(memory, 16)
    launch(memory, StepDemand(sequence, 0, 16))
    memory.plan([StepDemand(sequence, 16, 40)])
    until(lambda: memory.report().num_hidden >= 2)
    report = memory.report()
    assert 0 < report.in_flight_us <= report.hidden_us + report.exposed_us
