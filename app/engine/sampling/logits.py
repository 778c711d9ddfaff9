"""Logits processors: grammar masks, bad words, biases and penalties, applied before a token is sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from app.engine.sampling.penalties import penalise
from app.engine.sampling.state import GrammarMatcher, SamplingState


def apply_logits_processors(logits: torch.Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> None:
    """Change `logits [len(states), vocab_size]` (float32) in place, in vLLM's order.

    Forbidden tokens become minus infinity: by the structure, by bad words, and stop tokens before `min_tokens`. Then
    biases are added. Penalties come last and see the biases.

    Args:
        positions: for each row, the number of preceding tokens that its state lacks (draft tokens).
    """
    _mask_structures(logits, states)
    forbidden = [state.forbidden(position) for state, position in zip(states, positions, strict=True)]
    if any(forbidden):
        where = _places([np.asarray(tokens, np.int64) for tokens in forbidden])
        logits[where] = -torch.inf
    if any(len(state.bias) for state in states):
        where = _places([state.bias_ids for state in states])
        logits[where] += torch.from_numpy(np.concatenate([state.bias for state in states]))
    penalised = [i for i, state in enumerate(states) if state.params.penalises]
    if penalised:
        rows = [states[i] for i in penalised]
        penalise(logits, penalised, [row.params for row in rows], [row.counts for row in rows])


def _places(token_ids: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = np.repeat(np.arange(len(token_ids)), [len(tokens) for tokens in token_ids])
    return torch.from_numpy(rows), torch.from_numpy(np.concatenate(token_ids))


def _mask_structures(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    matchers: list[tuple[int, GrammarMatcher]] = []
    for i, state in enumerate(states):
        if state.matcher is not None:
            matchers.append((i, state.matcher))
        else:
            assert state.params.structure is None, "a structure without its matcher"
    if not matchers:
        return
    vocab_size = logits.shape[-1]
    masks = np.zeros((len(matchers), -(-vocab_size // 32)), "<i4")
    for mask, (_, matcher) in zip(masks, matchers, strict=True):
        matcher.fill(mask)
    allowed = np.unpackbits(masks.view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
    forbidden = torch.from_numpy(allowed) == 0
    if len(matchers) == len(states):  # always, in calls from `sample`: no copy
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        rows = [i for i, _ in matchers]
        logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)
