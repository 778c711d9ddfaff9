"""Random attention problems for the tests of all providers, and the comparison with the reference in float64."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from folio.kernels import AttentionProvider, CacheScales, Masking, VarlenBatch
from folio.kernels.provider import FP8_DTYPES
from folio.kernels.reference import ReferenceProvider, first_visible

# Largest difference allowed against float64, for values of order 1: sums are float32, weights and results are rounded.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LSE_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-4, torch.float16: 1e-4}
Lengths = list[tuple[int, int]]  # (queries, cached) of each sequence
RAGGED: Lengths = [(1, 1), (1, 17), (5, 5), (3, 64), (1, 65), (70, 200), (33, 33), (1, 300)]
# Table entry of no block, for all entries without visible tokens: reading it ends the process.
INVALID = -(10**6)


@dataclass(frozen=True)
class Case:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    batch: VarlenBatch
    masking: Masking
    scales: CacheScales | None = None

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, VarlenBatch, Masking]:
        """The positional arguments of `AttentionProvider.attend`."""
        return self.query, self.key_cache, self.value_cache, self.batch, self.masking


def make_batch(lengths: Lengths, table: torch.Tensor, leftpad: list[int] | None = None, slack: int = 0) -> VarlenBatch:
    """A batch of sequences; `slack` is added to its maxima."""
    return VarlenBatch(
        torch.tensor(list(itertools.accumulate((q for q, _ in lengths), initial=0)), dtype=torch.int32),
        torch.tensor([cached for _, cached in lengths], dtype=torch.int32),
        table.int().contiguous(),
        max(q for q, _ in lengths) + slack,
        max(cached for _, cached in lengths) + slack,
        None if leftpad is None else torch.tensor(leftpad, dtype=torch.int32),
    )


def make_case(
    lengths: Lengths,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float32,
    view: str = "block_table",
    *,
    cache_dtype: torch.dtype | None = None,
    block_tokens: int | None = None,
    spare_columns: int = 0,
    masking: Masking | None = None,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = 0,
    softcap: float = 0.0,
    alibi: str = "",
    sinks: bool = False,
    leftpad: list[int] | bool | None = None,
    slack: int = 0,
    device: str | torch.device = "cpu",
    seed: int = 7,
) -> Case:
    """Random tensors, sinks, leftpads, and slopes of all "heads", or for each of the "seqs". Tokens that no query sees
    are NaN, and table entries without visible tokens are `INVALID`."""
    generator = torch.Generator().manual_seed(seed)
    num_q_heads, num_kv_heads = heads
    if leftpad is True:
        leftpad = [int(torch.randint(0, max(1, cached // 2), (), generator=generator)) for _, cached in lengths]
    slopes = torch.rand(*([len(lengths)] * (alibi == "seqs")), num_q_heads, generator=generator).to(device) * 0.5
    masking = masking or Masking(
        dims[0] ** -0.5 if scale is None else scale,
        window_left,
        window_right,
        softcap,
        slopes if alibi else None,
        3 * torch.randn(num_q_heads, generator=generator).to(device) if sinks else None,
    )
    longest = max(cached for _, cached in lengths)
    block_tokens = block_tokens or (longest + 3 if view == "region" else 16)
    width = 1 if view == "region" else max(1, -(-longest // block_tokens)) + spare_columns
    num_blocks = len(lengths) * width + 2
    ids = torch.randperm(num_blocks, generator=generator)[: len(lengths) * width].view(-1, width)
    table, slots = torch.full_like(ids, INVALID), [torch.empty(0, dtype=torch.int64)]
    for i, (num_queries, end) in enumerate(lengths):
        begin = first_visible(num_queries, end, leftpad[i] if leftpad else 0, masking)
        if num_queries and begin < end:
            tokens = torch.arange(begin, end)
            columns = tokens // block_tokens
            table[i, columns] = ids[i, columns]
            slots.append(ids[i, columns] * block_tokens + tokens % block_tokens)
    visible = torch.cat(slots)

    def cache(dim: int) -> torch.Tensor:
        """One of three interleaved layers."""
        layers = torch.full((num_blocks * block_tokens, 3, num_kv_heads, dim), torch.nan)
        layers[visible, 1] = torch.randn(len(visible), num_kv_heads, dim, generator=generator)
        return layers.to(cache_dtype or dtype).to(device).unflatten(0, (num_blocks, block_tokens))[:, :, 1]

    # A slice, as of a fused projection.
    num_tokens = sum(num_queries for num_queries, _ in lengths)
    query = torch.randn(num_tokens, num_q_heads + 2, dims[0], generator=generator).to(dtype).to(device)[:, 1:-1]
    scales = None
    if cache_dtype in FP8_DTYPES:
        scales = CacheScales(*(0.5 + torch.rand(2, num_kv_heads, generator=generator).to(device)))
    batch = make_batch(lengths, table, leftpad or None, slack).to(torch.device(device))
    return Case(query, cache(dims[0]), cache(dims[1]), batch, masking, scales)


def in_chunks(provider: AttentionProvider, case: Case, size: int) -> torch.Tensor:
    """The results of a case of one sequence, whose queries come so many at a time."""
    [num_queries] = case.batch.cu_seqlens_q[1:].tolist()
    [num_cached] = case.batch.cache_seqlens.tolist()
    outs = []
    for begin in range(0, num_queries, size):
        end = min(begin + size, num_queries)
        batch = make_batch([(end - begin, num_cached - num_queries + end)], case.batch.block_table.cpu())
        query = case.query[begin:end]
        outs.append(provider.attend(query, case.key_cache, case.value_cache, batch.to(case.query.device), case.masking))
    return torch.cat(outs)


# Of three coprime lengths, so that all pairs come in turn.
GROUPS = [1, 2, 3, 4, 5, 6, 7, 9, 16, 33, 64]
DIMS = [(8, 8), (16, 64), (24, 24), (32, 24), (40, 40), (64, 64), (80, 80), (96, 128), (112, 112)]
DIMS += [(128, 128), (192, 128), (192, 192), (256, 256)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_case(
    seed: int,
    *,
    number: int | None = None,
    longest: int = 1200,
    cache_dtypes: Sequence[torch.dtype | None] = (None,),
    device: str | torch.device = "cpu",
) -> Case:
    """A problem that every provider supports. Those of the same `number`, by default the seed, differ in lengths."""
    number = seed if number is None else number
    shape, rng = random.Random(number), random.Random(1000 + seed)
    most = shape.choice([20, min(150, longest), longest])
    lengths: Lengths = []
    for _ in range(rng.randint(1, 6)):
        cached = rng.choice([0, 1, 2, 15, 16, 17, 63, 64, 65, rng.randint(1, most), rng.randint(1, most)])
        lengths.append((rng.choice([0, 1, 1, 1, 2, rng.randint(0, min(cached + 1, 40)), cached, cached + 3]), cached))
    if not any(num_queries for num_queries, _ in lengths):
        lengths[0] = (1, 5)
    group = GROUPS[number % len(GROUPS)]
    num_kv_heads = shape.choice([1, 2, 3]) if group < 16 else 1
    is_region = shape.random() < 0.3
    return make_case(
        lengths,
        (group * num_kv_heads, num_kv_heads),
        DIMS[number % len(DIMS)],
        DTYPES[number % len(DTYPES)],
        "region" if is_region else "block_table",
        cache_dtype=shape.choice(cache_dtypes),
        block_tokens=shape.choice([None, 1203]) if is_region else shape.choice([1, 3, 16, 48, 64, 128, 256, 700]),
        spare_columns=shape.choice([0, 1]),
        scale=shape.choice([None, None, 0.3]),
        window_left=shape.choice([-1, -1, 0, 5, 64, shape.randint(0, most)]),
        window_right=shape.choice([0, 0, 0, -1, shape.randint(0, 30)]),
        softcap=shape.choice([0.0, 0.0, 3.0, 30.0]),
        alibi=shape.choice(["", "", "heads", "seqs"]),
        sinks=shape.random() < 0.3,
        leftpad=shape.random() < 0.3,
        slack=rng.choice([0, 0, 100]),
        seed=seed,
        device=device,
    )


class GuardedMemory:
    """Two pieces of memory, each between two inaccessible pages."""

    def __init__(self, num_pages: int) -> None:
        self._num_bytes = num_pages * mmap.PAGESIZE
        self._maps = [mmap.mmap(-1, self._num_bytes + 2 * mmap.PAGESIZE) for _ in range(2)]

    def __enter__(self) -> GuardedMemory:
        self._protect(0)  # PROT_NONE
        return self

    def __exit__(self, *_: object) -> None:
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)

    def tensor(self, which: int, shape: tuple[int, ...], dtype: torch.dtype, *, at_end: bool) -> torch.Tensor:
        """Memory of piece 0 or 1 that ends or begins at an inaccessible page."""
        num_bytes = math.prod(shape) * dtype.itemsize
        assert num_bytes <= self._num_bytes
        offset = mmap.PAGESIZE + (self._num_bytes - num_bytes if at_end else 0)
        return torch.frombuffer(self._maps[which], dtype=dtype, count=math.prod(shape), offset=offset).view(shape)

    def _protect(self, flags: int) -> None:
        mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for mapped in self._maps:
            start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            for guard in (start, start + mmap.PAGESIZE + self._num_bytes):
                assert mprotect(guard, mmap.PAGESIZE, flags) == 0


def check(
    provider: AttentionProvider,
    case: Case,
    *,
    tolerance: float | None = None,
    lse_tolerance: float | None = None,
    relative: bool = False,
    num_splits: int = 0,
    with_lse: bool = True,
) -> torch.Tensor:
    """Compare the provider's results with the reference's in float64, and return them.

    Differences of results are absolute, or with `relative` divided by 1 + |expected|.
    """
    shape, dtype, device = case.query.shape[:2], case.query.dtype, case.query.device
    wide = [x if x.dtype.itemsize == 1 else x.double() for x in (case.query, case.key_cache, case.value_cache)]
    expected_lse = torch.empty(shape, device=device)
    expected = ReferenceProvider().attend(*wide, case.batch, case.masking, scales=case.scales, lse=expected_lse)
    lse = torch.full(shape, torch.nan, device=device) if with_lse else None
    actual = provider.attend(*case.arguments, scales=case.scales, lse=lse, num_splits=num_splits)
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    scale = 1 + expected.abs() if relative else 1.0
    difference = _largest((actual.double() - expected) / scale)
    assert difference <= (tolerance or TOLERANCE[dtype]), f"maximum difference {difference:.2e}"  # NaN fails too
    blind = expected_lse == -torch.inf
    assert not actual[blind].any()
    if lse is not None:
        assert torch.equal(lse == -torch.inf, blind)
        off = _largest((lse - expected_lse)[~blind] / expected_lse[~blind].abs().clamp(min=1.0))
        limit = lse_tolerance or tolerance or LSE_TOLERANCE[dtype]
        assert off <= limit, f"maximum difference of the logarithms {off:.2e}"
    return actual


def _largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item() if difference.numel() else 0.0
