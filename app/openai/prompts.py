"""Prompts: the texts, conversations and token ids of request bodies as token ids for the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from app.engine.vocabulary import conversation_prefix, text_prefix
from app.errors import RequestError
from app.openai.base import check_json
from app.openai.bodies import ChatCompletionRequest, CompletionRequest, Message, PinRequest, TokenizeRequest
from app.openai.text_encoder import TextBounds, TextEncoder
from app.openai.tools.bodies import Tool, ToolCall
from app.openai.tools.formats import tool_template


class PromptEncoder:
    """Encodes prompts with a model's tokenizer and chat template.

    In conversations only the template writes control tokens: what messages and tools spell is text. Texts that must
    have more than `max_model_len` tokens are refused before they are tokenised. All methods raise `RequestError`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._encoder = TextEncoder(tokenizer)
        self._bounds = TextBounds(tokenizer)

    def encode_completion(self, request: CompletionRequest, max_model_len: int) -> list[list[int]]:
        """Token ids of each prompt."""
        return [
            self._encode_text(prompt, max_model_len) if isinstance(prompt, str) else prompt
            for prompt in request.prompts
        ]

    def echoed_texts(self, request: CompletionRequest) -> list[str]:
        """The text of each prompt, for outputs to begin with."""
        return [
            prompt if isinstance(prompt, str) else self._decode(prompt, skip_special_tokens=True)
            for prompt in request.prompts
        ]

    def encode_chat(self, request: ChatCompletionRequest, max_model_len: int) -> list[int]:
        """Token ids of the conversation, with the tools unless `tool_choice` is "none"."""
        tools = request.tools if request.tool_choice != "none" else None
        return self._encode_conversation(request.messages, tools, max_model_len)

    def encode_tokenize(self, request: TokenizeRequest, max_model_len: int) -> list[int]:
        """Token ids of a text, or of a conversation."""
        _check_one_kind(request)
        if request.prompt is not None:
            for name in ("tools", "add_generation_prompt"):
                if getattr(request, name) is not None:
                    raise RequestError(f"{name} belongs to messages, and this is a prompt; leave it out", name)
            return self._encode_text(request.prompt, max_model_len, request.add_special_tokens is not False)
        assert request.messages is not None
        if request.add_special_tokens:
            raise RequestError("the chat template writes special tokens itself; leave it out", "add_special_tokens")
        return self._encode_conversation(
            request.messages, request.tools, max_model_len, request.add_generation_prompt is not False
        )

    def encode_pin(self, request: PinRequest) -> list[int]:
        """The token ids with which all prompts begin that begin with the pinned text or messages."""
        _check_one_kind(request)
        if request.messages is not None:
            shown = _template_messages(request.messages)
            if self._encoder.shielded(shown, "messages") != shown:  # no conversation's token ids would begin so
                raise RequestError("messages to pin cannot spell control tokens of this model", "messages")
            return conversation_prefix(self._tokenizer, shown)
        if isinstance(request.prompt, list):
            return request.prompt
        assert request.prompt is not None
        _check_text(request.prompt, "prompt")
        return text_prefix(self._tokenizer, request.prompt)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included. Raises `RequestError` for ids that the tokenizer does not have."""
        unknown = next((token_id for token_id in token_ids if token_id >= len(self._tokenizer)), None)
        if unknown is not None:
            raise RequestError(
                f"tokens contains {unknown}; token ids of this model are below {len(self._tokenizer)}", "tokens"
            )
        return self._decode(token_ids, skip_special_tokens=False)

    def _decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)
        return text

    def _encode_text(self, text: str, max_model_len: int, add_special_tokens: bool = True) -> list[int]:
        _check_text(text, "prompt")
        self._bounds.check_length(text, max_model_len, "prompt")
        return self._encoder.encode(text, add_special_tokens=add_special_tokens)

    def _encode_conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        max_model_len: int,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        if not messages:
            raise RequestError("messages is empty; it needs at least one message", "messages")
        if self._tokenizer.chat_template is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        shown = self._encoder.shielded(_template_messages(messages), "messages")
        described: list[Any] | None = None
        if tools is not None:  # without `strict`, which has no effect here: templates show all fields
            described = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]
            described = self._encoder.shielded(described, "tools")
        if tools is not None or any(message.role == "tool" or message.tool_calls for message in messages):
            tool_template(self._tokenizer)
        try:
            text: Any = self._tokenizer.apply_chat_template(
                shown, tools=described, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except TemplateError as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error
        # Not earlier: templates may leave out some of the messages.
        self._bounds.check_length(self._encoder.unshielded(text), max_model_len, "messages")
        return self._encoder.encode_shielded(text)


def _check_one_kind(request: TokenizeRequest | PinRequest) -> None:
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", "prompt")


def _template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: arguments are objects, and a tool's message has the function's name."""
    functions: dict[str, str] = {}  # by the id of the call
    shown = []
    for message in messages:
        _check_text(message.text, "messages")
        role = "system" if message.role == "developer" else message.role
        fields: dict[str, Any] = {"role": role, "content": message.text}
        if message.tool_calls is not None:
            functions |= {call.id: call.function.name for call in message.tool_calls}
            fields["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
                for call, arguments in zip(message.tool_calls, map(_arguments, message.tool_calls), strict=True)
            ]
        if message.role == "tool":
            if message.tool_call_id not in functions:
                raise RequestError(f"no earlier message has the tool call {message.tool_call_id!r}", "messages")
            fields |= {"tool_call_id": message.tool_call_id, "name": functions[message.tool_call_id]}
        shown.append(fields)
    return shown


def _arguments(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"arguments of the tool call {call.id!r} are not JSON: {error}", "messages") from error
    if not isinstance(arguments, dict):
        raise RequestError(f"arguments of the tool call {call.id!r} are not a JSON object", "messages")
    try:
        return check_json(arguments)
    except ValueError as error:
        raise RequestError(
            f"arguments of the tool call {call.id!r} cannot be written into the prompt: {error}", "messages"
        ) from error


def _check_text(text: str, param: str) -> None:
    """Refuse an unpaired surrogate, which has no tokens. Bodies by handle are not parsed from JSON."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{param} is not valid Unicode at character {error.start}", param) from error
