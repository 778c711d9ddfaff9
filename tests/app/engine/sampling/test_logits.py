"""Logits processors equal those of transformers, each and together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from folio.app.engine.sampling.bad_words import BadWords
from folio.app.engine.sampling.logits import Edits, apply_edits, gather_edits
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.sampling.penalties import counts_of, penalise
from folio.app.engine.sampling.sampler import sample
from folio.app.engine.sampling.settings import gather_settings
from folio.app.engine.sampling.state import SamplingState
from folio.app.engine.sampling.transfer import to_device
from tests.app.engine.sampling.helpers import Allowed, bad_words_of

VOCAB_SIZE = 300
EOS = frozenset({2, 5})


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def state(prompt: list[int], output: list[int], words: BadWords | None = None, **params: Any) -> SamplingState:
    named = params | ({"bad_words": ["a word"]} if words else {})
    made = SamplingState(SamplingParams(**named), prompt, bad_words=words, eos_token_ids=EOS)  # type: ignore[arg-type]
    for token in output:
        made.append(token)
    return made


def processed(logits: torch.Tensor, *states: SamplingState) -> torch.Tensor:
    changed, positions, width = logits.clone(), [0] * len(states), logits.shape[-1]
    settings = gather_settings(states, positions, width)
    edits = gather_edits(states, settings, positions, width, width)
    apply_edits(changed, Edits(*to_device(edits, logits.device)))
    penalise(changed, counts_of(states, settings), settings)
    return changed


WORDS = [[3], [10, 11], [9, 10, 12], [10, 13], [9, 10, 11, 14], [4, 9]]
BIAS = {0: 1.5, 299: -100.0, 17: 0.25}
# (params, prompt, output, by transformers)
PROCESSORS: list[tuple[dict[str, Any], list[int], list[int], list[LogitsProcessor]]] = [
    # Prompt and output count alike, however often a token occurs.
    *(
        ({"repetition_penalty": p}, [1, 7, 7, 299], [8, 7, 0], [RepetitionPenaltyLogitsProcessor(p)])
        for p in (0.5, 1.0, 1.3)
    ),
    # Single tokens always; the last token of several only when the others come right before.
    *(
        ({"words": bad_words_of(WORDS)}, [], output, [NoBadWordsLogitsProcessor(WORDS)])
        for output in ([4], [10], [9, 10], [10, 11], [4, 9, 10], [9, 4, 10], [9, 10, 9, 10, 11])
    ),
    ({"words": bad_words_of(WORDS)}, [9, 10], [], [NoBadWordsLogitsProcessor([[3]])]),
    # With ignore_eos the end-of-sequence token is an ordinary one; stop_token_ids never are.
    *(
        (
            {"ignore_eos": ignore, "min_tokens": 3, "stop_token_ids": [11]},
            [],
            [7] * n,
            [MinLengthLogitsProcessor(3, end)],
        )
        for n in (2, 3, 4)
        for ignore, end in ((False, [2, 5, 11]), (True, [11]))
    ),
    ({"min_tokens": 3, "stop_token_ids": [11]}, [1], [], [MinLengthLogitsProcessor(3, [2, 5, 11])]),
    ({"logit_bias": BIAS}, [1], [], [SequenceBiasLogitsProcessor([[[t], b] for t, b in BIAS.items()])]),
]


@pytest.mark.parametrize(("params", "prompt", "output", "processors"), PROCESSORS)
def test_processors_equal_those_of_transformers(
    params: dict[str, Any], prompt: list[int], output: list[int], processors: list[LogitsProcessor]
) -> None:
    logits = random_logits(1)
    expected = LogitsProcessorList(processors)(torch.tensor([prompt + output]), logits)
    assert torch.equal(processed(logits, state(prompt or [1], output, **params)), expected)


def test_presence_and_frequency_count_the_output_alone() -> None:
    """As OpenAI defines them: logit − count · frequency − (count > 0) · presence."""
    logits = random_logits(1)
    changed = processed(logits, state([1, 7, 8], [8, 7, 8, 9], presence_penalty=0.7, frequency_penalty=-0.4))
    count = torch.bincount(torch.tensor([8, 7, 8, 9]), minlength=VOCAB_SIZE)
    torch.testing.assert_close(changed[0], logits[0] + 0.4 * count - 0.7 * (count > 0), rtol=0, atol=1e-6)
    assert torch.equal(changed[0, 10:], logits[0, 10:])
    assert changed[0, 1] == logits[0, 1]


def test_counts_grow_with_the_output() -> None:
    """Counts are equal for tokens one by one, all at once, and in a fork, also beyond the first allocation."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCAB_SIZE, 40).tolist()
    params = {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.3}
    growing = state(prompt, [], **params)
    logits = random_logits(1)
    output: list[int] = []
    for token in rng.integers(0, VOCAB_SIZE, 250).tolist():
        output.append(token)
        growing.append(token)
        if len(output) % 25 == 1:
            expected = processed(logits, state(prompt, output, **params))
            assert torch.equal(processed(logits, growing), expected)
            fork = growing.fork()
            fork.append(3)
            assert torch.equal(processed(logits, fork), processed(logits, state(prompt, [*output, 3], **params)))
            assert torch.equal(processed(logits, growing), expected), "a fork's tokens are its own"
    assert len(growing.counts.token_ids) > 128


def test_allowed_tokens_keep_their_logits_and_others_have_none() -> None:
    """Also beside rows that allow all, and for the likeliest token, which is else taken without looking further."""
    logits = random_logits(3)
    changed = processed(logits, state([1], []), state([1], [], allowed_token_ids=[299, 0, 0]), state([1], []))
    expected = logits.clone()
    expected[1] = -torch.inf
    expected[1, [0, 299]] = logits[1, [0, 299]]
    assert torch.equal(changed, expected)
    least = int(logits[0].argmin())
    assert sample(logits[:1], [state([1], [], allowed_token_ids=[least], temperature=0)]).token_ids == [least]


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 300])
def test_structures_allow_what_their_bits_say(vocab_size: int) -> None:
    """Also in a last word that is not full, and beside rows that have no structure."""
    logits = torch.randn(4, vocab_size)
    structures = (range(vocab_size), None, [0, 30, vocab_size - 1], [5])
    states = [
        SamplingState(SamplingParams(), [1], matcher=None if allowed is None else Allowed(allowed))
        for allowed in structures
    ]
    changed = processed(logits, *states)
    for i, made in enumerate(states):
        allowed = made.matcher.token_ids if isinstance(made.matcher, Allowed) else range(vocab_size)
        expected = torch.full((vocab_size,), -torch.inf)
        expected[list(allowed)] = logits[i, list(allowed)]
        assert torch.equal(changed[i], expected)


def test_rows_do_not_mix() -> None:
    """Each of many different rows changes as it does alone."""
    bad = bad_words_of([[3], [7, 8]])
    states = [
        state([1, 2], [7], bad),
        state([1], []),
        state([9, 9], [9, 4], repetition_penalty=1.5),
        state([1], [3], logit_bias={4: 2.0, 5: -1.0}, presence_penalty=1.0),
        state([1], [], min_tokens=2),
        state([1], [], allowed_token_ids=[3, 7], logit_bias={3: 1.0}),
        state([1], [6, 6], bad, frequency_penalty=0.5, min_tokens=5, logit_bias={6: 1.0}),
    ]
    logits = random_logits(len(states))
    together = processed(logits, *states)
    for i, one in enumerate(states):
        assert torch.equal(together[i : i + 1], processed(logits[i : i + 1], one)), f"row {i}"
    assert torch.equal(together[1], logits[1])
