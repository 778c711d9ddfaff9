"""From logits to the next tokens, all sequences of a step at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from app.engine.request import TokenLogprobs
from app.engine.sampling.logits import apply_logits_processors
from app.engine.sampling.logprobs import chunks, sort_keys, token_logprobs
from app.engine.sampling.noise import draw, gumbel
from app.engine.sampling.params import SamplingParams
from app.engine.sampling.state import SamplingState

# Sorting a whole vocabulary costs more than a decode step; the likeliest few nearly always hold top_p of the mass.
_CANDIDATES = 256
# A flat distribution needs more of them; a row that does is tried again with so many times as many.
_MORE_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen, a value for each row.

    Attributes:
        sound: whether the row's logits were numbers, and a token could be chosen by them.
        logprobs: where they were asked for.
        blocked: rows that nothing may follow, because what their parameters ask for contradicts itself: the request is
            at fault. They are not sound.
    """

    token_ids: list[int]
    sound: list[bool]
    logprobs: list[TokenLogprobs | None]
    blocked: frozenset[int] = frozenset()


NOTHING = Sampled([], [], [])


def sample(logits: torch.Tensor, rows: Sequence[SamplingState], positions: Sequence[int] | None = None) -> Sampled:
    """The next token of each sequence, from its row of `logits [len(rows), vocab_size]`.

    In this order, as in vLLM: what may not follow, biases and penalties (`process`), on float32 logits; temperature;
    min_p, top_k, and top_p among what these have left. Of the tokens that are left the one is drawn whose logit and
    noise (`noise.py`) have the highest sum, the lower id among equals. Log probabilities are by the logits as they
    come.

    A row's token depends on nothing but its logits and its state, to the last bit: every operation here is one by row.

    Args:
        logits: of any floating type; not changed.
        positions: how many tokens that are not in the row's state yet come before the one to choose: it belongs to a
            sequence of drafts. Only states that `can_look_ahead` may have any but 0.
    """
    highest, likeliest = _likeliest(logits, any(state.takes_likeliest for state in rows))
    sound = highest.isfinite().tolist()  # a NaN anywhere in a row is its maximum
    tokens: list[int] = likeliest.tolist()
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    special = [i for i, state in enumerate(rows) if not state.is_plain_greedy]
    if not special:
        return Sampled(tokens, sound, logprobs)
    positions = positions or [0] * len(rows)
    blocked = []
    chosen = [i for i in special if not rows[i].takes_likeliest]
    structured = [i for i in chosen if rows[i].matcher is not None]  # together, so that they are masked in place
    for group in (structured, [i for i in chosen if rows[i].matcher is None]):
        for part in chunks(len(group), logits.shape[-1]):
            indices = group[part]
            states = [rows[i] for i in indices]
            drawn, possible = _choose(logits[indices].float(), states, [positions[i] for i in indices])
            for i, token, is_possible in zip(indices, drawn, possible, strict=True):
                tokens[i] = token
                if sound[i] and not is_possible:
                    sound[i] = False
                    blocked.append(i)
    asked = [i for i in special if rows[i].params.logprobs is not None]
    for part in chunks(len(asked), logits.shape[-1]):
        indices = asked[part]
        num_top = [rows[i].params.logprobs or 0 for i in indices]
        found = token_logprobs(logits[indices], [tokens[i] for i in indices], num_top)
        for i, value in zip(indices, found, strict=True):
            logprobs[i] = value
    return Sampled(tokens, sound, logprobs, frozenset(blocked))


def sample_apart(
    logits: torch.Tensor, rows: Sequence[SamplingState], positions: Sequence[int] | None, parts: Sequence[slice]
) -> tuple[Sampled, dict[int, BaseException]]:
    """What `sample` gives for each part of the rows by itself, and what it raises for some parts, by their index. The
    rows of these are not sound.

    Args:
        parts: rows that belong together. They cover all.
    """
    tokens, sound, logprobs = [0] * len(rows), [False] * len(rows), list[TokenLogprobs | None]([None] * len(rows))
    blocked: set[int] = set()
    errors: dict[int, BaseException] = {}
    for i, part in enumerate(parts):
        try:
            own = sample(logits[part], rows[part], None if positions is None else positions[part])
        except BaseException as error:  # noqa: BLE001 - returned
            errors[i] = error
            continue
        tokens[part], sound[part], logprobs[part] = own.token_ids, own.sound, own.logprobs
        blocked.update(part.start + row for row in own.blocked)
    return Sampled(tokens, sound, logprobs, frozenset(blocked)), errors


def _likeliest(logits: torch.Tensor, wanted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest of each row and its index; without that unless `wanted`: it takes most of the time."""
    if wanted:
        highest, indices = logits.max(dim=-1)  # several times faster than argmax in bfloat16 on CPUs
        return highest, indices
    return logits.amax(dim=-1), torch.zeros(len(logits), dtype=torch.int64)


def _choose(
    logits: torch.Tensor, states: Sequence[SamplingState], positions: Sequence[int]
) -> tuple[list[int], list[bool]]:
    """A token for each row of `logits`, which are changed, and whether any could be chosen."""
    apply_logits_processors(logits, states, positions)
    highest, tokens = _likeliest(logits, any(state.is_greedy for state in states))
    random = [i for i, state in enumerate(states) if not state.is_greedy]
    for indices, draw_from in (
        ([i for i in random if not _sorts(states[i].params)], _draw_plain),
        ([i for i in random if _sorts(states[i].params)], _draw_truncated),
    ):
        if indices:
            params = [states[i].params for i in indices]
            keys = torch.tensor([states[i].noise_key(positions[i]) for i in indices])
            mine = logits if len(indices) == len(states) else logits[indices]
            mine /= torch.tensor([p.temperature for p in params], dtype=torch.float32)[:, None]
            _drop_unlikely(mine, params)
            tokens[indices] = draw_from(mine, keys, params)
    return tokens.tolist(), (highest > -torch.inf).tolist()


def _sorts(params: SamplingParams) -> bool:
    """Whether the order of the tokens matters, not only how far each is below the likeliest."""
    return params.top_k > 0 or params.top_p < 1


def _drop_unlikely(logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """min_p, in place. The ratio of two probabilities is in their logits already."""
    if any(p.min_p for p in params):
        distance = torch.tensor([p.min_p for p in params], dtype=torch.float64).log().float()[:, None]
        logits.masked_fill_(logits < logits.amax(dim=-1, keepdim=True) + distance, -torch.inf)


def _draw_plain(logits: torch.Tensor, keys: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    return draw(logits, keys)


def _draw_truncated(logits: torch.Tensor, keys: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Top-k, then top-p among what is left, then draw."""
    vocab_size = logits.shape[-1]
    few = torch.tensor([0 < p.top_k < vocab_size for p in params])[:, None]  # and all of these few are sorted at once
    top_k = torch.tensor([p.top_k or vocab_size for p in params])[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64)[:, None]
    probs = logits.softmax(dim=-1)  # not logsumexp: of a single row, torch adds that up in another order
    ranks = sort_keys(logits)
    tokens = torch.empty(len(params), dtype=torch.int64)
    left = torch.arange(len(params))
    limit = max(_CANDIDATES, *(p.top_k for p in params))
    while len(left):
        limit = min(limit, vocab_size)
        candidates = ranks.topk(limit, dim=-1).indices
        weights = probs.gather(-1, candidates).double().masked_fill_(torch.arange(limit) >= top_k, 0.0)
        excluded, covered = _beyond_top_p(weights, few, top_p)
        enough = covered | few[:, 0] | (limit == vocab_size)
        kept = (~excluded & (weights > 0))[enough]
        tokens[left[enough]] = _draw_candidates(logits[enough], keys[enough], candidates[enough], kept)
        few, top_k, top_p, keys, logits, probs, ranks, left = (
            t[~enough] for t in (few, top_k, top_p, keys, logits, probs, ranks, left)
        )
        limit *= _MORE_CANDIDATES
    return tokens


def _draw_candidates(
    logits: torch.Tensor, keys: torch.Tensor, candidates: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """Draw among the `candidates [rows, n]` that are `kept [rows, n]`, which are the first ones of each row."""
    most = int(kept.sum(dim=-1).max()) if len(kept) else 0
    if not most:
        return candidates[:, 0]
    candidates = candidates[:, :most].contiguous()
    sums = logits.gather(-1, candidates).double() + gumbel(keys[:, None], candidates)
    sums.masked_fill_(~kept[:, :most], -torch.inf)
    highest = sums == sums.amax(dim=-1, keepdim=True)
    return candidates.masked_fill_(~highest, logits.shape[-1] - 1).amin(dim=-1)


def _beyond_top_p(weights: torch.Tensor, few: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the likeliest tokens top_p leaves out; their `weights [rows, n]` (float64) come in order.

    Nothing about a row may depend on how many tokens follow that cannot be drawn.

    Args:
        few: `[rows, 1]`, whether top_p is a share of these weights, rather than of 1.

    Returns:
        Those that are left out, `[rows, n]`, and whether the n have the mass of top_p, `[rows]`.
    """
    cumulated = weights.cumsum(dim=-1)
    before = cumulated.roll(1, dims=-1)
    before[:, 0] = 0.0
    wanted = top_p * torch.where(few, cumulated[:, -1:], 1.0)
    excluded = (before >= wanted) & (top_p < 1)
    excluded[:, 0] = False  # the likeliest token stays however small top_p is
    return excluded, ((cumulated[:, -1:] >= wanted) & (top_p < 1))[:, 0]
