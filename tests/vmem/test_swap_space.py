"""Swap space that several memories share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from folio.vmem import DevicePages, IntegrityError, LocalContents, OutOfSwap
from tests.vmem.sequences import begin
from tests.vmem.small_memory import BLOCK_TOKENS, PAGE_BYTES, FlakyHost, make_memory

CAPACITY = 200 * PAGE_BYTES


def test_memories_of_one_device_share_a_bound() -> None:
    """Regression: each had `swap_bytes` for itself, so that sixty models could take sixty times as much."""
    pages = DevicePages(CAPACITY, swap_bytes=0)
    memories = [make_memory(device=FlakyHost(CAPACITY, pages), pages=pages, swap_pages=60)[0] for _ in range(2)]
    sequences = [begin(memory, 8 * BLOCK_TOKENS, "auto") for memory in memories]
    num_bytes = memories[0].swapping.num_bytes(sequences[:1])
    pages.swap_space.most_bytes = num_bytes * 3 // 2
    swapped = memories[0].swap_out(sequences[:1])
    with pytest.raises(OutOfSwap, match=f"^{num_bytes} bytes to swap out, {num_bytes // 2} of .* of all models toget"):
        memories[1].swap_out(sequences[1:])
    memories[1].check_integrity()
    [sequences[0]] = memories[0].swap_in(swapped)
    memories[1].swap_out(sequences[1:])
    assert pages.swap_space.used_bytes == num_bytes
    memories[0].free(sequences[0])
    with pytest.raises(IntegrityError, match=f"and {num_bytes} swapped out"):
        pages.close()
    memories[1].close()  # what it has swapped out goes with it
    assert pages.swap_space.used_bytes == 0
    memories[0].close()
    pages.close()


def test_no_more_is_given_back_than_was_taken() -> None:
    pages = DevicePages(CAPACITY)
    pages.swap_space.take(10)
    with pytest.raises(IntegrityError, match="11 bytes of swap space given back, 10 are taken"):
        pages.swap_space.give_back(11)


def test_swaps_go_on_where_memory_cannot_be_pinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the step that preempted failed, with all requests. It is told once."""
    unused: Any = None
    contents, real, refused = LocalContents(unused), torch.empty, []

    def empty(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            refused.append(size)
            raise RuntimeError("CUDA error: out of memory\nCompile with …")
        return real(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    for _ in range(2):
        assert contents._host_rows(3, 5).shape == (3, 5)
    assert refused == [(3, 5)]
    [record] = caplog.records
    assert "120 bytes of host memory cannot be pinned (CUDA error: out of memory):" in record.getMessage()
