"""From the pieces of a chat's outputs to its answer, whole or chunk by chunk, with the tools that they call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from app.engine.request import TokenLogprobs
from app.fleet.messages import Piece, public_id
from app.openai.answers import Tally
from app.openai.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from app.openai.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChoiceEnd,
    PromptLogprobs,
    Usage,
)
from app.openai.tools.bodies import FunctionCall, ToolCall, ToolCallDelta


class ToolParser(Protocol):
    """Finds the tool calls in one output."""

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """More of the output; returns what is certain of the content and of the calls."""
        ...

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """The output is complete; returns the rest."""
        ...


class ChatAnswer:
    """The answer to a conversation.

    Args:
        num_top, num_prompt_top: see `CompletionAnswer`.
        parser: makes one for each output when there are tools that may be called.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        tokens: TokenTexts,
        prompt: Sequence[int],
        *,
        num_top: int | None = None,
        num_prompt_top: int | None = None,
        parser: Callable[[], ToolParser] | None = None,
    ) -> None:
        self._id = request_id
        self._model = model
        self._created = int(time.time())
        self._tokens = tokens
        self._num_top = num_top
        self._num_prompt_top = num_prompt_top
        self._tally = Tally([len(prompt)])
        self._parser = parser
        self._parsers: dict[int, ToolParser] = {}
        self._called: set[int] = set()  # outputs that have called a tool
        self._begun: set[int] = set()
        self._held_entries: dict[int, tuple[TokenLogprobs, ...]] = {}
        self._prompt_entries: tuple[TokenLogprobs, ...] = ()
        self._is_named = False

    @property
    def id(self) -> str:
        """What clients know the request by, once there has been a piece of it."""
        return self._id

    @property
    def usage(self) -> Usage:
        """Up to now."""
        return self._tally.usage()

    def chunk(self, piece: Piece) -> ChatCompletionChunk | None:
        """What a piece adds; `None` while it cannot be told whether it is part of a call."""
        content, calls = self._take(piece)
        entries = self._held_entries.pop(piece.index, ()) + piece.logprobs
        if not (content or calls or piece.finish_reason is not None):
            self._held_entries[piece.index] = entries
            return None
        first, begins = not self._begun, piece.index not in self._begun
        self._begun.add(piece.index)
        # Clients add up contents, so the first is there even when it is empty, unless there are calls instead.
        delta = ChatDelta(
            role="assistant" if begins else None,
            content=content if content or not calls else None,
            tool_calls=calls or None,
        )
        choice = ChatChunkChoice(
            index=piece.index,
            delta=delta,
            logprobs=self._logprobs(entries),
            finish_reason=self._reason(piece),
            stop_reason=piece.stop_reason,
            score=piece.score,
        )
        chunk = self._chunk([choice])
        chunk.prompt_logprobs = self._prompt_logprobs() if first else None
        return chunk

    def last_chunk(self) -> ChatCompletionChunk:
        """The usage, when everything else has been said."""
        return self._chunk([], self._tally.usage())

    def full_answer(self, pieces: Sequence[Piece]) -> ChatCompletion:
        """Args: outputs, each in one piece."""
        choices = []
        for piece in sorted(pieces, key=lambda piece: piece.index):
            content, deltas = self._take(piece)
            calls = joined_calls(deltas)
            message = AssistantMessage(content=content if content or not calls else None, tool_calls=calls or None)
            choices.append(
                ChatChoice(
                    index=piece.index,
                    message=message,
                    logprobs=self._logprobs(piece.logprobs),
                    finish_reason=self._reason(piece),
                    stop_reason=piece.stop_reason,
                    score=piece.score,
                )
            )
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._tally.usage(),
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _take(self, piece: Piece) -> tuple[str, list[ToolCallDelta]]:
        """The piece's content, and what it adds to calls."""
        if not self._is_named:
            self._id, self._is_named = public_id(self._id, piece.replica), True
        self._tally.add(piece)
        self._prompt_entries = self._prompt_entries or piece.prompt_logprobs
        if self._parser is None:
            return piece.text, []
        if piece.index not in self._parsers:
            self._parsers[piece.index] = self._parser()
        content, calls = self._parsers[piece.index].push(piece.text)
        if piece.finish_reason is not None:
            more, last_calls = self._parsers[piece.index].finish()
            content, calls = content + more, calls + last_calls
        if calls:
            self._called.add(piece.index)
        return content, calls

    def _reason(self, piece: Piece) -> ChoiceEnd | None:
        return "tool_calls" if piece.finish_reason == "stop" and piece.index in self._called else piece.finish_reason

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        return None if self._num_top is None else chat_logprobs(self._tokens, entries, self._num_top)

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        if self._num_prompt_top is None:
            return None
        return prompt_logprobs(self._tokens, self._prompt_entries, self._num_prompt_top)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatCompletionChunk:
        return ChatCompletionChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)


def joined_calls(deltas: Sequence[ToolCallDelta]) -> list[ToolCall]:
    """The calls that the deltas of one output make up, in order. The first delta of each has its id and name."""
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        function = delta.function
        if delta.index not in calls:
            assert delta.id is not None
            assert function.name is not None
            calls[delta.index] = ToolCall(id=delta.id, function=FunctionCall(name=function.name, arguments=""))
        calls[delta.index].function.arguments += function.arguments or ""
    return [calls[index] for index in sorted(calls)]
