"""Mapped memory with random keys and values, and sequences of it in both views, for `benchmarks.attention`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from folio.kernels import VarlenBatch
from folio.vmem import (
    KVMemory,
    LayerGroup,
    LayerSpec,
    LayoutKind,
    SequenceMemory,
    StepDemand,
    View,
    plan_groups,
    select_backend,
)

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Heads:
    num_q_heads: int
    num_kv_heads: int
    dim: int

    @property
    def token_bytes(self) -> int:
        """Size of one token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.dim * DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` sequences of `length` cached tokens; the last `queries` of each attend."""

    batch: int
    length: int
    queries: int = 1

    @property
    def num_tokens(self) -> int:
        return self.batch * self.length


@dataclass(frozen=True, slots=True)
class Device:
    """Sizes of the measurements on a device.

    Attributes:
        num_layers: layers whose tokens lie side by side in the interleaved layout.
        cold_bytes: bytes that a case reads before it reads any of them again: many times a processor's cache.
        filled_length: cached tokens of the sequences that fill the device.
        page_bytes: the smallest page size, if larger ones are measured as well.
        footprints: cases of `--footprints`.
        limit_bytes, limit_size: bytes read, and side of the matrix, for the device's limits.
        least_s: least time of one measurement.
    """

    name: str
    providers: tuple[str, ...]
    num_layers: int
    cold_bytes: int
    most_tokens: int
    repeats: int
    filled_length: int = 4096
    page_bytes: int | None = None
    footprints: tuple[Case, ...] = ()
    limit_bytes: int = 1 << 30
    limit_size: int = 0
    least_s: float = 0.05


@dataclass(frozen=True, slots=True)
class Setting:
    """A memory of one layout whose blocks hold random numbers.

    Attributes:
        caches: keys and values of the layers that are read, in both views.
        cold_bytes: see `Device`; 0 if every case reads its own sequences only.
    """

    heads: Heads
    layout: str
    block_tokens: int
    memory: KVMemory
    caches: Mapping[View, list[tuple[torch.Tensor, torch.Tensor]]]
    cold_bytes: int

    def pass_bytes(self, case: Case) -> int:
        """Bytes of keys and values that are read before any of them is read again."""
        num_sets = _num_sets(self.cold_bytes, self.heads, case, len(self.caches["region"]))
        return num_sets * len(self.caches["region"]) * case.num_tokens * self.heads.token_bytes

    @contextmanager
    def sequences(self, case: Case) -> Iterator[list[list[SequenceMemory]]]:
        """Sets of mapped sequences of a case."""
        sets: list[list[SequenceMemory]] = []
        for _ in range(_num_sets(self.cold_bytes, self.heads, case, len(self.caches["region"]))):
            sets.append([self.memory.create_sequence("region") for _ in range(case.batch)])
            for sequence in sets[-1]:
                self.memory.append(sequence, case.length)
        self.memory.ensure([StepDemand(sequence, 0, case.length) for sequences in sets for sequence in sequences])
        try:
            yield sets
        finally:
            self.memory.launched()
            for sequences in sets:
                for sequence in sequences:
                    self.memory.free(sequence)


@contextmanager
def setting(
    device: Device,
    heads: Heads,
    layout: LayoutKind,
    block_tokens: int,
    cases: Sequence[Case],
    *,
    all_layers: bool = False,
) -> Iterator[Setting]:
    """A memory for these cases.

    With `all_layers`, each case is one set of sequences, whose layers are all read. Otherwise two of interleaved layers
    or a single layer are read, with as many sets as no cache holds.
    """
    num_layers = device.num_layers if layout == "interleaved" or all_layers else 1
    read = range(num_layers if all_layers else min(2, num_layers))
    cold_bytes = 0 if all_layers else device.cold_bytes
    num_sets = {case: _num_sets(cold_bytes, heads, case, len(read)) for case in cases}
    longest = max(case.length for case in cases)
    backend = select_backend(torch.device(device.name), capacity_bytes=1 << 40)  # the budget is below
    [planned] = plan_groups(
        [[LayerSpec(heads.num_kv_heads, heads.dim, heads.dim)] * num_layers],
        DTYPE,
        granularity_bytes=backend.granularity_bytes,
        kind=layout,
        block_tokens=block_tokens,
        expected_tokens=device.filled_length,
    )
    group = LayerGroup(tuple(range(num_layers)), planned)
    num_blocks = max(num_sets[case] * case.batch * planned.num_blocks(case.length) for case in cases)
    num_pages = max(num_blocks, planned.num_blocks(longest)) * group.most_pages(1, 1)
    memory = KVMemory(
        backend,
        [group],
        budget_bytes=num_pages * planned.page_bytes,
        floor_bytes=num_pages * planned.page_bytes,
        num_regions=max(num_sets[case] * case.batch for case in cases),
        max_tokens=max(longest, planned.block_tokens),
        prefix_cache=False,
    )
    try:
        _fill(memory, num_blocks, planned.block_tokens, read)
        caches: dict[View, list[tuple[torch.Tensor, torch.Tensor]]] = {
            "region": [memory.tensors.region_view(layer) for layer in read],
            "block_table": [memory.tensors.home_view(layer) for layer in read],
        }
        yield Setting(heads, layout, planned.block_tokens, memory, caches, cold_bytes)
    finally:
        memory.close()


def _num_sets(cold_bytes: int, heads: Heads, case: Case, num_layers: int) -> int:
    """Number of sets of sequences of a case: reading all of them evicts the first from every cache.

    A prefill reads less: its time is that of products, and in a server its keys and values have just been written.
    """
    if case.queries > 1:
        cold_bytes //= 64
    return max(1, -(-cold_bytes // (case.num_tokens * heads.token_bytes * num_layers)))


def _fill(memory: KVMemory, num_blocks: int, block_tokens: int, layers: Sequence[int]) -> None:
    """Write random numbers everywhere in these layers, and shuffle the free blocks."""
    sequences = []
    for _ in range(num_blocks):
        sequences.append(memory.create_sequence("block_table"))
        memory.append(sequences[-1], block_tokens)
    memory.ensure([StepDemand(sequence, 0, block_tokens) for sequence in sequences])
    block_ids = [sequence.groups[0].block_ids[0] for sequence in sequences]
    for cache in (side for layer in layers for side in memory.tensors.home_view(layer)):
        noise = torch.randn(min(256, num_blocks), *cache.shape[1:], device=cache.device).to(cache.dtype)
        for start in range(0, num_blocks, len(noise)):
            part = torch.tensor(block_ids[start : start + len(noise)], device=cache.device)
            cache[part] = noise[: len(part)]
    memory.launched()
    random.Random(0).shuffle(sequences)
    for sequence in sequences:
        memory.free(sequence)


def batch_of(sequences: Sequence[SequenceMemory], view: View, case: Case) -> VarlenBatch:
    """The step in which the last `case.queries` tokens of these sequences attend."""
    tables = [sequence.groups[0] for sequence in sequences]
    if view == "region":
        assert all(table.region is not None for table in tables)
        places = [[table.region.slot] for table in tables if table.region is not None]
    else:
        places = [table.block_ids for table in tables]
    return VarlenBatch(
        torch.arange(case.batch + 1, dtype=torch.int32) * case.queries,
        torch.full((case.batch,), case.length, dtype=torch.int32),
        torch.tensor(places, dtype=torch.int32),
        case.queries,
        case.length,
    )
