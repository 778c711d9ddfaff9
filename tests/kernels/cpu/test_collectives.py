"""Collectives over shared memory: sums in the order of ranks, all sizes, slow ranks, and the end of a group."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch

from folio.kernels import SharedGroup, shared_group_bytes

SIZES = (1, 2, 3, 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Around a slot of 256 KiB, its half, and a vector.
COUNTS = (0, 1, 15, 16, 17, 1000, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, (1 << 17) + 3, 300_000)


def make_groups(size: int) -> list[SharedGroup]:
    memory = mmap.mmap(-1, shared_group_bytes(size))
    return [SharedGroup(memory, rank, size) for rank in range(size)]


def on_all(groups: list[SharedGroup], act: Callable[[int, SharedGroup], Any]) -> list[Any]:
    """The results of every rank, in a thread each."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(act, range(len(groups)), groups, timeout=60))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_sums(size: int, dtype: torch.dtype) -> None:
    """Equal, bit for bit, to float32 sums in the order of ranks that are rounded once: other orders differ."""
    torch.manual_seed(size)
    groups = make_groups(size)
    for count in COUNTS:
        parts = [(torch.randn(count) * 10 ** random.Random(rank).randint(-2, 2)).to(dtype) for rank in range(size)]
        expected = torch.zeros(count)
        for part in parts:
            expected = expected + part.float()
        tensors = [part.clone() for part in parts]
        on_all(groups, lambda rank, group, tensors=tensors: group.all_reduce(tensors[rank]))
        for tensor in tensors:
            assert torch.equal(tensor, expected.to(dtype)), f"{count} elements"


def test_infinite_and_undefined_values() -> None:
    groups, inf, nan = make_groups(2), float("inf"), float("nan")
    for dtype in DTYPES:
        tensors = [torch.tensor(values, dtype=dtype) for values in ([inf, inf, nan, -0.0], [1.0, -inf, 1.0, 0.0])]
        on_all(groups, lambda rank, group, tensors=tensors: group.all_reduce(tensors[rank]))
        for tensor in tensors:
            assert tensor[0] == inf
            assert tensor[1:3].isnan().all()
            assert tensor[3] == 0


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool])
def test_gathers(dtype: torch.dtype) -> None:
    """With unequal columns, none on a rank, no rows, and rows that are larger than a slot."""
    groups = make_groups(3)
    unequal = (5, [7, 1, 300]), (2, [50_000, 0, 200_000]), (400, [1000, 999, 1]), (0, [3, 3, 3]), (1, [0, 1, 0])
    for rows, sizes in unequal:
        parts = [torch.randint(0, 2, (1, rows, size)).to(dtype) for size in sizes]
        for result in on_all(groups, lambda rank, group, parts=parts, sizes=sizes: group.gather(parts[rank], sizes)):
            assert torch.equal(result, torch.cat(parts, dim=-1))


@pytest.mark.parametrize("count", COUNTS)
def test_broadcasts(count: int) -> None:
    groups = make_groups(3)
    for source in range(3):
        tensors = [torch.randint(1 << 60, (count,)) for _ in groups]
        expected = tensors[source].clone()
        on_all(groups, lambda rank, group, own=tensors, source=source: group.broadcast(own[rank], source))
        assert all(torch.equal(tensor, expected) for tensor in tensors)


def test_random_sequences_with_slow_ranks() -> None:
    """A rank that only gives does not wait, and must not overwrite a slot that a slower rank still reads."""
    size, rng = 3, random.Random(0)
    groups = make_groups(size)
    steps = [
        (rng.choice(["sum", "gather", "broadcast"]), rng.choice([1, 100, 100_000]), rng.randrange(size))
        for _ in range(300)
    ]

    def data(step: int, rank: int, count: int) -> torch.Tensor:
        return torch.full((2, count), float((step * size + rank) % 97))

    def run(rank: int, group: SharedGroup) -> None:
        pauses = random.Random(rank)
        for step, (kind, count, source) in enumerate(steps):
            if pauses.random() < 0.1:
                time.sleep(pauses.random() * 2e-3)
            parts = [data(step, other, count) for other in range(size)]
            own = parts[rank].clone()
            if kind == "sum":
                group.all_reduce(own)
                assert torch.equal(own, sum(parts)), (step, rank)
            elif kind == "broadcast":
                group.broadcast(own, source)
                assert torch.equal(own, parts[source]), (step, rank)
            elif rank == source:
                assert torch.equal(group.gather(own, [count] * size), torch.cat(parts, dim=-1)), (step, rank)
            else:
                group.give(own, [count] * size)

    on_all(groups, run)


def test_the_count_of_rounds_wraps_around() -> None:
    memory = mmap.mmap(-1, shared_group_bytes(2))
    groups = [SharedGroup(memory, rank, 2) for rank in range(2)]
    first = (1 << 32) - 3
    words = memoryview(memory).cast("I")
    for rank, group in enumerate(groups):
        group._group.round = first
        words[16 + 16 * rank] = first  # a line of 64 bytes each, behind the header's
    tensors = [torch.ones(10), torch.ones(10)]
    for _ in range(6):
        on_all(groups, lambda rank, group: group.all_reduce(tensors[rank]))
    assert tensors[0].tolist() == tensors[1].tolist() == [64.0] * 10


def test_the_end_of_a_group_ends_its_waits() -> None:
    """Of ranks that spin and of ranks that sleep, and later collectives at once."""
    for delay_s in (0.0, 0.0, 0.0, 0.3):
        groups = make_groups(3)
        with ThreadPoolExecutor(2) as pool:
            waits = [pool.submit(group.all_reduce, torch.ones(5)) for group in groups[:2]]
            time.sleep(delay_s)
            groups[2].end()
            assert not wait(waits, timeout=10).not_done
        for waiting in waits:
            with pytest.raises(ConnectionAbortedError):
                waiting.result()
        group, own, sizes = groups[2], torch.ones(5), ([5, 5, 5],)
        calls = (group.all_reduce, ()), (group.gather, sizes), (group.give, sizes), (group.broadcast, (2,))
        for call, arguments in calls:
            with pytest.raises(ConnectionAbortedError):
                call(own, *arguments)


def test_waiting_ranks_sleep() -> None:
    """They used to take a whole core each while they waited."""
    groups = make_groups(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(groups[0].all_reduce, torch.ones(5))
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1
        groups[1].all_reduce(torch.ones(5))
        waiting.result(10)


def test_more_ranks_than_cores() -> None:
    """Ranks that spin for those which they keep from running would need minutes."""
    groups = make_groups(4 * len(os.sched_getaffinity(0)))

    def run(rank: int, group: SharedGroup) -> None:
        for _ in range(300):
            tensor = torch.full((100,), float(rank))
            group.all_reduce(tensor)
            assert tensor[0] == tensor[-1] == sum(range(len(groups)))

    on_all(groups, run)


def test_tensors_that_cannot_be_shared() -> None:
    [group] = make_groups(1)
    with pytest.raises(ValueError, match="float64 cannot be summed"):
        group.all_reduce(torch.ones(5, dtype=torch.float64))
    with pytest.raises(ValueError, match="contiguous"):
        group.all_reduce(torch.ones(4, 4).t()[:2])
    with pytest.raises(ValueError, match="ranks' sizes"):
        group.gather(torch.ones(5), [4])
