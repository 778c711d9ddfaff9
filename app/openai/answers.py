"""From the pieces of a completion's outputs to its answer, whole or chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Sequence

from app.engine.request import TokenLogprobs
from app.exchange import current_context
from app.fleet.messages import Piece, public_id
from app.openai.logprobs import Offsets, TokenTexts, completion_logprobs, prompt_logprobs
from app.openai.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    PromptTokensDetails,
    Usage,
)


class Tally:
    """What a request has used: each prompt once, and the tokens of all outputs. Its caller is charged for that.

    Raises:
        RateLimitError: the caller may not have so many tokens now.
        RequestError: the caller may never have so many.
    """

    def __init__(self, num_prompt_tokens: Sequence[int]) -> None:
        self._num_prompt_tokens = sum(num_prompt_tokens)
        self._num_cached = [0] * len(num_prompt_tokens)
        self._num_output_tokens = 0
        self._exchange = current_context()
        if self._exchange is not None:
            self._exchange.count_prompt(self._num_prompt_tokens)

    def add(self, piece: Piece, prompt: int = 0) -> None:
        self._num_cached[prompt] = max(self._num_cached[prompt], piece.num_cached_tokens)
        self._num_output_tokens += len(piece.token_ids)
        if self._exchange is not None:
            self._exchange.count_output(len(piece.token_ids), sum(self._num_cached))

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_output_tokens,
            total_tokens=self._num_prompt_tokens + self._num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._num_cached)),
        )


class CompletionAnswer:
    """The answer to one or several prompts. Only that to a single one has an id that can be forked.

    Args:
        prompts: token ids of each; an empty one for a fork, whose prompt has been counted already.
        num_outputs: of each prompt.
        num_top: alternatives to list with each token; `None`: no log probabilities.
        num_prompt_top: the same for `prompt_logprobs`.
        echo: the prompts' texts, for outputs to begin with.
        only_echoes: the outputs themselves are not shown.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        tokens: TokenTexts,
        prompts: Sequence[Sequence[int]],
        *,
        num_outputs: int = 1,
        num_top: int | None = None,
        num_prompt_top: int | None = None,
        echo: Sequence[str] | None = None,
        only_echoes: bool = False,
    ) -> None:
        self._id = request_id
        self._model = model
        self._created = int(time.time())
        self._tokens = tokens
        self._prompts = prompts
        self._num_outputs = num_outputs
        self._num_top = num_top
        self._num_prompt_top = num_prompt_top
        self._echo = echo
        self._only_echoes = only_echoes
        self._tally = Tally([len(prompt) for prompt in prompts])
        self._prompt_entries: dict[int, tuple[TokenLogprobs, ...]] = {}  # by prompt: they come with one output only
        self._offsets: dict[tuple[int, int], Offsets] = {}  # of outputs that have begun
        self._is_named = len(prompts) > 1

    def chunk(self, piece: Piece, prompt: int = 0) -> Completion:
        """What a piece of an output of that prompt adds."""
        return self._completion([self._choice(piece, prompt)])

    def last_chunk(self) -> Completion:
        """The usage, when everything else has been said."""
        return self._completion([], self._tally.usage())

    def full_answer(self, outputs: Sequence[Sequence[Piece]]) -> Completion:
        """Args: for each prompt its outputs, each in one piece."""
        choices = [self._choice(piece, prompt) for prompt, pieces in enumerate(outputs) for piece in pieces]
        return self._completion(sorted(choices, key=lambda choice: choice.index), self._tally.usage())

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _choice(self, piece: Piece, prompt: int) -> CompletionChoice:
        if not self._is_named:
            self._id, self._is_named = public_id(self._id, piece.replica), True
        if piece.prompt_logprobs:
            self._prompt_entries[prompt] = piece.prompt_logprobs
        offsets = self._offsets.get((prompt, piece.index))
        begins = offsets is None
        echo = self._echo[prompt] if self._echo is not None and begins else ""
        if offsets is None:
            offsets = self._offsets[prompt, piece.index] = self._first_offsets(prompt)
        logprobs = self._echoed(prompt, offsets) if begins else None
        if not self._only_echoes:
            self._tally.add(piece, prompt)
            logprobs = self._joined(logprobs, piece, offsets)
        return CompletionChoice(
            index=prompt * self._num_outputs + piece.index,
            text=echo if self._only_echoes else echo + piece.text,
            logprobs=logprobs,
            finish_reason="length" if self._only_echoes and piece.finish_reason is not None else piece.finish_reason,
            stop_reason=None if self._only_echoes else piece.stop_reason,
            score=piece.score,
            prompt_logprobs=self._of_prompt(prompt) if begins else None,
        )

    def _first_offsets(self, prompt: int) -> Offsets:
        if self._echo is None:
            return Offsets(self._tokens)
        whole = Offsets(self._tokens)
        for token_id in self._prompts[prompt]:
            whole.push(token_id)
        return Offsets(self._tokens, whole.at - len(self._echo[prompt]))

    def _echoed(self, prompt: int, offsets: Offsets) -> CompletionLogprobs | None:
        if self._echo is None or self._num_top is None:
            return None
        entries = self._prompt_entries.get(prompt, ())
        return completion_logprobs(self._tokens, offsets, entries, self._num_top, self._prompts[prompt][0])

    def _joined(self, before: CompletionLogprobs | None, piece: Piece, offsets: Offsets) -> CompletionLogprobs | None:
        if self._num_top is None:
            return None
        after = completion_logprobs(self._tokens, offsets, piece.logprobs, self._num_top)
        if before is None:
            return after
        return CompletionLogprobs(
            tokens=before.tokens + after.tokens,
            token_logprobs=before.token_logprobs + after.token_logprobs,
            top_logprobs=before.top_logprobs + after.top_logprobs,
            text_offset=before.text_offset + after.text_offset,
        )

    def _of_prompt(self, prompt: int) -> PromptLogprobs | None:
        if self._num_prompt_top is None:
            return None
        return prompt_logprobs(self._tokens, self._prompt_entries.get(prompt, ()), self._num_prompt_top)
