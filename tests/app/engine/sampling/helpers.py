"""Helpers of sampling tests: the exact distribution in float64, a structure, chi-square, sequences of all kinds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from folio.app.engine.sampling.bad_words import BadWords, TokenSearch
from folio.app.engine.sampling.params import SamplingParams, Structure
from folio.app.engine.sampling.state import SamplingState


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


PROMPT, OUTPUT = [1, 2, 3], [3, 4, 4, 9]
ENDS = frozenset({15})
WORDS = [(0,), (4, 9, 5), (9, 6), (8, 7)]
FEATURES: dict[str, dict[str, object]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.06},
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 0.9, "frequency_penalty": -0.3},
    "bias": {"logit_bias": {3: 1.0, 7: -2.0, 15: 0.5}},
    "allowed": {"allowed_token_ids": [15, 0, 3, 6, 7, 8, 6]},
    "bad_words": {"bad_words": ["some"]},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [10]},
    "structure": {"structure": Structure("choice", "[]")},
}
NAMES = list(FEATURES)


def state_with(features: tuple[str, ...], index: int, **more: object) -> SamplingState:
    """A sequence after OUTPUT that has some of the features."""
    params: dict[str, object] = {"seed": index} | more
    for name in features:
        params |= FEATURES[name]
    state = SamplingState(
        SamplingParams(**params),  # type: ignore[arg-type]
        PROMPT,
        matcher=Allowed(range(0, 16, 3)) if "structure" in features else None,
        bad_words=bad_words_of(WORDS) if "bad_words" in features else None,
        eos_token_ids=ENDS,
    )
    if state.matcher is not None:
        state.matcher.token_ids |= {*OUTPUT}  # type: ignore[attr-defined]
    for token in OUTPUT:
        state.append(token)
    return state
