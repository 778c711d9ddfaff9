"""The providers of this machine against the reference in float64, over ragged batches and both views."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from folio.kernels import AttentionProvider, CacheScales, KernelError, Masking, VarlenBatch, int8_cache, select_provider
from folio.kernels.cpu.provider import CpuProvider
from folio.kernels.reference import ReferenceProvider
from tests.kernels.cases import (
    RAGGED,
    TOLERANCE,
    Case,
    GuardedMemory,
    check,
    in_chunks,
    make_batch,
    make_case,
    random_case,
)
from tests.kernels.marches import MARCHES

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=MARCHES)
def march(request: pytest.FixtureRequest) -> str:
    march: str = request.param
    return march


@pytest.fixture(scope="module")
def cpu(march: str) -> CpuProvider:
    return CpuProvider(march)


@pytest.mark.thirds
@pytest.mark.parametrize("seed", range(80))
def test_random_problem(cpu: CpuProvider, seed: int) -> None:
    check(cpu, random_case(seed), num_splits=seed % 3)


@pytest.mark.parametrize("seed", range(40))
def test_random_problem_without_a_compiler(seed: int) -> None:
    check(select_provider("sdpa", CPU), random_case(seed))


@pytest.mark.parametrize("block_tokens", [1, 2, 16, 37, 512])
@pytest.mark.parametrize("num_splits", [0, 1, 2, 7])
def test_long_sequences_are_split(block_tokens: int, num_splits: int) -> None:
    case = make_case([(1, 2100), (1, 513), (1, 512), (1, 1)], (8, 2), block_tokens=block_tokens)
    check(select_provider("cpu", CPU), case, num_splits=num_splits)


def test_result_does_not_depend_on_the_rest_of_the_batch() -> None:
    """Equal to the bit: a request gives the same tokens in every batch."""
    provider = select_provider("cpu", CPU)
    lengths = [(1, 700), (40, 90), (1, 64), (1, 1500)]
    case = make_case(lengths, (14, 2), dtype=torch.bfloat16)
    together = provider.attend(*case.arguments)
    starts = case.batch.cu_seqlens_q.tolist()
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        one = make_batch([length], case.batch.block_table[i : i + 1])
        alone = provider.attend(case.query[rows], case.key_cache, case.value_cache, one, case.masking)
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (9, 3)])
def test_batch_invariance(heads: tuple[int, int], dtype: torch.dtype, march: str) -> None:
    """Equal to the bit, wherever chunks of a prompt and its decodes begin; by default decodes have another order."""
    provider = CpuProvider(march, batch_invariant=True)
    for masks in ({}, {"window_left": 40}, {"window_left": 9, "softcap": 3.0, "sinks": True}):
        for cache_dtype in (dtype, torch.int8):
            case = make_case([(100, 140)], heads, dtype=dtype, block_tokens=37, **masks)
            if cache_dtype == torch.int8:
                case = in_int8(case)
            whole = in_chunks(provider, case, 100)
            for size in (1, 2, 64):
                assert torch.equal(in_chunks(provider, case, size), whole), f"{masks}, chunks of {size}"
            if dtype == torch.float32:  # others may be rounded to the same
                assert not torch.equal(in_chunks(CpuProvider(march), case, 1), whole)


@pytest.mark.parametrize("seed", range(0, 80, 3))
def test_random_problem_with_batch_invariance(march: str, seed: int) -> None:
    """Tiles begin before a window, where memory may be missing."""
    check(CpuProvider(march, batch_invariant=True), random_case(seed))


def in_int8(case: Case) -> Case:
    """The same case over a cache of int8."""
    shape = *case.key_cache.shape[:3], case.key_cache.shape[3] + 4
    caches = torch.zeros(2, *shape, dtype=torch.int8)
    keys, values = (cache.flatten(0, 1).nan_to_num() for cache in (case.key_cache, case.value_cache))
    CpuProvider().write(keys, values, caches[0], caches[1], torch.arange(len(keys)))
    return replace(case, key_cache=caches[0], value_cache=caches[1])


def test_large_scores_do_not_overflow() -> None:
    """exp of the raw scores (about 200) would be infinite in float32; only their rounding error remains."""
    case = make_case(RAGGED, (8, 2), view="region", masking=Masking(1.0))
    case = replace(case, query=case.query * 5, key_cache=case.key_cache * 5)
    check(select_provider("cpu", CPU), case, tolerance=1e-3)


@pytest.mark.parametrize("name", ["cpu", "sdpa", "reference"])
def test_edges(name: str) -> None:
    """No queries, nothing cached, one token, a full block, a full region, more queries than tokens."""
    provider = select_provider(name, CPU)
    for view in ("region", "block_table"):
        check(provider, make_case([(1, 5), (0, 9), (2, 7), (1, 0), (0, 0), (1, 1), (16, 16), (4, 2)], view=view))
    full = make_case([(1, 16), (3, 16)], block_tokens=16)
    assert full.batch.block_table.shape == (2, 1)
    check(provider, full)


def test_eight_bit_cache() -> None:
    """Values are divided by the scales when written, multiplied when read, and clipped if too large."""
    torch.manual_seed(0)
    provider = select_provider("auto", CPU)
    scales = CacheScales(torch.tensor([0.5, 2.0]), torch.tensor([0.25, 1.0]))
    cache = torch.zeros(4, 16, 2, 2, 64, dtype=torch.float8_e4m3fn)
    key_cache, value_cache = cache[:, :, 0], cache[:, :, 1]
    key, value = torch.randn(40, 2, 64), torch.randn(40, 2, 64)
    value[0] = 1e6
    provider.write(key, value, key_cache, value_cache, torch.arange(40), scales=scales)
    held = value_cache.float().flatten(0, 1)[:40] * scales.value[:, None]
    assert (held[1:] - value[1:]).abs().max() < 0.07 * value[1:].abs().max()
    assert (held[0, 0] == 448 * 0.25).all()
    batch = make_batch([(1, 40)], torch.tensor([[0, 1, 2]]))
    check(provider, Case(torch.randn(1, 4, 64), key_cache, value_cache, batch, Masking(0.125), scales), tolerance=1e-4)
    with pytest.raises(KernelError, match="float8"):
        select_provider("cpu", CPU).attend(torch.randn(1, 4, 64), key_cache, value_cache, batch, Masking(0.125))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_int8_cache(cpu: CpuProvider, dtype: torch.dtype) -> None:
    """Rows have their own scales, at the end of mapped memory too; one with an infinity is NaN."""
    torch.manual_seed(0)
    with GuardedMemory(16) as memory:
        for heads, dims, queries in itertools.product([(9, 3), (2, 2), (5, 1)], [(64, 64), (20, 36)], (1, 21)):
            shapes = [(13, 8, heads[1], int8_cache.row_bytes(dim)) for dim in dims]
            caches = [memory.tensor(i, shape, torch.int8, at_end=True).zero_() for i, shape in enumerate(shapes)]
            key, value = (torch.randn(104, heads[1], dim).to(dtype) for dim in dims)
            cpu.write(key, value, caches[0], caches[1], torch.arange(104))
            for cache, new in zip(caches, (key, value), strict=True):
                off = cache.flatten(0, 1).int() - int8_cache.quantise(new).int()
                assert off[..., :-4].abs().max() <= 1  # halves
                assert not off[..., -4:].any()
            batch = make_batch([(queries, 103), (1, 104)], torch.arange(13).repeat(2, 1))
            query = torch.randn(queries + 1, heads[0], dims[0]).to(dtype)
            check(cpu, Case(query, caches[0], caches[1], batch, Masking(dims[0] ** -0.5, window_left=90)))
    key[3, 0, 5] = torch.inf
    for provider in (cpu, ReferenceProvider()):
        provider.write(key[:8], value[:8], caches[0], caches[1], torch.arange(8))
        assert int8_cache.dequantise(caches[0], dtype)[0, :, 0].isnan().all(-1).tolist() == [i == 3 for i in range(8)]


@pytest.mark.parametrize("make", [lambda: select_provider("cpu", CPU), ReferenceProvider])
def test_write_then_read_back(make: Callable[[], AttentionProvider]) -> None:
    cache = torch.zeros(6, 16, 5, 3, 40)  # [blocks, tokens, layer and side, heads, dim]
    key_cache, value_cache = cache[:, :, 2], cache[:, :, 3]
    key = torch.randn(1, 3, 20, 40).transpose(1, 2)[0]  # a transposed view, as models hand it over
    value = torch.randn(20, 3, 40)
    slots = torch.randperm(6 * 16)[:20]
    make().write(key, value, key_cache, value_cache, slots)
    assert torch.equal(key_cache[slots // 16, slots % 16], key)
    assert torch.equal(value_cache[slots // 16, slots % 16], value)
    assert cache.count_nonzero() == key.numel() + value.numel()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (14, 2)])
def test_nothing_beyond_the_cache_is_read(cpu: CpuProvider, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """The caches end or begin at an inaccessible page."""
    with GuardedMemory(64) as memory:
        for at_end, dim, length, queries in itertools.product((True, False), (64, 80, 34), (1, 17, 33, 70), (1, 5)):
            shape = (1, length, heads[1], dim)
            key, value = (memory.tensor(side, shape, dtype, at_end=at_end).normal_() for side in range(2))
            query = torch.randn(queries, heads[0], dim).to(dtype)
            region, blocks = torch.zeros(1, 1), torch.arange(length - 1, -1, -1)[None]
            for table, block_tokens in ((region, length), (blocks, 1)):
                caches = (cache.view(-1, block_tokens, *shape[2:]) for cache in (key, value))
                check(cpu, Case(query, *caches, make_batch([(queries, length)], table), Masking(dim**-0.5)))


def test_heads_far_apart() -> None:
    """A head-major cache: memory between the heads must not be prefetched."""
    cache = torch.randn(2, 2, 8, 3000, 64).bfloat16().transpose(2, 3)
    batch = make_batch([(1, 2900), (1, 40)], torch.tensor([[1], [0]]))
    query = torch.randn(2, 16, 64).bfloat16()
    check(select_provider("cpu", CPU), Case(query, cache[0], cache[1], batch, Masking(0.125)))


def test_wrong_writes_are_named_and_nothing_is_stored() -> None:
    good = {
        "key": torch.zeros(3, 2, 32),
        "value": torch.zeros(3, 2, 32),
        "key_cache": torch.full((4, 8, 2, 32), 7.0),
        "value_cache": torch.full((4, 8, 2, 32), 7.0),
        "slots": torch.arange(3),
    }
    for wrong, message in (
        ({"key": torch.zeros(3, 2, 16)}, r"key \[3, 2, 16\]"),
        ({"value_cache": torch.zeros(4, 8, 2, 32).bfloat16()}, r"\[4, 8, 2, 32\] torch.bfloat16 do not match"),
        ({"value_cache": torch.zeros(8, 4, 2, 32)}, r"of values \[8, 4, 2, 32\] .* do not match"),
        ({"value": torch.zeros(3, 2, 32).bfloat16()}, r"value \[3, 2, 32\] torch.bfloat16 does not fit"),
        ({"value_cache": torch.zeros(4, 8, 32, 2).transpose(2, 3)}, "stride 1"),
        (
            {name: torch.zeros(4, 8, 2, 32, dtype=torch.float8_e5m2) for name in ("key_cache", "value_cache")}
            | {"value": torch.zeros(3, 2, 32).half()},
            "keys of torch.float32 and values of torch.float16",
        ),
        ({"slots": torch.arange(6)[::2]}, "contiguous int64 slots"),
        ({"slots": torch.arange(2)}, "3 keys"),
    ):
        for name in ("cpu", "reference"):
            with pytest.raises(ValueError, match=message):
                select_provider(name, CPU).write(**(good | wrong))  # type: ignore[arg-type]
    assert (good["key_cache"] == 7).all()


def test_wrong_shapes_are_named() -> None:
    case = make_case([(1, 5)], view="region")
    for wrong, message in (
        (replace(case, query=case.query[..., :16]), r"\[1, 4, 16\]"),
        (replace(case, query=case.query[:, :3]), "3 query heads"),
        (replace(case, query=case.query.half()), "queries of torch.float16 cannot read a cache of torch.float32"),
        (replace(case, key_cache=case.key_cache[0]), r"caches must be \[blocks, tokens, kv_heads, dim\]"),
        (replace(case, masking=Masking(1.0, sinks=torch.zeros(3))), r"sinks must be .* \[4\], got \[3\]"),
        (replace(case, masking=Masking(1.0, alibi_slopes=torch.zeros(2, 4))), r"alibi_slopes must be .* \[1, 4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            select_provider("cpu", CPU).attend(*wrong.arguments)
    with pytest.raises(ValueError, match="lse"):
        select_provider("cpu", CPU).attend(*case.arguments, lse=torch.zeros(4))
    batch = case.batch
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        VarlenBatch(batch.cu_seqlens_q[:1], batch.cache_seqlens, batch.block_table, 1, 5)
