"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from app.engine.detokenizer import TextStream
from app.engine.params import SamplingParams
from vmem import SequenceMemory

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to a request. `error` is set when the engine failed it; it is then the last one."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its output so far, and how far its keys and values are cached.

    Attributes:
        token_ids: prompt and output.
        num_computed: tokens whose keys and values are in the cache; the rest is still to be computed.
        max_tokens: output tokens at most, resolved against the context.
        memory: its blocks while it runs, else `None`.
        text: the incremental detokeniser, `None` without a tokenizer.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    text: TextStream | None
    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    memory: SequenceMemory | None = None
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        seed = self.params.seed
        # One uniform number a token from a generator of its own: what else is in the batch cannot matter.
        self.random = np.random.default_rng(None if seed is None else seed % 2**64)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    def append(self, token_id: int, eos_token_ids: frozenset[int]) -> Delta:
        """Add a sampled token; the returned delta says whether it was the last."""
        self.token_ids.append(token_id)
        reason: FinishReason | None = None
        if token_id in eos_token_ids and not self.params.ignore_eos:
            reason = "stop"
        elif self.num_output_tokens >= self.max_tokens:
            reason = "length"
        text = ""
        if self.text is not None:
            text, stopped = self.text.push(token_id)
            if stopped:
                reason = "stop"
            elif reason is not None:
                text += self.text.flush()
        return Delta(self.request_id, (token_id,), text, reason)
