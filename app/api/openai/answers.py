"""Answers: the pieces of a completion or chat completion as JSON bodies, whole or chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from folio.app.api.base import joined_text
from folio.app.api.openai.bodies import CompletionRequest, ForkRequest, GenerationBody, TokenFields
from folio.app.api.openai.chat_body import ChatCompletionRequest
from folio.app.api.openai.logprobs import Offsets, TokenTexts, chat_logprobs, completion_logprobs, prompt_logprobs
from folio.app.api.openai.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChoiceEnd,
    Completion,
    CompletionChoice,
    CompletionTokensDetails,
    PromptLogprobs,
    PromptTokensDetails,
    Usage,
)
from folio.app.api.openai.sampling_body import SamplingBody
from folio.app.api.output.parser import Part
from folio.app.api.output.plan import OutputPlan
from folio.app.api.output.reader import Kind
from folio.app.api.output.reasoning import ReasoningTokens
from folio.app.api.tools.bodies import FunctionCallDelta, ToolCall, ToolCallDelta
from folio.app.engine.request.delta import FinishReason
from folio.app.engine.sampling.token_logprobs import TokenLogprobs
from folio.app.fleet.messages import Piece, public_id
from folio.app.http.request_context import current_context


class Answer:
    """Base of all answers: id, usage and prompt log probabilities. Usage is charged to the caller.

    Args:
        prompts: token ids of each prompt; a fork has one empty prompt, which has been counted already.
        num_top: alternatives to list with each token; `None`: no log probabilities.

    Attributes:
        id: the public id, once there has been a piece. An answer can be forked by it, unless it has several prompts or
            the client has chosen the id.

    Raises:
        RateLimitError: the caller may not have so many tokens now.
        RequestError: the caller may never have so many.
    """

    def __init__(
        self,
        request_id: str,
        request: SamplingBody,
        tokens: TokenTexts,
        prompts: Sequence[Sequence[int]],
        num_top: int | None,
    ) -> None:
        given = request.request_id if isinstance(request, GenerationBody) else None
        self.id = request_id if given is None else f"{request_id.partition('-')[0]}-{given}"
        self.created = int(time.time())
        self._request = request
        token_fields = request if isinstance(request, TokenFields) else TokenFields()
        self._returns_token_ids = bool(token_fields.return_token_ids)
        self._tokens = tokens.written_as_ids() if token_fields.return_tokens_as_token_ids else tokens
        self._prompts = prompts
        self._num_top = num_top
        self._prompt_entries: dict[int, tuple[TokenLogprobs, ...]] = {}  # by prompt: only one output carries them
        self._has_public_id = len(prompts) > 1 or given is not None
        self._num_prompt_tokens = sum(map(len, prompts))
        self._num_cached = [0] * len(prompts)
        self._num_output_tokens = 0
        self._context = current_context()
        if self._context is not None:
            self._context.count_prompt(self._num_prompt_tokens)

    @property
    def usage(self) -> Usage:
        """The usage so far: each prompt once, and the tokens of all outputs."""
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_output_tokens,
            total_tokens=self._num_prompt_tokens + self._num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._num_cached)),
        )

    def keep_id(self) -> None:
        """Keep the present id: a client has seen it. Before the first piece it names no replica, so that the answer
        cannot be forked."""
        self._has_public_id = True

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self._request.model}

    def _receive(self, piece: Piece, prompt: int = 0) -> None:
        if not self._has_public_id:
            self.id, self._has_public_id = public_id(self.id, piece.replica), True
        if piece.prompt_logprobs:
            self._prompt_entries[prompt] = piece.prompt_logprobs

    def _count(self, piece: Piece, prompt: int = 0) -> None:
        self._num_cached[prompt] = max(self._num_cached[prompt], piece.num_cached_tokens)
        self._num_output_tokens += len(piece.token_ids)
        if self._context is not None:
            self._context.count_output(len(piece.token_ids), sum(self._num_cached))

    @property
    def _chunk_usage(self) -> Usage | None:
        """The usage in a chunk that is not the last."""
        return self.usage if self._request.continuous_usage else None

    def _token_ids(self, token_ids: Sequence[int]) -> list[int] | None:
        """The tokens, if they are requested."""
        return list(token_ids) if self._returns_token_ids else None

    def _prompt_logprobs(self, prompt: int = 0) -> PromptLogprobs | None:
        if self._request.prompt_logprobs is None:
            return None
        return prompt_logprobs(self._tokens, self._prompt_entries.get(prompt, ()), self._request.prompt_logprobs)


class CompletionAnswer(Answer):
    """The answer to one or several prompts.

    Args:
        echoed: the prompts' texts, with which outputs begin. With `max_tokens` 0 the generated tokens are not shown.
    """

    def __init__(
        self,
        request_id: str,
        request: CompletionRequest | ForkRequest,
        tokens: TokenTexts,
        prompts: Sequence[Sequence[int]],
        echoed: Sequence[str] | None = None,
    ) -> None:
        super().__init__(request_id, request, tokens, prompts, request.logprobs)
        self._echoed = echoed
        self._only_echoes = echoed is not None and request.max_tokens == 0
        self._offsets: dict[tuple[int, int], Offsets] = {}  # by prompt and output, once the output has begun

    def chunk(self, piece: Piece, prompt: int = 0) -> Completion:
        """The chunk of a piece of an output of that prompt."""
        choice = self._choice(piece, prompt)
        return self._completion([choice], self._chunk_usage)

    def last_chunk(self) -> Completion:
        """The chunk after all others, with the usage."""
        return self._completion([], self.usage)

    def full_answer(self, outputs: Sequence[Sequence[Piece]]) -> Completion:
        """The whole answer. Args: for each prompt its outputs, each in one piece."""
        choices = [self._choice(piece, prompt) for prompt, pieces in enumerate(outputs) for piece in pieces]
        return self._completion(sorted(choices, key=lambda choice: choice.index), self.usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(**self._head(), choices=choices, usage=usage)

    def _choice(self, piece: Piece, prompt: int) -> CompletionChoice:
        self._receive(piece, prompt)
        offsets = self._offsets.get((prompt, piece.index))
        begins = offsets is None
        if offsets is None:
            offsets = self._offsets[prompt, piece.index] = self._first_offsets(prompt)
        text, first = "", None
        entries: tuple[TokenLogprobs, ...] = ()
        if self._echoed is not None and begins:
            text, entries, first = self._echoed[prompt], self._prompt_entries.get(prompt, ()), self._prompts[prompt][0]
        if self._only_echoes:
            ends: FinishReason | None = "length" if piece.finish_reason is not None else None
            piece = replace(piece, text="", token_ids=(), logprobs=(), finish_reason=ends, stop_reason=None)
        else:
            self._count(piece, prompt)
        text, entries = text + piece.text, entries + piece.logprobs
        logprobs = None
        if self._num_top is not None and (begins or not self._only_echoes):
            logprobs = completion_logprobs(self._tokens, offsets, entries, self._num_top, first)
        return CompletionChoice(
            index=prompt * self._request.num_outputs + piece.index,
            text=text,
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            score=piece.score,
            prompt_logprobs=self._prompt_logprobs(prompt) if begins else None,
            token_ids=self._token_ids(piece.token_ids),
            prompt_token_ids=self._token_ids(self._prompts[prompt]) if begins else None,
        )

    def _first_offsets(self, prompt: int) -> Offsets:
        if self._echoed is None or self._num_top is None:
            return Offsets(self._tokens)
        tokens_text = Offsets(self._tokens)
        for token_id in self._prompts[prompt]:
            tokens_text.push(token_id)
        return Offsets(self._tokens, tokens_text.at - len(self._echoed[prompt]))


class ChatAnswer(Answer):
    """The answer to a conversation.

    Args:
        plan: makes a parser for each output.
    """

    def __init__(
        self,
        request_id: str,
        request: ChatCompletionRequest,
        tokens: TokenTexts,
        prompt: Sequence[int],
        plan: OutputPlan,
    ) -> None:
        super().__init__(request_id, request, tokens, [prompt], request.num_logprobs)
        self._plan = plan
        self._outputs: dict[int, _Output] = {}
        self._has_begun = False
        last = request.messages[-1] if request.echo else None
        self._echoed = joined_text(last.content) if last is not None and last.role == "assistant" else ""
        self._service_tier: Literal["default"] | None = None if request.service_tier is None else "default"

    @property
    def usage(self) -> Usage:
        usage = super().usage
        if self._plan.format.reasons:
            num_tokens = sum(output.num_reasoning_tokens for output in self._outputs.values())
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=num_tokens)
        return usage

    def parts(self, piece: Piece) -> list[Part]:
        """The parts of an output that this piece adds, in order. The parser may hold back ambiguous text."""
        self._receive(piece)
        self._count(piece)
        return self._output(piece).push(piece)

    def chunk(self, piece: Piece, _prompt: int = 0) -> ChatCompletionChunk | None:
        """The chunk of a piece; `None` while the parser holds all of its text back."""
        parts, output = self.parts(piece), self._output(piece)
        entries = (*output.held_entries, *piece.logprobs)
        token_ids = (*output.held_token_ids, *piece.token_ids)
        if not parts and piece.finish_reason is None:
            output.held_entries, output.held_token_ids = entries, token_ids
            return None
        output.held_entries, output.held_token_ids = (), ()
        is_first, self._has_begun = not self._has_begun, True
        begins, output.has_begun = not output.has_begun, True
        content, reasoning = _joined(parts, "content"), _joined(parts, "reasoning")
        if begins:
            content = self._echoed + content
        calls = output.call_deltas(parts)
        delta = ChatDelta(
            role="assistant" if begins else None,
            # Clients concatenate contents: an empty one is sent, too, unless there is something else instead.
            content=content if content or not (calls or reasoning) else None,
            reasoning_content=reasoning or None,
            reasoning=reasoning or None,
            tool_calls=calls or None,
        )
        choice = ChatChunkChoice(
            delta=delta,
            **self.ending(piece),
            logprobs=self.logprobs(entries),
            token_ids=self._token_ids(token_ids),
        )
        return self._chunk(
            [choice],
            usage=self._chunk_usage,
            prompt_logprobs=self._prompt_logprobs() if is_first else None,
            prompt_token_ids=self._token_ids(self._prompts[0]) if is_first else None,
        )

    def last_chunk(self) -> ChatCompletionChunk:
        """The chunk after all others, with the usage."""
        return self._chunk([], usage=self.usage)

    def full_answer(self, outputs: Sequence[Sequence[Piece]]) -> ChatCompletion:
        """The whole answer. Args: the outputs of the one prompt, each in one piece."""
        [pieces], choices = outputs, []
        for piece in sorted(pieces, key=lambda piece: piece.index):
            parts = self.parts(piece)
            content, reasoning = self._echoed + _joined(parts, "content"), _joined(parts, "reasoning") or None
            calls = [
                ToolCall.model_validate(d.model_dump(exclude={"index"})) for d in self._output(piece).call_deltas(parts)
            ]
            message = AssistantMessage(
                content=content if content or not calls else None,
                reasoning_content=reasoning,
                reasoning=reasoning,
                tool_calls=calls or None,
            )
            choice = ChatChoice(
                message=message,
                **self.ending(piece),
                logprobs=self.logprobs(piece.logprobs),
                token_ids=self._token_ids(piece.token_ids),
            )
            choices.append(choice)
        return ChatCompletion(
            **self._head(),
            choices=choices,
            usage=self.usage,
            service_tier=self._service_tier,
            prompt_logprobs=self._prompt_logprobs(),
            prompt_token_ids=self._token_ids(self._prompts[0]),
        )

    def new_call_id(self) -> str:
        return self._plan.format.new_call_id()

    def ending(self, piece: Piece) -> dict[str, Any]:
        """The fields of a choice that its piece decides."""
        reason: ChoiceEnd | None = piece.finish_reason
        if reason == "stop" and self._output(piece).num_calls and not self.ends_within_call(piece):
            reason = "tool_calls"
        return {
            "index": piece.index,
            "finish_reason": reason,
            "stop_reason": piece.stop_reason,
            "score": piece.score,
        }

    def ends_within_call(self, piece: Piece) -> bool:
        """Whether a stop string has ended the output in the middle of a call, which must not run then."""
        return isinstance(piece.stop_reason, str) and self._output(piece).is_cut

    def logprobs(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        return None if self._num_top is None else chat_logprobs(self._tokens, entries, self._num_top)

    def _output(self, piece: Piece) -> _Output:
        if piece.index not in self._outputs:
            self._outputs[piece.index] = _Output(self._plan, self._tokens)
        return self._outputs[piece.index]

    def _chunk(self, choices: list[ChatChunkChoice], **more: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._head(), choices=choices, service_tier=self._service_tier, **more)


class _Output:
    """One output of a chat completion, as it grows."""

    def __init__(self, plan: OutputPlan, tokens: TokenTexts) -> None:
        self.has_begun = False
        self.held_entries: tuple[TokenLogprobs, ...] = ()
        self.held_token_ids: tuple[int, ...] = ()
        self.num_calls = 0
        marks = plan.reasoning_marks
        self._reasoning = None if marks is None else ReasoningTokens(*marks, tokens.bytes_of)
        self._parser = plan.parser()
        self._new_call_id = plan.format.new_call_id

    @property
    def is_cut(self) -> bool:
        return self._parser is not None and self._parser.is_cut

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._reasoning is None else self._reasoning.count

    def push(self, piece: Piece) -> list[Part]:
        if self._reasoning is not None:
            self._reasoning.push(piece.token_ids)
        if self._parser is None:
            return [Part("content", piece.text)] if piece.text else []
        parts = self._parser.push(piece.text)
        if piece.finish_reason is not None:
            parts += self._parser.finish()
        self.num_calls += sum(part.kind == "call" for part in parts)
        return parts

    def call_deltas(self, parts: Sequence[Part]) -> list[ToolCallDelta]:
        """The deltas of calls: one for each call that begins, and one for arguments of an earlier one."""
        deltas: list[ToolCallDelta] = []
        index = self.num_calls - sum(part.kind == "call" for part in parts) - 1
        for part in parts:
            if part.kind == "call":
                index += 1
                function = FunctionCallDelta(name=part.text, arguments="")
                deltas.append(ToolCallDelta(index=index, id=self._new_call_id(), type="function", function=function))
            elif part.kind == "arguments" and deltas:
                deltas[-1].function.arguments = (deltas[-1].function.arguments or "") + part.text
            elif part.kind == "arguments":
                deltas.append(ToolCallDelta(index=index, function=FunctionCallDelta(arguments=part.text)))
        return deltas


def _joined(parts: Sequence[Part], kind: Kind) -> str:
    return "".join(part.text for part in parts if part.kind == kind)
