"""Log probabilities in OpenAI's shapes."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from app.engine.request import TokenLogprobs
from app.openai.replies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from app.openai.token_texts import TokenTexts

# JSON has no infinity; OpenAI writes this for what is next to impossible.
LEAST_LOGPROB = -9999.0


class Offsets:
    """Where each token's text begins in an output, as it grows.

    Args:
        before: characters by which the tokens' texts are ahead of the output's: tokenizers of some models begin every
            text with a space that is not in it.
    """

    def __init__(self, tokens: TokenTexts, before: int = 0) -> None:
        self._tokens = tokens
        self._at = -before
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def at(self) -> int:
        """Characters so far."""
        return self._at

    def push(self, token_id: int) -> int:
        """The token's offset in characters. A token that ends a character begins where the character does."""
        begins = max(self._at, 0)
        if not self._tokens.is_special(token_id):
            self._at += len(self._decoder.decode(self._tokens.bytes_of(token_id)))
        return begins


def completion_logprobs(
    tokens: TokenTexts, offsets: Offsets, entries: Sequence[TokenLogprobs], num_top: int, first: int | None = None
) -> CompletionLogprobs:
    """Of `num_top` alternatives, and the token itself if it is not one of them.

    Args:
        first: the token before all others, a prompt's first, which has no log probability.
    """
    answer = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    if first is not None:
        answer.tokens.append(tokens.completion_token(first))
        answer.token_logprobs.append(None)
        answer.top_logprobs.append(None)
        answer.text_offset.append(offsets.push(first))
    for entry in entries:
        answer.tokens.append(tokens.completion_token(entry.token_id))
        answer.token_logprobs.append(_finite(entry.logprob))
        top = {tokens.completion_token(token_id): _finite(logprob) for token_id, logprob in entry.top[:num_top]}
        answer.top_logprobs.append({answer.tokens[-1]: _finite(entry.logprob)} | top)
        answer.text_offset.append(offsets.push(entry.token_id))
    return answer


def chat_logprobs(tokens: TokenTexts, entries: Sequence[TokenLogprobs], num_top: int) -> ChatLogprobs:
    """Of exactly `num_top` alternatives, of which the token may be one."""

    def written(token_id: int, logprob: float) -> TopLogprob:
        content = tokens.bytes_of(token_id)
        return TopLogprob(token=tokens.chat_token(token_id), logprob=_finite(logprob), bytes=list(content))

    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                **written(entry.token_id, entry.logprob).model_dump(),
                top_logprobs=[written(token_id, logprob) for token_id, logprob in entry.top[:num_top]],
            )
            for entry in entries
        ]
    )


def prompt_logprobs(tokens: TokenTexts, entries: Sequence[TokenLogprobs], num_top: int) -> PromptLogprobs:
    """Nothing for the first token; `entries` are those of the others."""
    answer: PromptLogprobs = [None]
    for entry in entries:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:num_top], 1)]
        if entry.token_id not in {token_id for token_id, _, _ in ranked}:
            ranked.append((entry.token_id, entry.logprob, entry.rank))
        answer.append(
            {
                token_id: PromptLogprob(logprob=_finite(logprob), rank=rank, decoded_token=tokens.chat_token(token_id))
                for token_id, logprob, rank in ranked
            }
        )
    return answer


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
