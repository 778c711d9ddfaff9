"""A decoder layer in one call against the single operations, bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from folio.kernels import CpuElementwise, CpuLinear, KernelError
from folio.kernels.cpu.layer import CpuLayer, LayerPart, LayerWeights, Product, StepParts, Workspace
from folio.kernels.cpu.ops import CpuRotaryWrite
from folio.kernels.cpu.provider import CpuAttend, CpuProvider
from folio.kernels.elementwise import Activation, HeadNorm, RotaryWrite
from folio.kernels.provider import AttentionCall, Masking
from tests.kernels.cases import Lengths, make_batch
from tests.kernels.cpu.test_ops import has_layers

SIZE, WIDTH, DIM, BLOCK = 48, 80, 16, 4
HEADS = (14, 2)
DTYPES = [torch.float32, torch.bfloat16]
DECODES: Lengths = [(1, 1), (1, 37), (1, 5), (1, 64)]
MIXED: Lengths = [(1, 9), (7, 7), (1, 30), (20, 41)]
LONG: Lengths = [(460, 470), (1, 2100)]  # more rows than a chunk, and a sequence of two parts


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    if not has_layers(dtype):
        pytest.skip(f"no layers in one call with {dtype} here")
    return dtype


def make_weights(
    dtype: torch.dtype,
    *,
    int8: bool = False,
    norms: bool = False,
    biases: bool = False,
    activation: Activation = "silu",
) -> LayerWeights:
    generator = torch.Generator().manual_seed(3)
    linear = CpuLinear()

    def product(outputs: int, inputs: int) -> Product:
        weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
        packed = linear.pack((weight * inputs**-0.5).to(dtype), int8=int8)
        return Product(packed, bias.to(dtype) if biases else None)

    def norm(size: int, offset: float) -> HeadNorm:
        return HeadNorm(torch.randn(size, generator=generator).to(dtype), 1e-5 * (1 + offset), offset)

    num_q_heads, num_kv_heads = HEADS
    return LayerWeights(
        (norm(SIZE, 0.0), norm(SIZE, 1.0)),
        (norm(DIM, 0.0), norm(DIM, 1.0)) if norms else (),
        product((num_q_heads + 2 * num_kv_heads) * DIM, SIZE),
        product(SIZE, num_q_heads * DIM),
        product(2 * WIDTH, SIZE),
        product(SIZE, WIDTH),
        activation,
    )


@dataclass(frozen=True)
class Step:
    """One part of a step: calls on random caches, of which all layers' keys and values are interleaved."""

    rotary: RotaryWrite
    attention: AttentionCall

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rotary.key_cache, self.rotary.value_cache

    def copied(self) -> Step:
        keys, values = (cache.clone() for cache in self.caches)
        rotary = replace(self.rotary, heads=self.rotary.heads.clone(), key_cache=keys, value_cache=values)
        return Step(rotary, replace(self.attention, key_cache=keys, value_cache=values))


def make_step(lengths: Lengths, weights: LayerWeights, dtype: torch.dtype, seed: int = 1) -> Step:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(queries for queries, _ in lengths)
    width = -(-max(cached for _, cached in lengths) // BLOCK)
    table = torch.randperm(len(lengths) * width + 1, generator=generator)[1:].view(len(lengths), width)
    shape = int(table.max()) + 1, BLOCK, 3, 2, HEADS[1], DIM
    cache = torch.randn(shape, generator=generator).to(dtype)[:, :, 1]
    positions = [torch.arange(cached - queries, cached) for queries, cached in lengths]
    slots = [table[i, at // BLOCK] * BLOCK + at % BLOCK for i, at in enumerate(positions)]
    heads = torch.empty(rows, HEADS[0] + 2 * HEADS[1], DIM, dtype=dtype)
    cos, sin = torch.randn(2, rows, DIM, generator=generator).to(dtype)
    norms = weights.head_norms or (None, None)
    keys, values = cache[:, :, 0], cache[:, :, 1]
    rotary = RotaryWrite(heads, cos, sin, DIM, keys, values, torch.cat(slots), *norms)
    batch = make_batch(lengths, table)
    return Step(rotary, AttentionCall(heads[:, : HEADS[0]], keys, values, batch, Masking(0.2, window_left=1500)))


def prepared(steps: list[Step]) -> StepParts:
    ops, provider = CpuElementwise(), CpuProvider()
    parts, first = [], 0
    for step in steps:
        rotary, attend = ops.prepare_rotary_write(step.rotary), provider.prepare_attend(step.attention)
        assert isinstance(rotary, CpuRotaryWrite)
        assert isinstance(attend, CpuAttend)
        parts.append(LayerPart(rotary, attend, first))
        first += len(step.rotary.heads)
    return StepParts(parts)


def in_one_call(weights: LayerWeights, hidden: torch.Tensor, steps: list[Step]) -> torch.Tensor:
    heads = hidden.new_empty(len(hidden), *steps[0].rotary.heads.shape[1:])
    return CpuLayer(weights, Workspace())(hidden, heads, prepared(steps), [step.caches for step in steps])


def by_single_operations(weights: LayerWeights, hidden: torch.Tensor, steps: list[Step]) -> torch.Tensor:
    linear, ops, provider = CpuLinear(), CpuElementwise(), CpuProvider()
    before_attention, before_mlp = weights.norms
    x = ops.rms_norm(hidden, before_attention.weight, before_attention.eps, before_attention.offset)
    rows = [len(step.rotary.heads) for step in steps]
    parts = linear(x, weights.qkv.weight, weights.qkv.bias).view(len(hidden), -1, DIM).split(rows)
    for step, heads in zip(steps, parts, strict=True):
        write = ops.prepare_rotary_write(replace(step.rotary, heads=heads))
        write(heads, *step.caches, *(norm.weight for norm in weights.head_norms))
    attended = [
        provider.run_attend(replace(step.attention, query=heads[:, : HEADS[0]]))
        for step, heads in zip(steps, parts, strict=True)
    ]
    x = linear(torch.cat(attended).flatten(1), weights.attention_out.weight, weights.attention_out.bias)
    hidden, x = ops.add_rms_norm(x, hidden, before_mlp.weight, before_mlp.eps, before_mlp.offset)
    x = ops.gate(linear(x, weights.gate_up.weight, weights.gate_up.bias), weights.activation)
    return hidden + linear(x, weights.down.weight, weights.down.bias)


def random_hidden(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(9)).to(dtype)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("lengths", [[(1, 40)], DECODES, MIXED, LONG], ids=["one", "decodes", "mixed", "long"])
def test_equals_the_single_operations(
    lengths: Lengths, biases: bool, norms: bool, int8: bool, dtype: torch.dtype
) -> None:
    weights = make_weights(dtype, int8=int8, norms=norms, biases=biases)
    ours = make_step(lengths, weights, dtype)
    theirs = ours.copied()
    hidden = random_hidden(len(ours.rotary.heads), dtype)
    actual, expected = in_one_call(weights, hidden, [ours]), by_single_operations(weights, hidden, [theirs])
    assert expected.isfinite().all()
    assert torch.equal(actual, expected), (actual.float() - expected.float()).abs().max()
    for a, b in zip(ours.caches, theirs.caches, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_other_activations(activation: Activation, dtype: torch.dtype) -> None:
    weights = make_weights(dtype, activation=activation)
    ours = make_step(DECODES, weights, dtype)
    theirs, hidden = ours.copied(), random_hidden(len(DECODES), dtype)
    assert torch.equal(in_one_call(weights, hidden, [ours]), by_single_operations(weights, hidden, [theirs]))


def test_parts_of_two_views(dtype: torch.dtype) -> None:
    """Rows of the first part, then those of the second, on caches of different shapes."""
    weights = make_weights(dtype, norms=True)
    ours = [make_step(MIXED, weights, dtype, seed=1), make_step(DECODES, weights, dtype, seed=2)]
    theirs = [step.copied() for step in ours]
    hidden = random_hidden(sum(len(step.rotary.heads) for step in ours), dtype)
    assert torch.equal(in_one_call(weights, hidden, ours), by_single_operations(weights, hidden, theirs))
    for a, b in zip(ours, theirs, strict=True):
        assert all(itertools.starmap(torch.equal, zip(a.caches, b.caches, strict=True)))


def test_a_row_depends_neither_on_other_rows_nor_on_threads(dtype: torch.dtype) -> None:
    """One sequence alone is also divided between threads by heads."""
    weights = make_weights(dtype)
    lengths: Lengths = [(1, 2100), (1, 37), (1, 5)]
    together, threads = make_step(lengths, weights, dtype), torch.get_num_threads()
    hidden = random_hidden(len(lengths), dtype)
    expected = in_one_call(weights, hidden, [together])
    try:
        for row, (num_threads, at) in enumerate([(1, 0), (2, 1), (3, 2)]):
            torch.set_num_threads(num_threads)
            batch = together.attention.batch
            alone = replace(
                together.attention,
                query=together.attention.query[row : row + 1],
                batch=replace(
                    batch,
                    cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
                    cache_seqlens=batch.cache_seqlens[at : at + 1],
                    block_table=batch.block_table[at : at + 1],
                ),
            )
            old = together.rotary
            rotary = replace(
                old, heads=old.heads[row : row + 1], cos=old.cos[row : row + 1], sin=old.sin[row : row + 1],
                slots=old.slots[row : row + 1],
            )  # fmt: skip
            actual = in_one_call(weights, hidden[row : row + 1], [Step(rotary, alone)])
            assert torch.equal(actual, expected[row : row + 1]), f"row {row}, {num_threads} threads"
    finally:
        torch.set_num_threads(threads)


def test_a_workspace_serves_calls_of_any_size(dtype: torch.dtype) -> None:
    """Values that a larger call left behind are not read."""
    weights, workspace = make_weights(dtype), Workspace()
    layer = CpuLayer(weights, workspace)
    for lengths in (DECODES, MIXED, [(1, 3)], MIXED, DECODES):
        ours = make_step(lengths, weights, dtype)
        theirs, hidden = ours.copied(), random_hidden(len(ours.rotary.heads), dtype)
        heads = hidden.new_empty(ours.rotary.heads.shape)
        actual = layer(hidden, heads, prepared([ours]), [ours.caches])
        assert torch.equal(actual, by_single_operations(weights, hidden, [theirs]))
        workspace.at_least(0).fill_(255)  # NaN in both dtypes


@pytest.mark.parametrize("wrong", ["slot", "block"])
def test_calls_outside_of_the_cache_change_nothing(wrong: str, dtype: torch.dtype) -> None:
    """Of the second part, too: the first one has not been written by then."""
    weights = make_weights(dtype)
    steps = [make_step(DECODES, weights, dtype, seed=seed) for seed in (1, 2)]
    if wrong == "slot":
        steps[1].rotary.slots[2] = 10**6
    else:
        steps[1].attention.batch.block_table[3, 0] = 10**6
    before = [step.copied() for step in steps]
    with pytest.raises(KernelError, match=r"exceeds its cache.*1000000"):
        in_one_call(weights, random_hidden(2 * len(DECODES), dtype), steps)
    for a, b in zip(steps, before, strict=True):
        assert all(itertools.starmap(torch.equal, zip(a.caches, b.caches, strict=True)))


def test_products_that_do_not_follow_each_other_are_named(dtype: torch.dtype) -> None:
    weights = make_weights(dtype)
    with pytest.raises(ValueError, match="do not follow each other"):
        replace(weights, down=weights.gate_up)
    with pytest.raises(ValueError, match="norms of"):
        replace(weights, norms=(weights.norms[0], HeadNorm(torch.ones(SIZE + 1, dtype=dtype), 1e-5)))
    other = make_weights(torch.float32 if dtype == torch.bfloat16 else torch.bfloat16)
    with pytest.raises(ValueError, match="in a layer of"):
        replace(weights, down=other.down)
