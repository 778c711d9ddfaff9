"""Sampler: from logits to the next tokens and their log probabilities, for all sequences of a step at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from app.engine.delta import TokenLogprobs
from app.engine.sampling.logits import apply_logits_processors
from app.engine.sampling.noise import draw, gumbel
from app.engine.sampling.params import SamplingParams
from app.engine.sampling.state import SamplingState

# Sorting a complete vocabulary costs more than a decode step; few tokens nearly always hold top_p of the mass.
_CANDIDATES = 256
# Factor of further attempts, for rows with a flat distribution.
_MORE_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens, one for each row.

    Attributes:
        sound: whether the row's logits were numbers and allowed a token.
        logprobs: where they were requested.
        blocked: rows without an allowed token, because their request's parameters contradict each other. They are not
            sound.
    """

    token_ids: list[int]
    sound: list[bool]
    logprobs: list[TokenLogprobs | None]
    blocked: frozenset[int] = frozenset()


def sample(logits: torch.Tensor, rows: Sequence[SamplingState], positions: Sequence[int] | None = None) -> Sampled:
    """The next token of each sequence, from its row of `logits [len(rows), vocab_size]`.

    The order is vLLM's: forbidden tokens, biases and penalties (`apply_logits_processors`) on float32 logits;
    temperature; min_p, top_k, and top_p among the remaining tokens. The token with the highest sum of logit and noise
    (`noise.py`) is drawn, the lower id among equals. Log probabilities are by the unprocessed logits.

    A row's token depends only on its logits and its state, to the last bit: every operation is row by row.

    Args:
        logits: of any floating type; not changed.
        positions: for each row, the number of preceding tokens that its state lacks (draft tokens); not 0 only for
            states that `can_look_ahead`.
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
    structured = [i for i in chosen if rows[i].matcher is not None]  # together, to be masked in place
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
    requested = [i for i in special if rows[i].params.logprobs is not None]
    for part in chunks(len(requested), logits.shape[-1]):
        indices = requested[part]
        num_top = [rows[i].params.logprobs or 0 for i in indices]
        values = token_logprobs(logits[indices], [tokens[i] for i in indices], num_top)
        for i, value in zip(indices, values, strict=True):
            logprobs[i] = value
    return Sampled(tokens, sound, logprobs, frozenset(blocked))


def sample_apart(
    logits: torch.Tensor, rows: Sequence[SamplingState], positions: Sequence[int] | None, parts: Sequence[slice]
) -> tuple[Sampled, dict[int, BaseException]]:
    """Call `sample` for each part of the rows; return all results, and errors by part index. Rows of failed parts are
    not sound. `parts` cover all rows.
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


def _likeliest(logits: torch.Tensor, needed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum of each row, and its index if `needed`: the index takes most of the time."""
    if needed:
        highest, indices = logits.max(dim=-1)  # several times faster than argmax in bfloat16 on CPUs
        return highest, indices
    return logits.amax(dim=-1), torch.zeros(len(logits), dtype=torch.int64)


def _choose(
    logits: torch.Tensor, states: Sequence[SamplingState], positions: Sequence[int]
) -> tuple[list[int], list[bool]]:
    """A token for each row of `logits`, which are changed, and whether any token was allowed."""
    apply_logits_processors(logits, states, positions)
    highest, tokens = _likeliest(logits, any(state.is_greedy for state in states))
    for truncated in (False, True):
        indices = [i for i, s in enumerate(states) if not s.is_greedy and _is_truncated(s.params) == truncated]
        if indices:
            params = [states[i].params for i in indices]
            keys = torch.tensor([states[i].noise_key(positions[i]) for i in indices])
            drawn = logits if len(indices) == len(states) else logits[indices]
            drawn /= torch.tensor([p.temperature for p in params], dtype=torch.float32)[:, None]
            _apply_min_p(drawn, params)
            tokens[indices] = _draw_truncated(drawn, keys, params) if truncated else draw(drawn, keys)
    return tokens.tolist(), (highest > -torch.inf).tolist()


def _is_truncated(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1


def _apply_min_p(logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """In place; the difference of two logits is the ratio of the probabilities."""
    if any(p.min_p for p in params):
        distance = torch.tensor([p.min_p for p in params], dtype=torch.float64).log().float()[:, None]
        logits.masked_fill_(logits < logits.amax(dim=-1, keepdim=True) + distance, -torch.inf)


def _draw_truncated(logits: torch.Tensor, keys: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    vocab_size = logits.shape[-1]
    few = torch.tensor([0 < p.top_k < vocab_size for p in params])[:, None]
    top_k = torch.tensor([p.top_k or vocab_size for p in params])[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64)[:, None]
    probs = logits.softmax(dim=-1)  # not logsumexp: torch adds up a single row in another order
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
    """Draw among the first `candidates [rows, n]` of each row, those that are `kept [rows, n]`."""
    most = int(kept.sum(dim=-1).max()) if len(kept) else 0
    if not most:
        return candidates[:, 0]
    candidates = candidates[:, :most].contiguous()
    sums = logits.gather(-1, candidates).double() + gumbel(keys[:, None], candidates)
    sums.masked_fill_(~kept[:, :most], -torch.inf)
    highest = sums == sums.amax(dim=-1, keepdim=True)
    return candidates.masked_fill_(~highest, logits.shape[-1] - 1).amin(dim=-1)


def _beyond_top_p(weights: torch.Tensor, few: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply top_p to the likeliest tokens with the ordered `weights [rows, n]` (float64).

    A row's result must not depend on the number of following tokens of weight 0.

    Args:
        few: `[rows, 1]`, whether top_p is a share of these weights rather than of 1.

    Returns:
        Excluded tokens, `[rows, n]`, and whether the n tokens have the mass of top_p, `[rows]`.
    """
    cumulated = weights.cumsum(dim=-1)
    before = cumulated.roll(1, dims=-1)
    before[:, 0] = 0.0
    mass = top_p * torch.where(few, cumulated[:, -1:], 1.0)
    excluded = (before >= mass) & (top_p < 1)
    excluded[:, 0] = False  # the likeliest token stays however small top_p is
    return excluded, ((cumulated[:, -1:] >= mass) & (top_p < 1))[:, 0]


# Logits processed at once: some tens of MB with all intermediate results.
CHUNK_ELEMENTS = 1 << 21


def chunks(num_rows: int, row_elements: int) -> Iterator[slice]:
    """Rows to process at once; a row's results must not depend on the rest of its chunk."""
    step = max(1, CHUNK_ELEMENTS // row_elements)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def prompt_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of `token_ids[i]` by row i of `logits [n, vocab_size]`, each with `num_top` alternatives."""
    return tuple(token_logprobs(logits, token_ids, [num_top] * len(token_ids)))


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """`prompt_logprobs` with a number of alternatives for each row. Equal tokens are ordered by id."""
    assert len(logits) == len(token_ids) == len(num_top)
    results = []
    for rows in chunks(*logits.shape):
        results += _chunk(logits[rows].float(), token_ids[rows], num_top[rows])
    return results


def _chunk(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    vocab_size = logits.shape[-1]
    logprobs = logits.log_softmax(dim=-1)
    chosen = torch.tensor(token_ids)[:, None]
    own = logits.gather(-1, chosen)
    before = (logits > own) | ((logits == own) & (torch.arange(vocab_size) < chosen))
    ranks = (before.sum(dim=-1) + 1).tolist()
    own_logprobs = logprobs.gather(-1, chosen)[:, 0].tolist()
    most = min(max(num_top), vocab_size)
    if most:
        top_ids = sort_keys(logits).topk(most, dim=-1).indices
        tops = list(zip(top_ids.tolist(), logprobs.gather(-1, top_ids).tolist(), strict=True))
    else:
        tops = [([], [])] * len(token_ids)
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:num], values[:num], strict=True)))
        for token_id, logprob, rank, num, (ids, values) in zip(
            token_ids, own_logprobs, ranks, num_top, tops, strict=True
        )
    ]


def sort_keys(logits: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the float32 logits, and of token ids among equal ones.

    Half precision gives many equal logits, whose order in `topk` depends on k, and with that on other requests'
    parameters.
    """
    bits = logits.contiguous().view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return ordered * logits.shape[-1] - torch.arange(logits.shape[-1])
