"""A router's keys of a prompt are those of the replicas' prefix caches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from folio.app.engine.request.prefix_keys import compiled_hashing, extra_keys, prompt_keys
from folio.vmem import TokenChain, key_of


@pytest.fixture(params=["compiled", "unit by unit"])
def hashing(request: pytest.FixtureRequest) -> Iterator[None]:
    compiled_hashing.cache_clear()
    if request.param == "unit by unit":
        request.getfixturevalue("without_compiler")
    assert (compiled_hashing() is None) == (request.param == "unit by unit")
    yield
    compiled_hashing.cache_clear()


@pytest.mark.usefixtures("hashing")
@pytest.mark.parametrize("unit_tokens", [16, 48])
def test_as_the_prefix_cache(unit_tokens: int) -> None:
    """With and without a compiler, whatever is hashed beside the tokens."""
    token_ids = list(range(1000, 1000 + 7 * unit_tokens + 3))
    for salt, adapter, tenant in ((None, None, None), ("s", "a", "t"), (None, "a", None)):
        chain = TokenChain(unit_tokens, extra_keys(salt, adapter, tenant))
        chain.extend(token_ids)
        expected = [key_of(digest) for digest in chain.digests]
        assert prompt_keys(token_ids, unit_tokens, salt, adapter, tenant) == expected
        assert prompt_keys(tuple(token_ids), unit_tokens, salt, adapter, tenant) == expected
    assert len(expected) == 7
    assert prompt_keys(token_ids[: unit_tokens - 1], unit_tokens, None) == []


def test_it_is_said_when_it_cannot_be_compiled(without_compiler: None, caplog: pytest.LogCaptureFixture) -> None:
    compiled_hashing.cache_clear()
    for _ in range(2):
        prompt_keys([1] * 32, 16, None)
    compiled_hashing.cache_clear()
    assert caplog.text.count("unit by unit") == 1
    assert "no C++ compiler" in caplog.text
