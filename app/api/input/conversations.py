"""Conversations: messages of clients as chat templates get them, and their prompts as text."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from folio.app.api.base import check_json
from folio.app.api.openai.chat_body import Message
from folio.app.api.tools.bodies import ToolCall
from folio.app.errors import RequestError
from folio.app.models.chat_template.template import LIMIT_S, ChatTemplate, RenderError, chat_template_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# CPU seconds of a rendering in an event loop. A rendering that takes longer is repeated in a thread.
_LOOP_LIMIT_S = 0.1


class SlowTemplateError(RequestError):
    """A rendering takes too long for the event loop."""


class ConversationTemplate:
    """A model's chat template, and its template for conversations with tools if that is another one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.plain = chat_template_of(tokenizer)
        self._with_tools = self.plain
        if isinstance(tokenizer.chat_template, dict):
            self._with_tools = chat_template_of(tokenizer, has_tools=True)

    @property
    def faults(self) -> list[str]:
        """Reasons why conversations cannot be rendered; none if they can."""
        templates = dict.fromkeys((self.plain, self._with_tools))
        return [template.fault for template in templates if template is not None and template.fault is not None]

    def of(self, *, has_tools: bool) -> ChatTemplate:
        """The template for conversations with or without tools. Raises `RequestError` if there is none."""
        template = self._with_tools if has_tools else self.plain
        if template is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        return template

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        continues: bool,
        blamed: str | None = None,
    ) -> str:
        """The prompt. Raises `RequestError` with the template's own message and the place of the refused message.

        Args:
            messages: of `template_messages`.
            continues: the prompt ends within the last message.
            blamed: the body's field that an error names, unless the template has raised it on purpose.
        """
        template = self.of(has_tools=tools is not None)
        in_loop = _is_in_event_loop()
        limit_s = _LOOP_LIMIT_S if in_loop else LIMIT_S

        def rendered(of: Sequence[dict[str, Any]]) -> str:
            return template.render(
                template.arrangement.arranged(of),
                tools,
                variables,
                add_generation_prompt=add_generation_prompt,
                continues=continues and len(of) == len(messages),
                limit_s=limit_s,
            )

        try:
            text = rendered(messages)
        except RenderError as error:
            if error.is_slow and in_loop:
                raise SlowTemplateError(f"the model's chat template is slow: {error}", "messages") from error
            number = None
            if not error.is_slow and template.fault is None:
                number = _first_refused(rendered, messages, error, limit_s)
            raise _explained(error, messages, number, blamed) from error
        if not text:
            raise RequestError("the model's chat template writes nothing for this conversation", "messages")
        return text


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: arguments are objects if they can be, and a tool's message has the function's
    name."""
    functions: dict[str, str] = {}  # by the id of the call
    unanswered: list[str] = []
    shown = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        fields: dict[str, Any] = {"role": role, "content": message.text}
        if message.tool_calls is not None:
            calls = [(call.id or f"call_{i}", call) for i, call in enumerate(message.tool_calls)]
            unanswered = [call_id for call_id, _ in calls]
            functions |= {call_id: call.function.name for call_id, call in calls}
            fields["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call)},
                }
                for call_id, call in calls
            ]
        if (reasoning := message.reasoning_text) is not None:
            fields |= {"reasoning_content": reasoning, "reasoning": reasoning}
            if not (message.tool_calls and fields["content"]):  # gpt-oss's template refuses both beside calls
                fields["thinking"] = reasoning
        if role == "tool":
            call_id = message.tool_call_id or next(iter(unanswered), "")
            if call_id in unanswered:
                unanswered.remove(call_id)
            fields |= {"tool_call_id": call_id, "name": functions.get(call_id) or message.name or "tool"}
        shown.append(fields)
    return shown


def _arguments(call: ToolCall) -> dict[str, Any] | str:
    """The arguments as an object, or as text if they are invalid: the history keeps a model's broken call for good."""
    text = call.function.arguments.strip()
    try:
        value = json.loads(text or "{}")
        if isinstance(value, str):  # encoded twice
            value = json.loads(value or "{}")
        return {} if value is None else check_json(value) if isinstance(value, dict) else text
    except (ValueError, RecursionError):
        return text


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _first_refused(
    rendered: Callable[[Sequence[dict[str, Any]]], str],
    messages: Sequence[dict[str, Any]],
    error: RenderError,
    limit_s: float,
) -> int | None:
    """Bisect for the first message, counted from 1, with which the conversation fails in this way. `None` if that takes
    longer than `limit_s`."""
    low, high = 1, len(messages)
    deadline = time.monotonic() + limit_s
    while low < high:
        if time.monotonic() > deadline:
            return None
        middle = (low + high) // 2
        try:
            rendered(messages[:middle])
        except RenderError as other:
            if other.words == error.words:
                high = middle
                continue
        low = middle + 1
    return high


def _explained(
    error: RenderError, messages: Sequence[dict[str, Any]], number: int | None, blamed: str | None
) -> RequestError:
    place = ""
    if number is not None:
        place = f" at message {number} of {len(messages)} (role {messages[number - 1]['role']!r})"
    if error.refuses:
        return RequestError(f"the model's chat template refuses the conversation{place}: {error}", "messages")
    if blamed is not None:
        return RequestError(f"the model's chat template fails with this {blamed}: {error}", blamed)
    return RequestError(f"the model's chat template fails{place}: {error}", "messages")
