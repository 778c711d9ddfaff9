"""Random attention problems for the tests of all providers, and the comparison with the reference in float64."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import random
from dataclasses import dataclass

import torch

from kernels import AttentionProvider, CacheScales, Masking, VarlenBatch
from kernels.provider import FP8_DTYPES
from kernels.reference import ReferenceProvider, first_visible

# Largest difference allowed against float64, for values of order 1: sums are float32, weights and results are rounded.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LSE_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-4, torch.float16: 1e-4}
RAGGED = [(1, 1), (1, 17), (5, 5), (3, 64), (1, 65), (70, 200), (33, 33), (1, 300)]


@dataclass(frozen=True)
class Case:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    batch: VarlenBatch
    masking: Masking
    scales: CacheScales | None = None


def make_case(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float32,
    view: str = "block_table",
    *,
    block_tokens: int = 16,
    masking: Masking | None = None,
    leftpad: list[int] | None = None,
    seed: int = 7,
) -> Case:
    """`lengths` are (queries, cached) of each sequence. What no query may see is NaN; table entries that are not used
    name a block that is not there."""
    generator = torch.Generator().manual_seed(seed)
    num_q_heads, num_kv_heads = heads
    masking = masking or Masking(dims[0] ** -0.5)
    query = torch.randn(sum(q for q, _ in lengths), num_q_heads, dims[0], generator=generator).to(dtype)
    longest = max(cached for _, cached in lengths)
    if view == "region":
        block_tokens = longest + 3
    width = max(1, -(-longest // block_tokens))
    num_blocks = len(lengths) * width + 2
    table = torch.randperm(num_blocks, generator=generator)[: len(lengths) * width].view(-1, width).int()
    spans = [
        (first_visible(q, cached, leftpad[i] if leftpad else 0, masking), cached)
        for i, (q, cached) in enumerate(lengths)
    ]

    def cache(dim: int) -> torch.Tensor:
        interleaved = torch.full((num_blocks, block_tokens, 3, num_kv_heads, dim), torch.nan, dtype=dtype)
        layer = interleaved[:, :, 1]
        for sequence, (begin, end) in enumerate(spans):
            positions = torch.arange(begin, max(begin, end))
            rows = torch.randn(len(positions), num_kv_heads, dim, generator=generator).to(dtype)
            layer[table[sequence, positions // block_tokens].long(), positions % block_tokens] = rows
        return layer

    caches = cache(dims[0]), cache(dims[1])
    places = torch.arange(width)
    for sequence, (_, cached) in enumerate(lengths):
        table[sequence, places >= -(-cached // block_tokens)] = 2**31 - 1
    batch = VarlenBatch(
        torch.tensor(list(itertools.accumulate((q for q, _ in lengths), initial=0)), dtype=torch.int32),
        torch.tensor([cached for _, cached in lengths], dtype=torch.int32),
        table.contiguous(),
        max(q for q, _ in lengths),
        longest,
        None if leftpad is None else torch.tensor(leftpad, dtype=torch.int32),
    )
    return Case(query, *caches, batch, masking)


def random_case(seed: int) -> Case:
    """Anything that a provider of this machine should do."""
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
    return make_case(
        lengths,
        (num_heads, num_kv_heads),
        (key_dim, value_dim),
        rng.choice([torch.float32, torch.bfloat16, torch.float16]),
        rng.choice(["region", "block_table"]),
        block_tokens=rng.choice([1, 3, 16, 64, 256]),
        masking=masking,
        leftpad=leftpad,
        seed=seed,
    )


class GuardedMemory:
    """Two pieces of memory, each between two pages that nobody may touch."""

    def __init__(self, num_pages: int) -> None:
        self._num_bytes = num_pages * mmap.PAGESIZE
        self._maps = [mmap.mmap(-1, self._num_bytes + 2 * mmap.PAGESIZE) for _ in range(2)]

    def __enter__(self) -> GuardedMemory:
        self._protect(0)  # PROT_NONE
        return self

    def __exit__(self, *_: object) -> None:
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)

    def tensor(self, which: int, shape: tuple[int, ...], dtype: torch.dtype, *, at_end: bool) -> torch.Tensor:
        """Memory of piece 0 or 1, ending or beginning at a page that is not to be touched."""
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


def check(provider: AttentionProvider, case: Case, *, tolerance: float | None = None, num_splits: int = 0) -> None:
    """The provider's results against the reference's in float64."""
    query = case.query
    caches = case.key_cache, case.value_cache
    wide = caches if caches[0].dtype in FP8_DTYPES else tuple(cache.double() for cache in caches)
    shape = query.shape[:2]
    expected_lse, lse = torch.empty(shape), torch.full(shape, torch.nan)
    args = (case.batch, case.masking)
    expected = ReferenceProvider().attend(query.double(), *wide, *args, scales=case.scales, lse=expected_lse)
    actual = provider.attend(query, *caches, *args, scales=case.scales, lse=lse, num_splits=num_splits)
    assert actual.dtype == query.dtype
    difference = (actual.double() - expected).abs().max().item() if actual.numel() else 0.0
    assert difference <= (tolerance or TOLERANCE[query.dtype]), f"maximum difference {difference:.2e}"  # NaN fails too
    empty = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    off = (lse - expected_lse)[~empty].abs().max().item() if (~empty).any() else 0.0
    bound = (tolerance or LSE_TOLERANCE[query.dtype]) * max(1.0, expected_lse[~empty].abs().max().item() if off else 1)
    assert off <= bound, f"maximum difference of the logarithms {off:.2e}"
