"""A scheduled step: the tokens of each sequence."""

from __future__ import annotations

from dataclasses import dataclass

from folio.app.engine.report import attended_tokens
from folio.app.engine.request.request import Sequence
from folio.vmem import PrefixNode


class Scheduled:
    """The tokens of one sequence in a step; immutable.

    Attributes:
        start: number of the sequence's tokens before them.
        num_tokens: number of tokens, drafts included.
        drafts: draft tokens after the sequence's last token.
        samples: whether the sequence's last token is computed, so that the next one is chosen.
        num_logits: number of tokens, the last ones, whose logits are needed.
        pending_row: the row of the only token, which is not known yet, in the previous step's sampled tokens.
    """

    __slots__ = ("drafts", "num_logits", "num_tokens", "pending_row", "samples", "sequence", "start")

    def __init__(self, sequence: Sequence, num_tokens: int, drafts: tuple[int, ...] = ()) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.drafts = drafts
        self.start = start = sequence.num_computed
        self.pending_row = sequence.pending_row
        num_certain = num_tokens - len(drafts)
        self.samples = (
            start + num_certain == len(sequence.token_ids) + sequence.num_awaited
            and sequence.pin_name is None
            and sequence.pooled is None
        )
        self.num_logits = 1 + len(drafts) if self.samples else 0
        if sequence.params.prompt_logprobs is not None and start < len(sequence.prompt_token_ids):
            self.num_logits = num_tokens

    @property
    def num_attended(self) -> int:
        """Sum of the cached tokens that each query attends to, sliding windows ignored."""
        return attended_tokens(self.num_tokens, self.start)

    @property
    def ends_prompt(self) -> bool:
        """Whether the last of the sequence's known tokens is computed."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)


@dataclass(slots=True)
class Committed:
    """A committed step.

    Attributes:
        units: units of the prefix cache that the step computes (`PrefixCache.commit_prefixes`).
        progress: whether it computes any token for the first time, not again after a preemption.
    """

    units: list[tuple[PrefixNode, int]]
    progress: bool = False
