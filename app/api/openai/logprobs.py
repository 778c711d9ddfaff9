"""Log probabilities in OpenAI's shapes, and tokens as they are written in them."""

from __future__ import annotations

import codecs
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from folio.app.api.openai.replies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from folio.app.engine.sampling.token_logprobs import TokenLogprobs
from folio.app.engine.sampling.token_text import byte_level_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# JSON has no infinity. OpenAI sends this value for tokens of probability 0.
LEAST_LOGPROB = -9999.0
# SentencePiece's sign for a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenTexts:
    """The texts of a tokenizer's tokens, as bytes from the vocabulary: a decoder would drop a token's first space, and
    replace incomplete characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._added = self._backend.get_added_tokens_decoder()
        decoders = set(_decoder_types(self._backend))
        self._is_byte_level = "ByteLevel" in decoders
        self._has_space_sign = bool(decoders & {"Metaspace", "Replace", "ByteFallback"})
        self._as_ids = False

    def written_as_ids(self) -> TokenTexts:
        """A copy that writes tokens as `token_id:5`."""
        other = copy.copy(self)
        other._as_ids = True
        return other

    def is_special(self, token_id: int) -> bool:
        """Whether the token is not part of any text."""
        added = self._added.get(token_id)
        return added is not None and added.special

    def bytes_of(self, token_id: int) -> bytes:
        """The token's text in UTF-8, perhaps part of a character; empty for ids beyond the tokenizer's vocabulary."""
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level and (content := byte_level_bytes(token)) is not None:
            return content
        if self._has_space_sign:
            if len(token) == 6 and token.startswith("<0x"):
                return bytes([int(token[3:5], 16)])
            return token.replace(_SPACE, " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    def chat_token(self, token_id: int) -> str:
        """The token as in chat completions: `\\xe2\\x82` for an incomplete character."""
        return self._written(token_id, "")

    def completion_token(self, token_id: int) -> str:
        """The token as in completions: `bytes:\\xe2\\x82` for an incomplete character."""
        return self._written(token_id, "bytes:")

    def _written(self, token_id: int, mark: str) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        content = self.bytes_of(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return mark + "".join(f"\\x{byte:02x}" for byte in content)


def _decoder_types(tokenizer: Tokenizer) -> Iterator[str]:
    if tokenizer.decoder is None:
        return
    state: Mapping[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    yield state["type"]
    for part in state.get("decoders", ()):
        # "Replace" replaces the sign for a space, or anything else.
        if part["type"] != "Replace" or part["pattern"] == {"String": _SPACE}:
            yield part["type"]


class Offsets:
    """The offset of each token's text in an output that grows.

    Args:
        before: characters by which the tokens' text is ahead of the output's. Some tokenizers begin every text with a
            space that the output does not have.

    Attributes:
        at: characters so far.
    """

    def __init__(self, tokens: TokenTexts, before: int = 0) -> None:
        self.at = -before
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> int:
        """The token's offset in characters. A token that completes a character begins where the character does."""
        begins = max(self.at, 0)
        if not self._tokens.is_special(token_id):
            self.at += len(self._decoder.decode(self._tokens.bytes_of(token_id)))
        return begins


def completion_logprobs(
    tokens: TokenTexts, offsets: Offsets, entries: Sequence[TokenLogprobs], num_top: int, first: int | None = None
) -> CompletionLogprobs:
    """Each token with `num_top` alternatives, and the token itself if it is not one of them.

    Args:
        first: the first token of the prompt, which has no log probability and precedes all entries.
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
    """Each token with exactly `num_top` alternatives, of which the token may be one."""

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
    """Log probabilities of a prompt: `None` for its first token, and `entries` for the others."""
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
