"""Token chain: the hashes by which prefixes of one sequence are found."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

Digest = bytes
Hash = Callable[[Digest, bytes], Digest]

_DIGEST_BYTES = 16


def stable_hash(parent: Digest, content: bytes) -> Digest:
    """A hash that is equal on all machines and in all runs, unlike Python's: replicas and routers compare digests."""
    return hashlib.blake2b(parent + content, digest_size=_DIGEST_BYTES).digest()


class TokenChain:
    """Token ids in units, with the hash of the prefix that ends with each. Used by one thread at a time.

    Args:
        unit_tokens: tokens of a unit.
        keys: what must be equal beside the tokens: a cache salt, an adapter's id.

    Attributes:
        root: the hash of the keys, parent of the first unit's.
    """

    def __init__(self, unit_tokens: int, keys: tuple[str, ...] = (), hash: Hash = stable_hash) -> None:
        self.unit_tokens = unit_tokens
        self.keys = keys
        self.units: list[bytes] = []
        self.digests: list[Digest] = []
        self._hash = hash
        self.root = hash(b"", b"".join(f"{len(key.encode())}:{key}".encode() for key in keys))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the whole units of `token_ids` that are new; earlier ones must be unchanged."""
        done = len(self.units) * self.unit_tokens
        end = len(token_ids) // self.unit_tokens * self.unit_tokens
        if end <= done:
            return
        content = encode_tokens(token_ids[done:end])
        size = 4 * self.unit_tokens
        for start in range(0, len(content), size):
            unit = content[start : start + size]
            self.digests.append(self._hash(self.digests[-1] if self.digests else self.root, unit))
            self.units.append(unit)

    def truncate_chain(self, num_tokens: int) -> None:
        """Drop the units beyond the first `num_tokens` tokens; other tokens may follow."""
        del self.units[num_tokens // self.unit_tokens :]
        del self.digests[num_tokens // self.unit_tokens :]

    def fork(self, num_tokens: int) -> TokenChain:
        """A chain that begins with the whole units of the first `num_tokens` tokens."""
        chain = TokenChain(self.unit_tokens, self.keys, self._hash)
        chain.units = self.units[: num_tokens // self.unit_tokens]
        chain.digests = self.digests[: num_tokens // self.unit_tokens]
        return chain


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Four bytes a token, lowest first."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def decode_tokens(content: bytes) -> tuple[int, ...]:
    """Inverse of `encode_tokens`."""
    return tuple(np.frombuffer(content, dtype="<i4").tolist())
