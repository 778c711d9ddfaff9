"""Prefix hashing against hashlib."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from folio.kernels.cpu.chain import DIGEST_BYTES, CpuChain

ROOT = bytes(range(DIGEST_BYTES))


@pytest.fixture(scope="module")
def chain() -> CpuChain:
    return CpuChain()


# A unit and the digest before it take less than a BLAKE2b block of 128 bytes, just one (28), little more, or several.
@pytest.mark.parametrize("unit_tokens", [1, 16, 27, 28, 29, 32, 60, 61, 256])
@pytest.mark.parametrize("name_bytes", [6, DIGEST_BYTES])
def test_equals_hashlib(chain: CpuChain, unit_tokens: int, name_bytes: int) -> None:
    rng = np.random.default_rng(unit_tokens)
    token_ids = [-(2**31), 2**31 - 1, -1, *rng.integers(0, 200_000, 5 * unit_tokens).tolist()]
    expected, digest, content = [], ROOT, np.array(token_ids, dtype="<i4").tobytes()
    for at in range(0, len(token_ids) // unit_tokens * unit_tokens, unit_tokens):
        unit = content[4 * at : 4 * (at + unit_tokens)]
        digest = hashlib.blake2b(digest + unit, digest_size=DIGEST_BYTES).digest()
        expected.append(digest[:name_bytes])
    assert chain(token_ids, unit_tokens, ROOT, name_bytes) == b"".join(expected)
    assert len(expected) >= 5


def test_less_than_a_unit_has_no_digest(chain: CpuChain) -> None:
    assert chain([1] * 15, 16, ROOT, 6) == chain([], 16, ROOT, 6) == b""


@pytest.mark.parametrize(
    ("token", "error"),
    [(2**31, OverflowError), (-(2**31) - 1, OverflowError), (2**80, OverflowError)]
    + [(token, TypeError) for token in ("1", None, 1.0)],
)
def test_tokens_that_are_not_32_bit_integers(chain: CpuChain, token: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        chain([0, token], 2, ROOT, 6)


def test_wrong_sizes_are_refused(chain: CpuChain) -> None:
    for root, unit_tokens, name_bytes in ((b"short", 16, 6), (ROOT, 0, 6), (ROOT, 16, 0), (ROOT, 16, 17)):
        with pytest.raises(ValueError, match="digests have 16 bytes"):
            chain([1] * 64, unit_tokens, root, name_bytes)
