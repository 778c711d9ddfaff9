"""The names that routers and replicas have for the prefixes of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from vmem import TokenChain, key_of


def extra_keys(cache_salt: str | None, adapter: str | None = None) -> tuple[str, ...]:
    """What must be equal beside the tokens, for two prompts to share what is cached of them."""
    salt = () if cache_salt is None else (f"salt:{cache_salt}",)
    return salt if adapter is None else (*salt, f"adapter:{adapter}")


def prompt_keys(
    prompt_token_ids: Sequence[int], unit_tokens: int, cache_salt: str | None, adapter: str | None = None
) -> list[bytes]:
    """Of each whole unit the key of the prefix that ends with it, as replicas report them."""
    chain = TokenChain(unit_tokens, extra_keys(cache_salt, adapter))
    chain.extend(prompt_token_ids)
    return [key_of(digest) for digest in chain.digests]
