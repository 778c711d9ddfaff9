"""Attention problems for Triton's kernels: on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch

from folio.kernels.triton.provider import TritonProvider
from tests.kernels import cases

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# Largest difference allowed, divided by 1 + |expected|. The interpreter cuts bfloat16 off instead of rounding.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LSE_TOLERANCE = 1e-4
ALL_MASKS = {"window_left": 21, "window_right": 4, "softcap": 3.0, "alibi": "seqs", "sinks": True, "leftpad": True}


def make_case(*arguments: Any, region: bool = False, block_tokens: int = 16, **options: Any) -> cases.Case:
    """With a spare column in the table; 600 tokens are what the kernels take for a region."""
    options = {"block_tokens": 600 if region else block_tokens, "spare_columns": 1, "device": DEVICE} | options
    return cases.make_case(*arguments, view="region" if region else "block_table", **options)


def check(provider: TritonProvider, case: cases.Case, num_splits: int = 0) -> torch.Tensor:
    tolerance = TOLERANCE[case.query.dtype]
    return cases.check(
        provider, case, tolerance=tolerance, lse_tolerance=LSE_TOLERANCE, relative=True, num_splits=num_splits
    )
