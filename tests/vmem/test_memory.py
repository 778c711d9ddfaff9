"""KV memory, one behaviour at a time; `test_memory_machine.py` mixes them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
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
    SequenceMemory,
    StepDemand,
    ViewPolicy,
    VmemError,
    plan_layout,
)
from folio.vmem.budget import MemoryCounts
from folio.vmem.mapping.mapper_policy import PromptDemand
from tests.processes import until
from tests.vmem.small_memory import (
    BLOCK_TOKENS,
    MAX_TOKENS,
    PAGE_BYTES,
    WINDOW_TOKENS,
    FlakyCuda,
    FlakyHost,
    FlakyMirror,
    FlakyStandIn,
    cache,
    do_background,
    groups,
    layout,
    make_memory,
    no_thread,
    pages_read,
    read,
    write,
)

__all__ = ["no_thread"]  # a fixture

DEADLINE_S = 10
NUM_ANCHORS = 2  # mappings of the anchor page in a memory of one group with one slice: at home and before the regions


def begin(memory: KVMemory, num_tokens: int, policy: str = "region") -> SequenceMemory:
    """A sequence with blocks, mapped, and its positions written as its content."""
    sequence = memory.create_sequence(policy)  # type: ignore[arg-type]
    memory.append(sequence, num_tokens)
    step(memory, sequence, 0, num_tokens)
    return sequence


def step(memory: KVMemory, sequence: SequenceMemory, start: int, end: int) -> StepDemand:
    demand = StepDemand(sequence, start, end)
    memory.ensure([demand])
    write(memory, demand, [float(p) for p in range(start, end)], "own")
    return demand


def finish(memory: KVMemory, *sequences: SequenceMemory) -> None:
    for sequence in sequences:
        memory.free(sequence)
    memory.check_idle()
    memory.close()


# ---- views ----


@pytest.mark.parametrize("kind", ["interleaved", "per_layer"])
@pytest.mark.parametrize("backend", [FlakyHost, FlakyCuda, FlakyStandIn])
def test_written_through_one_view_read_through_the_other(backend: type, kind: str) -> None:
    memory, _ = make_memory(backend, kind=kind, windowed=True)  # type: ignore[arg-type]
    sequence = begin(memory, 40)
    for layer in (0, 1):
        for view in ("home", "region"):
            assert read(memory, StepDemand(sequence, 0, 40), layer, view) == list(range(40))
    write(memory, StepDemand(sequence, 0, 40), [p + 0.5 for p in range(40)], "region")
    assert read(memory, StepDemand(sequence, 0, 40), 1, "home") == [p + 0.5 for p in range(40)]
    finish(memory, sequence)


def test_pages_come_on_demand_and_only_for_blocks() -> None:
    memory, backend = make_memory()
    assert memory.report().physical_bytes == 0
    sequence = begin(memory, 17, "block_table")
    report = memory.report()
    assert (report.physical_bytes, report.active_bytes) == (2 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert report.num_mappings == 2 + NUM_ANCHORS
    with pytest.raises(IntegrityError, match="1 sequences open"):
        memory.close()
    finish(memory, sequence)
    assert backend.num_mappings == 0


def test_the_mapping_budget_turns_regions_into_block_tables(no_thread: None) -> None:
    """ "auto" has a region while mappings are left, and is demoted once even parked ones are used up."""
    memory, _ = make_memory(max_mappings=20 + NUM_ANCHORS)
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
    assert read(memory, StepDemand(third, 0, 10 * BLOCK_TOKENS), 0, "home") == list(range(10 * BLOCK_TOKENS))
    assert memory.report().num_mappings <= 25 + NUM_ANCHORS
    memory.check_integrity()
    finish(memory, second, third, fourth)


# ---- parked, adopted, aliased ----


def test_the_next_sequence_adopts_a_parked_region(no_thread: None) -> None:
    memory, _ = make_memory()
    memory.free(begin(memory, 60))
    before = memory.report()
    assert before.parked_bytes == 4 * PAGE_BYTES
    sequence = begin(memory, 60)
    after = memory.report()
    assert (after.map_calls, after.create_calls) == (before.map_calls, before.create_calls)
    assert (after.adoptions, after.adopted_blocks, after.parked_bytes) == (1, 4, 0)
    finish(memory, sequence)


def test_adoption_takes_the_shortest_region_that_is_long_enough(no_thread: None) -> None:
    memory, _ = make_memory()
    sequences = [begin(memory, blocks * BLOCK_TOKENS) for blocks in (2, 7, 4)]
    slots = [sequence.groups[0].region.slot for sequence in sequences]  # type: ignore[union-attr]
    for sequence in sequences:
        memory.free(sequence)
    adopted = begin(memory, 3 * BLOCK_TOKENS)
    assert adopted.groups[0].region.slot == slots[2]  # type: ignore[union-attr]
    longest = begin(memory, 9 * BLOCK_TOKENS)
    assert longest.groups[0].region.slot == slots[1]  # type: ignore[union-attr]
    memory.check_integrity()
    finish(memory, adopted, longest)


def test_a_fork_adopts_the_region_that_begins_with_its_prefix(no_thread: None) -> None:
    """The longest mapped prefix counts, and the rest of the prefix is mapped once more where it is."""
    memory, _ = make_memory(num_regions=5)
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
    assert read(memory, StepDemand(again, 0, 64), 0, "region") == list(range(64))
    finish(memory, parent, again)


def test_stale_places_are_remapped(no_thread: None) -> None:
    """Free-mapped blocks may be allocated to others; the adopter of their region maps its own blocks instead."""
    memory, _ = make_memory(num_pages=10, num_regions=2)
    memory.free(begin(memory, 160))
    thief = begin(memory, 64, "block_table")
    sequence = begin(memory, 96)
    demand = StepDemand(sequence, 0, 96)
    assert read(memory, demand, 0, "region") == list(range(96))
    assert set(sequence.groups[0].block_ids).isdisjoint(thief.groups[0].block_ids)
    memory.check_integrity()
    finish(memory, thief, sequence)


# ---- copy-on-write ----


@pytest.mark.parametrize("policy", ["region", "block_table"])
def test_a_shared_last_block_is_copied_before_the_first_write(policy: str, no_thread: None) -> None:
    memory, _ = make_memory(FlakyCuda)
    parent = begin(memory, 40, policy)
    child = memory.fork(parent, 40)
    assert child.groups[0].block_ids == parent.groups[0].block_ids
    for sequence in (parent, child):
        memory.append(sequence, 44)
    assert child.groups[0].block_ids[:2] == parent.groups[0].block_ids[:2]
    assert child.groups[0].block_ids[2] != parent.groups[0].block_ids[2]
    demands = [StepDemand(sequence, 40, 44) for sequence in (parent, child)]
    memory.ensure(demands)
    for demand, first in zip(demands, (100.0, 200.0), strict=True):
        write(memory, demand, [first + i for i in range(4)], "home")
    for demand, first in zip(demands, (100.0, 200.0), strict=True):
        expected = [*range(40), *(first + i for i in range(4))]
        assert read(memory, demand, 0, "home") == expected
        if policy == "region":
            assert read(memory, demand, 0, "region") == expected
    memory.check_integrity()
    finish(memory, parent, child)


def test_of_two_owners_of_a_last_block_only_one_copies_it(no_thread: None) -> None:
    """The other one writes into the block itself, after the copy."""
    memory, _ = make_memory()
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
    memory.check_integrity()
    finish(memory, first, second)


def test_a_copy_of_a_due_copy(no_thread: None) -> None:
    memory, _ = make_memory()
    first = begin(memory, 10)
    second = memory.fork(first, 10)
    memory.append(second, 11)  # its copy is made with the next step
    third = memory.fork(second, 10)
    memory.append(third, 12)
    memory.free(first)
    memory.free(second)
    demand = step(memory, third, 10, 12)
    assert read(memory, demand, 0, "region") == list(range(12))
    memory.check_integrity()
    finish(memory, third)


def test_truncated_tokens_can_be_written_again(no_thread: None) -> None:
    memory, _ = make_memory()
    sequence = begin(memory, 100)
    memory.truncate(sequence, 37)
    assert memory.report().active_bytes == 3 * PAGE_BYTES
    other = begin(memory, 64)
    memory.append(sequence, 90)
    demand = step(memory, sequence, 37, 90)
    assert read(memory, demand, 0, "region") == list(range(90))
    assert read(memory, StepDemand(other, 0, 64), 0, "region") == list(range(64))
    finish(memory, sequence, other)


# ---- windows and groups ----


def test_blocks_that_leave_the_window_are_freed_and_unmapped(no_thread: None) -> None:
    memory, backend = make_memory(windowed=True)
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
    assert backend.num_mappings == memory.report().num_mappings
    finish(memory, sequence)


def test_blocks_before_the_window_make_room_for_the_next(no_thread: None) -> None:
    memory, _ = make_memory(windowed=True, num_pages=20)
    sequence, other = begin(memory, 96), begin(memory, 48)  # six and three blocks in each group
    with pytest.raises(OutOfPages, match="4 pages needed"):
        memory.append(sequence, 128)
    memory.append(sequence, 128, start=96)  # three blocks have left the window
    finish(memory, sequence, other)


def test_groups_share_one_budget(no_thread: None) -> None:
    """Pages of one group's freed blocks go to the other."""
    memory, _ = make_memory(num_pages=20, windowed=True, max_tokens=160)
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
    memory.close()


# ---- failures ----


@pytest.mark.thirds
@pytest.mark.parametrize("backend", [FlakyHost, FlakyCuda, FlakyStandIn, FlakyMirror])
@pytest.mark.parametrize("fail_at", range(1, 60))
def test_a_failure_at_each_call_changes_nothing(backend: type, fail_at: int, no_thread: None) -> None:
    """Append, fork, copy, unmap and release with call k failing: the same calls succeed a moment later."""
    memory, device = make_memory(backend, kind="per_layer", windowed=True, idle_release_s=0.0, num_pages=60)
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
    assert read(memory, StepDemand(sequences[1], 0, 40), 0, "region") == list(range(40))
    if isinstance(device, FlakyMirror):
        assert device.there.num_mappings == device.num_mappings
    finish(memory, *sequences)
    if isinstance(device, FlakyCuda):
        assert device.fake.leftovers == (0, 0, 0, 0, 0)


def test_a_page_that_cannot_be_destroyed_is_kept(no_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapping fails, and so does destroying the new pages: they become spare, and the next call uses them."""
    memory, device = make_memory(FlakyCuda)
    sequence = memory.create_sequence("block_table")
    with monkeypatch.context() as patch:
        patch.setattr(device, "map", refuse)
        patch.setattr(device, "destroy", refuse)
        with pytest.raises(MapError):
            memory.append(sequence, 20)
    memory.check_integrity()
    assert memory.report().physical_bytes == 2 * PAGE_BYTES
    memory.append(sequence, 20)
    assert memory.report().create_calls == 2
    finish(memory, sequence)


def test_out_of_pages_leaves_the_sequence_alone() -> None:
    memory, _ = make_memory(num_pages=11)
    a, b = begin(memory, 96), begin(memory, 80, "block_table")
    with pytest.raises(OutOfPages, match="2 pages needed, 0 free"):
        memory.append(b, 7 * BLOCK_TOKENS)
    assert len(b.groups[0].block_ids) == 5
    memory.check_integrity()
    memory.free(a)
    memory.append(b, 7 * BLOCK_TOKENS)
    finish(memory, b)


def test_misuse_is_refused() -> None:
    memory, _ = make_memory(num_regions=2)
    sequences = [begin(memory, 16) for _ in range(2)]
    extra = memory.create_sequence("region")
    with pytest.raises(VmemError, match="are held by other sequences"):
        memory.append(extra, 5)
    with pytest.raises(VmemError, match="exceed the 160"):
        memory.append(extra, MAX_TOKENS + 1)
    with pytest.raises(VmemError, match="a fork of 17"):
        memory.fork(sequences[0], 17)
    with pytest.raises(VmemError, match="truncation to 17"):
        memory.truncate(sequences[0], 17)
    for sequence in (*sequences, extra):
        memory.free(sequence)
    with pytest.raises(IntegrityError, match="not open"):
        memory.free(extra)
    with pytest.raises(IntegrityError, match="not open"):
        memory.append(sequences[0], 1)
    with pytest.raises(IntegrityError, match="not open"):
        memory.fork(sequences[0], 0)
    memory.close()


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
def test_the_anchor_page_is_at_the_beginning_of_every_range(kind: LayoutKind) -> None:
    """Triton refuses a tensor that begins with a hole; padding rows write to the anchor page."""
    memory, device = make_memory(FlakyCuda, kind=kind, num_pages=80, windowed=True, stateful=True, idle_release_s=0.0)
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
    assert read(memory, StepDemand(sequence, 0, 150), 0, "region") == list(range(150))
    report = memory.report()
    memory.free(sequence)
    assert isinstance(device, FlakyCuda)
    device.fake.finish_work()
    until(lambda: memory.report().physical_bytes == 0)
    assert memory.report().anchor_bytes == report.anchor_bytes == PAGE_BYTES
    assert device.fake.leftovers[0] == 1
    memory.check_integrity()
    memory.close()


def test_groups_of_different_pages_are_refused() -> None:
    backend = HostBackend(1 << 20)
    other = plan_layout(layout().layers, torch.float32, granularity_bytes=8192, block_tokens=16)
    with pytest.raises(LayoutError, match="one page size"):
        KVMemory(backend, [*groups(), LayerGroup((1,), other)], budget_bytes=1 << 20, num_regions=1, max_tokens=160)
    backend.close()


# ---- fences ----


def test_nothing_a_running_step_reads_is_unmapped(no_thread: None) -> None:
    """Freed, truncated, copied and expired blocks stay where a step may still read them."""
    memory, device = make_memory(FlakyCuda, windowed=True, num_pages=80, idle_release_s=0.0)
    assert isinstance(device, FlakyCuda)
    a, b, c = begin(memory, 60), begin(memory, 100), begin(memory, 150, "block_table")
    child = memory.fork(a, 60)
    demands = [StepDemand(a, 59, 60), StepDemand(b, 70, 100), StepDemand(c, 100, 101), StepDemand(child, 59, 60)]
    memory.ensure(demands)
    device.fake.finish_work()
    do_background(memory)
    device.fake.launch(pages_read(memory, demands))
    memory.launched()
    read_pages = pages_read(memory, demands)
    memory.free(c)
    memory.truncate(b, 70)
    memory.append(child, 61)
    memory.append(b, 90)
    memory.free(a)
    do_background(memory)
    assert device.fake.num_running == 1
    assert not device.fake.violations
    assert read_pages <= set(device.mappings)
    demands = [StepDemand(b, 89, 90), StepDemand(child, 60, 61)]
    memory.ensure(demands)  # the copy changes a place that the step reads: this has to wait for it
    assert device.fake.num_running == 0
    do_background(memory)
    assert not device.fake.violations
    assert not read_pages <= set(device.mappings)
    finish(memory, b, child)


def test_windows_expire_under_a_running_step(no_thread: None) -> None:
    memory, device = make_memory(FlakyCuda, windowed=True)
    assert isinstance(device, FlakyCuda)
    sequence = begin(memory, 150)
    device.fake.launch(pages_read(memory, [StepDemand(sequence, 0, 150)]))
    memory.launched()
    memory.append(sequence, 151)
    memory.ensure([StepDemand(sequence, 150, 151)])
    do_background(memory)
    assert not device.fake.violations
    device.fake.finish_work()
    before = memory.report().unmap_calls
    do_background(memory)
    assert memory.report().unmap_calls == before + sequence.groups[1].first
    finish(memory, sequence)


# ---- the mapper ----


def test_the_next_step_is_mapped_beside_this_one() -> None:
    memory, _ = make_memory()
    sequences = [begin(memory, 16) for _ in range(3)]
    exposed = memory.report().num_exposed
    memory.plan([StepDemand(sequence, 16, 40) for sequence in sequences])
    until(lambda: memory.report().eager_bytes == 6 * PAGE_BYTES)
    for sequence in sequences:
        memory.append(sequence, 40)
    memory.ensure([StepDemand(sequence, 16, 40) for sequence in sequences])
    assert memory.report().num_exposed == exposed
    memory.check_integrity()
    finish(memory, *sequences)


def cached_regions(memory: KVMemory, count: int, num_tokens: int) -> None:
    """Leave parked regions whose blocks are all cached."""
    sequences = []
    for i in range(count):
        ids = list(range(i * num_tokens, (i + 1) * num_tokens))
        sequences.append(memory.create_sequence("region", expected_tokens=num_tokens))
        memory.share_prefix(sequences[-1], memory.prefixes.chain(), ids)
        memory.append(sequences[-1], num_tokens)
        memory.prefixes.stage_prefix(sequences[-1], ids, 0, num_tokens)
        step(memory, sequences[-1], 0, num_tokens)
        memory.prefixes.commit_prefixes()
    for sequence in sequences:
        memory.free(sequence)


@pytest.mark.parametrize(("num_pages", "in_region"), [(40, True), (18, True), (18, False)])
def test_what_an_earlier_sequence_has_left_is_replaced_beside_the_step(
    no_thread: None, num_pages: int, in_region: bool
) -> None:
    """The step of a long prompt once remapped every place of its region that mapped cached content, and a unit took
    the blocks that the one before had mapped ahead. With 18 pages the content is evicted."""
    memory, device = make_memory(FlakyCuda, num_pages=num_pages, num_regions=1, max_tokens=256)
    assert isinstance(device, FlakyCuda)
    if in_region:
        cached_regions(memory, 1, 256)
    else:
        cache(memory, list(range(256)))
    memory.policy.unit_pages = 4
    sequence = begin(memory, 64)
    device.fake.launch(pages_read(memory, [StepDemand(sequence, 0, 64)]))
    memory.launched()
    region = sequence.groups[0].region
    assert region is not None
    region.fence = memory.mapper.fence  # as if the earlier sequence's last step were still running
    memory.plan([StepDemand(sequence, 64, 256)])
    do_background(memory)
    assert not device.fake.violations
    device.fake.finish_work()
    do_background(memory)
    memory.check_integrity()
    exposed = memory.report().num_exposed
    memory.append(sequence, 256)
    step(memory, sequence, 64, 256)
    assert memory.report().num_exposed == exposed
    finish(memory, sequence)


@pytest.mark.parametrize(
    ("num_cached", "num_pages", "policy"),
    [(0, 40, "region"), (6, 40, "region"), (6, 24, "region"), (0, 40, "block_table")],
    ids=["empty", "no slot left", "nor a page", "home"],
)
def test_the_prompt_that_waits_finds_its_blocks(
    no_thread: None, num_cached: int, num_pages: int, policy: ViewPolicy
) -> None:
    memory, _ = make_memory(num_pages=num_pages, num_regions=6, max_tokens=128)
    cached_regions(memory, num_cached, 64)
    memory.plan([], 64, policy)
    do_background(memory)
    memory.check_integrity()
    assert memory.report().cached_bytes >= (num_cached - 1) * 4 * PAGE_BYTES
    exposed = memory.report().num_exposed
    sequence = begin(memory, 64, policy)
    assert memory.report().num_exposed == exposed
    memory.plan([], 128)
    assert do_background(memory) < 100
    finish(memory, sequence)


@pytest.mark.parametrize("idle_release_s", [0.0, 0.05])
def test_a_prompt_that_never_begins_keeps_no_memory(idle_release_s: float) -> None:
    """Regression: a request that was cancelled after the last step was expected for ever. Its region was unmapped as
    idle and mapped again at once, without end."""
    memory, _ = make_memory(idle_release_s=idle_release_s)
    memory.plan([], 64)
    until(lambda: memory.report().num_hidden > 0)
    until(lambda: memory.report().physical_bytes == 0)
    num_hidden = memory.report().num_hidden
    memory.wait_for_progress(0.1)  # which nothing interrupts
    assert (memory.report().num_hidden, memory.report().physical_bytes) == (num_hidden, 0)
    finish(memory)


def test_the_region_of_a_prompt_that_goes_on_waiting_stays(no_thread: None) -> None:
    """A batch may be full for longer than `idle_release_s`."""
    memory, _ = make_memory(idle_release_s=100.0)
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
    finish(memory)


def test_no_region_stays_where_no_block_can_be_had(no_thread: None) -> None:
    """Regression: for each prompt that was announced while another layer group had all free blocks, a region without
    mappings was parked, until there was none left to map ahead."""
    memory, _ = make_memory(num_pages=24, windowed=True, reclaim_threshold=0.0)
    sequence = begin(memory, 160)
    memory.append(sequence, 160, start=159)
    memory.ensure([StepDemand(sequence, 159, 160)])
    other = begin(memory, 64, "block_table")
    for _ in range(3):
        memory.plan([], 16)
        do_background(memory)
        assert [len(group.parked) for group in memory.group_memories] == [0, 1]
        assert all(region.num_mapped for group in memory.group_memories for region in group.parked)
    finish(memory, sequence, other)


def test_blocks_for_the_next_step_are_attached_ahead(no_thread: None) -> None:
    """Where the home view reads them: as many as are missing."""
    memory, _ = make_memory()
    sequence = begin(memory, 32, "block_table")
    memory.plan([StepDemand(sequence, 32, 64)])
    do_background(memory)
    assert memory.report().physical_bytes == 4 * PAGE_BYTES
    finish(memory, sequence)


def test_blocks_whose_fence_is_open_are_looked_at_again_soon(no_thread: None) -> None:
    """No notification comes when the device passes the fence."""
    memory, device = make_memory(FlakyCuda, idle_release_s=0.0)
    assert isinstance(device, FlakyCuda)
    sequence = begin(memory, 32, "block_table")
    device.fake.launch(pages_read(memory, [StepDemand(sequence, 0, 32)]))
    memory.launched()
    memory.free(sequence)
    assert do_background(memory) == 0
    assert (memory.policy.wait_s(time.monotonic() - 100.0) or math.inf) < 1.0
    device.fake.finish_work()
    do_background(memory)
    assert memory.report().physical_bytes == 0
    memory.close()


def test_a_page_that_cannot_be_created_leaves_none_behind(no_thread: None) -> None:
    memory, device = make_memory()
    sequence = memory.create_sequence("block_table")
    device.fail_at = device.num_calls + 3
    with pytest.raises(MapError, match="injected"):
        memory.append(sequence, 64)
    assert memory.report().physical_bytes == 0
    finish(memory, sequence)


def test_a_report_made_at_most_50_ms_ago_is_not_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that cannot have the lock get the last one."""
    monkeypatch.setattr("folio.vmem.report._RENEWED_AFTER_S", 100.0)
    memory, _ = make_memory()
    sequence = begin(memory, 32)
    with memory.lock, ThreadPoolExecutor(1) as pool:
        report = pool.submit(memory.report).result()
    assert report.active_bytes == 0
    assert memory.report().active_bytes == 2 * PAGE_BYTES
    finish(memory, sequence)


def test_counts_begin_at_zero() -> None:
    assert not any(asdict(MemoryCounts()).values())


def test_prompts_find_regions_mapped_ahead() -> None:
    memory, _ = make_memory(eager_allocation=True, deferred_reclamation=False, num_pages=80)
    first = begin(memory, 64)
    memory.plan([])
    until(lambda: memory.report().eager_bytes == 4 * PAGE_BYTES)
    exposed = memory.report().num_exposed
    second = begin(memory, 64)
    assert memory.report().num_exposed == exposed
    finish(memory, first, second)


@pytest.mark.parametrize(
    ("options", "num_blocks"),
    [
        ({}, 4),
        ({"idle_release_s": 60.0}, 4),
        ({"idle_release_s": 0.0, "floor_pages": 20}, 0),  # no prompt lately
        ({"eager_allocation": False}, 0),
        ({"num_pages": 10, "reclaim_threshold": 0.2}, 4),  # of the 6 free pages, 2 are left
        ({"num_pages": 10, "reclaim_threshold": 0.3}, 0),
        ({"max_mappings": 20 + NUM_ANCHORS}, 4),  # the prompt has 8; 4 at home, and half of the rest in a region
        ({"max_mappings": 19 + NUM_ANCHORS}, 0),
    ],
)
def test_eager_allocation_for_the_next_prompt(options: dict[str, Any], num_blocks: int, no_thread: None) -> None:
    memory, _ = make_memory(**{"eager_allocation": True, **options})
    first = begin(memory, 64)
    do_background(memory)
    assert memory.report().eager_bytes == num_blocks * PAGE_BYTES
    finish(memory, first)


def test_eager_allocation_for_prompts_that_come_at_once(no_thread: None) -> None:
    memory, _ = make_memory(eager_allocation=True, num_pages=80, num_regions=8)
    prompts = [begin(memory, 64) for _ in range(3)]
    do_background(memory)
    assert memory.report().eager_bytes == 3 * 4 * PAGE_BYTES
    finish(memory, *prompts)


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


def test_low_memory_unmaps_parked_regions(no_thread: None) -> None:
    """Under the threshold the regions parked longest are unmapped; their blocks become free without a mapping call."""
    memory, _ = make_memory(num_pages=20, reclaim_threshold=0.5, num_regions=4)
    sequences = [begin(memory, 80) for _ in range(4)]
    for sequence in sequences:
        memory.free(sequence)
    assert memory.report().parked_bytes == 20 * PAGE_BYTES
    do_background(memory)
    assert memory.report().parked_bytes == 10 * PAGE_BYTES
    assert memory.report().physical_bytes == 20 * PAGE_BYTES
    finish(memory)


def refuse(*_: object) -> None:
    raise MapError("injected")


def test_failing_unmaps_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go on meanwhile, and the report counts the failures."""
    memory, device = make_memory(idle_release_s=0.0)
    sequence = begin(memory, 64)
    with monkeypatch.context() as patch:
        patch.setattr(device, "unmap", refuse)
        memory.truncate(sequence, 16)
        until(lambda: memory.report().mapper_failures >= 4)
        memory.ensure([StepDemand(sequence, 15, 16)])
    until(lambda: memory.report().physical_bytes == PAGE_BYTES)
    memory.ensure([StepDemand(sequence, 15, 16)])
    finish(memory, sequence)


def test_mapping_that_keeps_failing_is_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next step raises what the mapper failed at three times in a row; idle pages still go back."""
    memory, device = make_memory(idle_release_s=0.01)
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
    with monkeypatch.context() as patch:
        patch.setattr(device, "map", refuse)
        until(is_raised)
        assert "failure 2 in a row" in caplog.text
        assert "failure 3 in a row" not in caplog.text  # the first, and ever fewer of the next
        until(lambda: memory.report().physical_bytes == PAGE_BYTES)
    memory.check_integrity()
    finish(memory, sequence)


def test_a_dead_mapper_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, _ = make_memory()
    sequence = begin(memory, 16)

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(memory.policy, "next_work", broken)
    memory.plan([])
    until(lambda: memory.mapper.death is not None)
    calls: list[Callable[[], object]] = [
        lambda: memory.ensure([StepDemand(sequence, 0, 16)]),
        lambda: memory.append(sequence, 17),
        lambda: memory.wait_for_progress(0.01),
    ]
    for call in calls:
        with pytest.raises(IntegrityError, match="mapper thread has died"):
            call()
    finish(memory, sequence)


def test_blocks_that_the_mapper_moves_count_as_free(no_thread: None) -> None:
    """Regression: blocks being mapped ahead counted as owned, and the only request was preempted."""
    memory, _ = make_memory(num_pages=10)
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
    finish(memory, sequence)


def test_a_busy_region_is_waited_for() -> None:
    """Regression: a busy region, the only parked one, counted as none and failed every request in flight."""
    memory, _ = make_memory(num_regions=1)
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
    finish(memory, begin(memory, 40))
    timer.join()


def test_a_step_waits_for_one_unit_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the mapper went from unit to unit of a region, and a step that needed it waited for all."""
    memory, device = make_memory()
    monkeypatch.setattr(memory.policy, "unit_pages", 1)
    sequence = memory.create_sequence("region")
    memory.append(sequence, 80)
    gate, begun = threading.Event(), threading.Event()
    units: list[int] = []
    seen_by_the_step: list[int] = []
    real = device.map

    def gated(address: int, handles: Sequence[int]) -> None:
        if threading.current_thread().name == "folio-mapper":
            units.append(len(handles))
            begun.set()
            gate.wait(DEADLINE_S)
        else:
            seen_by_the_step.append(len(units))
        real(address, handles)

    monkeypatch.setattr(device, "map", gated)
    memory.plan([StepDemand(sequence, 0, 80)])
    assert begun.wait(DEADLINE_S)
    threading.Timer(0.05, gate.set).start()
    memory.ensure([StepDemand(sequence, 0, 80)])
    assert seen_by_the_step == [1]
    finish(memory, sequence)


def test_nothing_changes_while_the_mapper_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph is captured then. The pause begins with the end of the unit of work in hand."""
    memory, device = make_memory(num_pages=20, idle_release_s=0.0, cache_release_s=0.0)
    monkeypatch.setattr(memory.policy, "unit_pages", 1)
    begun = threading.Event()
    destroy = device.destroy

    def slow(handle: int) -> None:
        begun.set()
        time.sleep(0.002)
        destroy(handle)

    monkeypatch.setattr(device, "destroy", slow)
    memory.free(begin(memory, 160))
    assert begun.wait(DEADLINE_S)
    with memory.mapper.paused():
        before = device.num_calls
        time.sleep(0.05)
        assert device.num_calls == before
        assert memory.report().physical_bytes > 0
    until(lambda: memory.report().physical_bytes == 0)
    assert device.num_calls > before
    finish(memory)


def test_a_dead_mapper_cannot_be_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, _ = make_memory()
    monkeypatch.setattr(memory.mapper, "death", ZeroDivisionError("a bug"))
    with pytest.raises(IntegrityError, match="mapper thread has died"), memory.mapper.paused():
        raise AssertionError
    monkeypatch.undo()
    finish(memory)


def test_a_refused_mapping_demotes_the_sequence(no_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose table of mappings is full: what parked regions give up makes room for the blocks at home."""
    memory, device = make_memory()
    automatic, forced, ended = begin(memory, 20, "auto"), begin(memory, 20, "region"), begin(memory, 16, "region")
    memory.free(ended)
    for sequence in (automatic, forced):
        memory.append(sequence, 40)
    most, map_pages = device.num_mappings, device.map

    def map_or_refuse(address: int, handles: Sequence[int]) -> None:
        if device.num_mappings + len(handles) > most:
            raise MapError("injected")
        map_pages(address, handles)

    with monkeypatch.context() as patch:
        patch.setattr(device, "map", map_or_refuse)
        memory.ensure([StepDemand(automatic, 20, 40)])
        with pytest.raises(MapError):
            memory.ensure([StepDemand(forced, 20, 40)])
    assert (automatic.view, forced.view) == ("block_table", "region")
    assert read(memory, StepDemand(automatic, 0, 20), 0, "own")[:20] == list(range(20))
    memory.check_integrity()
    finish(memory, automatic, forced)


def test_forced_regions_take_mappings_from_parked_ones(no_thread: None) -> None:
    """Regression: `max_mappings` was ignored, and useless parked regions stayed mapped for ever."""
    memory, _ = make_memory(num_pages=40, max_mappings=25, num_regions=8)
    for _ in range(3):
        sequences = [begin(memory, 32) for _ in range(4)]
        for sequence in sequences:
            memory.free(sequence)
        table = begin(memory, 100, "block_table")
        memory.free(table)
    memory.check_integrity()
    assert memory.report().num_mappings <= 25
    finish(memory)


def test_unneeded_copies_are_dropped(no_thread: None) -> None:
    """Regression: a copy whose both ends were freed held its pages for ever, and growing twice copied twice."""
    memory, _ = make_memory(num_pages=10)
    parent = begin(memory, 150, "block_table")
    memory.truncate(parent, 10)
    child = memory.fork(parent, 10)
    for num_tokens in (11, 12, 13):
        memory.append(child, num_tokens)
    assert memory.report().active_bytes == 2 * PAGE_BYTES
    memory.free(child)
    assert memory.report().active_bytes == PAGE_BYTES
    memory.free(parent)
    finish(memory, begin(memory, 160))


def test_the_pages_of_a_copy_stay_until_it_is_made(no_thread: None) -> None:
    """Regression: freed with the fence of the step before, they were unmapped while the copy ran."""
    memory, device = make_memory(FlakyCuda, idle_release_s=0.0)
    assert isinstance(device, FlakyCuda)
    parent = begin(memory, 10, "block_table")
    device.fake.finish_work()
    child = memory.fork(parent, 10)
    memory.append(child, 11)
    memory.free(parent)
    unmapped = memory.report().unmap_calls
    memory.ensure([StepDemand(child, 10, 11)])  # queues the copy
    do_background(memory)
    assert memory.report().unmap_calls == unmapped
    device.fake.finish_work()
    do_background(memory)
    assert memory.report().unmap_calls == unmapped + 1
    finish(memory, child)


def test_a_full_device_takes_pages_from_the_other_group(no_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has less memory than the budget: pages of another group's free blocks are used instead."""
    memory, device = make_memory(windowed=True, num_pages=40)
    sequence = begin(memory, 96, "block_table")
    memory.append(sequence, 97)
    memory.ensure([StepDemand(sequence, 96, 97)])  # the window's group has free blocks now
    free = memory.group_memories[1].pool.num_free
    assert free >= 2

    def full(page_bytes: int) -> int:
        raise OutOfPages(1, 0)

    with monkeypatch.context() as patch:
        patch.setattr(device, "create", full)
        memory.append(sequence, 97 + 16)
        with pytest.raises(OutOfPages):
            memory.append(sequence, 160)
    memory.check_integrity()
    finish(memory, sequence)


# ---- the elastic budget ----


def test_idle_memory_goes_back_to_the_machine() -> None:
    memory, device = make_memory(FlakyHost, idle_release_s=0.05, eager_allocation=True, num_pages=80)
    assert isinstance(device, HostBackend)
    sequences = [begin(memory, 100, policy) for policy in ("region", "block_table", "auto")]
    assert device.memory_info().physical_bytes >= 21 * PAGE_BYTES
    for sequence in sequences:
        memory.free(sequence)
    until(lambda: memory.report().physical_bytes == 0)
    assert device.memory_info().physical_bytes == memory.report().anchor_bytes == PAGE_BYTES
    assert memory.report().num_mappings == NUM_ANCHORS
    sequence = begin(memory, 100)
    finish(memory, sequence)


def test_the_floor_is_there_at_once_and_stays() -> None:
    memory, _ = make_memory(floor_pages=12, idle_release_s=0.0)
    until(lambda: memory.report().physical_bytes == 12 * PAGE_BYTES)
    sequences = [begin(memory, 160), begin(memory, 160, "block_table")]
    assert memory.report().physical_bytes == 20 * PAGE_BYTES
    for sequence in sequences:
        memory.free(sequence)
    until(lambda: memory.report().physical_bytes == 12 * PAGE_BYTES)
    memory.wait_for_progress(0.02)  # which nothing interrupts
    assert memory.report().physical_bytes == 12 * PAGE_BYTES
    finish(memory)


def test_a_lower_budget_takes_free_pages_first() -> None:
    memory, _ = make_memory(num_pages=40)
    other, kept = begin(memory, 160), begin(memory, 100, "block_table")
    memory.free(other)
    assert memory.set_budget(10 * PAGE_BYTES, 1) == "deferred"
    until(lambda: memory.report().physical_bytes <= 10 * PAGE_BYTES)
    assert memory.num_free_pages == 3
    assert read(memory, StepDemand(kept, 0, 100), 0, "home") == list(range(100))
    with pytest.raises(OutOfPages):
        memory.append(memory.create_sequence("block_table"), 64)
    assert memory.set_budget(30 * PAGE_BYTES, 3) == "applied"
    assert memory.set_budget(10 * PAGE_BYTES, 2) == "stale"
    assert memory.report().budget_revision == 3
    for sequence in list(memory.tables.sequences):
        memory.free(sequence)
    memory.close()


def test_free_pages_are_negative_beyond_a_lowered_budget() -> None:
    memory, _ = make_memory(num_pages=40)
    sequences = [begin(memory, 100, "block_table") for _ in range(4)]
    assert memory.set_budget(14 * PAGE_BYTES, 1) == "deferred"
    assert memory.num_free_pages == -14
    memory.free(sequences.pop())
    memory.free(sequences.pop())
    assert memory.num_free_pages == 0
    until(lambda: memory.report().physical_bytes == 14 * PAGE_BYTES)
    finish(memory, *sequences)


def test_bounds_of_the_budget() -> None:
    memory, _ = make_memory(num_pages=40)
    assert (memory.least_budget_bytes, memory.most_budget_bytes) == (10 * PAGE_BYTES, 40 * PAGE_BYTES)
    for pages in (9, 41):
        with pytest.raises(BudgetError, match=f"must be between {10 * PAGE_BYTES}, .* and {40 * PAGE_BYTES}"):
            memory.set_budget(pages * PAGE_BYTES, 1)
    assert memory.report().budget_revision == 0
    with pytest.raises(BudgetError):
        make_memory(num_pages=9)
    sequences = [begin(memory, 160, "block_table") for _ in range(4)]
    assert memory.held_bytes == 40 * PAGE_BYTES
    assert memory.set_budget(memory.least_budget_bytes, 1) == "deferred"
    assert memory.set_budget(memory.most_budget_bytes, 2) == "applied"
    finish(memory, *sequences)


@pytest.mark.parametrize(("kind", "num_pages"), [("interleaved", 40), ("per_layer", 80)])
def test_lengths_that_fit_together(kind: LayoutKind, num_pages: int) -> None:
    """Sequences of four blocks; shared whole blocks count once, and pinned blocks are not available."""
    memory, _ = make_memory(kind=kind, num_pages=num_pages)
    assert memory.fit_together([64] * 10)
    assert not memory.fit_together([64] * 11)
    assert memory.fit_together([64] * 19, shared_tokens=47)
    assert not memory.fit_together([64] * 20, shared_tokens=47)
    pinned = begin(memory, 32)
    memory.pin("system", pinned, 32)
    assert memory.fit_together([64] * 9)
    assert not memory.fit_together([64] * 10)
    memory.unpin("system")
    finish(memory, pinned)


def test_the_time_for_mapping_calls_is_part_of_the_time() -> None:
    began = time.perf_counter()
    memory, _ = make_memory()
    sequence = begin(memory, 40)
    memory.plan([StepDemand(sequence, 40, 90)])
    until(lambda: memory.report().num_hidden > 0)
    report, passed_us = memory.report(), (time.perf_counter() - began) * 1e6
    assert 0 < report.exposed_us <= passed_us
    assert 0 < report.hidden_us <= passed_us
    finish(memory, sequence)


@pytest.mark.parametrize("kind", ["interleaved", "per_layer"])
def test_pages_a_sequence_still_needs(kind: LayoutKind) -> None:
    memory, _ = make_memory(kind=kind)
    slices = memory.groups[0].layout.num_slices
    sequence = begin(memory, 64)
    assert memory.pages_still_needed(None, 64) == 4 * slices
    assert memory.pages_still_needed(sequence, 96) == 2 * slices
    assert memory.pages_still_needed(sequence, 64) == memory.pages_still_needed(sequence, 16) == 0
    finish(memory, sequence)


# ---- homes ----


def test_blocks_of_regions_are_mapped_once(no_thread: None) -> None:
    """Regression: every block was mapped twice, at home and in its region, whether anything read it at home or not."""
    memory, backend = make_memory()
    sequence = begin(memory, 80)
    assert backend.num_mappings == NUM_ANCHORS + 5
    other = begin(memory, 40, "block_table")
    assert backend.num_mappings == NUM_ANCHORS + 5 + 3
    memory.map_home(sequence)
    assert backend.num_mappings == NUM_ANCHORS + 5 + 3 + 5
    memory.map_home(sequence)
    assert backend.num_mappings == NUM_ANCHORS + 5 + 3 + 5
    memory.check_integrity()
    finish(memory, sequence, other)


def test_a_copied_block_is_read_at_home(no_thread: None) -> None:
    """Copy-on-write of a block that only a region mapped, into a block that only a region will map."""
    memory, backend = make_memory()
    parent = begin(memory, 40)
    child = memory.fork(parent, 40)
    memory.append(child, 41)
    memory.ensure([StepDemand(child, 40, 41)])
    assert backend.num_mappings == NUM_ANCHORS + 3 + 3 + 2  # source and target of the copy
    write(memory, StepDemand(child, 40, 41), [40.0], "own")
    assert read(memory, StepDemand(child, 0, 41), 0, "region") == list(range(41))
    memory.check_integrity()
    finish(memory, parent, child)


def test_swapped_blocks_are_read_at_home(no_thread: None) -> None:
    memory, backend = make_memory(swap_pages=10, prefix_cache=False)
    sequence = begin(memory, 40)
    swapped = memory.swap_out([sequence])
    assert backend.num_mappings == NUM_ANCHORS + 3 + 3
    filler = begin(memory, 48)
    [back] = memory.swap_in(swapped)
    memory.ensure([StepDemand(back, 39, 40)])
    assert read(memory, StepDemand(back, 0, 40), 0, "own") == list(range(40))
    finish(memory, filler, back)


@pytest.mark.parametrize("backend", [FlakyHost, FlakyCuda])
def test_a_swap_that_cannot_read_its_blocks_changes_nothing(backend: type, no_thread: None) -> None:
    """The engine then recomputes the sequence, as without swap space."""
    memory, device = make_memory(backend, swap_pages=10)
    sequence = begin(memory, 40)
    device.fail_at = device.num_calls + 1
    with pytest.raises(OutOfSwap, match="cannot be copied"):
        memory.swap_out([sequence])
    assert memory.report().swapped_bytes == 0
    assert read(memory, StepDemand(sequence, 0, 40), 0, "region") == list(range(40))
    memory.check_integrity()
    finish(memory, sequence)


def test_a_demoted_sequence_finds_its_blocks_at_home(no_thread: None) -> None:
    """The bound on mappings has room for every block at home."""
    memory, backend = make_memory(max_mappings=NUM_ANCHORS + 12)
    first, second = begin(memory, 48, "auto"), begin(memory, 48, "auto")
    assert (first.view, second.view) == ("region", "region")
    memory.append(first, 64)
    memory.ensure([StepDemand(first, 48, 64)])
    assert first.view == "block_table"
    assert backend.num_mappings <= NUM_ANCHORS + 12
    assert read(memory, StepDemand(first, 0, 48), 0, "own")[:48] == list(range(48))
    memory.check_integrity()
    finish(memory, first, second)


# ---- handles that several blocks share ----


@pytest.mark.parametrize("backend", [FlakyHost, FlakyCuda, FlakyStandIn])
def test_sequences_share_handles(backend: type, no_thread: None) -> None:
    """Two blocks of 16 tokens share a handle of 4 KiB in each of two slices: an extent is 8 KiB."""
    memory, device = make_memory(backend, kind="sliced", num_pages=41, idle_release_s=0.0)
    assert memory.report().budget_bytes == 40 * PAGE_BYTES  # whole extents
    first, second = (begin(memory, 16, policy) for policy in ("region", "auto"))
    assert (first.view, second.view) == ("block_table", "block_table")
    assert memory.report().physical_bytes == 2 * PAGE_BYTES
    assert memory.report().active_bytes == 2 * PAGE_BYTES
    third = begin(memory, 17)
    report = memory.report()
    assert (report.physical_bytes, report.active_bytes) == (4 * PAGE_BYTES, 4 * PAGE_BYTES)
    assert report.num_mappings == device.num_mappings == 6  # with the anchor's extent
    for sequence, length in ((first, 16), (second, 16), (third, 17)):
        for layer in (0, 1):
            assert read(memory, StepDemand(sequence, 0, length), layer, "own") == list(range(length))
    if isinstance(device, FlakyCuda):
        device.fake.finish_work()
    memory.free(first)
    do_background(memory)
    assert memory.report().physical_bytes == 4 * PAGE_BYTES  # the other block of its extent is owned
    memory.check_integrity()
    memory.free(second)
    do_background(memory)
    assert memory.report().physical_bytes == 2 * PAGE_BYTES
    memory.check_integrity()
    finish(memory, third)


def test_a_block_in_a_used_extent_needs_no_page(no_thread: None) -> None:
    memory, _ = make_memory(kind="sliced", num_pages=20)
    one = begin(memory, 16)
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
    finish(memory, one, *others)


def test_a_budget_of_shared_handles_is_whole_extents(no_thread: None) -> None:
    memory, _ = make_memory(kind="sliced", num_pages=40, max_tokens=48, pin_quota=0.5)
    assert memory.least_budget_bytes == 2 * 2 * PAGE_BYTES  # three blocks, in two extents
    sequence = begin(memory, 16)
    memory.pin("one", sequence, 16)
    memory.free(sequence)
    assert memory.least_budget_bytes == 2 * 2 * PAGE_BYTES
    assert memory.set_budget(memory.least_budget_bytes, 1) == "applied"
    with pytest.raises(BudgetError):
        memory.set_budget(memory.least_budget_bytes - 1, 2)
    whole = begin(memory, 48)  # the longest sequence fits beside the pin
    memory.free(whole)
    memory.unpin("one")
    memory.check_idle()
    memory.close()


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


def test_driver_time_beside_launched_steps_is_counted(no_thread: None) -> None:
    memory, device = make_memory(FlakyCuda)
    assert isinstance(device, FlakyCuda)
    device.fake.finish_work()
    first = begin(memory, 16)
    assert memory.report().in_flight_us == 0
    device.fake.launch(pages_read(memory, [StepDemand(first, 0, 16)]))
    memory.launched()
    second = begin(memory, 16)
    counted = memory.report().in_flight_us
    assert 0 < counted <= memory.report().exposed_us
    device.fake.finish_work()
    third = begin(memory, 16)
    assert memory.report().in_flight_us == counted
    finish(memory, first, second, third)


def test_the_mapper_counts_its_time_beside_launched_steps() -> None:
    memory, device = make_memory(FlakyCuda)
    assert isinstance(device, FlakyCuda)
    sequence = begin(memory, 16)
    device.fake.launch(pages_read(memory, [StepDemand(sequence, 0, 16)]))
    memory.launched()
    memory.plan([StepDemand(sequence, 16, 40)])
    until(lambda: memory.report().num_hidden >= 2)
    report = memory.report()
    assert 0 < report.in_flight_us <= report.hidden_us + report.exposed_us
    device.fake.finish_work()
    finish(memory, sequence)
