"""What travels between the ingress and an engine replica."""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.params import SamplingParams
from app.engine.request import FinishReason


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A tokenised prompt and how to continue it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Some output: all of it, or what one or more steps added. The last piece has a `finish_reason`.

    `num_cached_tokens`: of the prompt, found in the prefix cache.
    """

    text: str
    num_tokens: int
    finish_reason: FinishReason | None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What the ingress tells clients about the model."""

    max_model_len: int
