"""The names that routers and replicas have for the prefixes of a prompt."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

from kernels import KernelError
from kernels.cpu.prefix_hash import CpuChain
from vmem import KEY_BYTES, TokenChain, key_of, split_keys

logger = logging.getLogger(__name__)

_ADAPTER = "adapter:"


def extra_keys(cache_salt: str | None, adapter: str | None = None, tenant: str | None = None) -> tuple[str, ...]:
    """What must be equal beside the tokens, for two prompts to share what is cached of them.

    Each is a key of its own, and a `TokenChain` hashes keys with their lengths: so no salt can be mistaken for another
    tenant's, whatever either is called.

    Args:
        tenant: who shares cached prefixes with nobody else; `None`: those who need not be kept apart.
    """
    keys = [] if tenant is None else [f"tenant:{tenant}"]
    if cache_salt is not None:
        keys.append(f"salt:{cache_salt}")
    return tuple(keys) if adapter is None else (*keys, _ADAPTER + adapter)


def adapter_of(keys: Sequence[str]) -> str | None:
    """The adapter that `extra_keys` was given."""
    last = keys[-1] if keys else ""
    return last.removeprefix(_ADAPTER) if last.startswith(_ADAPTER) else None


def prompt_keys(
    prompt_token_ids: Sequence[int],
    unit_tokens: int,
    cache_salt: str | None,
    adapter: str | None = None,
    tenant: str | None = None,
) -> list[bytes]:
    """Of each whole unit the key of the prefix that ends with it, as replicas report them."""
    chain = TokenChain(unit_tokens, extra_keys(cache_salt, adapter, tenant))
    if (hashed := compiled_hashing()) is not None:
        token_ids = prompt_token_ids if isinstance(prompt_token_ids, list) else list(prompt_token_ids)
        return split_keys(hashed(token_ids, unit_tokens, chain.root, KEY_BYTES))
    chain.extend(prompt_token_ids)
    return [key_of(digest) for digest in chain.digests]


@cache
def compiled_hashing() -> CpuChain | None:
    """What hashes a prompt in one call. The first time on a machine it is compiled, which takes a second: ask before
    there are requests. `None` where that cannot be done; then prompts are hashed unit by unit."""
    try:
        return CpuChain()
    except KernelError as error:
        logger.warning("routers hash prompts unit by unit, which takes several times as long: %s", error)
        return None
