"""Triton kernels against the reference in float64: on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from folio.kernels import flash_attn_with_kvcache
from folio.kernels.provider import FP8_DTYPES, AttentionCall, CacheScales, KernelError, Masking, VarlenBatch
from folio.kernels.reference import ReferenceProvider
from folio.kernels.triton.provider import TritonProvider
from tests.kernels import cases
from tests.kernels.cases import GuardedMemory, Lengths

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu if CUDA else pytest.mark.thirds]

# Largest difference allowed, divided by 1 + |expected|. The interpreter cuts bfloat16 off instead of rounding.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LSE_TOLERANCE = 1e-4
# (queries, cached): prompts of one token and more, decodes, chunks, a sequence without queries, one without a cache.
RAGGED: Lengths = [(1, 1), (1, 17), (5, 5), (3, 64), (0, 9), (1, 65), (40, 130), (0, 0), (33, 33), (1, 150)]
ALL_MASKS = {"window_left": 21, "window_right": 4, "softcap": 3.0, "alibi": "seqs", "sinks": True, "leftpad": True}


@pytest.fixture(scope="module")
def provider() -> TritonProvider:
    return TritonProvider()


def make_case(
    lengths: Lengths,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float32,
    *,
    block_tokens: int = 16,
    region: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = 0,
    softcap: float = 0.0,
    alibi: str = "",
    sinks: bool = False,
    leftpad: bool = False,
    seed: int = 7,
    **options: Any,
) -> cases.Case:
    """A case with random slopes, sinks and leftpads; the table has one column more than the lengths need."""
    generator = torch.Generator().manual_seed(seed)
    pads = [int(torch.randint(0, max(1, cached // 2), (), generator=generator)) for _, cached in lengths]
    slopes = torch.rand(*([len(lengths)] * (alibi == "seqs")), heads[0], generator=generator).to(DEVICE)
    masking = Masking(
        dims[0] ** -0.5 if scale is None else scale,
        window_left,
        window_right,
        softcap,
        slopes if alibi else None,
        torch.randn(heads[0], generator=generator).to(DEVICE) if sinks else None,
    )
    options |= {"masking": masking, "leftpad": pads if leftpad else None, "seed": seed, "device": DEVICE}
    view = "region" if region else "block_table"
    return cases.make_case(lengths, heads, dims, dtype, view, block_tokens=block_tokens, spare_columns=1, **options)


def check(provider: TritonProvider, case: cases.Case, num_splits: int = 0) -> torch.Tensor:
    tolerance = TOLERANCE[case.query.dtype]
    return cases.check(
        provider, case, tolerance=tolerance, lse_tolerance=LSE_TOLERANCE, relative=True, num_splits=num_splits
    )


@pytest.mark.parametrize(("block_tokens", "region"), [(1, False), (3, False), (16, False), (256, False), (600, True)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_ragged_batch(provider: TritonProvider, dtype: torch.dtype, block_tokens: int, region: bool) -> None:
    check(provider, make_case(RAGGED, (3, 1), dtype=dtype, block_tokens=block_tokens, region=region))


@pytest.mark.parametrize("dims", [(80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_sizes(provider: TritonProvider, dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(provider, make_case([(1, 140), (9, 30), (20, 20), (1, 1)], (4, 1), dims, dtype))


@pytest.mark.parametrize("group", [1, 4, 7, 64])
def test_group_sizes(provider: TritonProvider, group: int) -> None:
    for lengths in ([(1, 40), (1, 1)], [(2, 40), (1, 3)], [(11, 70)]):
        check(provider, make_case(lengths, (group, 1), dtype=torch.float16))


@pytest.mark.parametrize(
    "features",
    [
        {"window_left": 0},
        {"window_left": 31},
        {"window_left": 5, "window_right": 9},
        {"window_right": 3},
        {"window_right": -1},
        {"softcap": 2.0, "scale": 0.5},
        {"alibi": "heads"},
        {"alibi": "seqs", "window_right": -1},
        {"sinks": True},
        {"leftpad": True},
        ALL_MASKS,
    ],
    ids=str,
)
def test_masking(provider: TritonProvider, features: dict[str, Any]) -> None:
    lengths = [(1, 17), (5, 5), (3, 64), (0, 9), (1, 90), (40, 70)]
    for seed, region in enumerate((False, True)):
        case = make_case(lengths, (3, 1), block_tokens=600 if region else 16, region=region, seed=seed, **features)
        check(provider, case, num_splits=2)


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
            options = {"block_tokens": 600 if region else 16, "region": region} | features
            check(provider, make_case(lengths, (3, 1), dtype=torch.float16, **options))


def test_maxima_may_be_overstated(provider: TritonProvider) -> None:
    for lengths in ([(1, 30), (1, 70)], [(1, 30)], [(4, 30)], [(4, 30), (1, 20)]):
        check(provider, make_case(lengths, slack=1000))


def test_empty_batches(provider: TritonProvider) -> None:
    case = make_case([(0, 5), (0, 0)])
    assert check(provider, case).shape == (0, 4, 64)
    empty = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    batch = VarlenBatch(empty.new_zeros(1), empty, empty.view(0, 1), max_seqlen_q=0, max_seqlen_k=0)
    assert provider.attend(case.query, case.key_cache, case.value_cache, batch, case.masking).numel() == 0


@pytest.mark.parametrize("num_splits", [1, 3, 20, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_splits(provider: TritonProvider, num_splits: int, dtype: torch.dtype) -> None:
    lengths = [(1, 300), (1, 0), (0, 4), (1, 129), (1, 64)][: 2 if num_splits == 1000 else 5]
    features: dict[str, Any]
    for features in ({}, ALL_MASKS):
        check(provider, make_case(lengths, (3, 1), dtype=dtype, **features), num_splits)


def test_splits_can_be_repeated(provider: TritonProvider) -> None:
    """Counters that were not back at zero would make the second call combine partial results before all are stored."""
    case = make_case([(1, 200), (1, 90), (2, 40)], (6, 2))
    first = check(provider, case, num_splits=4)
    for _ in range(3):
        assert torch.equal(check(provider, case, num_splits=4), first)


def test_split_buffers_grow() -> None:
    provider = TritonProvider()
    for num_seqs in (1, 3, 2):
        check(provider, make_case([(1, 100)] * num_seqs), num_splits=3)


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
PROBLEMS, PROBLEMS_PER_SHAPE = (300, 5) if CUDA else (30, 1)


@pytest.mark.parametrize("seed", range(PROBLEMS))
def test_random_problem(provider: TritonProvider, seed: int) -> None:
    shape, lengths_of = random.Random(seed // PROBLEMS_PER_SHAPE), random.Random(1000 + seed)
    num_kv_heads = shape.choice([1, 2, 3])
    group = shape.choice([1, 2, 3, 4, 6, 7, 8, 16, 33, 64][: 10 if num_kv_heads == 1 else 7])
    dim = shape.choice([8, 16, 40, 64, 80, 96, 112, 128, 192, 256])
    most = shape.choice([20, 150, 400 if CUDA else 200])
    lengths: Lengths = []
    for _ in range(lengths_of.randint(1, 5)):
        cached = lengths_of.randint(0, most)
        several = [2, lengths_of.randint(1, 40), cached, cached + 3]
        lengths.append((lengths_of.choice([0, 1, 1, 1, *several]), cached))
    region = shape.random() < 0.3
    case = make_case(
        lengths,
        (group * num_kv_heads, num_kv_heads),
        (dim, shape.choice([dim, dim, 64, 128])),
        shape.choice(list(TOLERANCE)),
        cache_dtype=shape.choice([None, None, None, *FP8_DTYPES]),
        block_tokens=shape.choice([most, 601]) if region else shape.choice([1, 3, 16, 48, 64, 128, 256, 700]),
        region=region,
        window_left=shape.choice([-1, -1, 0, shape.randint(0, most)]),
        window_right=shape.choice([0, 0, 0, -1, shape.randint(0, 30)]),
        softcap=shape.choice([0.0, 0.0, 3.0, 30.0]),
        alibi=shape.choice(["", "", "heads", "seqs"]),
        sinks=shape.random() < 0.3,
        leftpad=shape.random() < 0.3,
        slack=lengths_of.choice([0, 0, 100]),
        seed=seed,
    )
    check(provider, case, num_splits=lengths_of.choice([0, 0, 1, 2, 5, 200]))


@pytest.mark.parametrize("interleaved", [True, False])
def test_front(provider: TritonProvider, interleaved: bool) -> None:
    """The public function over Triton: new keys are rotated, stored and read in the same call."""
    torch.manual_seed(0)
    caches = [torch.randn(10, 16, 2, 64, device=DEVICE) for _ in range(2)]
    others = [cache.clone() for cache in caches]
    q, k, v = (torch.randn(2, 3, heads, 64, device=DEVICE) for heads in (4, 2, 2))
    angles = torch.rand(64, 16, device=DEVICE) * 6
    options: dict[str, Any] = {
        "cache_seqlens": torch.tensor([20, 0], dtype=torch.int32, device=DEVICE),
        "block_table": torch.tensor([[3, 1], [4, 5]], dtype=torch.int32, device=DEVICE),
        "causal": True,
        "rotary_interleaved": interleaved,
        "return_softmax_lse": True,
    }
    new = k, v, angles.cos(), angles.sin()
    found = flash_attn_with_kvcache(q, *caches, *new, **options, provider=provider)
    expected = flash_attn_with_kvcache(q, *others, *new, **options, provider=ReferenceProvider())
    for a, b in zip((*found, *caches), (*expected, *others), strict=True):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=3e-5)


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
