"""Quantised weights on a GPU beside bfloat16 (a job of `benchmarks.gpu_day`).

--measure products: of Llama-3-8B's weights in codes of 2 to 8 bits, over enough copies that no cache holds them, with
1 to 256 rows, beside torch's with the same values in bfloat16; and other tiles than the chosen ones. Bytes a second are
those of codes and scales, for bfloat16, too; one fact is what the device reads at most.

--measure eight_bits: of the same weights in int8 and float8, with a scale for each 128 inputs, 1 to 256 rows: as the
number of rows chooses, with codes widened, and with rows rounded to 8 bits, by every tile; beside bfloat16, 4 bits, and
`torch._scaled_mm` with rows that were rounded before.

--measure experts: of gates and ups of Qwen3-30B-A3B, in MXFP4's form and in float8, 1 to 256 tokens with 8 experts
each: with the tile that the number of rows chooses, and others, beside torch's grouped product in bfloat16.

--measure steps: greedy decode steps of Llama-3-8B's shape with random weights, 1 to 256 sequences of 1,024 tokens, in
bfloat16, in codes of 4 bits with a scale for each 32 inputs, and of 8 with one for each 128, by decode graphs.

--fake runs tiny sizes in Triton's interpreter, and measures nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if "--fake" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before the engine imports Triton

import torch
from torch.nn import functional

from benchmarks.engine import sweep
from benchmarks.engine.device_time import compare, read_limit
from benchmarks.facts import record
from benchmarks.gpu.gpu_products import CACHE_BYTES, FAKE_ROWS, ROWS, SHAPES, TINY
from benchmarks.gpu.parts import Parts, arguments
from folio.app.engine.layers.linear import Product, pack_linears, packed_by
from folio.app.engine.model import checkpoint_module
from folio.kernels import QuantisedWeight, quantise
from folio.kernels.experts import stacked
from folio.kernels.quantised import Bits
from tests.kernels.quantised_weights import random_weight

if TYPE_CHECKING:
    from folio.kernels.cpu.ops import PackedWeight
    from folio.kernels.triton.code_tiles import CodeTile
    from folio.kernels.triton.codes import TritonCodes

# The first of all weights, the others of one: as Q4_0, Q4_K, Q6_K, Q8_0, Q2_K and MXFP4 have them.
FORMS: tuple[tuple[Bits, str], ...] = (
    (4, "scales"),
    (4, "nested offsets"),
    (6, "nested"),
    (8, "scales"),
    (2, "nested offsets"),
    (4, "table"),
)
# By bits: the group, and how far uniform codes are apart.
STEPS: dict[str, tuple[Bits, int, float]] = {"codes of 4 bits": (4, 32, 4.6), "codes of 8 bits": (8, 128, 74.0)}
EIGHT_BIT_ROWS = (1, 16, 32, 256)
# Experts, those of a token, outputs and inputs; and choices of experts, one after the other.
EXPERTS, FAKE_EXPERTS = (128, 8, 1536, 2048), (4, 2, 96, 64)
EXPERT_TOKENS, NUM_CHOICES = (1, 16, 256), 16
SLAB = 128
# Of rows and weights in float8: 3.7 % of the norm, of the largest of a million values.
EIGHT_BIT_TOLERANCE = 8e-2
TIMED_STEPS = 24


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--measure", choices=("products", "eight_bits", "experts", "steps"), required=True)
    args = parser.parse_args()
    parts = Parts(math.inf)  # one that fails leaves the figures of the others
    torch.manual_seed(0)
    measures = {"products": products, "eight_bits": eight_bits, "experts": experts, "steps": steps}
    measures[args.measure](args, parts)
    parts.finish()


# ---- products ----


def products(args: argparse.Namespace, parts: Parts) -> None:
    device = torch.device("cpu" if args.fake else "cuda")
    limit = read_limit(device, 1 << (20 if args.fake else 30))()
    record("read limit", f"{limit / 1e12:.2f} TB/s", bytes_per_s=limit)
    shape = TINY if args.fake else SHAPES[0]
    for name, (outputs, inputs) in shape.sizes.items():
        for bits, form in FORMS if name == "gate_up" and not args.fake else FORMS[:1]:
            weight = random_weight(bits, form, outputs, inputs)
            for rows in FAKE_ROWS if args.fake else ROWS:
                title = f"{name} {outputs} x {inputs}, {bits} bits, {form}, {rows} rows"
                parts.run(title, partial(measure_product, title, weight, rows, device, args.fake))


def measure_product(title: str, weight: QuantisedWeight, rows: int, device: torch.device, fake: bool) -> None:
    from folio.kernels.triton.codes import TritonCodes

    linear = TritonCodes(device)
    packed = linear.pack_quantised(weight, sweep.DTYPE)
    copies = 2 if fake else math.ceil(CACHE_BYTES / packed.nbytes)
    all_packed = [cloned(packed) for _ in range(copies)]
    values = linear.rows(packed, torch.arange(packed.outputs, device=device))
    dense = [values.clone() for _ in range(copies)]
    x = torch.randn(rows, packed.inputs, device=device).to(sweep.DTYPE)

    def work(product: Callable[..., torch.Tensor], weights: list[Any]) -> torch.Tensor:
        for weight in weights:
            out = product(x, weight)
        return out

    variants = {"bfloat16": partial(work, functional.linear, dense), "codes": partial(work, linear, all_packed)}
    for tile in tiles(rows):
        sizes = f"{tile.outputs} x {tile.rows}, {tile.slabs} slabs, {tile.num_warps} warps, {tile.num_stages} stages"
        variants[sizes] = partial(work, TritonCodes(device, tile), all_packed)
    repeats, least_s = (1, 0.0) if fake else (3, 0.01)
    compare(title, variants, device, num_bytes=packed.nbytes, num_calls=copies, repeats=repeats, least_s=least_s)


def tiles(rows: int) -> list[CodeTile]:
    """Those that are compared, for so many rows."""
    from folio.kernels.triton.code_tiles import ONE_ROW, CodeTile, tiles_of

    if rows > 1:
        return list(tiles_of(rows))
    return [
        ONE_ROW,
        CodeTile(8, 1, 16, 4, 3),
        CodeTile(16, 1, 4, 1, 3),
        CodeTile(4, 1, 8, 1, 4),
        CodeTile(8, 1, 8, 2, 5),
    ]


def cloned(weight: PackedWeight) -> PackedWeight:
    """A copy in other memory."""
    names = ("codes", "scales", "supers", "factors", "table")

    def copies(part: Any) -> dict[str, Any]:
        return {name: None if (tensor := getattr(part, name)) is None else tensor.clone() for name in names}

    return replace(weight, parts=tuple(replace(part, **copies(part)) for part in weight.parts))


# ---- products in 8 bits ----


def eight_bits(args: argparse.Namespace, parts: Parts) -> None:
    from folio.kernels.triton.codes import TritonCodes

    device = torch.device("cpu" if args.fake else "cuda")
    linear, sizes = TritonCodes(device), {"o": TINY.sizes["o"]} if args.fake else SHAPES[0].sizes
    for name, (outputs, inputs) in sizes.items():
        packed = {"4 bits": linear.pack_quantised(random_weight(4, "scales", outputs, inputs), sweep.DTYPE)}
        values = linear.rows(packed["4 bits"], torch.arange(outputs, device=device))
        packed["int8"] = linear.pack_quantised(quantise(values, 8, SLAB), sweep.DTYPE)
        packed["float8"] = linear.pack_quantised(in_float8(values), sweep.DTYPE)
        for rows in FAKE_ROWS if args.fake else EIGHT_BIT_ROWS:
            title = f"8 bits, {name} {outputs} x {inputs}, {rows} rows"
            parts.run(title, partial(measure_eight_bits, title, packed, values, rows, linear))


def measure_eight_bits(
    title: str, packed: dict[str, PackedWeight], values: torch.Tensor, rows: int, linear: TritonCodes
) -> None:
    from folio.kernels.triton.code_tiles import EIGHT_BIT_TILES, choose_tile, tiles_of
    from folio.kernels.triton.codes import TritonCodes
    from folio.kernels.triton.eight_bits import EightBitProduct
    from folio.kernels.triton.product import num_processors

    (outputs, inputs), device, fake = values.shape, values.device, values.device.type == "cpu"
    x = torch.randn(rows, inputs, device=device).to(sweep.DTYPE)
    variants: dict[str, Callable[[], torch.Tensor]] = {}

    def add(name: str, product: Callable[[Any], torch.Tensor], weight: Any, num_bytes: int, copy: Any) -> None:
        copies = [copy(weight) for _ in range(2 if fake else math.ceil(CACHE_BYTES / num_bytes))]
        # As often as weights are read in 4 bits: every variant makes as many calls.
        calls = [copies[i % len(copies)] for i in range(num_calls)]
        variants[name] = lambda: [product(one) for one in calls][-1]

    def rounded(product: EightBitProduct, weight: PackedWeight) -> torch.Tensor:
        [part], out = weight.parts, x.new_empty(rows, outputs)
        product(product.round(x, part.codes.dtype), part, None, out)
        return out

    num_calls = 2 if fake else math.ceil(CACHE_BYTES / packed["4 bits"].nbytes)
    products = {tile: EightBitProduct(tile) for tile in tiles_of(rows, EIGHT_BIT_TILES)}
    add("bfloat16", partial(functional.linear, x), values, values.nbytes, torch.clone)
    widened = TritonCodes(device, choose_tile(rows, outputs, num_processors(device)))
    for name, weight in packed.items():
        add(name, partial(linear, x), weight, weight.nbytes, cloned)
        if name != "4 bits" and rows > 1:
            add(f"{name} widened", partial(widened, x), weight, weight.nbytes, cloned)
            for tile, product in products.items():
                title_of = f"{name} rounded, {tile.outputs} x {tile.rows}, {tile.num_warps} warps"
                add(title_of, partial(rounded, product), weight, weight.nbytes, cloned)
    by_torch, codes = scaled_product(x, values)
    try:
        by_torch(codes)
        add("torch._scaled_mm", by_torch, codes, codes.nbytes, torch.clone)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        record(f"{title}, torch._scaled_mm", f"is not there: {str(error)[:200]}")
    repeats, least_s = (1, 0.0) if fake else (3, 0.01)
    options: dict[str, Any] = {"num_calls": num_calls, "repeats": repeats, "least_s": least_s}
    medians = compare(title, variants, device, tolerance=EIGHT_BIT_TOLERANCE, **options)
    for name in ("int8", "float8"):
        ratios = {to: medians[to] / medians[name] for to in ("bfloat16", "4 bits")}
        shown = ", ".join(f"{ratio:.2f} times {to}" for to, ratio in ratios.items())
        record(f"{title}, {name}", f"{shown} in speed", **{to.replace(" ", "_"): ratio for to, ratio in ratios.items()})


def in_float8(values: torch.Tensor) -> QuantisedWeight:
    """With a scale for each slab of an output."""
    slabs = functional.pad(values.float(), (0, -values.shape[1] % SLAB)).unflatten(1, (-1, SLAB))
    scales = (slabs.abs().amax(2) / 448).half()
    codes = (slabs / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return QuantisedWeight(codes.flatten(1)[:, : values.shape[1]], 8, SLAB, scales)


def scaled_product(x: torch.Tensor, values: torch.Tensor) -> tuple[Callable[[Any], torch.Tensor], torch.Tensor]:
    """torch's product with a scale for each row and output, and the codes that it takes."""
    scales = [tensor.float().abs().amax(1, keepdim=True) / 448 for tensor in (x, values)]
    rows, codes = ((tensor / scale).to(torch.float8_e4m3fn) for tensor, scale in zip((x, values), scales, strict=True))
    options: dict[str, Any] = {
        "scale_a": scales[0],
        "scale_b": scales[1].t(),
        "out_dtype": x.dtype,
        "use_fast_accum": True,
    }
    return lambda weight: torch._scaled_mm(rows, weight.t(), **options), codes


# ---- experts ----


def experts(args: argparse.Namespace, parts: Parts) -> None:
    from folio.kernels.triton.codes import TritonCodes

    device = torch.device("cpu" if args.fake else "cuda")
    count, top_k, outputs, inputs = FAKE_EXPERTS if args.fake else EXPERTS
    table, linear = random_weight(4, "table", outputs, inputs), TritonCodes(device)
    for name, weight in {"MXFP4": table, "float8": in_float8(table.dequantised())}.items():
        one = linear.pack_quantised(weight, sweep.DTYPE)
        for tokens in FAKE_ROWS if args.fake else EXPERT_TOKENS:
            title = f"{count} experts {outputs} x {inputs}, {name}, {tokens} tokens"
            parts.run(title, partial(measure_experts, title, one, count, tokens * top_k, linear))


def measure_experts(title: str, one: PackedWeight, count: int, rows: int, linear: TritonCodes) -> None:
    """Args: `one`: of an expert."""
    from folio.kernels.triton.code_tiles import ONE_ROW, TILES
    from folio.kernels.triton.codes import TritonCodes

    device, packed = one.parts[0].codes.device, stacked([one] * count)
    dense = linear.rows(one, torch.arange(one.outputs, device=device)).repeat(count, 1, 1)
    x, fake = torch.randn(rows, one.inputs, device=device).to(sweep.DTYPE), device.type == "cpu"
    choices = [torch.randint(count, (rows,)).bincount(minlength=count) for _ in range(2 if fake else NUM_CHOICES)]
    ends = [choice.cumsum(0).to(device) for choice in choices]

    def work(multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return [multiply(one) for one in ends][-1]

    by_torch = partial(work, lambda end: torch._grouped_mm(x, dense.transpose(1, 2), offs=end.int()))
    variants = {"bfloat16": by_torch, "codes": partial(work, lambda end: linear.by_expert(x, packed, end))}
    for tile in (ONE_ROW, TILES[16][0], TILES[64][0]):
        product = partial(TritonCodes(device, tile).by_expert, x, packed)
        variants[f"{tile.outputs} x {tile.rows}"] = partial(work, product)
    num_bytes = one.nbytes * sum(int((choice > 0).sum()) for choice in choices) / len(choices)
    repeats, least_s = (1, 0.0) if fake else (3, 0.01)
    compare(title, variants, device, num_bytes=num_bytes, num_calls=len(ends), repeats=repeats, least_s=least_s)


# ---- steps ----


def steps(args: argparse.Namespace, parts: Parts) -> None:
    sizes = replace(sweep.QUICK, batches=FAKE_ROWS) if args.fake else sweep.Sizes()
    times: dict[tuple[str, int], float] = {}
    kinds = list(STEPS)[:1] if args.fake else list(STEPS)
    for kind in ("bfloat16", *kinds):
        parts.run(f"steps in {kind}", partial(measure_steps, args, sizes, kind, times))
    for kind in kinds:
        for batch in sizes.batches:
            dense, codes = (times.get((one, batch), math.nan) for one in ("bfloat16", kind))
            record(
                f"quantised decode step of {batch}, {kind}",
                f"{codes * 1e3:.2f} ms in {kind}, {dense * 1e3:.2f} in bfloat16: {dense / codes:.2f} times",
                step_ms=codes * 1e3,
                bfloat16_ms=dense * 1e3,
            )


def measure_steps(args: argparse.Namespace, sizes: sweep.Sizes, kind: str, times: dict[tuple[str, int], float]) -> None:
    """Put the median seconds of a step of each batch into `times`."""
    device, optimise = torch.device("cpu" if args.fake else "cuda"), checkpoint_module.optimise

    def packed(module: Any, *arguments: Any, **options: Any) -> None:
        if not args.fake:  # where layers would be packed for the CPU
            optimise(module, *arguments, **options)
        if kind in STEPS:
            pack(module, device, *STEPS[kind])

    config, settings = sweep.config_of("tiny" if args.fake else sweep.DEFAULT_SHAPE), dict[str, Any]()
    settings |= {"decode_graphs": "off", "num_threads": 1} if args.fake else {"decode_graphs": "on"}
    with (
        patch.object(checkpoint_module, "optimise", packed),
        sweep.make_llm(config, device.type, sizes, async_scheduling="off", **settings) as llm,
    ):
        measure = sweep.Sweep(llm, config, sizes, *sweep.ceilings(device))
        for batch in sizes.batches:
            with measure.decoding(batch, temperature=0.0):
                times[kind, batch] = median_step(llm, 2 if args.fake else TIMED_STEPS)
    sweep.let_go(device)


def median_step(llm: Any, count: int) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        llm.engine.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def pack(module: torch.nn.Module, device: torch.device, bits: Bits, group: int, codes_std: float) -> None:
    """Replace the weights of linear layers by random codes, about as far apart."""
    from folio.kernels.triton.codes import TritonCodes

    linear = TritonCodes(device)

    def pack_one(weight: torch.Tensor) -> PackedWeight:
        outputs, inputs = weight.shape
        codes = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8, device=device)
        scales = torch.full((outputs, -(-inputs // group)), sweep.WEIGHT_STD / codes_std, device=device).half()
        quantised = QuantisedWeight(codes, bits, group, scales, zero=2 ** (bits - 1))
        return linear.pack_quantised(quantised, weight.dtype)

    pack_linears(module, packed_by(Product(pack_one, linear)))


if __name__ == "__main__":
    main()
