"""Request bodies to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from app.engine.pinned import conversation_prefix, text_prefix
from app.errors import RequestError
from app.openai.bodies import ChatCompletionRequest, CompletionRequest, Message, PinRequest


def encode_completion(tokenizer: PreTrainedTokenizerBase, request: CompletionRequest) -> list[list[int]]:
    """Each prompt of the request."""
    token_ids = []
    for prompt in request.prompts:
        if isinstance(prompt, str):
            _check_text(prompt, "prompt")
        token_ids.append(list(tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt)
    return token_ids


def prompt_texts(tokenizer: PreTrainedTokenizerBase, request: CompletionRequest) -> list[str]:
    """Each prompt of the request as text, for outputs to begin with."""
    texts = []
    for prompt in request.prompts:
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=True)
        assert isinstance(text, str)
        texts.append(text)
    return texts


def encode_chat(tokenizer: PreTrainedTokenizerBase, request: ChatCompletionRequest) -> list[int]:
    """The conversation through the model's chat template.

    Raises:
        RequestError: there are no messages, no template, or the template refuses them.
    """
    if not request.messages:
        raise RequestError("messages is empty; it needs at least one message", "messages")
    if tokenizer.chat_template is None:
        raise RequestError("this model has no chat template; use /v1/completions", "messages")
    messages = _template_messages(request.messages)
    try:
        token_ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error
    return list(token_ids)


def encode_pin(tokenizer: PreTrainedTokenizerBase, request: PinRequest) -> list[int]:
    """The tokens that prompts beginning so have in common. Raises `RequestError` unless it is one or the other."""
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if request.messages is not None:
        return conversation_prefix(tokenizer, _template_messages(request.messages))
    if isinstance(request.prompt, list):
        return request.prompt
    assert request.prompt is not None
    _check_text(request.prompt, "prompt")
    return text_prefix(tokenizer, request.prompt)


def _template_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    for message in messages:
        _check_text(message.text, "messages")
    return [
        {"role": "system" if message.role == "developer" else message.role, "content": message.text}
        for message in messages
    ]


def _check_text(text: str, param: str) -> None:
    """JSON can carry half of a surrogate pair, which is no character and has no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{param} is not valid Unicode at character {error.start}", param) from error
