"""Requests without an engine."""

from __future__ import annotations

from collections import abc

from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.sampling.params import SamplingParams
from folio.vmem import TokenChain


def make_sequence(
    token_ids: abc.Sequence[int],
    params: SamplingParams | None = None,
    *,
    max_tokens: int = 1000,
    salt: str | None = None,
) -> Sequence:
    prompt = list(token_ids)
    chain = TokenChain(16, () if salt is None else (salt,))
    params = params or SamplingParams(temperature=0)
    return Sequence(Request("r", params), prompt, params, max_tokens, None, chain, prompt.copy())


def generate(sequence: Sequence, *token_ids: int) -> None:
    """Append tokens, as the engine does."""
    sequence.append(token_ids, frozenset())
