"""Request bodies to token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from app.engine.vocabulary import conversation_prefix, text_prefix
from app.errors import RequestError
from app.openai.base import check_json
from app.openai.bodies import ChatCompletionRequest, CompletionRequest, Message, PinRequest, TokenizeRequest
from app.openai.text_encoder import TextEncoder
from app.openai.tools.bodies import Tool, ToolCall
from app.openai.tools.formats import tool_template

# Of a text and the name of its field: raises a `RequestError` when it is too long.
CheckLength = Callable[[str, str], None]


def encode_completion(encoder: TextEncoder, request: CompletionRequest, check_length: CheckLength) -> list[list[int]]:
    """Each prompt of the request."""
    token_ids = []
    for prompt in request.prompts:
        if isinstance(prompt, str):
            _check_text(prompt, "prompt")
            check_length(prompt, "prompt")
        token_ids.append(encoder.encode(prompt) if isinstance(prompt, str) else prompt)
    return token_ids


def prompt_texts(tokenizer: PreTrainedTokenizerBase, request: CompletionRequest) -> list[str]:
    """Each prompt of the request as text, for outputs to begin with."""
    texts = []
    for prompt in request.prompts:
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=True)
        assert isinstance(text, str)
        texts.append(text)
    return texts


def encode_chat(encoder: TextEncoder, request: ChatCompletionRequest, check_length: CheckLength) -> list[int]:
    """The conversation through the model's chat template, with the tools unless none may be called. Control tokens are
    those of the template: what messages and tools spell is text.

    Raises:
        RequestError: there are no messages, no template, or the template refuses them or knows no tools.
    """
    tools = request.tools if request.tool_choice != "none" else None
    return _encode_conversation(encoder, request.messages, tools, check_length)


def encode_tokenize(encoder: TextEncoder, request: TokenizeRequest, check_length: CheckLength) -> list[int]:
    """A text, or a conversation as `encode_chat` makes it.

    Raises:
        RequestError: it has not just one of both, or as `encode_chat`.
    """
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if request.prompt is not None:
        for name in ("tools", "add_generation_prompt"):
            if getattr(request, name) is not None:
                raise RequestError(f"{name} belongs to messages, and this is a prompt; leave it out", name)
        check_length(request.prompt, "prompt")
        return encoder.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    assert request.messages is not None
    if request.add_special_tokens:
        raise RequestError("the chat template writes special tokens itself; leave it out", "add_special_tokens")
    prompts = request.add_generation_prompt is not False
    return _encode_conversation(encoder, request.messages, request.tools, check_length, add_generation_prompt=prompts)


def decode_tokens(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Their text, special tokens included. Raises `RequestError` for one that the tokenizer does not have."""
    unknown = next((token_id for token_id in token_ids if token_id >= len(tokenizer)), None)
    if unknown is not None:
        raise RequestError(f"tokens has {unknown}; this model's are below {len(tokenizer)}", "tokens")
    text = tokenizer.decode(list(token_ids), skip_special_tokens=False)
    assert isinstance(text, str)
    return text


def _encode_conversation(
    encoder: TextEncoder,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    check_length: CheckLength,
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    tokenizer = encoder.tokenizer
    if not messages:
        raise RequestError("messages is empty; it needs at least one message", "messages")
    if tokenizer.chat_template is None:
        raise RequestError("this model has no chat template; use /v1/completions", "messages")
    shown = encoder.shielded(_template_messages(messages), "messages")
    if tools is not None or any(message.role == "tool" or message.tool_calls for message in messages):
        tool_template(tokenizer)
    try:
        text: Any = tokenizer.apply_chat_template(
            shown,
            tools=None if tools is None else encoder.shielded([_template_tool(tool) for tool in tools], "tools"),
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    except TemplateError as error:
        raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error
    # Only now, since templates may leave out some of the messages.
    check_length(encoder.unshielded(text), "messages")
    return encoder.encode_shielded(text)


def encode_pin(encoder: TextEncoder, request: PinRequest) -> list[int]:
    """The tokens that prompts beginning so have in common. Raises `RequestError` unless it is one or the other, and
    when messages spell control tokens: no conversation would begin so."""
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if request.messages is not None:
        shown = _template_messages(request.messages)
        if encoder.shielded(shown, "messages") != shown:
            raise RequestError("messages to pin cannot spell control tokens of this model", "messages")
        return conversation_prefix(encoder.tokenizer, shown)
    if isinstance(request.prompt, list):
        return request.prompt
    assert request.prompt is not None
    _check_text(request.prompt, "prompt")
    return text_prefix(encoder.tokenizer, request.prompt)


def _template_tool(tool: Tool) -> dict[str, Any]:
    """Without `strict`, which changes nothing here: templates show all that there is."""
    return tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def _template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    functions: dict[str, str] = {}  # by the id of the call
    return [_template_message(message, functions) for message in messages]


def _template_message(message: Message, functions: dict[str, str]) -> dict[str, Any]:
    """As templates want it: arguments are objects, and an answer has the name of the function it comes from."""
    _check_text(message.text, "messages")
    role = "system" if message.role == "developer" else message.role
    shown: dict[str, Any] = {"role": role, "content": message.text}
    if message.tool_calls is not None:
        functions |= {call.id: call.function.name for call in message.tool_calls}
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        if message.tool_call_id not in functions:
            raise RequestError(f"no message before has the tool call {message.tool_call_id!r}", "messages")
        shown |= {"tool_call_id": message.tool_call_id, "name": functions[message.tool_call_id]}
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
        raise RequestError(f"arguments of the tool call {call.id!r} cannot be shown: {error}", "messages") from error


def _check_text(text: str, param: str) -> None:
    """JSON can carry half of a surrogate pair, which is no character and has no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{param} is not valid Unicode at character {error.start}", param) from error
