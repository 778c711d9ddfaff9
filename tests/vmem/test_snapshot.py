"""Snapshots agree with reports, whatever the blocks went through."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from folio.vmem import BlockState, KVMemory, StepDemand, take_snapshot
from tests.vmem.conftest import Make
from tests.vmem.sequences import run, serve


def counts(memory: KVMemory) -> dict[BlockState, int]:
    snapshot = take_snapshot(memory)
    assert snapshot is not None
    [states] = snapshot.states
    return {state: int((states == state).sum()) for state in BlockState}


def test_states_add_up_with_the_report(still: Make) -> None:
    memory = still(num_pages=40)
    serve(memory, list(range(96)))  # 6 cached blocks
    chain, reader = memory.prefixes.chain(), memory.create_sequence("region")
    shared = memory.share_prefix(reader, chain, [*range(48), *range(900, 920)])
    memory.append(reader, 68)
    memory.ensure([StepDemand(reader, shared, 68)])
    memory.fork(reader, 64)
    parking = memory.create_sequence("region")
    memory.append(parking, 32)
    memory.ensure([StepDemand(parking, 0, 32)])
    memory.free(parking)  # its region stays mapped
    snapshot = take_snapshot(memory, most_sequences=8, most_parked=8)
    assert snapshot is not None
    found, report = counts(memory), snapshot.report
    [group] = report.groups
    owned = found[BlockState.ACTIVE] + found[BlockState.SHARED] + found[BlockState.PINNED]
    assert owned * group.block_bytes == report.active_bytes
    assert found[BlockState.CACHED] * group.block_bytes == report.cached_bytes > 0
    assert found[BlockState.PARKED] * group.block_bytes == report.parked_bytes > 0
    backed = sum(found.values()) - found[BlockState.UNBACKED]
    assert backed * group.block_bytes == report.physical_bytes
    assert sum(found.values()) == 40
    assert found[BlockState.SHARED] == 4  # 64 tokens of the fork
    assert snapshot.num_parked == (1,)
    assert snapshot.parked[0][0][1] == 2
    by_length = {s.num_tokens: s.tables[0] for s in snapshot.sequences}
    assert by_length[68].num_mapped == 5
    assert len(by_length[68].block_ids) == 5
    assert by_length[64].block_ids == by_length[68].block_ids[:4]


def test_pinned_blocks_are_pinned_also_while_others_read_them(still: Make) -> None:
    memory = still(num_pages=40)
    sequence = run(memory, list(range(32)))
    memory.pin("rules", sequence, 32)
    assert counts(memory)[BlockState.PINNED] == 2
    memory.free(sequence)
    assert counts(memory)[BlockState.PINNED] == 2
    assert memory.report().pinned_bytes == 2 * 4096
    memory.unpin("rules")
    assert counts(memory)[BlockState.PINNED] == 0


def test_a_wanted_sequence_is_shown_however_short_it_is(still: Make) -> None:
    memory = still(num_pages=40)
    sequences = [memory.create_sequence() for _ in range(5)]
    for number, sequence in enumerate(sequences):
        memory.append(sequence, 16 * (number + 1))
    snapshot = take_snapshot(memory, most_sequences=2, wanted=[sequences[0]])
    assert snapshot is not None
    assert [s.num_tokens for s in snapshot.sequences] == [16, 80, 64]
    assert snapshot.num_sequences == 5
    for sequence in sequences:
        memory.free(sequence)
    assert take_snapshot(memory, wanted=[sequences[0]], most_sequences=2).sequences == ()  # type: ignore[union-attr]


def test_a_busy_memory_is_not_waited_for(still: Make) -> None:
    memory = still(num_pages=40)
    with memory.lock.exclusive(), ThreadPoolExecutor(1) as other:
        assert other.submit(take_snapshot, memory).result(60) is None
