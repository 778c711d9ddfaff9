"""Operations between products against float64: in C++, and in Triton, without a GPU in its interpreter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from folio.kernels import Activation, CacheScales, Elementwise, HeadNorm, KernelError, RotaryWrite, select_elementwise
from folio.kernels.provider import FP8_DTYPES
from folio.kernels.reference import ReferenceProvider

CUDA = torch.cuda.is_available()
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
needs_hopper = pytest.mark.skipif(
    not CUDA or torch.cuda.get_device_capability() < (9, 0), reason="no device of compute capability 9.0"
)
NAMES = [
    "cpu",
    pytest.param("triton", marks=[needs_triton, *([pytest.mark.gpu] if CUDA else [])]),
    pytest.param("dependent", marks=[needs_hopper, pytest.mark.gpu]),
]
# Relative to the largest value: one rounding to the dtype, and float32 arithmetic before it. Triton's interpreter cuts
# bfloat16 off instead of rounding.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 5e-4}
SHAPES = [(1, 1, 8), (1, 3, 896), (2, 5, 33), (1, 20, 128), (1, 2, 2304), (0, 16)]
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@pytest.fixture(scope="module", params=NAMES)
def ops(request: pytest.FixtureRequest) -> Elementwise:
    device = torch.device("cpu" if request.param == "cpu" else "cuda")
    return select_elementwise(device, dependent=request.param == "dependent")


@pytest.fixture
def device(ops: Elementwise) -> torch.device:
    return torch.device("cuda" if CUDA and type(ops).__name__.startswith("Triton") else "cpu")


def check(actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    assert actual.shape == expected.shape
    if actual.numel():
        difference = ((actual.double() - expected).abs() / expected.abs().max()).max().item()
        assert difference <= (tolerance or TOLERANCE[actual.dtype]), f"maximum difference {difference:.2e}"  # or NaN


def norm_in_float64(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)


def check_norms(ops: Elementwise, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, offset: float) -> None:
    before, normed = (x.clone(), residual.clone()), norm_in_float64(x, weight, 1e-5, offset)
    check(ops.rms_norm(x, weight, 1e-5, offset), normed)
    total, normed_total = ops.add_rms_norm(x, residual, weight, 1e-5, offset)
    check(total, residual.double() + x.double())
    # Of the rounded sum, which the layer goes on with.
    check(normed_total, norm_in_float64(total, weight, 1e-5, offset))
    check(ops.rms_norm_add(x, residual, weight, 1e-5, offset), residual.double() + normed)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.thirds
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("shape", "offset"), [(shape, float(i % 2)) for i, shape in enumerate(SHAPES)])
def test_norms(
    ops: Elementwise, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, offset: float
) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(shape).to(device, dtype) for _ in range(2))
    check_norms(ops, x, residual, torch.randn(shape[-1]).to(device, dtype), offset)


def test_norms_of_strided_rows(ops: Elementwise, device: torch.device) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(5, 3, 32).to(device)[:, 1], torch.randn(32, 5).to(device).T
    check_norms(ops, x, residual, torch.ones(32, device=device), 1.0)


def test_zeros_have_no_norm_but_eps(ops: Elementwise, device: torch.device) -> None:
    zeros = torch.zeros(2, 40, device=device)
    assert not ops.rms_norm(zeros, torch.ones(40, device=device), 1e-5).any()


@pytest.mark.thirds
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate(
    ops: Elementwise, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, activation: Activation
) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(*shape[:-1], 2 * shape[-1]) * 4).to(device, dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    check(ops.gate(gate_up, activation), ACTIVATIONS[activation](gate) * up)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_gates_stay_finite(ops: Elementwise, device: torch.device, activation: Activation) -> None:
    gate_up = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    assert ops.gate(gate_up, activation).tolist() == [[0.0, 0.0, 0.0, 200.0]]


def test_both_kinds_of_gelu_are_told_apart(ops: Elementwise, device: torch.device) -> None:
    """They differ by 5e-4 at most."""
    x = torch.linspace(-6, 6, 500, device=device)
    gate_up = torch.cat([x, torch.ones_like(x)])[None]
    for name in ("gelu", "gelu_tanh"):
        off = (ops.gate(gate_up, name)[0] - ACTIVATIONS[name](x)).abs().max().item()  # type: ignore[arg-type, index]
        assert off < 2e-6, f"{name} is off by {off:.2e}"


def test_wrong_shapes_are_named(ops: Elementwise, device: torch.device) -> None:
    x = torch.ones(2, 8, device=device)
    with pytest.raises(ValueError, match=r"weight \[4\]"):
        ops.rms_norm(x, torch.ones(4, device=device), 1e-5)
    for residual in (x[:1], x.double()):
        with pytest.raises(ValueError, match="residual"):
            ops.add_rms_norm(x, residual, torch.ones(8, device=device), 1e-5)
        with pytest.raises(ValueError, match="residual"):
            ops.rms_norm_add(x, residual, torch.ones(8, device=device), 1e-5)
    with pytest.raises(ValueError, match="even"):
        ops.gate(x[:, :7], "silu")


def test_other_dtypes_are_refused(ops: Elementwise, device: torch.device) -> None:
    call = make_call(device, torch.float64)
    with pytest.raises(KernelError, match="float64"):
        ops.prepare_rotary_write(call)
    with pytest.raises(KernelError, match="float64"):
        ops.gate(torch.ones(1, 8, dtype=torch.float64, device=device), "silu")


# --- rotation and cache write ---------------------------------------------------------------------------------------


def make_call(
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int = 9,
    heads: tuple[int, int] = (6, 2),
    dim: int = 16,
    rotary_dim: int | None = None,
    *,
    norms: bool = False,
    offset: float = 0.0,
    half_tables: bool = False,
    cache_dtype: torch.dtype | None = None,
    scaled: bool = False,
    block_tokens: int = 4,
) -> RotaryWrite:
    """A call on one of three interleaved layers; the projection's rows have three elements more than the heads."""
    generator = torch.Generator().manual_seed(dim)
    rotary_dim = dim if rotary_dim is None else rotary_dim
    num_q_heads, num_kv_heads = heads
    num_heads, num_blocks = num_q_heads + 2 * num_kv_heads, num_tokens // block_tokens + 3
    rows = torch.randn(num_tokens, num_heads * dim + 3, generator=generator).to(device, dtype)
    columns = rotary_dim // 2 if half_tables else rotary_dim
    cos, sin = torch.randn(2, 1, num_tokens, columns, generator=generator).to(device, dtype)
    caches = [
        torch.full((num_blocks, block_tokens, 3, num_kv_heads, dim), 7.0).to(device, cache_dtype or dtype)[:, :, 1]
        for _ in range(2)
    ]
    weights = torch.randn(2, dim, generator=generator).to(device, dtype)
    query_norm, key_norm = (HeadNorm(weight, 1e-5 * (i + 1), offset) for i, weight in enumerate(weights))
    scales = None
    if scaled:
        scales = CacheScales(*(0.5 + torch.rand(2, num_kv_heads, generator=generator)).to(device))
    return RotaryWrite(
        rows[:, :-3].view(num_tokens, num_heads, dim) if dim else rows,
        cos,
        sin,
        rotary_dim,
        caches[0],
        caches[1],
        torch.randperm(num_blocks * block_tokens, generator=generator)[:num_tokens].to(device),
        query_norm if norms else None,
        key_norm if norms else None,
        scales,
    )


def in_float64(call: RotaryWrite) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as the caches should hold them, before 8-bit floats."""
    query, key, value = call.heads.double().split([call.num_q_heads, call.num_kv_heads, call.num_kv_heads], dim=1)
    if call.query_norm is not None and call.key_norm is not None:
        query = norm_in_float64(query, call.query_norm.weight, call.query_norm.eps, call.query_norm.offset)
        key = norm_in_float64(key, call.key_norm.weight, call.key_norm.eps, call.key_norm.offset)
    dim = call.rotary_dim
    cos, sin = (table.double().reshape(len(query), 1, -1) for table in (call.cos, call.sin))
    if cos.shape[-1] != dim:
        cos, sin = cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)

    def turn(x: torch.Tensor) -> torch.Tensor:
        turned = torch.cat([-x[..., dim // 2 : dim], x[..., : dim // 2]], dim=-1)
        return torch.cat([x[..., :dim] * cos + turned * sin, x[..., dim:]], dim=-1)

    return turn(query), turn(key), value


def run(ops: Elementwise, call: RotaryWrite) -> None:
    norms = [norm.weight for norm in (call.query_norm, call.key_norm) if norm is not None]
    ops.prepare_rotary_write(call)(call.heads, call.key_cache, call.value_cache, *norms)


def check_call(ops: Elementwise, call: RotaryWrite) -> None:
    """Run the call, and check queries, caches, and that nothing else has changed."""
    query, key, value = in_float64(call)
    caches = call.key_cache, call.value_cache
    before = [cache.clone().float() for cache in caches]
    run(ops, call)
    tolerance = TOLERANCE[call.heads.dtype] * (4 if call.query_norm is not None else 1)
    check(call.heads[:, : call.num_q_heads], query, tolerance)
    block_tokens = call.key_cache.shape[1]
    at = call.slots // block_tokens, call.slots % block_tokens
    written = torch.zeros(caches[0].shape[:2], dtype=torch.bool, device=call.slots.device)
    written[at] = True
    if call.key_cache.dtype in FP8_DTYPES:
        shape, dtype = call.key_cache.shape, call.key_cache.dtype
        expected = [torch.zeros(shape, dtype=dtype, device=call.slots.device) for _ in caches]
        ReferenceProvider().write(key.float(), value.float(), *expected, call.slots, scales=call.scales)
        for cache, right in zip(caches, expected, strict=True):
            # A rounding of heads before that of the cache may move a value to the neighbouring 8-bit float.
            off = (cache[at].float() - right[at].float()).abs() / right[at].float().abs().clamp(min=2.0**-6)
            assert off.max().item() <= 0.26, f"maximum difference {off.max().item():.2e}"
            assert (off > 0.01).float().mean().item() <= 0.1
    else:
        check(call.key_cache[at], key, tolerance)
        check(call.value_cache[at], value)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.float()[~written], old[~written])


@pytest.mark.thirds
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "dim", "rotary_dim"),
    [((6, 2), 16, 16), ((1, 1), 128, 128), ((7, 1), 64, 64), ((3, 3), 80, 32), ((2, 1), 33, 6), ((5, 1), 256, 2)],
)
def test_rotary_write(
    ops: Elementwise,
    device: torch.device,
    heads: tuple[int, int],
    dim: int,
    rotary_dim: int,
    norms: bool,
    dtype: torch.dtype,
) -> None:
    for num_tokens, half_tables in ((1, False), (5, True)):
        options = {"norms": norms, "half_tables": half_tables, "offset": float(num_tokens > 1)}
        check_call(ops, make_call(device, dtype, num_tokens, heads, dim, rotary_dim, **options))  # type: ignore[arg-type]


def test_many_heads_take_several_programs(ops: Elementwise, device: torch.device) -> None:
    check_call(ops, make_call(device, torch.bfloat16, 2, (64, 40), 128, 64, norms=True))


@pytest.mark.parametrize("block_tokens", [1, 3, 600])
def test_blocks_of_any_size(ops: Elementwise, device: torch.device, block_tokens: int) -> None:
    check_call(ops, make_call(device, torch.float32, block_tokens=block_tokens))


def test_many_tokens(ops: Elementwise, device: torch.device) -> None:
    """As many as several threads share."""
    if type(ops).__name__.startswith("Triton") and not CUDA:
        pytest.skip("the interpreter has no threads")
    check_call(ops, make_call(device, torch.float32, 300, (4, 2), 32, norms=True))
    x = torch.randn(300, 256).to(device)
    gate, up = x.double().chunk(2, dim=-1)
    check(ops.gate(x, "silu"), functional.silu(gate) * up)
    check_norms(ops, x, x.flip(0), x[0], 0.0)


@pytest.mark.thirds
@pytest.mark.parametrize("cache_dtype", FP8_DTYPES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_cache_of_8_bit_floats(
    ops: Elementwise, device: torch.device, dtype: torch.dtype, scaled: bool, cache_dtype: torch.dtype
) -> None:
    check_call(ops, make_call(device, dtype, 5, (3, 2), 33, 6, norms=True, cache_dtype=cache_dtype, scaled=scaled))


def test_one_preparation_serves_all_layers(ops: Elementwise, device: torch.device) -> None:
    """Each layer has tensors of its own, and some of them start at other alignments than the prepared ones."""
    call = make_call(device, torch.float32, 4, norms=True)
    write = ops.prepare_rotary_write(call)
    for layer in range(3):
        storage = torch.randn(call.heads.numel() + 1, device=device)[layer % 2 :][: call.heads.numel()]
        heads = torch.as_strided(torch.cat([storage, storage]), call.heads.shape, call.heads.stride())
        weights = torch.randn(2, heads.shape[2], device=device)
        shape = *call.key_cache.shape[:2], 3, *call.key_cache.shape[2:]
        caches = [torch.empty(shape, device=device) for _ in range(2)]
        keys, values = (cache.fill_(7.0)[:, :, layer] for cache in caches)
        norms = {"query_norm": HeadNorm(weights[0], 1e-5), "key_norm": HeadNorm(weights[1], 2e-5)}
        other = replace(call, heads=heads, key_cache=keys, value_cache=values, **norms)
        query, key, value = in_float64(other)
        write(heads, keys, values, weights[0], weights[1])
        at = call.slots // 4, call.slots % 4
        check(heads[:, : call.num_q_heads], query, 4e-6)
        check(keys[at], key, 4e-6)
        check(values[at], value)


def test_no_tokens(ops: Elementwise, device: torch.device) -> None:
    call = make_call(device, torch.float32, 0)
    run(ops, call)
    assert call.key_cache.eq(7.0).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rotary_dim": 15}, "rotary_dim 15 must be even"),
        ({"rotary_dim": 18}, "rotary_dim 18"),
        ({"cos": torch.ones(1, 8, 16)}, "are not for 9 tokens"),
        ({"cos": torch.ones(1, 9, 12), "sin": torch.ones(1, 9, 12)}, "are not for 9 tokens"),
        ({"cos": torch.ones(1, 9, 16).half(), "sin": torch.ones(1, 9, 16).half()}, "float16"),
        ({"key_norm": None}, "both or neither"),
        ({"key_norm": HeadNorm(torch.ones(8), 1e-5)}, r"weight \[8\]"),
        ({"slots": torch.arange(8)}, "slots"),
        ({"heads": torch.ones(9, 4, 16)}, "leave no query"),
        ({"heads": torch.ones(9, 16, 10).transpose(1, 2)}, "strides"),
        ({"heads": torch.ones(9, 10, 12)}, "does not fit a cache"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_call(torch.device("cpu"), torch.float32, norms=True), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("slot", [-1, 20])
def test_slots_outside_of_the_cache(slot: int) -> None:
    """On a CPU nothing is written."""
    call = make_call(torch.device("cpu"), torch.float32)
    call.slots[4] = slot
    before = call.heads.clone()
    with pytest.raises(KernelError, match=r"exceeds its cache .* of 20"):
        run(select_elementwise(torch.device("cpu")), call)
    assert call.key_cache.eq(7.0).all()
    assert torch.equal(call.heads, before)
