"""The public attention functions against flash-attention's semantics, written out query by query."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from folio.kernels import KernelError, Masking, flash_attn_with_kvcache, select_provider, varlen_attention
from folio.kernels.cpu.provider import CpuProvider
from folio.kernels.reference import ReferenceProvider

PROVIDERS = {"cpu": CpuProvider, "reference": ReferenceProvider}


def rotate_token(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position: int, interleaved: bool
) -> torch.Tensor:
    """Rotate one token's heads `[heads, dim]` by the definition of rotary embedding, dimension by dimension."""
    out, half = x.clone(), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[position, i].double(), sin[position, i].double()
        out[:, a], out[:, b] = x[:, a] * c - x[:, b] * s, x[:, a] * s + x[:, b] * c
    return out


def attend_one(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    i: int,
    seqlen_q: int,
    *,
    first: int,
    scale: float,
    window: tuple[int, int],
    softcap: float,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query i `[heads, dim]` of a sequence over all its cached tokens `[tokens, kv_heads, dim]`."""
    seqlen_k = len(keys)
    diagonal = i + seqlen_k - seqlen_q
    seen = [
        j
        for j in range(first, seqlen_k)
        if (window[0] < 0 or j >= diagonal - window[0]) and (window[1] < 0 or j <= diagonal + window[1])
    ]
    out = torch.zeros(q.shape[0], values.shape[2], dtype=q.dtype)
    lse = torch.full((q.shape[0],), -math.inf, dtype=q.dtype)
    if not seen:
        return out, lse
    for head in range(q.shape[0]):
        kv_head = head // (q.shape[0] // keys.shape[1])
        scores = (keys[seen, kv_head] @ q[head]) * scale
        if softcap > 0:
            scores = softcap * (scores / softcap).tanh()
        if slopes is not None:
            scores = scores - slopes[head] * (diagonal - torch.tensor(seen)).abs()
        lse[head] = (scores if sinks is None else torch.cat([scores, sinks[head : head + 1]])).logsumexp(0)
        out[head] = (scores - lse[head]).exp() @ values[seen, kv_head]
    return out, lse


@pytest.mark.thirds
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("name", PROVIDERS)
def test_flash_attn_with_kvcache(name: str, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch_size, seqlen_q = rng.randint(1, 4), rng.choice([1, 1, 3, 9])
    num_kv_heads = rng.choice([1, 2])
    num_heads = num_kv_heads * rng.choice([1, 4, 7])
    dim, value_dim = 32, rng.choice([32, 16])
    seqlen_new = rng.choice([0, seqlen_q, rng.randint(1, seqlen_q)])
    paged = rng.random() < 0.5
    block_size = rng.choice([1, 4, 16])
    capacity = 48
    num_rows = batch_size + 2
    table = torch.randperm(num_rows * capacity // block_size)[: batch_size * capacity // block_size]
    table = table.view(batch_size, -1).int()
    shape = (num_rows * capacity // block_size, block_size) if paged else (num_rows, capacity)
    k_cache = torch.randn(*shape, num_kv_heads, dim)
    v_cache = torch.randn(*shape, num_kv_heads, value_dim)
    rows = torch.randperm(num_rows)[:batch_size].int()
    cache_seqlens = torch.randint(0, capacity - seqlen_q + 1, (batch_size,), dtype=torch.int32)
    k: Any = torch.randn(batch_size, seqlen_new, num_kv_heads, dim) if seqlen_new else None
    v: Any = torch.randn(batch_size, seqlen_new, num_kv_heads, value_dim) if seqlen_new else None
    q = torch.randn(batch_size, seqlen_q, num_heads, dim)
    causal = rng.random() < 0.6
    window = rng.choice([(-1, -1), (-1, -1), (5, -1), (7, 2), (0, 0)])
    slopes = rng.choice([None, torch.rand(num_heads), torch.rand(batch_size, num_heads)])
    sinks = rng.choice([None, torch.randn(num_heads)])
    leftpad = rng.choice([None, torch.tensor([rng.randint(0, int(n)) for n in cache_seqlens], dtype=torch.int32)])
    softcap = rng.choice([0.0, 3.0])
    scale = rng.choice([None, 0.5])
    angles = torch.rand(capacity, rng.choice([4, 16])) * 6
    cos: Any
    sin: Any
    cos, sin = (angles.cos(), angles.sin()) if seqlen_new and rng.random() < 0.6 else (None, None)
    interleaved = rng.random() < 0.5
    before = k_cache.clone(), v_cache.clone()
    found = flash_attn_with_kvcache(
        *(q, k_cache, v_cache, k, v, cos, sin, cache_seqlens),
        **({"block_table": table} if paged else {"cache_batch_idx": rows}),  # type: ignore[arg-type]
        cache_leftpad=leftpad,
        softmax_scale=scale,
        causal=causal,
        window_size=window,
        softcap=softcap,
        rotary_interleaved=interleaved,
        alibi_slopes=slopes,
        num_splits=seed % 3,
        return_softmax_lse=True,
        sinks=sinks,
        provider=PROVIDERS[name](),
    )
    out, lse = found
    right = 0 if causal else window[1]
    local = causal or window != (-1, -1)
    for b in range(batch_size):

        def content(cache: torch.Tensor, b: int = b) -> torch.Tensor:
            return cache[table[b].long()].flatten(0, 1) if paged else cache[rows[b].long()]

        length = int(cache_seqlens[b])
        keys, values = content(before[0]).double(), content(before[1]).double()
        for t in range(seqlen_new):
            new = k[b, t].double()
            keys[length + t] = new if cos is None else rotate_token(new, cos, sin, length + t, interleaved)
            values[length + t] = v[b, t].double()
        torch.testing.assert_close(content(k_cache).double(), keys, atol=1e-5, rtol=0)
        torch.testing.assert_close(content(v_cache).double(), values, atol=0, rtol=0)
        for i in range(seqlen_q):
            query = q[b, i].double()
            if cos is not None:
                query = rotate_token(query, cos, sin, length + (i if local else 0), interleaved)
            expected, expected_lse = attend_one(
                query,
                keys[: length + seqlen_new],
                values[: length + seqlen_new],
                i,
                seqlen_q,
                first=0 if leftpad is None else int(leftpad[b]),
                scale=scale or dim**-0.5,
                window=(window[0], right),
                softcap=softcap,
                slopes=None if slopes is None else (slopes if slopes.ndim == 1 else slopes[b]).double(),
                sinks=None if sinks is None else sinks.double(),
            )
            torch.testing.assert_close(out[b, i].double(), expected, atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(lse[b, :, i].double(), expected_lse, atol=2e-5, rtol=1e-5)
    used = table[:, :, None] * block_size + torch.arange(block_size) if paged else rows[:, None] * capacity
    used = used if paged else used + torch.arange(capacity)
    untouched = torch.ones(num_rows * capacity, dtype=torch.bool)
    untouched[used.flatten().long()] = False
    assert torch.equal(k_cache.flatten(0, 1)[untouched], before[0].flatten(0, 1)[untouched])


@pytest.mark.parametrize("seed", range(20))
def test_varlen_attention_appends_and_attends_like_one_sequence_after_the_other(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    counts = [rng.choice([0, 1, 1, 5, 30]) for _ in range(5)]
    lengths = [count + rng.choice([0, 1, 40, 100]) for count in counts]
    caches = torch.randn(2, 60, 16, 2, 64).unbind()
    table = torch.randperm(60)[: 5 * 9].view(5, 9).int()
    q, k, v = (torch.randn(sum(counts), heads, 64) for heads in (6, 2, 2))
    angles, sinks = torch.rand(200, 32) * 6, torch.randn(6)
    options: dict[str, Any] = {
        "rotary_cos": angles.cos(),
        "rotary_sin": angles.sin(),
        "rotary_interleaved": False,
        "window_size": rng.choice([(-1, -1), (20, -1)]),
        "softcap": rng.choice([0.0, 5.0]),
        "sinks": rng.choice([None, sinks]),
        "return_softmax_lse": True,
    }
    starts = [sum(counts[:i]) for i in range(6)]
    ones = [cache.clone() for cache in caches]
    cu_seqlens, seqlens = (torch.tensor(numbers, dtype=torch.int32) for numbers in (starts, lengths))
    out, lse = varlen_attention(q, *caches, cu_seqlens, seqlens, table, k, v, **options)
    one_by_one = options | {"causal": True, "provider": ReferenceProvider()}
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        if count:
            mine = slice(starts[i], starts[i + 1])
            before = {"cache_seqlens": length - count, "block_table": table[i : i + 1]}
            one, one_lse = flash_attn_with_kvcache(
                q[None, mine], *ones, k[None, mine], v[None, mine], **before, **one_by_one
            )
            torch.testing.assert_close(out[mine], one[0], atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(lse[mine], one_lse[0].T, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(caches, tuple(ones))


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


GOOD: dict[str, Any] = {
    "q": zeros(2, 3, 4, 32),
    "k_cache": zeros(6, 16, 2, 32),
    "v_cache": zeros(6, 16, 2, 32),
    "k": zeros(2, 3, 2, 32),
    "v": zeros(2, 3, 2, 32),
    "cache_seqlens": ints([4, 20]),
    "block_table": ints([[0, 1], [2, 3]]),
}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q": zeros(2, 4, 32)}, r"q has shape \[2, 4, 32\], expected \[any, any, any, any\]"),
        ({"q": zeros(2, 3, 3, 32)}, "3 query heads cannot share 2 KV heads"),
        ({"q": zeros(2, 3, 4, 16)}, r"query \[6, 4, 16\] .* keys \[6, 16, 2, 32\]"),
        ({"v_cache": zeros(6, 8, 2, 32)}, r"v_cache has shape \[6, 8, 2, 32\], expected \[6, 16, 2, any\]"),
        ({"v_cache": zeros(6, 16, 2, 32).half()}, "v_cache .* has dtype torch.float16, expected torch.float32"),
        ({"k": None}, "only one of k and v is given"),
        ({"k": zeros(2, 3, 4, 32)}, r"k has shape \[2, 3, 4, 32\], expected \[2, any, 2, 32\]"),
        ({"v": zeros(2, 2, 2, 32)}, r"v has shape \[2, 2, 2, 32\], expected \[2, 3, 2, 32\]"),
        ({"v": zeros(2, 3, 2, 32).half()}, "v .* has dtype torch.float16"),
        ({"cache_seqlens": None}, "cache_seqlens is not given"),
        ({"cache_seqlens": torch.tensor([4, 20])}, "cache_seqlens .* has dtype torch.int64"),
        ({"cache_seqlens": ints([4])}, r"cache_seqlens has shape \[1\], expected \[2\]"),
        ({"cache_seqlens": ints([4, 30])}, "with new tokens to 33, are not within 0 … 32"),
        ({"cache_seqlens": ints([-2, 3])}, "from -2"),
        ({"cache_seqlens": 33}, "33 is not within 0 … 32"),
        (
            {"block_table": ints([[0, 1], [2, 6]])},
            "block_table has block 6, which is not within 0 … 5",
        ),
        (
            {
                "block_table": ints([[-1, 1], [2, 3]]),
                "cache_leftpad": ints([16, 0]),
            },
            "block_table has block -1",
        ),
        (
            {"block_table": None, "cache_seqlens": 4, "cache_batch_idx": ints([0, 6])},
            "cache_batch_idx has row 6",
        ),
        ({"k_cache": zeros(6, 0, 2, 32), "v_cache": zeros(6, 0, 2, 32)}, "are empty"),
        ({"block_table": ints([[0, 1]])}, r"block_table has shape \[1, 2\]"),
        ({"cache_batch_idx": ints([0, 1])}, "are both given"),
        ({"cache_leftpad": ints([0])}, r"cache_leftpad has shape \[1\], expected \[2\]"),
        ({"cache_leftpad": ints([])}, r"cache_leftpad has shape \[0\], expected \[2\]"),
        ({"cache_leftpad": ints([0, -1])}, "cache_leftpad -1 is below 0"),
        ({"window_size": (-2, 0)}, "-1 for no bound"),
        ({"softcap": -1.0}, "softcap -1.0 is below 0"),
        ({"alibi_slopes": zeros(3)}, r"alibi_slopes has shape \[3\], expected \[4\]"),
        ({"alibi_slopes": zeros(3, 4)}, r"alibi_slopes has shape \[3, 4\], expected \[2, 4\]"),
        ({"sinks": zeros(4).half()}, "sinks .* has dtype torch.float16"),
        ({"rotary_cos": zeros(64, 8)}, "only one of rotary_cos and rotary_sin"),
        ({"rotary_cos": zeros(64, 8), "rotary_sin": zeros(64, 9)}, "rotary_sin has shape"),
        ({"rotary_cos": zeros(64, 20), "rotary_sin": zeros(64, 20)}, "more dimensions than a head has"),
        ({"rotary_cos": zeros(9, 8), "rotary_sin": zeros(9, 8)}, "no row for position 22"),
        ({"k": None, "v": None, "rotary_cos": zeros(64, 8), "rotary_sin": zeros(64, 8)}, "give k and v"),
        ({"k_descale": torch.ones(2)}, "caches of 8-bit floats"),
        ({"num_splits": -1}, "num_splits -1 is below 0"),
    ],
)
def test_wrong_arguments_are_named_and_store_nothing(wrong: dict[str, Any], message: str) -> None:
    arguments = GOOD | {"k_cache": torch.full_like(GOOD["k_cache"], 7.0)} | wrong
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(**arguments)
    assert (arguments["k_cache"] == 7).all()


NEW = zeros(4, 2, 32)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cu_seqlens_q": ints([0, 3, 2])}, "increase from 0 to 4"),
        ({"k": NEW}, "only one of k and v"),
        ({"k": NEW, "v": NEW, "cache_seqlens": ints([2, 20])}, "cache_seqlens from -1"),
        ({"max_seqlen_q": 2}, "max_seqlen_q 2 is below"),
        ({"max_seqlen_k": 2}, "max_seqlen_k 2 is below"),
        ({"rotary_cos": zeros(9, 8)}, "rotary_cos"),
    ],
)
def test_wrong_packing_is_named(wrong: dict[str, Any], message: str) -> None:
    cache = zeros(6, 16, 2, 32)
    arguments = {
        "q": zeros(4, 4, 32),
        "cu_seqlens_q": ints([0, 3, 4]),
        "cache_seqlens": GOOD["cache_seqlens"],
        "block_table": GOOD["block_table"],
    }
    with pytest.raises(ValueError, match=message):
        varlen_attention(k_cache=cache, v_cache=cache, **(arguments | wrong))


def test_nothing_to_do() -> None:
    cache = torch.zeros(6, 16, 2, 32)
    assert flash_attn_with_kvcache(torch.zeros(0, 1, 4, 32), cache, cache).shape == (0, 1, 4, 32)
    assert flash_attn_with_kvcache(torch.zeros(2, 0, 4, 32), cache, cache).shape == (2, 0, 4, 32)
    none = torch.zeros(0, dtype=torch.int32)
    table = torch.zeros(0, 3, dtype=torch.int32)
    starts = torch.zeros(1, dtype=torch.int32)
    assert varlen_attention(torch.zeros(0, 4, 32), cache, cache, starts, none, table).shape == (0, 4, 32)


def test_a_provider_can_be_forced_and_stores_nothing_that_it_cannot_read() -> None:
    cache = torch.zeros(6, 16, 2, 33, dtype=torch.bfloat16)
    q = torch.zeros(1, 1, 4, 33, dtype=torch.bfloat16)
    new = torch.ones(1, 1, 2, 33, dtype=torch.bfloat16)
    with pytest.raises(KernelError, match="head size 33 is odd"):
        flash_attn_with_kvcache(
            q, cache, cache, new, new, cache_seqlens=3, provider=select_provider("cpu", torch.device("cpu"))
        )
    assert not cache.any()
    assert flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=3).shape == q.shape  # "auto" finds another
    assert cache.any()
    with pytest.raises(KernelError, match=r"queries cannot be torch\.int64"):
        flash_attn_with_kvcache(q.long(), cache.long(), cache.long())


def test_windows_without_a_bound() -> None:
    """Windows wider than the cache hide nothing, also beyond the kernels' 32 bits."""
    q, cache = torch.randn(2, 3, 4, 32), torch.randn(6, 16, 2, 32)
    lengths, table = torch.tensor([4, 20], dtype=torch.int32), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    expected = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, block_table=table)
    for window in ((2**40, -1), (-1, 2**31 - 1), (40, 40)):
        out = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, block_table=table, window_size=window)
        assert torch.equal(out, expected)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="-1 is no bound"):
        Masking(1.0, window_left=2**40)


def test_table_entries_of_invisible_blocks_may_be_invalid() -> None:
    """Blocks before the window, and those of a sequence without queries."""
    q, cache = torch.randn(1, 4, 32), torch.randn(6, 16, 2, 32)
    starts, lengths = torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([33, 20], dtype=torch.int32)
    table = torch.tensor([[-1, -1, 2], [-1, -1, -1]], dtype=torch.int32)
    out = varlen_attention(q, cache, cache, starts, lengths, table, window_size=(0, 0))
    torch.testing.assert_close(out, cache[2, 0].repeat_interleave(2, dim=0)[None])


def test_eight_bit_cache() -> None:
    q, new = torch.randn(1, 2, 4, 32), torch.randn(1, 2, 2, 32)
    cache = torch.zeros(2, 1, 16, 2, 32, dtype=torch.float8_e5m2)
    scales = torch.tensor([0.5, 4.0])
    out = flash_attn_with_kvcache(
        q, cache[0], cache[1], new, new, cache_seqlens=0, causal=True, k_descale=scales, v_descale=scales
    )
    held = (cache[1, 0, :2].float() * scales[:, None]).to(q.dtype)
    assert (held - new[0]).abs().max() < 0.15 * new.abs().max()
    exact = torch.zeros(1, 16, 2, 32)
    assert torch.allclose(
        out, flash_attn_with_kvcache(q, exact, exact, held[None], held[None], cache_seqlens=0, causal=True), atol=1e-5
    )


BEFORE_CALLS = """
import ctypes, mmap, torch
from folio.kernels import KernelError, Masking, VarlenBatch
from folio.kernels.cpu.provider import CpuProvider

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
size = 4 * 16 * 2 * 32 * 4  # 4 blocks of 16 tokens
address = libc.mmap(None, 2 * size, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
raw = torch.frombuffer((ctypes.c_char * (2 * size)).from_address(address), dtype=torch.float32)
key, value = raw.view(2, 4, 16, 2, 32)
provider = CpuProvider()
new = torch.ones(2, 2, 32)

def attend(length=20, table=(1, 3), starts=(0, 1), leftpad=None, window=-1):
    lengths, table, starts = (torch.tensor(n, dtype=torch.int32) for n in ([length], [table], starts))
    leftpad = None if leftpad is None else torch.tensor([leftpad], dtype=torch.int32)
    batch = VarlenBatch(starts, lengths, table, 1, 32, leftpad)
    provider.attend(torch.ones(1, 2, 32), key, value, batch, Masking(1.0, window))

def write(*slots):
    before = None if closed else raw.clone()
    try:
        provider.write(new, new, key, value, torch.tensor(slots))
    except KernelError:
        assert closed or torch.equal(raw, before)
        raise

def close():
    global closed
    closed = True
    libc.munmap(address, 2 * size)

def report(call):
    try:
        call()
        print("done")
    except KernelError as error:
        print(error)

closed = False
"""
CALLS = {
    "attend()": "done",
    "attend(table=(-9, 3), window=1)": "done",
    "attend(table=(1, 4))": "block 4, which is not within 0 … 3",
    "attend(table=(-1, 3))": "block -1, which is not within 0 … 3",
    "attend(table=(1, 1 << 30))": f"block {1 << 30}, which is not within 0 … 3",
    "attend(length=33)": "to 33, are not within 0 … 32",
    "attend(length=-1)": "from -1,",
    "attend(starts=(0, 1 << 20))": "cu_seqlens_q [0, 1048576] for 1 queries",
    "attend(leftpad=-4096)": "cache_leftpad tensor([-4096]",
    "write(0, 63)": "done",
    "write(0, 64)": "slots from 0 to 64, of 64",
    "write(-1, 0)": "slots from -1 to 0, of 64",
    "write(0, 1 << 40)": f"slots from 0 to {1 << 40}, of 64",
    "close()": "done",
    "attend( )": "its memory has been closed",
    "write(0, 62)": "its memory has been closed",
}


@pytest.mark.processes
def test_a_kernel_reads_and_writes_only_its_cache() -> None:
    """Regression: a closed memory, or a block id or length beyond the cache, ended the process with SIGSEGV."""
    script = BEFORE_CALLS + "\n".join(f"report(lambda: {call})" for call in CALLS)
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    found = zip(CALLS.items(), child.stdout.splitlines(), strict=True)
    assert [(call, line) for (call, expected), line in found if expected not in line] == []
