"""The names that routers and replicas have for the prefixes of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from vmem import TokenChain, key_of


def extra_keys(cache_salt: str | None) -> tuple[str, ...]:
    """What must be equal beside the tokens, for two prompts to share what is cached of them. An adapter's name will be
    another one, when there are adapters."""
    return () if cache_salt is None else (f"salt:{cache_salt}",)


def prompt_keys(prompt_token_ids: Sequence[int], unit_tokens: int, cache_salt: str | None) -> list[bytes]:
    """Of each whole unit the key of the prefix that ends with it, as replicas report them."""
    chain = TokenChain(unit_tokens, extra_keys(cache_salt))
    chain.extend(prompt_token_ids)
    return [key_of(digest) for digest in chain.digests]
