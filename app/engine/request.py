"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from app.engine.detokenizer import TextStream
from app.engine.params import SamplingParams
from vmem import SequenceMemory, SwappedGroup, TokenChain

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to a request. `error` is set when the engine failed it, `refused` it after all, or has become
    `unavailable`; it is then the last one.

    `num_cached_tokens`: of the prompt, found in the prefix cache.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None
    refused: bool = False
    unavailable: bool = False
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request and its forks: they are preempted, swapped and brought back together (PagedAttention §4.5).

    Attributes:
        priority: the lower goes first.
        arrival: the earlier goes first, among equals.
        members: those that have not finished.
        swapped: blocks in host memory while it is swapped out, of the members in `swapped_members`.
    """

    priority: int
    arrival: int
    members: list[Request] = field(default_factory=list)
    swapped: SwappedGroup | None = None
    swapped_members: list[Request] = field(default_factory=list)

    @property
    def rank(self) -> tuple[int, int]:
        return self.priority, self.arrival


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its output so far, and how far its keys and values are cached.

    Attributes:
        group: who is preempted with it.
        token_ids: prompt and output.
        num_computed: tokens whose keys and values are in the cache; the rest is still to be computed.
        furthest: the most of them there ever were.
        max_tokens: output tokens at most, resolved against the context.
        chain: hashes of its tokens, for the prefix cache.
        memory: its blocks while it runs, else `None`.
        num_cached_tokens: of its prompt, found in the prefix cache when it began; `None` before.
        expected_cached_tokens: what whoever sent it here expected that to be; `None`: nothing.
        stops_at: token counts at which a step must end, so that a recurrent state is kept there.
        pin_name: it computes a prefix to pin, and samples nothing.
        text: the incremental detokeniser, `None` without a tokenizer.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    text: TextStream | None
    chain: TokenChain
    group: SequenceGroup
    token_ids: list[int]
    num_computed: int = 0
    furthest: int = 0
    memory: SequenceMemory | None = None
    num_cached_tokens: int | None = None
    expected_cached_tokens: int | None = None
    stops_at: tuple[int, ...] = ()
    pin_name: str | None = None
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.group.members.append(self)
        seed = self.params.seed
        # One uniform number a token from a generator of its own: what else is in the batch cannot matter.
        self.random = np.random.default_rng(None if seed is None else seed % 2**64)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def most_tokens(self) -> int:
        """Tokens it may come to have."""
        return len(self.prompt_token_ids) + self.max_tokens

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
        return Delta(self.request_id, (token_id,), text, reason, num_cached_tokens=self.num_cached_tokens or 0)
