"""Random attention problems for the tests of all providers, and the comparison with the reference in float64."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import random
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
    leftpad: list[int] | None = None,
    slack: int = 0,
    device: str | torch.device = "cpu",
    seed: int = 7,
) -> Case:
    """Random tensors. Tokens that no query sees are NaN, and table entries without visible tokens are `INVALID`."""
    generator = torch.Generator().manual_seed(seed)
    num_q_heads, num_kv_heads = heads
    masking = masking or Masking(dims[0] ** -0.5)
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
    batch = make_batch(lengths, table, leftpad, slack).to(torch.device(device))
    return Case(query, cache(dims[0]), cache(dims[1]), batch, masking, scales)


def random_case(seed: int) -> Case:
    """A problem that every provider for CPUs supports."""
    rng = random.Random(seed)
    num_seqs = rng.randint(1, 6)
    lengths = []
    for _ in range(num_seqs):
        cached = rng.choice([0, 1, 2, 15, 16, 17, 63, 64, 65, rng.randint(1, 200), rng.randint(1, 1200)])
        queries = rng.choice([0, 1, 1, 1, 2, rng.randint(0, max(1, cached)), cached + 1])
        lengths.append((queries, cached))
    if not any(q for q, _ in lengths):
        lengths[0] = (1, 5)
    num_kv_heads = rng.choice([1, 2, 3])
    group_size = rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 16])
    num_heads = num_kv_heads * group_size
    key_dim = rng.choice([16, 32, 40, 64, 80, 96, 128, 192, 256])
    value_dim = rng.choice([key_dim, key_dim, 24, 128])
    generator = torch.Generator().manual_seed(seed)
    slopes = None
    if rng.random() < 0.25:
        shape = (num_heads,) if rng.random() < 0.5 else (num_seqs, num_heads)
        slopes = torch.rand(shape, generator=generator) * 0.3
    masking = Masking(
        rng.choice([key_dim**-0.5, 0.3]),
        window_left=rng.choice([-1, -1, 0, 5, 64, 500]),
        window_right=rng.choice([0, 0, 0, -1, 3]),
        softcap=rng.choice([0.0, 0.0, 4.0]),
        alibi_slopes=slopes,
        sinks=torch.randn(num_heads, generator=generator) * 3 if rng.random() < 0.25 else None,
    )
    leftpad = None
    if rng.random() < 0.25:
        leftpad = [rng.randint(0, cached) for _, cached in lengths]
    view = rng.choice(["region", "block_table"])
    return make_case(
        lengths,
        (num_heads, num_kv_heads),
        (key_dim, value_dim),
        rng.choice([torch.float32, torch.bfloat16, torch.float16]),
        view,
        block_tokens=None if view == "region" else rng.choice([1, 3, 16, 64, 256]),
        masking=masking,
        leftpad=leftpad,
        seed=seed,
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
    wide = [x if x.dtype in FP8_DTYPES else x.double() for x in (case.query, case.key_cache, case.value_cache)]
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
