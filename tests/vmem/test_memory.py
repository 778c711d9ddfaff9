"""KV memory: both views show the same bytes, a failure changes nothing, and the books always add up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from vmem import (
    HostBackend,
    IntegrityError,
    KVLayout,
    KVMemory,
    LayerSpec,
    MapError,
    OutOfPages,
    SequenceMemory,
    VmemError,
    plan_layout,
)

LAYOUT: KVLayout = plan_layout([LayerSpec(2, 8, 8)] * 2, torch.float32, granularity_bytes=4096)
NUM_BLOCKS, NUM_REGIONS, MAX_TOKENS = 12, 3, 100


class FlakyBackend(HostBackend):
    """The host backend with two failures to inject: call number `fail_at` raises, and fences wait for `open_fences`."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.calls = 0
        self.fail_at = -1
        self.fences = 0
        self.passed = 1 << 60

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise MapError("injected")

    def create(self, page_bytes: int) -> int:
        self._count()
        return super().create(page_bytes)

    def map(self, address: int, handles: Sequence[int]) -> None:
        self._count()
        super().map(address, handles)

    def fence(self) -> int:
        self.fences += 1
        return self.fences

    def completed(self, fence: int) -> bool:
        return fence <= self.passed


def make_memory() -> tuple[KVMemory, FlakyBackend]:
    backend = FlakyBackend(NUM_BLOCKS * LAYOUT.block_bytes)
    memory = KVMemory(backend, LAYOUT, num_blocks=NUM_BLOCKS, num_regions=NUM_REGIONS, max_tokens=MAX_TOKENS)
    return memory, backend


def test_written_at_home_read_in_the_region() -> None:
    memory, _ = make_memory()
    sequence = memory.open("region")
    memory.append(sequence, 40)
    memory.ensure([sequence])
    for layer in range(2):
        home_key, home_value = memory.home_view(layer)
        region_key, region_value = memory.region_view(layer)
        for position in (0, 15, 16, 39):
            block = sequence.block_ids[position // 16]
            home_key[block, position % 16] = float(position + layer)
            region_value[sequence.region, position] = float(-position - layer)
            assert region_key[sequence.region, position].eq(position + layer).all()
            assert home_value[block, position % 16].eq(-position - layer).all()
    memory.free(sequence)
    memory.check_integrity()
    memory.check_idle()
    memory.close()


def test_pages_come_on_demand_and_go_at_close() -> None:
    memory, backend = make_memory()
    assert memory.report().physical_bytes == 0
    sequence = memory.open("block_table")
    memory.append(sequence, 17)
    assert memory.report().physical_bytes == 2 * LAYOUT.block_bytes
    assert memory.report().active_blocks == 2
    with pytest.raises(IntegrityError, match="1 sequences open"):
        memory.close()
    memory.free(sequence)
    memory.close()
    assert backend.num_mappings == 0


@pytest.mark.parametrize("fail_at", range(1, 8))
def test_failure_at_each_call_changes_nothing(fail_at: int) -> None:
    """Six more blocks, four of them without a page yet: four creates, one map home, one map into the region."""
    memory, backend = make_memory()
    first, second, third = (memory.open("region") for _ in range(3))
    for sequence in (first, second, third):
        memory.append(sequence, 16)
    memory.free(first)
    memory.free(third)
    before = (memory.num_free_blocks, backend.num_mappings, list(second.block_ids))
    backend.calls, backend.fail_at = 0, fail_at
    try:
        memory.append(second, 16 * 7)
        memory.ensure([second])
    except MapError:
        memory.check_integrity()
        if len(second.block_ids) == 1:
            assert (memory.num_free_blocks, backend.num_mappings, list(second.block_ids)) == before
        else:
            assert second.num_mapped == 0
    else:
        assert fail_at > 6
    backend.fail_at = -1
    memory.append(second, 16 * 7)
    memory.ensure([second])
    memory.check_integrity()
    memory.free(second)
    memory.check_idle()
    memory.close()


def test_out_of_pages_leaves_the_sequence_alone() -> None:
    memory, _ = make_memory()
    a, b = memory.open("region"), memory.open("block_table")
    memory.append(a, 6 * 16)
    memory.append(b, 5 * 16)
    with pytest.raises(OutOfPages, match="2 blocks needed, 1 free"):
        memory.append(b, 7 * 16)
    assert len(b.block_ids) == 5
    memory.check_integrity()
    memory.free(a)
    memory.append(b, 7 * 16)
    memory.free(b)
    memory.close()


def test_nothing_is_reused_before_its_fence() -> None:
    """A launched step may still read a freed sequence: its blocks and its region wait."""
    memory, backend = make_memory()
    sequence = memory.open("region")
    memory.append(sequence, 16 * 7)
    memory.ensure([sequence])
    memory.launched()
    backend.passed = backend.fences - 1
    mapped = backend.num_mappings
    memory.free(sequence)
    memory.check_integrity()
    assert backend.num_mappings == mapped
    assert memory.num_free_blocks == NUM_BLOCKS - 7
    other = memory.open("region")
    assert other.region != sequence.region
    with pytest.raises(OutOfPages):
        memory.append(other, 16 * 6)
    backend.passed = backend.fences
    memory.append(other, 16 * 6)
    memory.free(other)
    memory.check_idle()
    memory.close()


def test_misuse_is_refused() -> None:
    memory, _ = make_memory()
    sequences = [memory.open("region") for _ in range(NUM_REGIONS)]
    with pytest.raises(VmemError, match="every region is taken"):
        memory.open("region")
    with pytest.raises(VmemError, match="exceed the 7 blocks"):
        memory.append(sequences[0], MAX_TOKENS + 16)
    for sequence in sequences:
        memory.free(sequence)
    with pytest.raises(IntegrityError, match="not open"):
        memory.free(sequences[0])
    memory.close()


def test_a_refused_reservation_leaves_nothing() -> None:
    backend = HostBackend(1 << 20)
    with pytest.raises(MapError, match="reservation"):
        KVMemory(backend, LAYOUT, num_blocks=4, num_regions=1 << 16, max_tokens=1 << 34)
    backend.close()  # raises if the first reservation were still there


class MemoryMachine(RuleBasedStateMachine):
    """Random use against a plain model: what each sequence wrote must still be there, in both views."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.backend = make_memory()
        self.written: dict[SequenceMemory, list[float]] = {}
        self.next_value = 1.0

    @rule(target=sequences, view=st.sampled_from(["region", "block_table"]))
    def open(self, view: str) -> SequenceMemory | None:
        try:
            sequence = self.memory.open(view)  # type: ignore[arg-type]
        except VmemError:
            return None
        self.written[sequence] = []
        return sequence

    @rule(sequence=sequences, count=st.integers(1, 40), fail_after=st.one_of(st.none(), st.integers(1, 6)))
    def append(self, sequence: SequenceMemory | None, count: int, fail_after: int | None) -> None:
        if sequence is None or len(self.written[sequence]) + count > MAX_TOKENS:
            return
        self.backend.calls, self.backend.fail_at = 0, fail_after or -1
        try:
            self.memory.append(sequence, len(self.written[sequence]) + count)
            self.memory.ensure([sequence])
        except (OutOfPages, MapError):
            return
        finally:
            self.backend.fail_at = -1
        key = self.memory.home_view(1)[0]
        for _ in range(count):
            position = len(self.written[sequence])
            key[sequence.block_ids[position // 16], position % 16] = self.next_value
            self.written[sequence].append(self.next_value)
            self.next_value += 1
        if sequence.region is not None:
            region = self.memory.region_view(1)[0][sequence.region, : len(self.written[sequence]), 0, 0]
            assert region.tolist() == self.written[sequence]

    @rule(sequence=consumes(sequences))
    def free(self, sequence: SequenceMemory | None) -> None:
        if sequence is not None:
            del self.written[sequence]
            self.memory.free(sequence)

    @rule()
    def launch(self) -> None:
        self.memory.launched()
        self.backend.passed = self.backend.fences - 1

    @rule()
    def finish_step(self) -> None:
        self.backend.passed = self.backend.fences

    @invariant()
    def books_add_up(self) -> None:
        self.memory.check_integrity()
        key = self.memory.home_view(1)[0]
        for sequence, values in self.written.items():
            assert [key[sequence.block_ids[i // 16], i % 16, 0, 0].item() for i in range(len(values))] == values

    def teardown(self) -> None:
        self.backend.passed = 1 << 60
        for sequence in self.written:
            self.memory.free(sequence)
        self.memory.check_idle()
        self.memory.close()


MemoryMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMemoryMachine = MemoryMachine.TestCase
