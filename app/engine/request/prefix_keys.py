"""Prefix keys: the names of prompt prefixes that routers and replicas share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

from folio.kernels import KernelError
from folio.kernels.cpu.chain import CpuChain
from folio.vmem import KEY_BYTES, TokenChain, key_of, split_keys

logger = logging.getLogger(__name__)

_ADAPTER = "adapter:"


def extra_keys(cache_salt: str | None, adapter: str | None = None, tenant: str | None = None) -> tuple[str, ...]:
    """Keys that prompts must have in common, beside the tokens, to share cached prefixes.

    A `TokenChain` hashes keys with their lengths, so that no choice of salt collides with another tenant's.

    Args:
        tenant: `None` unless tenants are isolated.
    """
    keys = [] if tenant is None else [f"tenant:{tenant}"]
    if cache_salt is not None:
        keys.append(f"salt:{cache_salt}")
    return tuple(keys) if adapter is None else (*keys, _ADAPTER + adapter)


def adapter_of(keys: Sequence[str]) -> str | None:
    """The adapter among `extra_keys`."""
    last = keys[-1] if keys else ""
    return last.removeprefix(_ADAPTER) if last.startswith(_ADAPTER) else None


def prompt_keys(
    prompt_token_ids: Sequence[int],
    unit_tokens: int,
    cache_salt: str | None,
    adapter: str | None = None,
    tenant: str | None = None,
) -> list[bytes]:
    """Keys of the prefixes that end with each whole unit, as replicas report them."""
    chain = TokenChain(unit_tokens, extra_keys(cache_salt, adapter, tenant))
    if (hashed := compiled_hashing()) is not None:
        token_ids = prompt_token_ids if isinstance(prompt_token_ids, list) else list(prompt_token_ids)
        return split_keys(hashed(token_ids, unit_tokens, chain.root, KEY_BYTES))
    chain.extend(prompt_token_ids)
    return [key_of(digest) for digest in chain.digests]


@cache
def compiled_hashing() -> CpuChain | None:
    """The compiled hash function, or `None` where it cannot be compiled; then prompts are hashed unit by unit.

    The first call on a machine compiles for a second: call it before there are requests.
    """
    try:
        return CpuChain()
    except KernelError as error:
        logger.warning("prompts are hashed unit by unit, several times slower: %s", error)
        return None
