"""Translator of request bodies into calls of engine replicas, and of the replicas' pieces into answers.

A conversation goes through here in one direction: tools (`tools.choice`) → prompt (`prompts`) → plan of the output
(`output.plan`) → sampling parameters (`bodies`, `sampling_body`) → call.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from folio.app.api.anthropic.answers import MessageAnswer
from folio.app.api.anthropic.body import CountTokensRequest, MessagesRequest, in_terms_of_messages
from folio.app.api.anthropic.replies import TokenCount
from folio.app.api.base import SizedExecutor
from folio.app.api.input.conversations import SlowTemplateError
from folio.app.api.input.prompts import PromptEncoder
from folio.app.api.openai.answers import ChatAnswer, CompletionAnswer
from folio.app.api.openai.bodies import CompletionRequest, ForkRequest, GenerationBody
from folio.app.api.openai.chat_body import ChatCompletionRequest
from folio.app.api.openai.logprobs import TokenTexts
from folio.app.api.openai.token_bodies import DetokenizedText, DetokenizeRequest, TokenizeRequest, Tokens
from folio.app.api.output.formats import OutputFormat, output_format
from folio.app.api.output.plan import plan_output
from folio.app.api.responses.answers import ResponseAnswer
from folio.app.api.responses.body import ResponsesRequest, in_terms_of_responses
from folio.app.api.tools.choice import chosen_tools
from folio.app.engine.request.turn import COMPLETION, Turn
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import ContextLengthError, RequestError, UnknownModelError, UnknownRequestError
from folio.app.fleet.messages import ForkCall, GenerateRequest, Piece, split_public_id
from folio.app.http.request_context import checked, current_context, note_ignored

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Separate threads: long texts must not occupy those of the event loop's default executor.
_NUM_THREADS = 4
# Smaller bodies are translated in the event loop: that takes no longer than the hand-over to a thread, which waits 5 ms
# for the interpreter's lock while other threads compute.
_LOOP_BYTES = 2048
# Log probabilities of prompts in an answer, alternatives included. They cost the engine little, but each output repeats
# them: this many are 5 MB of JSON.
MAX_PROMPT_LOGPROBS = 200_000
# Answers with log probabilities of more tokens are built in threads. A token counts like so many bytes of a body.
_LOOP_TOKENS, _TOKEN_BYTES = 200, 64

# The field with the output limit, by the prefix of the answer's id.
_LIMITS = {"resp": "max_output_tokens", "msg": "max_tokens"}

P = ParamSpec("P")
T = TypeVar("T")


class Translator:
    """Everything that needs the tokenizer. Methods may take long: call them through `in_thread`. All raise
    `RequestError`.

    Args:
        model_name: the name by which clients call the model.
        adapters: names of the LoRA adapters of the settings, which clients request as models.
        output: how the model writes reasoning and calls.

    Attributes:
        added: the adapters loaded at run time, name → id.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model_name: str,
        adapters: Sequence[str],
        output: OutputFormat | None = None,
    ) -> None:
        self._format = output_format(tokenizer) if output is None else output
        self.prompts = PromptEncoder(tokenizer)
        self._tokens = TokenTexts(tokenizer)
        self._executor = SizedExecutor("translator", _NUM_THREADS)
        self._model_name = model_name
        self._adapters = tuple(adapters)
        self.added: Mapping[str, str] = {}

    async def in_thread(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call another method: in the event loop for small bodies, and in a thread for large ones, for requests by
        handle, whose size is not known, and where the chat template turns out to be slow."""
        context = current_context()
        num_bytes = 0 if context is None else context.num_body_bytes
        if 0 < num_bytes <= _LOOP_BYTES:
            with suppress(SlowTemplateError):
                return method(*args, **kwargs)
        with checked():
            return await self._executor.run(num_bytes, method, *args, **kwargs)

    async def build_answer(self, build: Callable[[list[list[Piece]]], T], outputs: list[list[Piece]]) -> T:
        """Call `build` with complete outputs, in a thread if they have many log probabilities or long vectors."""
        pieces = [piece for of_prompt in outputs for piece in of_prompt]
        num_prompt = sum(len(piece.prompt_logprobs) for piece in pieces) * len(pieces)
        num_bytes = (num_prompt + sum(len(piece.logprobs) for piece in pieces)) * _TOKEN_BYTES
        num_bytes += sum(len(piece.pooled) for piece in pieces if piece.pooled is not None)
        if num_bytes < _LOOP_TOKENS * _TOKEN_BYTES:
            return build(outputs)
        return await self._executor.run(num_bytes, build, outputs)

    def translate_completion(
        self, request: CompletionRequest, session: str | None, max_model_len: int
    ) -> tuple[list[GenerateRequest], CompletionAnswer]:
        """A call for each prompt, and the answer."""
        adapter = self.adapter_of(request.model)
        prompts = self.prompts.encode_completion(request, max_model_len)
        tops = (request.logprobs if request.echo else None, request.prompt_logprobs)
        _check_entries(sum(map(len, prompts)) * request.num_outputs, *tops)
        params = request.sampling_params()
        request_id = _new_id("cmpl")
        fitted = [_fitted(params, prompt, max_model_len, "prompt", "max_tokens") for prompt in prompts]
        calls = [
            self._call_of(f"{request_id}-{i}" if i else request_id, prompt, fitted[i], request, adapter, session, i)
            for i, prompt in enumerate(prompts)
        ]
        if request.include_progress and len(calls) == 1:
            calls = [replace(calls[0], shows_progress=True)]
        echoed = self.prompts.echoed_texts(request, prompts) if request.echo else None
        return calls, CompletionAnswer(request_id, request, self._tokens, prompts, echoed)

    def translate_response(
        self, request: ResponsesRequest, session: str | None, max_model_len: int
    ) -> tuple[list[GenerateRequest], ResponseAnswer]:
        """The one call, and the answer."""
        note_ignored(request.ignored_fields)
        with in_terms_of_responses():
            calls, chat = self.translate_chat(request.as_chat(), session, max_model_len, "resp")
        return calls, ResponseAnswer(request, chat)

    def translate_message(
        self, request: MessagesRequest, session: str | None, max_model_len: int
    ) -> tuple[list[GenerateRequest], MessageAnswer]:
        """The one call, and the answer."""
        note_ignored(request.ignored_fields)
        with in_terms_of_messages():
            calls, chat = self.translate_chat(request.as_chat(), session, max_model_len, "msg")
        return calls, MessageAnswer(request, chat)

    def count_tokens(self, request: CountTokensRequest, max_model_len: int) -> TokenCount:
        """The tokens of a conversation."""
        self._check_model(request.model)
        with in_terms_of_messages():
            return TokenCount(input_tokens=len(self.prompts.encode_chat(request.as_chat(), max_model_len)))

    def translate_chat(
        self, request: ChatCompletionRequest, session: str | None, max_model_len: int, kind: str = "chatcmpl"
    ) -> tuple[list[GenerateRequest], ChatAnswer]:
        """The one call, and the answer. `kind` is the prefix of the id."""
        note_ignored(request.ignored_fields)
        adapter = self.adapter_of(request.model)
        given = request.given_tools
        tools = chosen_tools(given.functions, given.choice, request.parallel_tool_calls)
        prompt = self.prompts.encode_chat(request, max_model_len)
        end = partial(self.prompts.end_of, prompt)
        plan = plan_output(self._format, tools, end, request.reasoning_budget, request.continued_text)
        limit = _LIMITS.get(kind) or (
            "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        )
        params = _fitted(request.sampling_params(plan), prompt, max_model_len, "messages", limit)
        _check_entries(len(prompt) * params.n, params.prompt_logprobs)
        call = self._call_of(_new_id(kind), prompt, params, request, adapter, session, turn=plan.turn)
        if request.include_progress:
            call = replace(call, shows_progress=True)
        return [call], ChatAnswer(call.request_id, request, self._tokens, prompt, plan)

    def translate_fork(self, request: ForkRequest) -> tuple[ForkCall, CompletionAnswer]:
        """The call and the answer. Raises `UnknownRequestError` if no request with such an id could be forked."""
        self.adapter_of(request.model)
        fork_of, replica = split_public_id(request.request_id)
        if not replica:
            raise UnknownRequestError(
                f"{request.request_id!r} is not the id of an answer to one prompt, or was sent before a replica had "
                "the request: these cannot be forked",
                "request_id",
            )
        request_id, params = _new_id("cmpl"), request.sampling_params()
        timeout_s, owner, context = request.timeout_s, None, current_context()
        if context is not None:
            timeout_s, owner = context.authorize_fork(request_id, request.model, timeout_s), context.owner
        call = ForkCall(request_id, fork_of, request.index, replica, params, timeout_s, owner, self._model_name)
        return call, CompletionAnswer(call.request_id, request, self._tokens, [[]])

    def translate_tokenize(self, request: TokenizeRequest, max_model_len: int) -> Tokens:
        """The tokens of a text or a conversation."""
        self._check_model(request.model)
        tokens = self.prompts.encode_tokenize(request, max_model_len)
        texts = [self._tokens.chat_token(token_id) for token_id in tokens] if request.return_token_strs else None
        return Tokens(count=len(tokens), max_model_len=max_model_len, tokens=tokens, token_strs=texts)

    def translate_detokenize(self, request: DetokenizeRequest) -> DetokenizedText:
        """The text of tokens."""
        self._check_model(request.model)
        return DetokenizedText(prompt=self.prompts.decode(request.tokens))

    def adapter_of(self, model: str) -> str | None:
        """The adapter of that name, or `None` for the model itself. Raises `UnknownModelError`."""
        if model == self._model_name:
            return None
        if model not in self._adapters and model not in self.added:
            served = ", ".join(map(repr, (self._model_name, *self._adapters, *self.added)))
            raise UnknownModelError(f"the model {model!r} does not exist; this server has {served}", "model")
        return model

    def key_of(self, adapter: str | None) -> str | None:
        """`GenerateRequest.adapter_key`: the id of an adapter loaded at run time; `None` for others."""
        return None if adapter is None else self.added.get(adapter)

    def _check_model(self, model: str | None) -> None:
        """Check a request's model. Raises `UnknownModelError`, or `ForbiddenError` if the caller may not use it."""
        name = self._model_name if model is None else model
        self.adapter_of(name)
        if (context := current_context()) is not None:
            context.check_model(name)

    def _call_of(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        request: GenerationBody,
        adapter: str | None,
        session: str | None,
        number: int = 0,
        turn: Turn = COMPLETION,
    ) -> GenerateRequest:
        """The call for prompt `number`, as far as the caller's API key allows it."""
        tenant, timeout_s = request.tenant, request.timeout_s
        context, repeat_key = current_context(), None
        if context is not None:
            if context.attempt_of is not None:
                repeat_key = f"{context.attempt_of} {number}"
            tenant, timeout_s = context.authorize(
                request_id,
                model=request.model,
                tenant=tenant,
                priority=request.priority or 0,
                pins=request.pin is not None,
                timeout_s=timeout_s,
            )
        return GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=params,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            adapter=adapter,
            adapter_key=self.key_of(adapter),
            tenant=tenant,
            owner=None if context is None else context.owner,
            user=request.user or None,
            timeout_s=timeout_s,
            turn=turn,
            cache_ttl_s=request.wanted_ttl_s,
            session=session or request.session_id or request.prompt_cache_key,
            repeat_key=repeat_key,
            model=self._model_name,
        )


def _fitted(
    params: SamplingParams, prompt: Sequence[int], max_model_len: int, prompt_field: str, limit_field: str
) -> SamplingParams:
    """The parameters, without an output limit that exceeds the room in the context: clients that do not know this model
    ask for more. The answer's header names the limit's field. Raises `ContextLengthError` if the prompt has no room, or
    if the settings refuse such limits."""
    num_tokens, max_tokens = len(prompt), params.max_tokens or 1
    if num_tokens >= max_model_len:
        raise ContextLengthError.of_prompt(num_tokens, max_model_len, prompt_field)
    if num_tokens + max_tokens <= max_model_len:
        return params
    if (context := current_context()) is not None:
        if context.settings.max_tokens == "refuse":
            raise ContextLengthError.of_output(num_tokens, max_tokens, max_model_len, prompt_field, limit_field)
        context.note_ignored([limit_field])
    return replace(params, max_tokens=None)


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _check_entries(num_prompt_tokens: int, *num_top: int | None) -> None:
    """Raise `RequestError` for too many log probabilities of prompts.

    Args:
        num_prompt_tokens: over all outputs, since the answer repeats the prompt's for each.
        num_top: alternatives of each kind of log probabilities; `None`: not requested.
    """
    entries = num_prompt_tokens * sum(1 + top for top in num_top if top is not None)
    if entries > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"the answer would have {entries} log probabilities of prompts; at most {MAX_PROMPT_LOGPROBS}: request "
            "fewer prompts, outputs or alternatives at once",
            "logprobs",
        )
