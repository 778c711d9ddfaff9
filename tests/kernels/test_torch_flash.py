"""torch's flash attention: against stand-ins for it on the CPU, and for real on CUDA.

A stand-in has the signature that torch's source gives, refuses what torch refuses, and reads from its arguments what
the kernels would read: where they read whole tiles, so does it, and NaN in there comes through.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen

from kernels import KernelError, Masking, VarlenBatch
from kernels.provider import AttentionProvider, describe_problem
from kernels.reference import ReferenceProvider
from kernels.torch_flash import TorchFlashProvider

# Largest difference allowed against float64, for values of order 1.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
LSE_TOLERANCE = 1e-4
LSE_TOLERANCE_CUDA = 2e-2
TILE = 64
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, VarlenBatch]
Lengths = list[tuple[int, int]]

DECODE: Lengths = [(1, 1), (1, 17), (1, 64), (1, 300), (1, 256), (1, 513)]
PREFILL: Lengths = [(5, 5), (70, 200), (33, 33), (130, 130), (20, 300)]
MIXED: Lengths = [(1, 1), (5, 5), (3, 64), (1, 300), (70, 200), (1, 700), (2, 257)]
NO_QUERIES: Lengths = [(1, 5), (0, 9), (1, 300), (0, 0), (1, 7)]
NOTHING_CACHED: Lengths = [(1, 0), (1, 40), (1, 0), (1, 270)]
PADDED_PREFILL: Lengths = [(4, 0), (1, 40), (0, 0), (50, 270), (1, 0)]
RAGGED = {
    "decode": DECODE,
    "prefill": PREFILL,
    "mixed": MIXED,
    "no queries": NO_QUERIES,
    "nothing cached": NOTHING_CACHED,
    "padded prefill": PADDED_PREFILL,
}


def make_case(
    lengths: Lengths,
    view: str,
    *,
    heads: tuple[int, int] = (8, 2),
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    block_tokens: int = 256,
    leftpad: list[int] | None = None,
    window_left: int = -1,
    device: str = "cpu",
) -> Case:
    """Random (queries, keys, values, batch); `lengths` are (queries, cached) of each sequence. The caches are one layer
    of an interleaved cache, and all that no query sees is NaN."""
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(sum(q for q, _ in lengths), heads[0], dim, generator=generator).to(dtype)
    longest = max(cached for _, cached in lengths)
    if view == "region":
        block_tokens = longest + 24
    per_sequence = 1 if view == "region" else max(2, -(-longest // block_tokens))
    num_blocks = len(lengths) * per_sequence + 2
    table = torch.randperm(num_blocks, generator=generator)[: len(lengths) * per_sequence].view(-1, per_sequence)
    caches = torch.full((num_blocks, block_tokens, 3, 2, heads[1], dim), torch.nan, dtype=dtype)
    for sequence, (queries, cached) in enumerate(lengths):
        begin = 0 if leftpad is None else leftpad[sequence]
        if window_left >= 0:
            begin = max(begin, cached - queries - window_left)
        for position in range(begin, cached if queries else 0):
            rows = torch.randn(2, heads[1], dim, generator=generator).to(dtype)
            caches[table[sequence, position // block_tokens], position % block_tokens, 1] = rows
    for sequence, (_, cached) in enumerate(lengths):  # what is past the last block is not an index
        table[sequence, -(-cached // block_tokens) :] = -(10**6)
    caches = caches.to(device)
    starts = list(itertools.accumulate((q for q, _ in lengths), initial=0))
    batch = VarlenBatch(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([cached for _, cached in lengths], dtype=torch.int32),
        table.int().contiguous(),
        max(q for q, _ in lengths),
        longest,
        None if leftpad is None else torch.tensor(leftpad, dtype=torch.int32),
    )
    return query.to(device), caches[:, :, 1, 0], caches[:, :, 1, 1], _to(batch, device)


def _to(batch: VarlenBatch, device: str) -> VarlenBatch:
    return VarlenBatch(
        batch.cu_seqlens_q.to(device),
        batch.cache_seqlens.to(device),
        batch.block_table.to(device),
        batch.max_seqlen_q,
        batch.max_seqlen_k,
        None if batch.cache_leftpad is None else batch.cache_leftpad.to(device),
    )


def check(provider: AttentionProvider, case: Case, masking: Masking, *, with_lse: bool = True, splits: int = 0) -> None:
    query, key, value, batch = case
    host = _to(batch, "cpu")
    expected_lse = torch.full(query.shape[:2], torch.nan)
    expected = ReferenceProvider().attend(
        query.cpu().double(),
        key.cpu().double(),
        value.cpu().double(),
        host,
        masking,
        lse=expected_lse,
    )
    lse = torch.full(query.shape[:2], torch.nan, device=query.device) if with_lse else None
    actual = provider.attend(query, key, value, batch, masking, lse=lse, num_splits=splits)
    assert actual.dtype == query.dtype
    difference = (actual.cpu().double() - expected).abs().max().item()
    assert difference <= TOLERANCE[query.dtype], f"maximum difference {difference:.2e}"  # NaN fails too
    if lse is not None:
        found = lse.cpu()
        assert torch.equal(found == -torch.inf, expected_lse == -torch.inf)
        off = (found - expected_lse).masked_fill(expected_lse == -torch.inf, 0.0).abs().max().item()
        limit = LSE_TOLERANCE if lse.device.type == "cpu" else LSE_TOLERANCE_CUDA
        assert off <= limit, f"maximum difference of the logarithms {off:.2e}"


# --- FA2 -------------------------------------------------------------------------------------------------------------


def fa2_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence as FA2 does it: aligned to the bottom right, tiles from the one where the first row's window begins,
    +inf as the logarithm of nothing. Returns `[queries, heads, dim]` and `[heads, queries]`."""
    num_queries, num_keys = len(query), len(key)
    left, right = window
    first_tile = 0 if left < 0 else max(0, num_keys - num_queries - left) // TILE * TILE
    group_size = query.shape[1] // key.shape[1]
    keys = key[first_tile:].double().repeat_interleave(group_size, 1)
    values = value[first_tile:].double().repeat_interleave(group_size, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    distance = torch.arange(num_queries)[:, None] + num_keys - num_queries - torch.arange(first_tile, num_keys)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(hidden, 0.0)
    if not num_keys:
        weights = weights.new_zeros(scores.shape)
    out = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)  # weight 0 times NaN is NaN, as in a tile
    return out, lse.masked_fill(lse == -torch.inf, torch.inf).float()


def fa2_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: tuple[int, int],
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mha_varlen_fwd` of csrc/flash_attn/flash_api.cpp, in torch's copy, which splits all that is paged."""
    num_seqs, heads, dim = len(cu_q) - 1, q.shape[1], q.shape[2]
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert dim % 8 == 0
    assert dim <= 256
    assert num_seqs > 0
    for tensor in (cu_q, cu_k, seqused_k):
        assert tensor is None or (tensor.dtype == torch.int32 and tensor.is_contiguous())
    assert cu_k.shape == cu_q.shape
    assert seqused_k is None or seqused_k.shape == (num_seqs,)
    if block_table is None:
        assert k.ndim == 3
    else:
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert block_table.dtype == torch.int32
        assert block_table.shape[0] == num_seqs
    swapped = max_q == 1 and heads > k.shape[-2] and window == (-1, -1)
    if swapped:
        assert len(q) == num_seqs, "q.reshape({batch_size, ...})"
    elif block_table is not None:
        assert num_splits == 1, "the combine kernel knows no ragged rows"
    out, lse = torch.full_like(q, torch.nan), torch.full((heads, len(q)), torch.nan)
    starts, begins = cu_q.tolist(), cu_k.tolist()
    for i in range(num_seqs):
        used = begins[i + 1] - begins[i] if seqused_k is None else int(seqused_k[i])
        rows = slice(starts[i], starts[i + 1])
        assert rows.stop - rows.start <= max_q
        assert used <= max_k
        if rows.stop == rows.start:
            continue
        if block_table is None:
            key, value = (x[begins[i] : begins[i] + used] for x in (k, v))
            assert len(key) == used, "past the end of the cache"
        else:
            # The early exit writes an infinity to where it should not.
            assert used > 0 or swapped or max_q == 1
            key, value = (fa2_gather(x, block_table[i], used) for x in (k, v))
        out[rows], lse[:, rows] = fa2_sequence(q[rows], key, value, scale, window)
    return out, lse


def fa2_gather(cache: torch.Tensor, table: torch.Tensor, used: int) -> torch.Tensor:
    blocks = table[: -(-used // cache.shape[1])].tolist()
    assert all(0 <= block < len(cache) for block in blocks), "an index of no block was read"
    return cache[blocks].flatten(0, 1)[:used]


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """torch 2.13's torch/nn/attention/varlen.py."""
    assert enable_gqa or query.shape[1] == key.shape[-2]
    assert cu_seq_k is not None
    assert scale is not None
    found = fa2_varlen(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        scale,
        window_size,
        seqused_k,
        block_table,
        num_splits or 0,
    )
    return found if return_aux is not None and return_aux.lse else found[0]


# torch 2.11's: `torch.ops.aten._flash_attention_forward.default._schema`.
OPERATOR_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, "
    "float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None"
)
OPERATOR_RETURNS = "(Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"
_LIBRARY = torch.library.Library("folio_test", "DEF")


def define_operator(name: str, run: Callable[..., Any], arguments: str = OPERATOR_ARGUMENTS) -> Any:
    """An operator of the dispatcher, which checks arguments against the schema as it does torch's own."""
    _LIBRARY.define(f"{name}({arguments}) -> {OPERATOR_RETURNS}")
    _LIBRARY.impl(name, run, "CPU")
    return getattr(torch.ops.folio_test, name).default


def flash_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """ATen's native/transformers/cuda/attention.cu."""
    assert dropout_p == 0.0
    assert not return_debug_mask
    assert alibi_slopes is None
    assert cum_seq_q is not None
    assert cum_seq_k is not None
    assert scale is not None
    assert window_size_left is not None
    assert window_size_right is not None
    found = fa2_varlen(
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        scale,
        (window_size_left, 0 if is_causal else window_size_right),
        seqused_k,
        None,
        0,
    )
    return *found, torch.empty(2), torch.empty(0), torch.empty(0)


OPERATOR_2_11 = define_operator("flash_2_11", flash_attention_forward)


def varlen_attn_2_11(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """torch 2.11's torch/nn/attention/varlen.py."""
    raise AssertionError("it cannot read a cache")


def torch_flash() -> TorchFlashProvider:
    return TorchFlashProvider(varlen_attn, device_type="cpu")


def torch_flash_2_11() -> TorchFlashProvider:
    """Reads regions only: that torch has no block table."""
    return TorchFlashProvider(varlen_attn_2_11, OPERATOR_2_11, device_type="cpu")


everywhere = pytest.mark.parametrize("make", [torch_flash, torch_flash_2_11])
in_both_views = pytest.mark.parametrize(
    ("make", "view"), [(torch_flash, "region"), (torch_flash, "block_table"), (torch_flash_2_11, "region")]
)


@in_both_views
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED.keys())
def test_ragged_batch_equals_reference(
    make: Callable[[], TorchFlashProvider], view: str, with_lse: bool, lengths: Lengths
) -> None:
    check(make(), make_case(lengths, view), Masking(0.125), with_lse=with_lse)


@in_both_views
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (7, 1)])
@pytest.mark.parametrize("lengths", [DECODE, MIXED, NO_QUERIES], ids=["decode", "mixed", "no queries"])
def test_heads(make: Callable[[], TorchFlashProvider], view: str, heads: tuple[int, int], lengths: Lengths) -> None:
    check(make(), make_case(lengths, view, heads=heads, dim=128, dtype=torch.float16), Masking(0.1))
    check(make(), make_case(lengths, view, heads=heads), Masking(0.1), splits=1)


@everywhere
@pytest.mark.parametrize("window_left", [0, 31, 100, 10_000])
@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED, NO_QUERIES], ids=["decode", "prefill", "mixed", "none"])
def test_window_over_a_hole(make: Callable[[], TorchFlashProvider], window_left: int, lengths: Lengths) -> None:
    """Tiles would reach into the hole before the window; the region is read from its end."""
    case = make_case(lengths, "region", window_left=window_left)
    check(make(), case, Masking(0.125, window_left=window_left))
    padded = [min(5, cached) for _, cached in lengths]
    check(
        make(),
        make_case(lengths, "region", window_left=window_left, leftpad=padded),
        Masking(0.125, window_left=window_left),
    )


@everywhere
@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_leftpad(make: Callable[[], TorchFlashProvider], lengths: Lengths) -> None:
    padded = [min(3 * i, cached) for i, (_, cached) in enumerate(lengths)]
    check(make(), make_case(lengths, "region", leftpad=padded), Masking(0.125))


@in_both_views
@pytest.mark.parametrize("window_right", [-1, 4])
def test_not_causal(make: Callable[[], TorchFlashProvider], view: str, window_right: int) -> None:
    for lengths in (DECODE, MIXED, NO_QUERIES):
        check(make(), make_case(lengths, view), Masking(0.125, window_right=window_right))
    if view == "region":
        case = make_case(MIXED, view, window_left=9)
        check(make(), case, Masking(0.125, window_left=9, window_right=window_right))


@everywhere
def test_regions_within_a_larger_cache(make: Callable[[], TorchFlashProvider]) -> None:
    """Regions of all layers side by side: from one of a layer to its next are more tokens than a region has."""
    query, key, value, batch = make_case(MIXED, "region")
    num_regions, region_tokens, num_kv_heads, dim = key.shape
    cache = torch.full((num_regions, 3, 2, region_tokens, num_kv_heads, dim), torch.nan, dtype=key.dtype)
    cache[:, 1, 0], cache[:, 1, 1] = key, value
    check(make(), (query, cache[:, 1, 0], cache[:, 1, 1], batch), Masking(0.125))


@everywhere
def test_unequally_spaced_regions_are_refused(make: Callable[[], TorchFlashProvider]) -> None:
    query, key, _, batch = make_case(MIXED, "region")
    storage = torch.zeros(len(key) * (key.stride(0) + 8), dtype=key.dtype)
    odd = storage.as_strided(key.shape, (key.stride(0) + 8, *key.stride()[1:]))
    with pytest.raises(KernelError, match="rows of tokens"):
        make().attend(query, odd, odd, batch, Masking(0.125))
    crooked = storage.as_strided(key.shape, (key.stride(0) + 4, *key.stride()[1:]))
    with pytest.raises(KernelError, match="multiples"):
        make().attend(query, crooked, crooked, batch, Masking(0.125))
    with pytest.raises(KernelError, match="rows of tokens"):
        make().attend(query, key, odd, batch, Masking(0.125))


@everywhere
def test_no_queries_at_all(make: Callable[[], TorchFlashProvider]) -> None:
    query, key, value, batch = make_case([(0, 5), (0, 0)], "region")
    assert make().attend(query, key, value, batch, Masking(1.0)).shape == (0, 8, 64)
    view = "region" if make is torch_flash_2_11 else "block_table"
    query, key, value, batch = make_case([(1, 0), (1, 0)], view)
    lse = torch.zeros(2, 8)
    assert not make().attend(query, key, value, batch, Masking(1.0), lse=lse).any()
    assert torch.equal(lse, torch.full((2, 8), -torch.inf))


@everywhere
def test_what_is_beyond_it_has_a_reason(make: Callable[[], TorchFlashProvider]) -> None:
    provider = make()
    query, key, value, batch = make_case(MIXED, "block_table")
    cases: list[tuple[Case, Masking]] = [
        ((query.float(), key.float(), value.float(), batch), Masking(1.0)),
        ((query, key.to(torch.float8_e4m3fn), value.to(torch.float8_e4m3fn), batch), Masking(1.0)),
        ((query, key, value[..., :32], batch), Masking(1.0)),
        ((query[..., :60], key[..., :60], value[..., :60], batch), Masking(1.0)),
        ((query, key, value, batch), Masking(1.0, sinks=torch.ones(8))),
        ((query, key, value, batch), Masking(1.0, alibi_slopes=torch.ones(8))),
        ((query, key, value, batch), Masking(1.0, softcap=2.0)),
        ((query, key, value, batch), Masking(1.0, window_left=3)),
        (make_case(MIXED, "block_table", leftpad=[0] * 7), Masking(1.0)),
        (make_case(MIXED, "block_table", block_tokens=16), Masking(1.0)),
    ]
    for case, masking in cases:
        assert provider.unsupported(describe_problem(*case, masking)), masking
        with pytest.raises(KernelError, match=provider.name):
            provider.attend(*case, masking)
    taken = provider.unsupported(describe_problem(query, key, value, batch, Masking(1.0, window_right=3))) is None
    assert taken == (make is torch_flash)


@everywhere
def test_write(make: Callable[[], TorchFlashProvider]) -> None:
    cache = torch.zeros(6, 16, 5, 2, 64, dtype=torch.float16)
    key, value = torch.randn(2, 20, 2, 64).half()
    slots = torch.randperm(6 * 16)[:20]
    make().write(key, value, cache[:, :, 2], cache[:, :, 3], slots)
    assert torch.equal(cache[slots // 16, slots % 16, 2], key)
    assert torch.equal(cache[slots // 16, slots % 16, 3], value)


def test_an_older_torch_says_what_it_lacks() -> None:
    def torch_2_10(  # docs.pytorch.org/docs/2.10/nn.attention.varlen.html
        query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, is_causal: bool = False
    ) -> Any: ...

    without_lengths = define_operator(
        "without_lengths", flash_attention_forward, OPERATOR_ARGUMENTS.replace("Tensor? seqused_k=None, ", "")
    )
    lacking = "varlen_attn has no block_table, .*, window_size, and _flash_attention_forward no seqused_k; install"
    with pytest.raises(KernelError, match=lacking):
        TorchFlashProvider(torch_2_10, without_lengths, device_type="cpu")
    provider = torch_flash_2_11()
    paged = describe_problem(*make_case(MIXED, "block_table"), Masking(1.0))
    assert "no block_table; use the region view" in (provider.unsupported(paged) or "")
    for heads in ((8, 2), (2, 2)):
        assert provider.unsupported(describe_problem(*make_case(MIXED, "region", heads=heads), Masking(1.0))) is None


def test_an_operator_that_means_something_else_is_not_used() -> None:
    """An operator of torch's own may change what its arguments mean, or refuse grouped heads, without a new name."""

    def refuses_groups(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Number of heads must be the same")

    def ignores_lengths(*args: Any, seqused_k: Any = None, **kwargs: Any) -> Any:
        return flash_attention_forward(*args, seqused_k=torch.full_like(seqused_k, 1), **kwargs)

    def ignores_windows(*args: Any, window_size_left: Any = None, **kwargs: Any) -> Any:
        return flash_attention_forward(*args, window_size_left=-1, **kwargs)

    for run, reason in ((refuses_groups, "must be the same"), (ignores_lengths, "off by"), (ignores_windows, "off by")):
        operator = define_operator(run.__name__, run)
        with pytest.raises(KernelError, match=reason):
            TorchFlashProvider(varlen_attn_2_11, operator, device_type="cpu")


def test_stand_ins_have_the_arguments_of_the_installed_torch() -> None:
    """The provider is tried against the operator of torch 2.11; a later torch may add to it, not change it."""
    real = torch.ops.aten._flash_attention_forward.default._schema
    ours = OPERATOR_2_11._schema
    described = [
        [(a.name, str(a.type), a.kwarg_only, a.default_value) for a in schema.arguments] for schema in (real, ours)
    ]
    assert described[0][: len(described[1])] == described[1]
    assert all(a.has_default_value() for a in real.arguments[len(described[1]) :])
    assert [r.name for r in real.returns] == [r.name for r in ours.returns]
    public = inspect.signature(torch_varlen.varlen_attn).parameters
    stand_in = varlen_attn if "block_table" in public else varlen_attn_2_11
    assert {name: p.kind for name, p in public.items()} == {
        name: p.kind for name, p in inspect.signature(stand_in).parameters.items()
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so() -> None:
    with pytest.raises(KernelError, match="needs a CUDA device"):
        TorchFlashProvider()


@everywhere
def test_tensors_elsewhere_are_refused(make: Callable[[], TorchFlashProvider]) -> None:
    problem = describe_problem(*make_case(DECODE, "region"), Masking(1.0))
    assert make().unsupported(replace(problem, device_type="cuda")) == "runs on cpu, not on cuda"


def cuda_provider() -> TorchFlashProvider:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    try:
        return TorchFlashProvider()
    except KernelError as error:
        pytest.skip(str(error))


def check_cuda(
    provider: TorchFlashProvider, case: Case, masking: Masking, *, with_lse: bool = True, splits: int = 0
) -> None:
    reason = provider.unsupported(describe_problem(*case, masking))
    if reason is not None:
        pytest.skip(f"{provider.name}: {reason}")
    check(provider, case, masking, with_lse=with_lse, splits=splits)


@pytest.mark.gpu
def test_cuda_torch_flash_is_as_the_reference() -> None:
    """Where the comparison at the start fails, the tests below skip, and this one does not."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert TorchFlashProvider().name == "torch-flash"


@pytest.mark.gpu
@pytest.mark.parametrize("view", ["region", "block_table"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED.keys())
def test_cuda_ragged_batch_equals_reference(dtype: torch.dtype, view: str, lengths: Lengths) -> None:
    provider = cuda_provider()
    for heads, dim in (((8, 2), 64), ((4, 4), 128), ((7, 1), 64)):
        case = make_case(lengths, view, heads=heads, dim=dim, dtype=dtype, device="cuda")
        check_cuda(provider, case, Masking(dim**-0.5))
        check_cuda(provider, case, Masking(dim**-0.5), with_lse=False, splits=1)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED.keys())
def test_cuda_window_over_a_hole(lengths: Lengths) -> None:
    provider = cuda_provider()
    for window_left in (0, 31, 100):
        case = make_case(lengths, "region", window_left=window_left, dtype=torch.float16, device="cuda")
        check_cuda(provider, case, Masking(0.125, window_left=window_left))
    padded = [min(5, cached) for _, cached in lengths]
    case = make_case(lengths, "region", leftpad=padded, dtype=torch.float16, device="cuda")
    check_cuda(provider, case, Masking(0.125))
