"""From logits to the next tokens, all sequences of a step at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.engine.request import Request

# Sorting a whole vocabulary costs more than a decode step; the likeliest few nearly always hold top_p of the mass.
_TOP_P_CANDIDATES = 256
# Dividing logits by less than this overflows, and the result is greedy anyway.
_GREEDY_BELOW = 1e-5


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """The next token of each request, from its row of `logits [len(requests), vocab_size]`.

    A row's token depends on nothing but its logits, its parameters and its random generator.
    """
    tokens = logits.max(dim=-1).indices  # several times faster than argmax in bfloat16 on CPUs
    random = [i for i, request in enumerate(requests) if request.params.temperature >= _GREEDY_BELOW]
    plain = [i for i in random if not requests[i].params.truncates]
    truncated = [i for i in random if requests[i].params.truncates]
    for rows, draw in ((plain, _draw_plain), (truncated, _draw_truncated)):
        if rows:
            chosen = [requests[i] for i in rows]
            temperature = torch.tensor([r.params.temperature for r in chosen])[:, None]
            uniform = torch.tensor([r.random.random() for r in chosen], dtype=torch.float64)[:, None]
            tokens[rows] = draw(logits[rows].float() / temperature, uniform, chosen)
    result: list[int] = tokens.tolist()
    return result


def _draw_plain(logits: torch.Tensor, uniform: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    return _invert(logits.softmax(dim=-1), uniform)


def _draw_truncated(logits: torch.Tensor, uniform: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Top-k, then top-p among what is left, then draw."""
    params = [request.params for request in requests]
    vocab_size = logits.shape[-1]
    top_k = torch.tensor([min(p.top_k or vocab_size, vocab_size) for p in params])[:, None]
    top_p = torch.tensor([p.top_p for p in params])[:, None]
    limit = min(vocab_size, max(_TOP_P_CANDIDATES, *(p.top_k for p in params)))
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    values, candidates = logits.topk(limit, dim=-1)
    probs = (values - log_total).exp()
    if bool(((top_k > limit) & (probs.sum(dim=-1, keepdim=True) < top_p)).any()):  # a flat distribution: sort it all
        values, candidates = logits.sort(dim=-1, descending=True)
        probs = (values - log_total).exp()
    probs = probs.masked_fill(torch.arange(probs.shape[-1]) >= top_k, 0.0)
    mass = torch.where(top_k < vocab_size, probs.sum(dim=-1, keepdim=True), 1.0)
    mass_before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill((mass_before >= top_p * mass) & (top_p < 1), 0.0)
    return candidates.gather(-1, _invert(probs, uniform)[:, None])[:, 0]


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index `[rows]` at which the cumulated weights `[rows, n]` pass `uniform [rows, 1]` of their sum."""
    cumulated = weights.double().cumsum(dim=-1)
    # Just below 1, so that rounding never passes the last weight that is not zero.
    target = uniform * cumulated[:, -1:] * (1 - 2**-40)
    return torch.searchsorted(cumulated, target, right=True)[:, 0]
