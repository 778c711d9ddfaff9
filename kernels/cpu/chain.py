"""Prefix hashing in C++ (`csrc/chain.cpp`). Needs no torch, for routers."""

from __future__ import annotations

import ctypes

from folio.kernels.cpu.build import load_library

DIGEST_BYTES = 16

_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


class CpuChain:
    """Chain of BLAKE2b digests: each of the digest before and a unit's tokens, as 4-byte little-endian integers.

    Holds the interpreter's lock, which reading Python's list needs; reading takes half of the time.

    Raises:
        KernelError: the library cannot be compiled.
    """

    def __init__(self) -> None:
        self._hash = ctypes.PyDLL(load_library("chain")._name).folio_hash_chain
        self._hash.argtypes = [ctypes.py_object, *[_INT64] * 2, *[_POINTER] * 2, _INT64]
        self._hash.restype = _INT64

    def __call__(self, token_ids: list[int], unit_tokens: int, root: bytes, name_bytes: int) -> bytes:
        """The first `name_bytes` bytes of each whole unit's digest, joined.

        Args:
            root: the digest before the first unit, `DIGEST_BYTES`.

        Raises:
            OverflowError: a token does not fit 32 bits.
            TypeError: a token is not an integer.
        """
        if len(root) != DIGEST_BYTES or not 0 < name_bytes <= DIGEST_BYTES or unit_tokens < 1:
            raise ValueError(
                f"root of {len(root)} bytes, names of {name_bytes}, units of {unit_tokens} tokens: digests have "
                f"{DIGEST_BYTES} bytes, names 1 to {DIGEST_BYTES} of these, and units at least one token"
            )
        num_units = len(token_ids) // unit_tokens
        digest = ctypes.create_string_buffer(root, DIGEST_BYTES)
        names = ctypes.create_string_buffer(num_units * name_bytes)
        wrong = self._hash(token_ids, num_units, unit_tokens, digest, names, name_bytes)
        if wrong >= 0:
            raise OverflowError(f"token {wrong} is {token_ids[wrong]}, not an integer of 32 bits")
        return names.raw
