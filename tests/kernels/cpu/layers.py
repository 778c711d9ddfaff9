"""Random decoder layers on a CPU, and their steps over random caches."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from folio.kernels import CpuElementwise, CpuLinear, quantise
from folio.kernels.cpu.layer import (
    CpuLayer,
    LayerPart,
    LayerWeights,
    PreparedLayer,
    Product,
    StepParts,
    Workspace,
    run_layers,
)
from folio.kernels.cpu.ops import CpuRotaryWrite
from folio.kernels.cpu.provider import CpuAttend, CpuProvider
from folio.kernels.elementwise import ACTIVATIONS, Activation, HeadNorm, RotaryWrite
from folio.kernels.provider import AttentionCall, Masking
from tests.kernels.cases import Lengths, make_batch

SIZE, WIDTH, DIM, BLOCK = 48, 80, 16, 4
HEADS = (14, 2)
LONG: Lengths = [(460, 470), (1, 2100)]  # more rows than a chunk, and a sequence of two parts


def make_weights(
    dtype: torch.dtype,
    *,
    codes: bool = False,
    norms: bool = False,
    biases: bool = False,
    after: bool = False,
    activation: Activation = "silu",
    march: str = "native",
) -> LayerWeights:
    """Weights of a layer. Args: `codes`: quantised; `norms`: of heads; `after`: norms of the outputs."""

    generator = torch.Generator().manual_seed(3)
    linear = CpuLinear(march)

    def product(outputs: int, inputs: int) -> Product:
        weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
        weight *= inputs**-0.5
        if codes:  # of parts in different codes
            first, rest = (
                linear.pack_quantised(quantise(*part), dtype) for part in ((weight[:16], 8), (weight[16:], 4))
            )
            packed = replace(first, parts=first.parts + rest.parts)
        else:
            packed = linear.pack(weight.to(dtype))
        return Product(packed, bias.to(dtype) if biases else None)

    def norm(size: int, offset: float) -> HeadNorm:
        return HeadNorm(torch.randn(size, generator=generator).to(dtype), 1e-5 * (1 + offset), offset)

    num_q_heads, num_kv_heads = HEADS
    return LayerWeights(
        (norm(SIZE, 0.0), norm(SIZE, 1.0), *((norm(SIZE, 0.0), norm(SIZE, 1.0)) if after else (None, None))),
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


def of_step(layer: CpuLayer, steps: list[Step], heads: torch.Tensor | None = None) -> PreparedLayer:
    """The layer of a step. Args: `heads`: of all rows, new ones if not given."""
    if heads is None:
        like = steps[0].rotary.heads
        heads = like.new_empty(sum(len(step.rotary.heads) for step in steps), *like.shape[1:])
    return PreparedLayer(layer, heads, prepared(steps), [step.caches for step in steps])


def in_one_call(weights: LayerWeights, hidden: torch.Tensor, steps: list[Step], march: str = "native") -> torch.Tensor:
    return run_layers(hidden, [of_step(CpuLayer(weights, march), steps)], Workspace())


def by_single_operations(weights: LayerWeights, hidden: torch.Tensor, steps: list[Step]) -> torch.Tensor:
    """The layer's output before it is rounded, in float32."""
    linear, ops, provider = CpuLinear(), CpuElementwise(), CpuProvider()
    before_attention, before_mlp, after_attention, after_mlp = weights.norms
    assert before_attention is not None
    assert before_mlp is not None

    dtype, residual = weights.qkv.weight.dtype, hidden.float()

    def normed(norm: HeadNorm) -> torch.Tensor:
        return ops.rms_norm(residual, norm.weight.float(), norm.eps, norm.offset).to(dtype)

    def add(x: torch.Tensor, product: Product, norm: HeadNorm | None) -> torch.Tensor:
        if norm is None:
            return residual + linear(x, product.weight, product.bias, unrounded=True)
        x = linear(x, product.weight, product.bias).float()
        return ops.rms_norm_add(x, residual, norm.weight.float(), norm.eps, norm.offset)

    x = normed(before_attention)
    rows = [len(step.rotary.heads) for step in steps]
    parts = linear(x, weights.qkv.weight, weights.qkv.bias).view(len(hidden), -1, DIM).split(rows)
    for step, heads in zip(steps, parts, strict=True):
        write = ops.prepare_rotary_write(replace(step.rotary, heads=heads))
        write(heads, *step.caches, *(norm.weight for norm in weights.head_norms))
    attended = [
        provider.run_attend(replace(step.attention, query=heads[:, : HEADS[0]]))
        for step, heads in zip(steps, parts, strict=True)
    ]
    residual = add(torch.cat(attended).flatten(1), weights.attention_out, after_attention)
    x = linear(normed(before_mlp), weights.gate_up.weight, weights.gate_up.bias)
    return add(ops.gate(x, weights.activation), weights.down, after_mlp)


def random_hidden(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(9)).to(dtype)


def random_lengths(rng: random.Random) -> Lengths:
    """At most 70 rows: decodes, a prompt, or both; sometimes a sequence of two parts."""
    lengths: Lengths = [(1, rng.randint(1, 90)) for _ in range(rng.choice([0, 1, 1, 2, 5, 16]))]
    if not lengths or rng.random() < 0.5:
        queries = rng.randint(1, 70 - len(lengths))
        lengths.append((queries, queries + rng.randint(0, 40)))
    if rng.random() < 0.1:
        lengths[0] = (1, 1100 + rng.randint(0, 1100))
    return lengths


class Layer:
    """A random layer, and a step of one or two parts: of several views, whose caches have different shapes."""

    def __init__(self, seed: int, dtype: torch.dtype, parts: list[Lengths] | None = None) -> None:
        rng = random.Random(seed)
        flags = {name: bool(seed >> bit & 1) for bit, name in enumerate(("codes", "norms", "biases", "after"))}
        activation = ACTIVATIONS[seed % len(ACTIVATIONS)]
        self.weights = make_weights(dtype, **flags, activation=activation)
        self.description = f"seed {seed}, {flags}, {activation}"
        self._layer = CpuLayer(self.weights)
        parts = parts or [random_lengths(rng) for _ in range(rng.choice([1, 1, 2]))]
        self.steps = [make_step(lengths, self.weights, dtype, seed=seed + i) for i, lengths in enumerate(parts)]
        self.hidden = random_hidden(sum(len(step.rotary.heads) for step in self.steps), dtype)

    def results(self) -> list[torch.Tensor]:
        """The layer's output, its queries, keys and values, and the caches after the writes."""
        steps = [step.copied() for step in self.steps]
        heads = self.hidden.new_zeros(len(self.hidden), *steps[0].rotary.heads.shape[1:])
        out = run_layers(self.hidden, [of_step(self._layer, steps, heads)], Workspace())
        return [out, heads, *(cache for step in steps for cache in step.caches)]

    def expected(self) -> list[torch.Tensor]:
        """The output and the caches, by single operations."""
        steps = [step.copied() for step in self.steps]
        out = by_single_operations(self.weights, self.hidden, steps).to(self.hidden.dtype)
        return [out, *(cache for step in steps for cache in step.caches)]
