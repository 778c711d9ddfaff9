"""Choice of a token for each row of logits in C++ (`csrc/sampling.cpp`)."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.build import load_function

SETTING_NAMES = ("key", "top_p", "temperature", "min_p", "top_k")

_BLOCK_TOKENS = 64
_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


class _ChooseCall(ctypes.Structure):
    """`ChooseCall` of sampling.cpp."""

    _fields_ = [
        *[(name, _POINTER) for name in ("logits", *SETTING_NAMES, "tokens", "possible")],
        *[(name, _INT64) for name in ("rows", "width")],
    ]


class CpuChoice:
    """As `kernels.triton.sampling.choose`, for float32 logits in rows of whole blocks of 64.

    Args:
        march: the compiler's name of the processor.

    Raises:
        KernelError: the library cannot be compiled.
    """

    def __init__(self, march: str = "native") -> None:
        self._choose = load_function("sampling", "folio_choose", ctypes.POINTER(_ChooseCall), march=march)

    def __call__(self, logits: torch.Tensor, *settings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each row of `logits [rows, width]`, contiguous and -inf beyond the vocabulary, and whether any
        token has a logit above -inf.

        Args:
            settings: key, top_p, temperature, min_p and top_k of the rows.
        """
        rows, width = logits.shape
        dtypes = [torch.int64, torch.float64, torch.float32, torch.float32, torch.int32]
        assert logits.dtype == torch.float32
        assert logits.is_contiguous()
        assert width % _BLOCK_TOKENS == 0
        assert [column.dtype for column in settings] == dtypes
        assert all(column.shape == (rows,) and column.is_contiguous() for column in settings)
        tokens, possible = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
        pointers = (tensor.data_ptr() for tensor in (logits, *settings, tokens, possible))
        self._choose(ctypes.byref(_ChooseCall(*pointers, rows, width)))
        return tokens, possible
