"""Perplexity over windows of a text, as llama.cpp's `llama-perplexity` measures it: by the second half of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from folio.app.engine import LLM, SamplingParams

WINDOW = 512
_AT_ONCE, _BATCH = 8, 4  # windows of one call: the engine's, transformers'


@dataclass(frozen=True, slots=True)
class Predictions:
    """A model's predictions of all scored tokens.

    Attributes:
        logprobs: of the text's tokens.
        likeliest: the model's own first choices.
    """

    logprobs: list[float]
    likeliest: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))

    def agreement(self, other: Predictions) -> float:
        """Share of tokens with the same first choice as the other predictions', which may be of a longer text."""
        count = len(self.likeliest)
        return sum(a == b for a, b in zip(self.likeliest, other.likeliest[:count], strict=True)) / count


def windows(tokenizer: Any, text: str, most: int | None = None) -> list[list[int]]:
    """The text's whole windows, the first `most` of them. Where the tokenizer begins a text with a token (BOS), that
    token replaces the first one of each window."""
    ids: list[int] = tokenizer.encode(text)
    begins = len(ids) > len(tokenizer.encode(text, add_special_tokens=False))
    parts = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)][:most]
    return [[ids[0], *part[1:]] if begins else part for part in parts]


def by_folio(llm: LLM, parts: Sequence[list[int]]) -> Predictions:
    """By the engine's log probabilities of prompts."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    scored = [
        token
        for start in range(0, len(parts), _AT_ONCE)
        for completion in llm.generate(parts[start : start + _AT_ONCE], params)
        for token in completion.prompt_logprobs[WINDOW // 2 :]
    ]
    return Predictions([token.logprob for token in scored], [token.top[0][0] for token in scored])


@torch.inference_mode()
def by_transformers(model: Any, parts: Sequence[list[int]]) -> Predictions:
    """By the model itself."""
    logprobs: list[float] = []
    likeliest: list[int] = []
    for start in range(0, len(parts), _BATCH):
        ids = torch.tensor(parts[start : start + _BATCH])
        scores = model(ids, logits_to_keep=WINDOW // 2).logits[:, :-1].float().log_softmax(-1)
        logprobs += scores.gather(-1, ids[:, WINDOW // 2 + 1 :, None]).flatten().tolist()
        likeliest += scores.argmax(-1).flatten().tolist()
    return Predictions(logprobs, likeliest)
