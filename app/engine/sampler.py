"""From logits to the next tokens, all sequences of a step at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from app.engine.params import SamplingParams
from app.engine.request import TokenLogprobs
from app.engine.sampling_state import SamplingState

# Sorting a whole vocabulary costs more than a decode step; the likeliest few nearly always hold top_p of the mass.
_TOP_P_CANDIDATES = 256
# Dividing logits by less than this overflows, and the result is greedy anyway.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen, a value for each row.

    Attributes:
        sound: whether the row's logits were numbers.
        logprobs: where they were asked for.
    """

    token_ids: list[int]
    sound: list[bool]
    logprobs: list[TokenLogprobs | None]


NOTHING = Sampled([], [], [])


def sample(logits: torch.Tensor, rows: Sequence[SamplingState], positions: Sequence[int] | None = None) -> Sampled:
    """The next token of each sequence, from its row of `logits [len(rows), vocab_size]`.

    A row's token depends on nothing but its logits and its state.

    Args:
        positions: how many tokens that are not in the row's state yet come before the one to choose: it belongs to a
            sequence of drafts. Only states that `can_look_ahead` may have any but 0.
    """
    positions = positions or [0] * len(rows)
    tokens = logits.max(dim=-1).indices  # several times faster than argmax in bfloat16 on CPUs
    sound = logits.amax(dim=-1).isfinite().tolist()  # a NaN anywhere in a row is its maximum
    random = [i for i, state in enumerate(rows) if state.params.temperature >= _GREEDY_BELOW]
    plain = [i for i in random if not rows[i].params.truncates]
    truncated = [i for i in random if rows[i].params.truncates]
    for indices, draw in ((plain, _draw_plain), (truncated, _draw_truncated)):
        if indices:
            chosen = [rows[i].params for i in indices]
            temperature = torch.tensor([params.temperature for params in chosen])[:, None]
            uniform = torch.tensor([rows[i].uniform(positions[i]) for i in indices], dtype=torch.float64)[:, None]
            tokens[indices] = draw(logits[indices].float() / temperature, uniform, chosen)
    return Sampled(tokens.tolist(), sound, [None] * len(rows))


def _draw_plain(logits: torch.Tensor, uniform: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    return _invert(logits.softmax(dim=-1), uniform)


def _draw_truncated(logits: torch.Tensor, uniform: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Top-k, then top-p among what is left, then draw."""
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
