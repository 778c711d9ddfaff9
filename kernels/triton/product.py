"""Products with a weight, without split sums: of few rows, or of any number of rows in one order of sums.

A decode step reads every weight once for a few rows, so it is bound by memory. cuBLAS divides the sums of a small
weight between programs and adds them in a second kernel. Here a program has so few outputs that one wave fills the
device, and reads their whole rows of the weight, several tiles ahead.
"""

# ruff: noqa: N803 (compile-time constants are capitals in Triton's kernels)

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from folio.kernels.errors import KernelError
from folio.kernels.product import FewRowProduct
from folio.kernels.triton.dependent import launch_options, start_next, wait_for_previous
from folio.kernels.triton.launch import Kernel, Launch

_MAX_ROWS = 64
_DTYPES = (torch.bfloat16, torch.float16)
_MIN_ROWS = 8  # of a tensor core's product
_LINE = 64  # elements of a cache line
_PREFETCHED_LINES = 16  # of each output's row, while the kernel before drains
_INTERPRETED_PROCESSORS = 4  # without a GPU


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Work of a program.

    Attributes:
        outputs: of a program, 16 for each warp.
        inputs: of a tile.
        num_stages: tiles in flight, and one in use.
    """

    outputs: int
    inputs: int
    num_stages: int

    @property
    def num_warps(self) -> int:
        """As many as tensor cores' products along the outputs: more would repeat each other's work."""
        return self.outputs // 16


# The most outputs first: the rows of `x` are read again for each program.
_TILES = (ProductTile(64, 128, 4), ProductTile(32, 128, 7), ProductTile(16, 128, 8))
_FULL_WAVE = 0.9  # of the processors


@triton.jit
def _prefetch(
    weight_ptr: tl.tensor,
    outputs: tl.tensor,  # [BLOCK_OUTPUTS]
    inputs: tl.tensor,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
) -> None:
    """Move the first lines of the outputs' rows to the level-2 cache."""
    columns = tl.minimum(tl.arange(0, LINES) * LINE, inputs - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [weight_ptr + outputs[:, None] * inputs + columns[None, :]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_ptr: tl.tensor,  # [num_rows, num_inputs]
    weight_ptr: tl.tensor,  # [num_outputs, num_inputs]
    bias_ptr: tl.tensor,  # [num_outputs] or None
    out_ptr: tl.tensor,  # [num_rows, num_outputs]
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EVEN: tl.constexpr,  # whole tiles of inputs
    LINES: tl.constexpr,
    LINE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
) -> None:
    """One program per `BLOCK_OUTPUTS` outputs of `BLOCK_ROWS` rows."""
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    # Programs beyond the last output read it again: masks would narrow the reads.
    weight_rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    if DEPENDENT:
        _prefetch(weight_ptr, weight_rows, num_inputs, LINES, LINE)
    wait_for_previous(DEPENDENT)
    start_next(DEPENDENT)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    depths = tl.arange(0, BLOCK_INPUTS)
    weights = weight_ptr + weight_rows[:, None] * num_inputs + depths[None, :]
    xs = x_ptr + rows.to(tl.int64)[None, :] * num_inputs + depths[:, None]
    there = (rows < num_rows)[None, :]
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    for start in tl.range(0, num_inputs, BLOCK_INPUTS, num_stages=NUM_STAGES):
        if EVEN:
            weight = tl.load(weights + start)
            x = tl.load(xs + start, mask=there, other=0.0)
        else:
            inside = start + depths < num_inputs
            weight = tl.load(weights + start, mask=inside[None, :], other=0.0)
            x = tl.load(xs + start, mask=there & inside[:, None], other=0.0)
        if UPCAST_DOT:
            sums += tl.dot(weight.to(tl.float32), x.to(tl.float32), input_precision="ieee")
        else:
            sums = tl.dot(weight, x, sums)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + weight_rows).to(tl.float32)[:, None]
    out = out_ptr + rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=there & (outputs < num_outputs)[:, None])


class TritonProduct(FewRowProduct):
    """The product in Triton. A kernel is compiled for each size on first use, which takes seconds.

    Args:
        dependent: programmatic dependent launch.
        tile: instead of the one that fills the device.
        batch_invariant: any number of rows, whose sums have one order.
    """

    def __init__(
        self, *, dependent: bool = False, tile: ProductTile | None = None, batch_invariant: bool = False
    ) -> None:
        self._dependent, self._tile, self._batch_invariant = dependent, tile, batch_invariant
        self.max_rows = sys.maxsize if batch_invariant else _MAX_ROWS
        self._kernel = Kernel(_product_kernel)
        self._launches: dict[tuple[object, ...], tuple[Launch, int]] = {}

    def unsupported(self, weight: torch.Tensor) -> str | None:
        if weight.dtype not in _DTYPES:
            return f"weights are {weight.dtype}, neither bfloat16 nor float16"
        if weight.shape[1] % _LINE or not weight.is_contiguous():
            return f"a weight {list(weight.shape)} with strides {weight.stride()} has no rows of whole cache lines"
        return None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        num_outputs, num_inputs = weight.shape
        num_rows = x.numel() // num_inputs
        out = x.new_empty(*x.shape[:-1], num_outputs)
        if not num_rows:
            return out
        block_rows = _MAX_ROWS if self._batch_invariant else max(_MIN_ROWS, triton.next_power_of_2(num_rows))
        key = block_rows, num_outputs, num_inputs, bias is None, x.dtype, x.device
        known = self._launches.get(key)
        if known is None:
            known = self._launches[key] = self._prepare(x, weight, bias, out, block_rows)
        launch, num_programs = known
        tensors = (x.contiguous(), weight, out) if bias is None else (x.contiguous(), weight, out, bias)
        launch((num_programs, triton.cdiv(num_rows, block_rows), 1), *tensors, num_rows=num_rows)
        return out

    def _prepare(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, block_rows: int
    ) -> tuple[Launch, int]:
        """The launch for these shapes, and its number of programs along the outputs."""
        num_outputs, num_inputs = weight.shape
        num_rows = x.numel() // num_inputs
        if reason := self.unsupported(weight):
            raise KernelError(f"there is no Triton product: {reason}")
        if num_rows > self.max_rows or x.dtype != weight.dtype or x.shape[-1] != num_inputs:
            raise KernelError(
                f"x {list(x.shape)} {x.dtype} with a weight {list(weight.shape)} {weight.dtype}: a Triton product is "
                f"of at most {self.max_rows} rows of the weight's dtype and inputs"
            )
        tile = self._tile or choose_tile(num_outputs, num_processors(x.device))
        arguments = {
            "x_ptr": x.contiguous(),
            "weight_ptr": weight,
            "bias_ptr": bias,
            "out_ptr": out,
            "num_rows": num_rows,
            "num_outputs": num_outputs,
            "num_inputs": num_inputs,
            "BLOCK_ROWS": block_rows,
            "BLOCK_OUTPUTS": tile.outputs,
            "BLOCK_INPUTS": tile.inputs,
            "NUM_STAGES": tile.num_stages,
            "EVEN": num_inputs % tile.inputs == 0,
            "LINES": _PREFETCHED_LINES,
            "LINE": _LINE,
            "DEPENDENT": self._dependent,
            "UPCAST_DOT": not isinstance(_product_kernel, JITFunction),
        }
        names = ["x_ptr", "weight_ptr", "out_ptr", *([] if bias is None else ["bias_ptr"])]
        options = launch_options(self._dependent)
        launch = self._kernel.prepare(arguments, names, num_warps=tile.num_warps, **options)
        return launch, triton.cdiv(num_outputs, tile.outputs)


def choose_tile(num_outputs: int, num_processors: int) -> ProductTile:
    """The tile with the most outputs of which one wave fills the processors."""
    filling = (tile for tile in _TILES if triton.cdiv(num_outputs, tile.outputs) >= _FULL_WAVE * num_processors)
    return next(filling, _TILES[-1])


def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
