"""Helpers of sampling tests: the exact distribution in float64, a structure, chi-square."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from folio.app.engine.sampling.bad_words import BadWords, TokenSearch
from folio.app.engine.sampling.params import SamplingParams


class Allowed:
    """A structure that always allows the same tokens, and records accepted ones."""

    def __init__(self, token_ids: Iterable[int], accepted: Iterable[int] = ()) -> None:
        self.token_ids = frozenset(token_ids)
        self.accepted = list(accepted)
        self.finished = False
        self.error = None

    def fill(self, mask: np.ndarray) -> None:
        bits = np.zeros(mask.size * 32, np.uint8)
        bits[[token for token in self.token_ids if token < bits.size]] = 1
        mask[:] = np.packbits(bits, bitorder="little").view("<i4")

    def accept(self, token_id: int) -> None:
        assert token_id in self.token_ids
        self.accepted.append(token_id)

    def fork(self) -> Allowed:
        return Allowed(self.token_ids, self.accepted)


def chi_square_excess(seen: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of counts over its critical value at the 0.01 % level; cells where less than 5 are expected count as
    one."""
    rare = expected < 5
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    seen, expected = seen[expected > 0], expected[expected > 0]
    freedom = max(1, len(expected) - 1)
    critical = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson and Hilferty
    return float(((seen - expected) ** 2 / expected).sum() / critical)


def exact_distribution(
    logits: np.ndarray,
    params: SamplingParams,
    *,
    prompt: list[int],
    output: list[int],
    bad_words: Iterable[tuple[int, ...]] = (),
    eos: Iterable[int] = (),
    allowed: Iterable[int] | None = None,
) -> np.ndarray:
    """Probabilities of the next token, by the definitions and one token after the other."""
    values = [float(value) for value in logits]
    size = len(values)
    for token in range(size):
        ends = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
        completes = any([*output, token][-len(word) :] == list(word) for word in bad_words)
        if (allowed is not None and token not in allowed) or completes or (ends and len(output) < params.min_tokens):
            values[token] = -np.inf
        values[token] += params.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= params.frequency_penalty * output.count(token)
        values[token] -= params.presence_penalty * (token in output)
    scaled = np.array(values) / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0
    probs /= probs.sum()
    ranked = sorted(range(size), key=lambda token: -probs[token])
    if params.top_k:
        probs[ranked[params.top_k :]] = 0
        probs /= probs.sum()
    mass = 0.0
    for token in ranked:
        if mass >= params.top_p:
            probs[token] = 0
        mass += probs[token]
    result: np.ndarray = probs / probs.sum()
    return result


def bad_words_of(sequences: Iterable[Sequence[int]]) -> BadWords:
    """Sequences of token ids as bad words: the text of each token is a byte."""
    return BadWords(map(bytes, sequences), TokenSearch([bytes([token_id]) for token_id in range(128)]))
