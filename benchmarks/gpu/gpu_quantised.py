"""Quantised weights on a GPU beside bfloat16 (a job of `benchmarks.gpu_day`).

--measure products: of Llama-3-8B's weights in codes of 2 to 8 bits, over enough copies that no cache holds them, with
1 to 256 rows, beside torch's with the same values in bfloat16; and other tiles than the chosen ones. Bytes a second are
those of codes and scales, for bfloat16, too; one fact is what the device reads at most.

--measure steps: greedy decode steps of Llama-3-8B's shape with random weights, 1 to 256 sequences of 1,024 tokens, in
bfloat16 and in codes of 4 bits with a scale for each 32 inputs, by decode graphs.

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
from folio.kernels import QuantisedWeight
from folio.kernels.quantised import Bits
from tests.kernels.quantised_weights import random_weight

if TYPE_CHECKING:
    from folio.kernels.cpu.ops import PackedWeight
    from folio.kernels.triton.codes import CodeTile

# The first of all weights, the others of one: as Q4_0, Q4_K, Q6_K, Q8_0, Q2_K and MXFP4 have them.
FORMS: tuple[tuple[Bits, str], ...] = (
    (4, "scales"),
    (4, "nested offsets"),
    (6, "nested"),
    (8, "scales"),
    (2, "nested offsets"),
    (4, "table"),
)
CODES_STD = 4.6  # of uniform codes of 4 bits
TIMED_STEPS = 24


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--measure", choices=("products", "steps"), required=True)
    args = parser.parse_args()
    parts = Parts(math.inf)  # one that fails leaves the figures of the others
    torch.manual_seed(0)
    {"products": products, "steps": steps}[args.measure](args, parts)
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
    from folio.kernels.triton.codes import ONE_ROW, TILES, CodeTile

    if rows > 1:
        return list(TILES[next((most for most in TILES if most >= rows), max(TILES))])
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


# ---- steps ----


def steps(args: argparse.Namespace, parts: Parts) -> None:
    sizes = replace(sweep.QUICK, batches=FAKE_ROWS) if args.fake else sweep.Sizes()
    times: dict[tuple[str, int], float] = {}
    for kind in ("bfloat16", "codes"):
        parts.run(f"steps in {kind}", partial(measure_steps, args, sizes, kind, times))
    for batch in sizes.batches:
        dense, codes = (times.get((kind, batch), math.nan) for kind in ("bfloat16", "codes"))
        record(
            f"quantised decode step of {batch}",
            f"{codes * 1e3:.2f} ms in codes of 4 bits, {dense * 1e3:.2f} in bfloat16: {dense / codes:.2f} times",
            step_ms=codes * 1e3,
            bfloat16_ms=dense * 1e3,
        )


def measure_steps(args: argparse.Namespace, sizes: sweep.Sizes, kind: str, times: dict[tuple[str, int], float]) -> None:
    """Put the median seconds of a step of each batch into `times`."""
    device, optimise = torch.device("cpu" if args.fake else "cuda"), checkpoint_module.optimise

    def packed(module: Any, *arguments: Any, **options: Any) -> None:
        if not args.fake:  # where layers would be packed for the CPU
            optimise(module, *arguments, **options)
        if kind == "codes":
            pack(module, device)

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


def pack(module: torch.nn.Module, device: torch.device) -> None:
    """Replace the weights of linear layers by random codes, about as far apart."""
    from folio.kernels.triton.codes import TritonCodes

    linear = TritonCodes(device)

    def pack_one(weight: torch.Tensor) -> PackedWeight:
        outputs, inputs = weight.shape
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=device)
        scales = torch.full((outputs, -(-inputs // 32)), sweep.WEIGHT_STD / CODES_STD, device=device).half()
        return linear.pack_quantised(QuantisedWeight(codes, 4, 32, scales, zero=8), weight.dtype)

    pack_linears(module, packed_by(Product(pack_one, linear)))


if __name__ == "__main__":
    main()
