"""Prompts: texts, conversations and token ids of request bodies, encoded as bounded token ids for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from folio.app.api.base import joined_text
from folio.app.api.input.conversations import ConversationTemplate, template_messages
from folio.app.api.input.text_encoder import TextBounds, TextEncoder
from folio.app.api.openai.bodies import CompletionRequest, GenerationBody
from folio.app.api.openai.chat_body import ChatCompletionRequest, Message, TemplateFields
from folio.app.api.openai.token_bodies import TokenizeRequest
from folio.app.api.operators.bodies import PinRequest
from folio.app.api.output.formats import shows_tools
from folio.app.api.tools.bodies import Tool
from folio.app.api.tools.choice import GivenTools
from folio.app.api.tools.shown import with_tools_as_text
from folio.app.engine.request.text_prefix import conversation_prefix, text_prefix
from folio.app.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Tokens at a prompt's end that tell whether it has begun the reasoning.
_END_TOKENS = 32
_TEMPLATE_NAMES = ("messages", "raise_exception", "strftime_now", "self")
# A text of more contexts is refused even if only its end is to be kept, since all of it would be tokenised.
_TRUNCATED_CONTEXTS = 16


class PromptEncoder:
    """Encodes prompts with a model's tokenizer and chat template.

    In conversations only the template writes control tokens: what messages and tools spell is text. Texts that must
    have more than `max_model_len` tokens are refused before they are tokenised. All methods raise `RequestError`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.encoder = TextEncoder(tokenizer)
        self.bounds = TextBounds(tokenizer)
        self.template = ConversationTemplate(tokenizer)
        # Names that a client's variables may not have: the tokenizer's arguments, and variables that templates have.
        self._reserved = {*signature(tokenizer.apply_chat_template).parameters, *_TEMPLATE_NAMES}

    def encode_completion(self, request: CompletionRequest, max_model_len: int) -> list[list[int]]:
        """Token ids of each prompt."""
        kept = _Kept.of(request, request.max_tokens, max_model_len)
        add_special_tokens = request.add_special_tokens is not False
        return [
            kept.of_prompt(
                self._encode_text(prompt, kept.most_tokens, add_special_tokens) if isinstance(prompt, str) else prompt
            )
            for prompt in request.prompts
        ]

    def echoed_texts(self, request: CompletionRequest, prompts: Sequence[list[int]]) -> list[str]:
        """The text of each prompt, for outputs to begin with. `prompts`: the same as tokens, perhaps truncated."""
        return [
            given
            if isinstance(given, str) and request.truncate_prompt_tokens is None
            else self._decode(prompt, skip_special_tokens=True)
            for given, prompt in zip(request.prompts, prompts, strict=True)
        ]

    def encode_chat(self, request: ChatCompletionRequest, max_model_len: int) -> list[int]:
        """Token ids of the conversation, with the tools unless `tool_choice` is "none"."""
        given = request.given_tools
        tools = given.functions if given.choice != "none" else None
        most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        kept = _Kept.of(request, most, max_model_len)
        return kept.of_prompt(
            self._encode_conversation(
                request.messages,
                tools,
                request,
                kept.most_tokens,
                add_special_tokens=request.add_special_tokens,
                settings=request.template_settings,
            )
        )

    def encode_tokenize(self, request: TokenizeRequest, max_model_len: int) -> list[int]:
        """Token ids of a text, or of a conversation."""
        _check_one_kind(request)
        if request.prompt is not None:
            for name in ("tools", *TemplateFields.model_fields):
                if getattr(request, name) is not None:
                    raise RequestError(f"{name} belongs to messages, and this is a prompt; leave it out", name)
            return self._encode_text(request.prompt, max_model_len, request.add_special_tokens is not False)
        assert request.messages is not None
        return self._encode_conversation(
            request.messages,
            GivenTools.of(request.tools, None).functions,
            request,
            max_model_len,
            add_special_tokens=request.add_special_tokens,
        )

    def encode_pin(self, request: PinRequest, max_model_len: int) -> list[int]:
        """The token ids that all prompts share whose text or messages begin with the pinned ones."""
        _check_one_kind(request)
        if request.messages is not None:
            text = "".join(joined_text(message.content) for message in request.messages)
            self.bounds.check_length(text, max_model_len, "messages")
            shown = template_messages(request.messages)
            if self.encoder.shielded(shown, "messages") != shown:  # no conversation's token ids would begin so
                raise RequestError("messages to pin cannot spell control tokens of this model", "messages")
            return conversation_prefix(self._tokenizer, self.template.of(has_tools=False), shown)
        if isinstance(request.prompt, list):
            return request.prompt
        assert request.prompt is not None
        self.bounds.check_length(request.prompt, max_model_len, "prompt")
        return text_prefix(self._tokenizer, request.prompt)

    def end_of(self, prompt: Sequence[int]) -> str:
        """The last characters of a prompt, control tokens included."""
        return self._decode(prompt[-_END_TOKENS:], skip_special_tokens=False)

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
        self.bounds.check_length(text, max_model_len, "prompt")
        return self.encoder.encode(text, add_special_tokens=add_special_tokens)

    def _encode_conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        options: TemplateFields,
        most_tokens: int,
        *,
        add_special_tokens: bool | None = None,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        if not messages:
            raise RequestError("messages is empty; it needs at least one message", "messages")
        self.template.of(has_tools=tools is not None)
        shown = self.encoder.shielded(template_messages(messages), "messages")
        described: list[Any] | None = None
        if tools is not None:  # without `strict`, which has no effect here: templates show all fields
            described = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]
            described = self.encoder.shielded(described, "tools")
        has_calls = any(message.role == "tool" or message.tool_calls for message in messages)
        if (tools is not None or has_calls) and not shows_tools(self._tokenizer):
            shown, described = with_tools_as_text(shown, described), None
        variables = self._template_variables(options, messages)
        given = [name for name in ("chat_template_kwargs", "documents") if getattr(options, name) is not None]
        text = self.template.render(
            shown,
            described,
            {**settings, **variables},
            add_generation_prompt=not options.continue_final_message and options.add_generation_prompt is not False,
            continues=bool(options.continue_final_message),
            blamed=given[0] if given else None,
        )
        # Not earlier: templates may leave out some of the messages.
        self.bounds.check_length(self.encoder.unshielded(text), most_tokens, "messages")
        return self.encoder.encode(text, add_special_tokens=bool(add_special_tokens))

    def _template_variables(self, options: TemplateFields, messages: Sequence[Message]) -> dict[str, Any]:
        """Variables of the template beside messages and tools."""
        given = options.chat_template_kwargs or {}
        if refused := sorted(given.keys() & self._reserved):
            raise RequestError(
                f"chat_template_kwargs has {refused[0]!r}, which is reserved; leave it out",
                "chat_template_kwargs",
            )
        continues = options.continue_final_message
        if continues and options.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; leave one of them out",
                "continue_final_message",
            )
        if continues and not messages[-1].text.strip():
            raise RequestError("the last message has no text to continue", "continue_final_message")
        variables: dict[str, Any] = self.encoder.shielded(given, "chat_template_kwargs")
        if options.documents is not None:
            variables["documents"] = self.encoder.shielded(options.documents, "documents")
        return variables


@dataclass(frozen=True, slots=True)
class _Kept:
    """The part of a prompt that is kept: all, or the last tokens.

    Attributes:
        most_tokens: a text that must have more is refused without being tokenised.
    """

    num_tokens: int | None
    most_tokens: int

    @staticmethod
    def of(request: GenerationBody, max_tokens: int | None, max_model_len: int) -> _Kept:
        """From `truncate_prompt_tokens`. With -1 it leaves room for `max_tokens` of output."""
        number = request.truncate_prompt_tokens
        if number is None:
            return _Kept(None, max_model_len)
        if number > max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens is {number}; the context has {max_model_len} tokens: ask for fewer",
                "truncate_prompt_tokens",
            )
        if number == -1:
            number = max(1, max_model_len - (max_tokens or 1))
        if number == 0:
            raise RequestError("truncate_prompt_tokens is 0; a prompt needs at least 1 token", "truncate_prompt_tokens")
        return _Kept(number, _TRUNCATED_CONTEXTS * max_model_len)

    def of_prompt(self, token_ids: list[int]) -> list[int]:
        return token_ids if self.num_tokens is None else token_ids[-self.num_tokens :]


def _check_one_kind(request: TokenizeRequest | PinRequest) -> None:
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
