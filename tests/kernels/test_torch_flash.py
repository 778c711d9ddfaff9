"""The torch-flash provider: over stand-ins for torch's functions on the CPU, and over torch's own on CUDA.

A stand-in has the signature of torch's function, refuses the same arguments, and reads the same whole tiles as the
kernels, so that NaN in them reaches the result.
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

from folio.kernels import KernelError, Masking
from folio.kernels.provider import AttentionCall
from folio.kernels.torch_flash import TorchFlashProvider
from tests.kernels import cases
from tests.kernels.cases import Case, Lengths

LSE_TOLERANCE_CUDA = 2e-2
TILE = 64

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
    device: str = "cpu",
    masking: Masking | None = None,
) -> Case:
    """A case over regions, or over a table of several blocks."""
    paged: dict[str, int] = {} if view == "region" else {"block_tokens": block_tokens, "spare_columns": 1}
    masking = masking or Masking(0.125)
    return cases.make_case(
        lengths, heads, (dim, dim), dtype, view, masking=masking, leftpad=leftpad, device=device, **paged
    )


# --- FA2 -------------------------------------------------------------------------------------------------------------


def fa2_sequence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """FA2 for one sequence: masks aligned to the bottom right, tiles from the one where the first row's window begins,
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
    """`mha_varlen_fwd` of csrc/flash_attn/flash_api.cpp, in torch's copy, which splits all paged calls."""
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
    assert all(0 <= block < len(cache) for block in blocks), "an invalid block index was read"
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
    lengths = cu_seq_q, cu_seq_k, max_q, max_k
    found = fa2_varlen(query, key, value, *lengths, scale, window_size, seqused_k, block_table, num_splits or 0)
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
    """Register an operator: the dispatcher checks its arguments against the schema, as for torch's own."""
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
    lengths, window = (cum_seq_q, cum_seq_k, max_q, max_k), (window_size_left, 0 if is_causal else window_size_right)
    found = fa2_varlen(query, key, value, *lengths, scale, window, seqused_k, None, 0)
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


def cuda_provider() -> TorchFlashProvider:
    try:
        return TorchFlashProvider()
    except KernelError as error:
        pytest.skip(str(error))


on_cuda = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
everywhere = pytest.mark.parametrize("make", [torch_flash, torch_flash_2_11])
in_regions = pytest.mark.parametrize(
    "make", [torch_flash, torch_flash_2_11, pytest.param(cuda_provider, marks=on_cuda)]
)
in_both_views = pytest.mark.parametrize(
    ("make", "view"),
    [
        (torch_flash, "region"),
        (torch_flash, "block_table"),
        (torch_flash_2_11, "region"),
        pytest.param(cuda_provider, "region", marks=on_cuda),
        pytest.param(cuda_provider, "block_table", marks=on_cuda),
    ],
)
of_all_lengths = pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED.keys())


def check(
    make: Callable[[], TorchFlashProvider],
    lengths: Lengths,
    view: str,
    *,
    with_lse: bool = True,
    num_splits: int = 0,
    **options: Any,
) -> torch.Tensor:
    """The provider's result, which is the reference's."""
    provider, on_device = make(), make is cuda_provider
    case = make_case(lengths, view, device="cuda" if on_device else "cpu", **options)
    if on_device and (reason := provider.unsupported(AttentionCall(*case.arguments))):
        pytest.skip(f"{provider.name}: {reason}")
    tolerance = LSE_TOLERANCE_CUDA if on_device else None
    return cases.check(provider, case, lse_tolerance=tolerance, with_lse=with_lse, num_splits=num_splits)


@pytest.mark.thirds
@in_both_views
@of_all_lengths
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"with_lse": False, "num_splits": 1},
        *({"heads": heads, "dim": 128, "dtype": torch.float16} for heads in ((1, 1), (4, 4), (6, 2), (7, 1))),
        *({"heads": heads, "num_splits": 1} for heads in ((1, 1), (4, 4), (6, 2), (7, 1))),
        *({"masking": Masking(0.125, window_right=right)} for right in (-1, 4)),
    ],
    ids=str,
)
def test_ragged_batch_equals_reference(
    make: Callable[[], TorchFlashProvider], view: str, lengths: Lengths, options: dict[str, Any]
) -> None:
    check(make, lengths, view, **options)


@pytest.mark.thirds
@in_regions
@pytest.mark.parametrize("window", [(-1, 0), (0, 0), (31, 0), (100, 0), (10_000, 0), (9, -1), (9, 4)], ids=str)
@of_all_lengths
def test_windows_and_leftpads_over_a_hole(
    make: Callable[[], TorchFlashProvider], window: tuple[int, int], lengths: Lengths
) -> None:
    """Tiles would reach into the hole before the window; reading must begin with the window."""
    for pads in (itertools.repeat(0), itertools.repeat(5), itertools.count(0, 3)):
        leftpad = [min(pad, cached) for pad, (_, cached) in zip(pads, lengths, strict=False)]
        if window[1] == 0 or not any(leftpad):
            check(make, lengths, "region", masking=Masking(0.125, *window), leftpad=leftpad if any(leftpad) else None)


@everywhere
def test_regions_within_a_larger_cache(make: Callable[[], TorchFlashProvider]) -> None:
    """Regions of all layers side by side: the regions of one layer are further apart than a region is long."""
    case = make_case(MIXED, "region")
    num_regions, *shape = case.key_cache.shape
    cache = torch.full((num_regions, 3, 2, *shape), torch.nan, dtype=case.query.dtype)
    cache[:, 1, 0], cache[:, 1, 1] = case.key_cache, case.value_cache
    cases.check(make(), replace(case, key_cache=cache[:, 1, 0], value_cache=cache[:, 1, 1]))


@everywhere
def test_unequally_spaced_regions_are_refused(make: Callable[[], TorchFlashProvider]) -> None:
    case = make_case(MIXED, "region")
    key = case.key_cache
    storage = torch.zeros(len(key) * (key.stride(0) + 8), dtype=key.dtype)
    odd, crooked = (storage.as_strided(key.shape, (key.stride(0) + by, *key.stride()[1:])) for by in (8, 4))
    for caches, message in (((odd, odd), "one run"), ((crooked, crooked), "multiples"), ((key, odd), "one run")):
        with pytest.raises(KernelError, match=message):
            make().attend(case.query, *caches, case.batch, case.masking)


@everywhere
def test_no_queries_at_all(make: Callable[[], TorchFlashProvider]) -> None:
    assert check(make, [(0, 5), (0, 0)], "region").shape == (0, 8, 64)
    assert not check(make, [(1, 0), (1, 0)], "region" if make is torch_flash_2_11 else "block_table").any()


@everywhere
def test_unsupported_calls_have_a_reason(make: Callable[[], TorchFlashProvider]) -> None:
    provider, case = make(), make_case(MIXED, "block_table")
    tensors = {"query": case.query, "key_cache": case.key_cache, "value_cache": case.value_cache}
    fp8 = {name: cache.to(torch.float8_e4m3fn) for name, cache in tensors.items() if name != "query"}
    for unsupported in (
        replace(case, **{name: tensor.float() for name, tensor in tensors.items()}),
        replace(case, **fp8),
        replace(case, value_cache=case.value_cache[..., :32]),
        replace(case, **{name: tensor[..., :60] for name, tensor in tensors.items()}),
        replace(case, masking=Masking(1.0, sinks=torch.ones(8))),
        replace(case, masking=Masking(1.0, alibi_slopes=torch.ones(8))),
        replace(case, masking=Masking(1.0, softcap=2.0)),
        replace(case, masking=Masking(1.0, window_left=3)),
        make_case(MIXED, "block_table", leftpad=[0] * 7),
        make_case(MIXED, "block_table", block_tokens=16),
    ):
        assert provider.unsupported(AttentionCall(*unsupported.arguments))
        with pytest.raises(KernelError, match=provider.name):
            provider.attend(*unsupported.arguments)
    bounded = replace(case, masking=Masking(1.0, window_right=3))
    assert (provider.unsupported(AttentionCall(*bounded.arguments)) is None) == (make is torch_flash)


@everywhere
def test_write(make: Callable[[], TorchFlashProvider]) -> None:
    cache = torch.zeros(6, 16, 5, 2, 64, dtype=torch.float16)
    key, value = torch.randn(2, 20, 2, 64).half()
    slots = torch.randperm(6 * 16)[:20]
    make().write(key, value, cache[:, :, 2], cache[:, :, 3], slots)
    assert torch.equal(cache[slots // 16, slots % 16, 2], key)
    assert torch.equal(cache[slots // 16, slots % 16, 3], value)


def test_an_older_torch_is_refused_with_the_missing_arguments() -> None:
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
    paged = AttentionCall(*make_case(MIXED, "block_table").arguments)
    assert "no block_table; use the region view" in (provider.unsupported(paged) or "")
    for heads in ((8, 2), (2, 2)):
        assert provider.unsupported(AttentionCall(*make_case(MIXED, "region", heads=heads).arguments)) is None


def test_an_operator_with_another_meaning_is_not_used() -> None:
    """A private operator may change the meaning of its arguments, or refuse grouped heads, without a new name."""

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
    """The stand-in is torch 2.11's operator; a later torch may add arguments, and must not change these."""
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
def test_without_a_cuda_device_it_is_not_available() -> None:
    with pytest.raises(KernelError, match="needs a CUDA device"):
        TorchFlashProvider()


@everywhere
def test_tensors_elsewhere_are_refused(make: Callable[[], TorchFlashProvider]) -> None:
    call = AttentionCall(*make_case(DECODE, "region").arguments)
    elsewhere = {name: getattr(call, name).to("meta") for name in ("query", "key_cache", "value_cache")}
    assert make().unsupported(replace(call, **elsewhere)) == "runs on cpu, not on meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_operator_agrees_with_the_reference() -> None:
    """Where the comparison at the start fails, the tests above skip on CUDA, and this one fails."""
    assert TorchFlashProvider().name == "torch-flash"
