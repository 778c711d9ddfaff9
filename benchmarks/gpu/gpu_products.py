"""The rest of a decode layer on a GPU: what surrounds attention, today's kernels and their variants in turn (a job of
`benchmarks.gpu_day`).

- products of attention's weights with few rows: torch's, and Triton's without split sums (`few_row_products`), whose
  other tiles are measured at 1 and 16 rows
- layers without attention over the cache: norm, products, rotation with the cache write, activation; with a residual
  addition of its own, with lazy sums as today, and with each variant (`few_row_products`, `dependent_launch`)

Shapes are those of Llama-3-8B and Qwen2.5-0.5B in bfloat16, with as many sets of weights as do not fit the level-2
cache; bytes are those of the weights. Times are of all sets together.

--fake runs a tiny shape in Triton's interpreter, and measures nothing.
"""

from __future__ import annotations

import bisect
import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from benchmarks.engine.device_time import compare
from benchmarks.facts import record
from benchmarks.gpu.parts import Parts, arguments
from folio.kernels import Elementwise, RotaryWrite, select_elementwise, select_product

if TYPE_CHECKING:
    from folio.kernels import FewRowProduct
    from folio.kernels.elementwise import WriteLayer

ROWS, FAKE_ROWS = (1, 16, 64, 256), (1, 3)
FEW_ROWS = 64  # most rows for which products are compared
TILE_ROWS = (1, 16)  # with other tiles, too; the last is the most of `few_row_products`
CACHE_BYTES = 180e6  # three times the largest level-2 cache
MOST_LAYERS = 8
BLOCK_TOKENS = 16
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's layer. `has_bias`: of queries, keys and values."""

    name: str
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    dim: int
    intermediate: int
    has_bias: bool

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each weight."""
        return {
            "qkv": ((self.num_q_heads + 2 * self.num_kv_heads) * self.dim, self.hidden),
            "o": (self.hidden, self.num_q_heads * self.dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }


SHAPES = (
    Shape("Llama-3-8B", 4096, 32, 8, 128, 14336, has_bias=False),
    Shape("Qwen2.5-0.5B", 896, 14, 2, 64, 4864, has_bias=True),
)
TINY = Shape("tiny", 64, 2, 1, 32, 96, has_bias=True)


@dataclass(frozen=True, slots=True)
class Weights:
    """One layer's weights, and its cache of keys and values."""

    linear: dict[str, torch.Tensor]
    bias: torch.Tensor | None
    norms: tuple[torch.Tensor, torch.Tensor]
    caches: tuple[torch.Tensor, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.linear.values())


def make_weights(shape: Shape, num_rows: int, device: torch.device) -> Weights:
    linear = {
        name: torch.randn(outputs, inputs, dtype=DTYPE, device=device) * inputs**-0.5
        for name, (outputs, inputs) in shape.sizes.items()
    }
    bias = torch.randn(shape.sizes["qkv"][0], dtype=DTYPE, device=device) if shape.has_bias else None
    norms = torch.rand(2, shape.hidden, device=device).to(DTYPE).unbind()
    num_blocks = -(-num_rows // BLOCK_TOKENS)
    caches = torch.zeros(2, num_blocks, BLOCK_TOKENS, shape.num_kv_heads, shape.dim, dtype=DTYPE, device=device)
    return Weights(linear, bias, (norms[0], norms[1]), (caches[0], caches[1]))


@dataclass(frozen=True, slots=True)
class Variant:
    """Kernels of a layer. `adds`: the last residual is added by a launch of its own."""

    ops: Elementwise
    product: FewRowProduct | None = None
    adds: bool = False

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.product is None:
            return functional.linear(x, weight, bias)
        return self.product(x, weight, bias)


def layers(
    shape: Shape, variant: Variant, sets: list[Weights], states: torch.Tensor, angles: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """A function that computes layers, each from the output of the one before.

    Args:
        states: `[2, num_rows, hidden]`, whose sum is the first layer's input.
        angles: `[2, num_rows, dim]`, cosines and sines.
    """
    num_rows, device = states.shape[1], states.device
    slots = torch.arange(num_rows, device=device)
    num_heads, ops = shape.num_q_heads + 2 * shape.num_kv_heads, variant.ops
    heads = torch.empty(num_rows, num_heads, shape.dim, dtype=DTYPE, device=device)
    write: WriteLayer = ops.prepare_rotary_write(
        RotaryWrite(heads, angles[0], angles[1], shape.dim, *sets[0].caches, slots)
    )

    def work() -> torch.Tensor:
        x, total = states
        for weights in sets:
            if variant.adds:
                total = total + x
                x = ops.rms_norm(total, weights.norms[0], 1e-5)
            else:
                total, x = ops.add_rms_norm(x, total, weights.norms[0], 1e-5)
            heads = variant.linear(x, weights.linear["qkv"], weights.bias).view(num_rows, num_heads, shape.dim)
            write(heads, *weights.caches)
            attended = heads[:, : shape.num_q_heads].reshape(num_rows, -1)  # a small copy in attention's place
            x = variant.linear(attended, weights.linear["o"], None)
            total, x = ops.add_rms_norm(x, total, weights.norms[1], 1e-5)
            x = functional.linear(
                ops.gate(functional.linear(x, weights.linear["gate_up"]), "silu"), weights.linear["down"]
            )
        return total + x

    return work


def measure_layers(shape: Shape, num_rows: int, sets: list[Weights], variants: dict[str, Variant]) -> None:
    device = sets[0].norms[0].device
    states = torch.randn(2, num_rows, shape.hidden, device=device).to(DTYPE)
    angles = torch.rand(2, num_rows, shape.dim, device=device).to(DTYPE)
    compare(
        f"{shape.name}: {len(sets)} layers without attention, {num_rows} rows",
        {name: layers(shape, variant, sets, states, angles) for name, variant in variants.items()},
        device,
        num_bytes=sum(weights.num_bytes for weights in sets),
        tolerance=5e-2,  # sums in another order pass through several layers
        repeats=1 if device.type == "cpu" else 3,
    )


def measure_products(shape: Shape, num_rows: int, sets: list[Weights], products: dict[str, FewRowProduct]) -> None:
    """Products of queries, keys and values, and of attention's output, over enough sets of weights."""
    device = sets[0].norms[0].device
    all_products: dict[str, Callable[..., torch.Tensor]] = {"torch": functional.linear, **products}
    for name in ("qkv", "o"):
        weights = [(layer.linear[name], layer.bias if name == "qkv" else None) for layer in sets]
        x = torch.randn(num_rows, shape.sizes[name][1], device=device).to(DTYPE)

        def work(
            product: Callable[..., torch.Tensor],
            weights: list[tuple[torch.Tensor, torch.Tensor | None]],
            x: torch.Tensor,
        ) -> torch.Tensor:
            for weight, bias in weights:
                out = product(x, weight, bias)
            return out

        compare(
            f"{shape.name}: {name} of {len(sets)} layers, {num_rows} rows",
            {title: functools.partial(work, product, weights, x) for title, product in all_products.items()},
            device,
            num_bytes=sum(weight.nbytes for weight, _ in weights),
            repeats=1 if device.type == "cpu" else 3,
        )


def variants_of(device: torch.device, product: FewRowProduct, fake: bool) -> dict[str, Variant]:
    """Today's kernels of a layer, and others."""
    from folio.kernels.triton.dependent import unsupported
    from folio.kernels.triton.elementwise import TritonElementwise

    plain = TritonElementwise() if fake else select_elementwise(device)
    variants = {
        "today": Variant(plain),
        "an addition more": Variant(plain, adds=True),
        "few-row products": Variant(plain, product),
    }
    if (reason := unsupported(device)) is not None:
        record("dependent launches", f"not measured: {reason}")
        return variants
    dependent = select_elementwise(device, dependent=True)
    return variants | {
        "dependent": Variant(dependent),
        "both": Variant(dependent, select_product(device, dependent=True)),
    }


def main() -> None:
    args = arguments(__doc__).parse_args()
    if args.fake:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from folio.kernels.triton.product import _TILES, TritonProduct

    device = torch.device("cpu" if args.fake else "cuda")
    product = TritonProduct() if args.fake else select_product(device)
    variants = variants_of(device, product, args.fake)
    tiles: dict[str, FewRowProduct] = {f"Triton, {tile.outputs} outputs": TritonProduct(tile=tile) for tile in _TILES}
    parts = Parts(math.inf)  # a variant that fails costs its shape and number of rows only
    torch.manual_seed(0)
    for shape in (TINY,) if args.fake else SHAPES:
        outputs, inputs = shape.sizes["o"]  # the smallest weight
        num_sets = 2 if args.fake else math.ceil(CACHE_BYTES / (outputs * inputs * DTYPE.itemsize))
        all_rows = FAKE_ROWS if args.fake else ROWS
        sets = [make_weights(shape, all_rows[-1], device) for _ in range(num_sets)]
        for num_rows in all_rows:
            few = num_rows <= TILE_ROWS[-1]  # else the products are torch's
            chosen = {name: variant for name, variant in variants.items() if few or variant.product is None}
            name = f"{shape.name}, layers, {num_rows} rows"
            parts.run(name, functools.partial(measure_layers, shape, num_rows, sets[:MOST_LAYERS], chosen))
        for num_rows in all_rows[: bisect.bisect(all_rows, FEW_ROWS)]:
            products = {"Triton": product} | (tiles if num_rows in TILE_ROWS else {})
            name = f"{shape.name}, products, {num_rows} rows"
            parts.run(name, functools.partial(measure_products, shape, num_rows, sets, products))
    parts.finish()


if __name__ == "__main__":
    main()
