"""Requests without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from folio.app.engine.request import Request, SequenceGroup
from folio.app.engine.sampling.params import SamplingParams
from folio.vmem import TokenChain


def make_request(
    token_ids: Sequence[int], params: SamplingParams | None = None, *, max_tokens: int = 1000, salt: str | None = None
) -> Request:
    prompt = list(token_ids)
    chain = TokenChain(16, () if salt is None else (salt,))
    params = params or SamplingParams(temperature=0)
    return Request("r", prompt, params, max_tokens, None, chain, SequenceGroup(0, 0), prompt.copy())


def generate(request: Request, *token_ids: int) -> None:
    """Append tokens, as the engine does."""
    request.append(token_ids, frozenset())
