"""Choice of a token for each row of logits in C++ (`csrc/sampling.cpp`)."""

from __future__ import annotations

import ctypes

import torch

from folio.kernels.cpu.build import load_function
from folio.kernels.cpu.ops import CPP_DTYPES

SETTING_NAMES = ("key", "top_p", "temperature", "min_p", "top_k", "repetition", "frequency", "presence")

_COLUMNS = (*SETTING_NAMES, "entries", "num_entries")
_INT64, _FLOAT = torch.int64, torch.float32
_DTYPES = [_INT64, torch.float64, _FLOAT, _FLOAT, torch.int32, _FLOAT, _FLOAT, _FLOAT, _INT64, _INT64]


class _ChooseCall(ctypes.Structure):
    """`ChooseCall` of sampling.cpp."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("logits", "where", *_COLUMNS, "tokens", "possible")],
        *[(name, ctypes.c_int64) for name in ("dtype", "rows", "vocab_size", "stride")],
    ]


class CpuChoice:
    """As `folio.kernels.triton.sampling.choose`, after penalties.

    Raises:
        KernelError: the library cannot be compiled.
    """

    def __init__(self) -> None:
        self._choose = load_function("sampling", "folio_choose", ctypes.POINTER(_ChooseCall))

    def __call__(
        self, logits: torch.Tensor, where: torch.Tensor, *columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each of the rows `where [n]` (int64) of `logits [*, vocab_size]` (float32, bfloat16 or
        float16), and whether any token has a logit above -inf.

        Args:
            columns: `SETTING_NAMES` of the rows; addresses of `entries [num_entries]` in int64, each `token id << 32 |
                count` of a token to penalise; and `num_entries`.
        """
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        rows = len(where)
        assert where.dtype == torch.int64
        assert where.is_contiguous()
        assert [column.dtype for column in columns] == _DTYPES
        assert all(column.shape == (rows,) and column.is_contiguous() for column in columns)
        tokens, possible = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
        pointers = (tensor.data_ptr() for tensor in (logits, where, *columns, tokens, possible))
        dtype, vocab_size, stride = CPP_DTYPES[logits.dtype], logits.shape[1], logits.stride(0)
        self._choose(ctypes.byref(_ChooseCall(*pointers, dtype, rows, vocab_size, stride)))
        return tokens, possible
