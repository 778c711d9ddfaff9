"""Chat template: compiled once, probed for the conversations that it accepts, and rendered within bounds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError

from folio.app.models.chat_template.arrangement import Arrangement
from folio.app.models.chat_template.probes import probe
from folio.app.models.chat_template.sandbox import WORK, LimitError, TemplateEnvironment, Work

# Processor time of one rendering. Usual ones take milliseconds.
LIMIT_S = 5.0
# Processor time of one probe, and of all probes of a template.
_PROBE_LIMIT_S, _PROBES_LIMIT_S = 0.2, 1.0
_MAX_SOURCE = 1 << 20
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "


class RenderError(Exception):
    """A template cannot render a conversation.

    Attributes:
        line: of the template; `None`: not known.
        refuses: the template has raised the exception on purpose, with these words.
        is_slow: the limit of processor time is exceeded.
    """

    def __init__(self, words: str, line: int | None = None, *, refuses: bool = False, is_slow: bool = False) -> None:
        super().__init__(words)
        self.words, self.line, self.refuses, self.is_slow = words, line, refuses, is_slow

    def __str__(self) -> str:
        return self.words if self.line is None else f"{self.words} (line {self.line} of the template)"


class ChatTemplate:
    """A model's chat template.

    Args:
        source: in Jinja's language.
        variables: variables of every rendering: the model's special tokens by name.

    Attributes:
        fault: why not even the simplest conversation can be rendered; `None` if it can.
        arrangement: turns a conversation into one that the template accepts.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source, self._variables = source, dict(variables)
        self.arrangement = Arrangement()
        self.fault: str | None = None
        self._template: Template | RenderError
        try:
            self._template = self._compile()
        except RenderError as error:
            self._template, self.fault = error, str(error)
            return
        self._probed_until = time.thread_time() + _PROBES_LIMIT_S
        found = probe(self._rendered_probe)
        self.arrangement = found.arrangement
        if found.error is not None and not (isinstance(found.error, RenderError) and found.error.refuses):
            self.fault = str(found.error)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        continues: bool = False,
        limit_s: float = LIMIT_S,
    ) -> str:
        """The prompt of a conversation as the template accepts it, see `arrangement`. Raises `RenderError`.

        Args:
            variables: of the template, beside its own.
            continues: the prompt ends within the last message.
            limit_s: processor time.
        """
        if isinstance(self._template, RenderError):
            raise self._template
        if continues:
            messages = [*messages[:-1], _tagged(messages[-1])]
        given = {
            **self._variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(variables or {}),
            WORK: Work(limit_s),
        }
        context = self._template.new_context(given)
        try:
            text: str = self._template.environment.concat(self._template.root_render_func(context))
        except LimitError as error:
            raise RenderError(str(error), self._line(error), is_slow=error.is_time) from error
        except Exception as error:  # any error of the template's operations on clients' values
            raise self._failure(error) from error
        return _cut(text) if continues else text

    def _compile(self) -> Template:
        if len(self.source) > _MAX_SOURCE:
            raise RenderError(f"the template has {len(self.source)} characters; at most {_MAX_SOURCE} are allowed")
        try:
            return TemplateEnvironment().from_string(self.source)
        except TemplateSyntaxError as error:
            raise RenderError(str(error.message), error.lineno) from error
        except Exception as error:  # of Jinja's or Python's compiler
            raise RenderError(f"{type(error).__name__}: {error}") from error

    def _rendered_probe(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None) -> str:
        limit_s = min(_PROBE_LIMIT_S, self._probed_until - time.thread_time())
        if limit_s <= 0:
            raise RenderError(f"small conversations take more than {_PROBES_LIMIT_S:g} s", is_slow=True)
        return self.render(messages, tools, add_generation_prompt=True, limit_s=limit_s)

    def _failure(self, error: Exception) -> RenderError:
        if type(error) is TemplateError:  # of raise_exception
            return RenderError(str(error), refuses=True)
        words = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        return RenderError(words[:500], self._line(error))

    def _line(self, error: Exception) -> int | None:
        """The line of the template at which the error was raised."""
        assert isinstance(self._template, Template)
        line, trace = None, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("__jinja_template__") is self._template:
                line = self._template.get_corresponding_lineno(trace.tb_lineno)
            trace = trace.tb_next
        return line


def chat_template_of(tokenizer: Any, *, has_tools: bool = False) -> ChatTemplate | None:
    """The template of a tokenizer for conversations with or without tools; `None` if it has none."""
    source = source_of(tokenizer.chat_template, has_tools=has_tools)
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens_map)


def source_of(templates: str | Mapping[str, str] | None, *, has_tools: bool = False) -> str | None:
    """The template for conversations with or without tools; a model may have several, by name."""
    if not isinstance(templates, Mapping):
        return templates
    return templates.get("tool_use", templates.get("default")) if has_tools else templates.get("default")


def _tagged(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": content + _CONTINUED}
    *parts, last = content
    return message | {"content": [*parts, last | {"text": last["text"] + _CONTINUED}]}


def _cut(text: str) -> str:
    """The text up to the end of the last message. A template that trims messages has trimmed the tag's space, too."""
    place = text.rfind(_CONTINUED.strip())
    if place < 0:
        raise RenderError("it does not show the end of the last message, which is to be continued")
    is_whole = text.startswith(_CONTINUED, place)
    return text[:place] if is_whole else text[:place].rstrip()
