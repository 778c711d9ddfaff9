"""Names of all prefixes of a row of tokens in one call, on the CPU (`csrc/chain.cpp`)."""

from __future__ import annotations

import ctypes

from kernels.cpu.build import load_library

DIGEST_BYTES = 16


class CpuChain:
    """Each prefix's digest is BLAKE2b of the last one's and of the tokens of a unit, four bytes each, lowest first.

    Holds the interpreter's lock: reading a list of numbers without it is not allowed, and takes as long as the rest.

    Raises:
        KernelError: there is no compiler, or it failed.
    """

    def __init__(self) -> None:
        self._hash = ctypes.PyDLL(load_library("chain")._name).folio_hash_chain
        self._hash.argtypes = [ctypes.py_object, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 2, ctypes.c_int64]
        self._hash.restype = ctypes.c_int64

    def __call__(self, token_ids: list[int], unit_tokens: int, root: bytes, name_bytes: int) -> bytes:
        """The first `name_bytes` bytes of each whole unit's digest.

        Args:
            root: the digest before the first unit, `DIGEST_BYTES`.

        Raises:
            OverflowError: a token is no number of 32 bits.
            TypeError: it is none at all.
        """
        if len(root) != DIGEST_BYTES or not 0 < name_bytes <= DIGEST_BYTES or unit_tokens < 1:
            raise ValueError(f"digests have {DIGEST_BYTES} bytes, not {len(root)}; names {name_bytes} of these")
        num_units = len(token_ids) // unit_tokens
        digest = ctypes.create_string_buffer(root, DIGEST_BYTES)
        names = ctypes.create_string_buffer(num_units * name_bytes)
        wrong = self._hash(token_ids, num_units, unit_tokens, digest, names, name_bytes)
        if wrong >= 0:
            raise OverflowError(f"token {wrong} is {token_ids[wrong]}, not a number of 32 bits")
        return names.raw
