"""Every provider against the reference in float64, over ragged batches and both views."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from kernels import AttentionProvider, KernelError, Masking, VarlenBatch, select_provider
from kernels.reference import ReferenceProvider

CPU = torch.device("cpu")
# Largest difference allowed against float64, for values of order 1.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
RAGGED = [(1, 1), (1, 17), (5, 5), (3, 64), (1, 65), (70, 200), (33, 33), (1, 300)]


def make_case(
    lengths: list[tuple[int, int]], heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, view: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, VarlenBatch]:
    """Random (queries, keys, values, batch); `lengths` are (queries, cached) of each sequence. What no query may see is
    poisoned with NaN."""
    generator = torch.Generator().manual_seed(7)
    num_q_heads, num_kv_heads = heads
    num_tokens = sum(q for q, _ in lengths)
    query = torch.randn(num_tokens, num_q_heads, dims[0], generator=generator).to(dtype)
    longest = max(cached for _, cached in lengths)
    group_tokens = longest + 3 if view == "region" else 16
    per_sequence = 1 if view == "region" else -(-longest // group_tokens)
    num_groups = len(lengths) * per_sequence + 2
    groups = torch.randperm(num_groups, generator=generator)[: len(lengths) * per_sequence].view(-1, per_sequence)

    def cache(dim: int) -> torch.Tensor:
        interleaved = torch.full((num_groups, group_tokens, 3, num_kv_heads, dim), torch.nan, dtype=dtype)
        layer = interleaved[:, :, 1]
        for sequence, (_, cached) in enumerate(lengths):
            for position in range(cached):
                group = groups[sequence, position // group_tokens]
                row = torch.randn(num_kv_heads, dim, generator=generator).to(dtype)
                layer[group, position % group_tokens] = row
        return layer

    starts = list(itertools.accumulate((q for q, _ in lengths), initial=0))
    batch = VarlenBatch(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([cached for _, cached in lengths], dtype=torch.int32),
        groups.int().contiguous(),
    )
    return query, cache(dims[0]), cache(dims[1]), batch


def check(
    provider: AttentionProvider,
    case: tuple[torch.Tensor, torch.Tensor, torch.Tensor, VarlenBatch],
    masking: Masking,
    tolerance: float | None = None,
) -> None:
    query, key, value, batch = case
    expected = ReferenceProvider().attend(query.double(), key.double(), value.double(), batch, masking)
    actual = provider.attend(query, key, value, batch, masking)
    difference = (actual.double() - expected).abs().max().item()
    assert actual.dtype == query.dtype
    assert difference <= (tolerance or TOLERANCE[query.dtype]), f"maximum difference {difference:.2e}"  # NaN fails too


@pytest.mark.parametrize("view", ["region", "block_table"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["cpu", "sdpa", "reference"])
def test_ragged_batch_equals_reference(name: str, dtype: torch.dtype, view: str) -> None:
    case = make_case(RAGGED, (14, 2), (64, 64), dtype, view)
    check(select_provider(name, CPU), case, Masking(64**-0.5))


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (6, 2), (32, 1), (64, 1)])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (16, 16), (24, 24), (8, 8), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_heads_and_dims(heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> None:
    case = make_case([(1, 40), (9, 30), (20, 20)], heads, dims, dtype, "region")
    check(select_provider("cpu", CPU), case, Masking(dims[0] ** -0.5))


@pytest.mark.parametrize("name", ["cpu", "sdpa"])
@pytest.mark.parametrize(
    "masking",
    [
        Masking(0.125, window_left=0),
        Masking(0.125, window_left=31),
        Masking(0.125, softcap=5.0),
        Masking(0.3, window_left=100, softcap=2.0, sinks=torch.linspace(-3, 5, 8)),
        Masking(0.125, sinks=torch.linspace(-3, 50, 8)),
    ],
    ids=["own token", "window", "softcap", "all", "sinks"],
)
def test_masking(name: str, masking: Masking) -> None:
    for view in ("region", "block_table"):
        check(select_provider(name, CPU), make_case(RAGGED, (8, 2), (64, 64), torch.float32, view), masking)


def test_large_scores_do_not_overflow() -> None:
    query, key, value, batch = make_case(RAGGED, (8, 2), (64, 64), torch.float32, "region")
    """exp of the raw scores (about 200) would be infinite in float32; their rounding error is what is left."""
    check(select_provider("cpu", CPU), (query * 5, key * 5, value, batch), Masking(1.0), tolerance=1e-3)


@pytest.mark.parametrize("name", ["cpu", "sdpa", "reference"])
def test_sequence_without_queries(name: str) -> None:
    case = make_case([(1, 5), (0, 9), (2, 7)], (4, 2), (32, 32), torch.float32, "region")
    check(select_provider(name, CPU), case, Masking(0.2))


@pytest.mark.parametrize("make", [lambda: select_provider("cpu", CPU), ReferenceProvider])
def test_write_then_read_back(make: Callable[[], AttentionProvider]) -> None:
    cache = torch.zeros(6, 16, 5, 3, 40)  # [groups, tokens, layer and side, heads, dim]
    key_cache, value_cache = cache[:, :, 2], cache[:, :, 3]
    key = torch.randn(1, 3, 20, 40).transpose(1, 2)[0]  # a transposed view, as models hand it over
    value = torch.randn(20, 3, 40)
    slots = torch.randperm(6 * 16)[:20]
    make().write(key, value, key_cache, value_cache, slots)
    assert torch.equal(key_cache[slots // 16, slots % 16], key)
    assert torch.equal(value_cache[slots // 16, slots % 16], value)
    assert cache.count_nonzero() == key.numel() + value.numel()


def test_wrong_shapes_are_named() -> None:
    query, key, value, batch = make_case([(1, 5)], (4, 2), (32, 32), torch.float32, "region")
    with pytest.raises(ValueError, match=r"\[1, 4, 16\]"):
        select_provider("cpu", CPU).attend(query[..., :16], key, value, batch, Masking(1.0))
    with pytest.raises(ValueError, match="3 query heads"):
        select_provider("cpu", CPU).attend(query[:, :3], key, value, batch, Masking(1.0))
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        VarlenBatch(batch.cu_seqlens_q[:1], batch.cache_seqlens, batch.groups)


def test_unknown_provider_is_an_error() -> None:
    with pytest.raises(KernelError, match="choose one of"):
        select_provider("fastest", CPU)
    with pytest.raises(KernelError, match="cannot run on cuda"):
        select_provider("cpu", torch.device("cuda"))
    assert select_provider("auto", torch.device("cuda")).name == "sdpa"


def test_no_compiler_falls_back_only_when_auto(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kernels import build

    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    build.load_library.cache_clear()
    try:
        assert select_provider("auto", CPU).name == "sdpa"
        assert "falling back" in caplog.text
        with pytest.raises(KernelError, match="g\\+\\+"):
            select_provider("cpu", CPU)
    finally:
        build.load_library.cache_clear()
