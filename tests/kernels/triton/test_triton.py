"""Triton kernels against the reference in float64: on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from folio.kernels.provider import FP8_DTYPES, AttentionCall, CacheScales, KernelError, Masking, VarlenBatch
from folio.kernels.reference import ReferenceProvider
from folio.kernels.triton.provider import TritonProvider
from tests.kernels import cases
from tests.kernels.cases import GuardedMemory, in_chunks
from tests.kernels.triton.problems import ALL_MASKS, CUDA, DEVICE, TOLERANCE, check, make_case

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu if CUDA else pytest.mark.thirds]


@pytest.fixture(scope="module")
def provider() -> TritonProvider:
    return TritonProvider()


def test_buffers_that_a_graph_may_have_captured_stay(provider: TritonProvider) -> None:
    """Regression: a larger batch replaced the splits' buffers, and a captured launch wrote to freed memory."""
    from folio.kernels.triton.decode import SplitDecode  # needs Triton, which `provider` asks for

    decode = SplitDecode()
    seen: list[list[int]] = []
    for count in (1, 2):
        case = make_case([(1, 300)] * count, (2, 1))
        attend = decode.prepare(AttentionCall(*case.arguments, num_splits=4))
        attend(*case.arguments[:3], torch.empty_like(case.query))
        [buffers] = decode._partial.values()
        seen.append([buffer.data_ptr() for buffer in buffers])
    assert seen[1][:1] == seen[0]
    assert len(seen[1]) == 2
    assert not any(counters.any() for [*kept] in decode._counters.values() for counters in kept)


def test_windows_end_anywhere_in_a_tile(provider: TritonProvider) -> None:
    """Tiles without masks are derived from the windows: an error of one shows only where a window ends at a tile."""
    for width in range(16, 33):
        check(provider, make_case([(2, 36)], (1, 1), (16, 16), window_left=width))
        check(provider, make_case([(7, 36 + width)], (2, 1), (16, 16), window_right=3))


@pytest.mark.parametrize("masks", [{}, {"window_left": 21, "softcap": 3.0, "sinks": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batch_invariance(
    provider: TritonProvider, dtype: torch.dtype, masks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to the bit, wherever chunks of a prompt and its decodes begin; by default decodes have another order."""
    # The interpreter's products are numpy's, whose BLAS adds up a row by its place in a tile on some processors.
    monkeypatch.setattr(np, "matmul", partial(np.einsum, "...ik,...kn->...in"))
    case, invariant = make_case([(21, 90)], (3, 1), (16, 16), dtype, **masks), TritonProvider(batch_invariant=True)
    whole = check(invariant, case)
    for size in (1, 8):
        assert torch.equal(in_chunks(invariant, case, size), whole), f"chunks of {size}"
    if dtype == torch.float32:  # bfloat16 may be rounded to the same
        assert not torch.equal(in_chunks(provider, case, 1), whole)


@pytest.mark.parametrize("features", [{}, ALL_MASKS], ids=["plain", "all"])
def test_lengths_at_the_edges(provider: TritonProvider, features: dict[str, Any]) -> None:
    for lengths in (
        [(1, 0), (1, 1), (0, 0)],  # nothing is cached
        [(0, 5), (0, 7)],
        [(1, 1)] * 5,
        [(16, 16)],  # one block
        [(1, 600)],  # a full region
        [(7, 600)],
        [(9, 4), (5, 0), (1, 3)],  # more queries than cached tokens: the first ones see nothing
        [(1, 40), (6, 6)],
    ):
        for region in (False, True):
            check(provider, make_case(lengths, (3, 1), dtype=torch.float16, region=region, **features))


def test_empty_batches(provider: TritonProvider) -> None:
    case = make_case([(0, 5), (0, 0)])
    assert check(provider, case).shape == (0, 4, 64)
    empty = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    batch = VarlenBatch(empty.new_zeros(1), empty, empty.view(0, 1), max_seqlen_q=0, max_seqlen_k=0)
    assert provider.attend(case.query, case.key_cache, case.value_cache, batch, case.masking).numel() == 0


@pytest.mark.parametrize("num_splits", [1, 3, 20, 1000])
@pytest.mark.parametrize("features", [{}, ALL_MASKS], ids=["plain", "all"])
def test_splits_can_be_repeated(provider: TritonProvider, num_splits: int, features: dict[str, Any]) -> None:
    """Counters that were not back at zero would make the second call combine partial results before all are stored."""
    lengths = [(1, 300), (1, 0), (0, 4), (2, 129), (1, 64)][: 2 if num_splits == 1000 else 5]
    case = make_case(lengths, (3, 1), dtype=torch.bfloat16, **features)
    first = check(provider, case, num_splits)
    assert torch.equal(provider.attend(*case.arguments, num_splits=num_splits), first)


@pytest.mark.parametrize("cache_dtype", FP8_DTYPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_float8_cache(provider: TritonProvider, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Written by the kernel, and read by it and by the reference."""
    case = make_case([(1, 90), (3, 40), (20, 20)], (6, 2), (96, 64), dtype, cache_dtype=cache_dtype)
    assert case.scales is not None
    num_tokens = 40
    generator = torch.Generator().manual_seed(3)
    new = [(3 * torch.randn(num_tokens, 2, dim, generator=generator)).to(dtype).to(DEVICE) for dim in (96, 64)]
    new[0][0, 0, 0], new[1][1, 0, 0] = 60000, -60000  # clipped
    visible = (~case.key_cache[:, :, 0, 0].float().isnan()).flatten().nonzero()[:, 0].cpu()
    slots = visible[torch.randperm(len(visible), generator=generator)[:num_tokens]].to(DEVICE)
    # The reference on the CPU: not every version of torch has `index_put` for 8-bit floats on CUDA.
    expected = [case.key_cache.cpu().clone(), case.value_cache.cpu().clone()]
    on_cpu = CacheScales(case.scales.key.cpu(), case.scales.value.cpu())
    ReferenceProvider().write(new[0].cpu(), new[1].cpu(), *expected, slots.cpu(), scales=on_cpu)
    provider.write(*new, case.key_cache, case.value_cache, slots, scales=case.scales)
    for actual, written in zip((case.key_cache, case.value_cache), expected, strict=True):
        assert torch.equal(actual.cpu().float().nan_to_num(1e6), written.float().nan_to_num(1e6))
    for scales in (case.scales, None):
        check(provider, replace(case, scales=scales))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (192, 128), (256, 8)])
def test_write(provider: TritonProvider, dims: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    num_tokens, num_heads, shape = 23, 3, (6, 16, 5)  # a cache of five layers' keys and values
    caches = [torch.randn(*shape, num_heads, dim, generator=generator).to(dtype).to(DEVICE) for dim in dims]
    expected = [cache.clone() for cache in caches]
    fused = torch.randn(num_tokens, num_heads + 1, sum(dims), generator=generator).to(dtype).to(DEVICE)[:, 1:]
    key, value = fused.split(dims, dim=-1)
    slots = torch.randperm(6 * 16, generator=generator)[:num_tokens].to(DEVICE)
    ReferenceProvider().write(key, value, expected[0][:, :, 2], expected[1][:, :, 3], slots)
    provider.write(key, value, caches[0][:, :, 2], caches[1][:, :, 3], slots)
    for cache, written in zip(caches, expected, strict=True):
        assert torch.equal(cache, written)


def test_write_takes_any_strides(provider: TritonProvider) -> None:
    """Keys beside values in one allocation, heads before tokens, and keys whose last stride is not 1."""
    storage = torch.zeros(5, 3, 2, 4, 32, device=DEVICE)  # [blocks, heads, side, tokens, dim]
    key_cache, value_cache = storage[:, :, 0].transpose(1, 2), storage[:, :, 1].transpose(1, 2)
    key = torch.randn(32, 3, 7, device=DEVICE).permute(2, 1, 0)
    value = torch.randn(3, 7, 32, device=DEVICE).transpose(0, 1)
    slots = torch.randperm(20)[:7].to(DEVICE)
    provider.write(key, value, key_cache, value_cache, slots)
    assert torch.equal(key_cache[slots // 4, slots % 4], key)
    assert torch.equal(value_cache[slots // 4, slots % 4], value)
    assert storage.count_nonzero() == key.numel() + value.numel()
    provider.write(key[:0], value[:0], key_cache, value_cache, slots[:0])


@pytest.mark.parametrize("words", [1, 100, 2500])
def test_copy_blocks(words: int) -> None:
    from folio.kernels.triton.cache import copy_blocks

    source = torch.randint(-(2**62), 2**62, (9, words + 3), device=DEVICE)[:, :words]
    target = torch.zeros(7, words + 5, dtype=torch.int64, device=DEVICE)
    rows = torch.tensor([8, 0, 8, 3], device=DEVICE)
    target_rows = torch.tensor([1, 6, 2, 0], device=DEVICE)
    copy_blocks(source, target[:, :words], rows, target_rows)
    assert torch.equal(target[target_rows, :words], source[rows])
    assert target.count_nonzero() == 4 * words
    copied = source.clone()
    copied[[1, 2]] = source[[5, 6]]
    copy_blocks(source, source, rows.new_tensor([5, 6]), rows.new_tensor([1, 2]))
    assert torch.equal(source, copied)
    copy_blocks(source, target[:, :words], rows[:0], rows[:0])
    with pytest.raises(ValueError, match=f"4 blocks of {words} words to 4 of {words + 5} words"):
        copy_blocks(source, target, rows, rows)
    with pytest.raises(ValueError, match="int32"):
        copy_blocks(source.int(), target, rows, rows)


def test_unsupported_problems_have_a_reason(provider: TritonProvider) -> None:
    case = make_case([(1, 5)])
    call = AttentionCall(*case.arguments)
    assert provider.unsupported(call) is None
    wide = {name: getattr(case, name).double() for name in ("query", "key_cache", "value_cache")}
    for change, reason in (
        (wide, "float64"),
        ({"value_cache": case.value_cache.new_zeros(*case.value_cache.shape[:3], 264)}, "more than 256"),
        ({"query": case.query.new_zeros(1, 130, 64)}, "65 query heads"),
    ):
        assert reason in str(provider.unsupported(replace(call, **change)))
    with pytest.raises(KernelError, match="float64"):
        provider.attend(*(tensor.double() for tensor in case.arguments[:3]), case.batch, case.masking)


def test_without_triton_or_a_device_there_is_no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if not CUDA:
        with pytest.raises(KernelError, match="needs a CUDA device"):
            TritonProvider()
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(KernelError, match="needs the package triton"):
        TritonProvider()


# On a GPU most of the time goes into compiling, for which the lengths do not matter.
PROBLEMS, PROBLEMS_PER_SHAPE = (300, 5) if CUDA else (36, 1)


@pytest.mark.parametrize("seed", range(PROBLEMS))
def test_random_problem(provider: TritonProvider, seed: int) -> None:
    options = {"longest": 400 if CUDA else 200, "cache_dtypes": [None, None, None, *FP8_DTYPES], "device": DEVICE}
    case = cases.random_case(seed, number=seed // PROBLEMS_PER_SHAPE, **options)
    check(provider, case, num_splits=(0, 1, 0, 2, 5, 200)[seed % 6])


@pytest.mark.skipif(CUDA, reason="pages of the host cannot be guarded for a GPU")
def test_nothing_beyond_the_cache_is_read(provider: TritonProvider) -> None:
    """The caches end or begin at an inaccessible page."""
    torch.manual_seed(0)
    with GuardedMemory(128) as memory:  # 600 tokens are what the kernels take for a region
        for at_end, dim, length, queries in itertools.product((True, False), (64, 80), (1, 17, 600), (1, 5)):
            shape = (1, length, 2, dim)
            caches = [memory.tensor(side, shape, torch.float32, at_end=at_end).normal_() for side in range(2)]
            query = torch.randn(queries, 6, dim)
            region, blocks = torch.zeros(1, 1), torch.arange(length - 1, -1, -1)[None]
            for table, block_tokens in ((region, length), (blocks, 1))[: 1 if length > 512 else 2]:
                views = [cache.view(-1, block_tokens, 2, dim) for cache in caches]
                batch = cases.make_batch([(queries, length)], table)
                check(provider, cases.Case(query, views[0], views[1], batch, Masking(0.125)))
