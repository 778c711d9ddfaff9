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
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64)[:, None]
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    ranks = _ranks(logits)
    limit = min(vocab_size, max(_TOP_P_CANDIDATES, *(p.top_k for p in params)))
    candidates, probs = _likeliest(logits, ranks, log_total, limit)
    if bool(((top_k > limit) & (probs.sum(dim=-1, keepdim=True) < top_p)).any()):  # flat: more are needed
        candidates, probs = _likeliest(logits, ranks, log_total, vocab_size)
    probs = probs.masked_fill(torch.arange(probs.shape[-1]) >= top_k, 0.0)
    cumulated = probs.cumsum(dim=-1)
    mass = torch.where(top_k < vocab_size, cumulated[:, -1:], 1.0)
    excluded = (cumulated - probs >= top_p * mass) & (top_p < 1)
    excluded[:, 0] = False  # the likeliest token stays however small top_p is
    return candidates.gather(-1, _invert(probs.masked_fill(excluded, 0.0), uniform)[:, None])[:, 0]


def _ranks(logits: torch.Tensor) -> torch.Tensor:
    """Integers that order like the float32 logits, the lower token id first among equals.

    Half precision gives many equal logits, and `topk` orders those differently for another k: then a request's tokens
    would depend on its neighbours' parameters.
    """
    bits = logits.contiguous().view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return ordered * logits.shape[-1] - torch.arange(logits.shape[-1])


def _likeliest(
    logits: torch.Tensor, ranks: torch.Tensor, log_total: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest tokens of each row and their probabilities (float64), likeliest first."""
    candidates = ranks.topk(count, dim=-1).indices
    return candidates, (logits.gather(-1, candidates) - log_total).double().exp()


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index `[rows]` at which the cumulated weights `[rows, n]` pass `uniform [rows, 1]` of their sum."""
    cumulated = weights.double().cumsum(dim=-1)
    # Just below 1, so that rounding never passes the last weight that is not zero.
    target = uniform * cumulated[:, -1:] * (1 - 2**-40)
    index = torch.searchsorted(cumulated, target, right=True)[:, 0]
    return index.clamp_(max=weights.shape[-1] - 1)  # only weights that are not numbers get past the end
