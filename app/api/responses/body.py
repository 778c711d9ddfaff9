"""Body of `POST /v1/responses`, and its conversion to a chat completion."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Annotated, Literal

from pydantic import Field, Tag

from folio.app.api.base import (
    JsonObject,
    ListOf,
    Name,
    StrictBody,
    Text,
    at_most,
    in_terms_of,
    plain_name,
    text_or,
    unsupported_field,
)
from folio.app.api.openai.bodies import GenerationBody
from folio.app.api.openai.chat_body import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOP_LOGPROBS,
    ChatCompletionRequest,
    ReasoningEffort,
    TemplateFields,
)
from folio.app.api.openai.sampling_body import (
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
    TextFormat,
)
from folio.app.api.responses.conversation import messages_of
from folio.app.api.responses.items import CallOutput, InputItem, InputMessage, ItemReference, OtherItem, OtherPart
from folio.app.api.responses.tools import AnyTool, Choice, ShownTools
from folio.app.api.tools.bodies import MAX_TOOLS
from folio.app.errors import RequestError

_LOGPROBS = "message.output_text.logprobs"


class NamedSchemaFormat(StrictBody):
    """JSON that follows the schema. `name`, `description` and `strict` are accepted and ignored."""

    type: Literal["json_schema"]
    name: Text
    schema_: Annotated[JsonObject, Field(alias="schema")]
    description: Text | None = None
    strict: bool | None = None


class TextConfig(StrictBody):
    format: Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat | None, Field(discriminator="type")] = None
    """The form of the answer: text, a JSON object, or JSON that follows a schema."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """No effect: ask for a length in the instructions."""


class Reasoning(StrictBody):
    effort: ReasoningEffort | None = None
    """How much the model reasons before it answers; see `reasoning_effort` of chat completions."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """With any value the whole reasoning is the answer's `summary`, and otherwise its `content`."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name of `summary`."""


class ResponsesRequest(GenerationBody, TemplateFields):
    """`POST /v1/responses`. The conversation is the stored one of `previous_response_id`, if there is one, and then
    `input`."""

    input: (
        Annotated[
            Annotated[Text, Tag("text")] | Annotated[ListOf[InputItem], at_most(MAX_MESSAGES, "items"), Tag("items")],
            text_or("items"),
            Field(examples=["What is Folio?"]),
        ]
        | None
    ) = None
    """The user's text, or the conversation so far: messages, calls of tools, and their return values. Items that
    mean nothing here are dropped, and named in the header `x-folio-ignored-fields`."""
    instructions: Text | None = None
    """A system message before the conversation. The instructions of `previous_response_id` do not apply any more."""
    previous_response_id: Name | None = None
    """A stored response: its conversation and output come before `input`."""
    store: bool | None = None
    """Keep the response, with its conversation, for `previous_response_id`, `item_reference` and
    `GET /v1/responses/{response_id}`. True by default; the server's settings `http.responses` bound size and time."""
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    """The most tokens to generate; by default as many as the context has room for."""
    text: TextConfig | None = None
    """The form of the answer."""
    tools: Annotated[ListOf[AnyTool] | None, Field(max_length=MAX_TOOLS), at_most(MAX_TOOLS, "tools")] = None
    """Tools that the model may call and the client runs: functions, custom tools, and namespaces of them. Tools that
    run on OpenAI's servers are dropped, and named in the header `x-folio-ignored-fields`."""
    tool_choice: Choice | None = None
    """"none": the prompt does not show tools; "auto", the default: the model decides; "required", or a tool's name: the
    answer is a call. A choice of a tool that was dropped is dropped."""
    parallel_tool_calls: bool | None = None
    """Whether a forced answer may have several calls. True by default."""
    max_tool_calls: Annotated[int | None, Field(ge=1)] = None
    """The most calls in the answer; further ones are left out of it."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """Log probabilities of each token, with this number of alternatives."""
    include: Annotated[ListOf[Text], at_most(MAX_PARTS, "names")] | None = None
    """`message.output_text.logprobs`: log probabilities of each token. `reasoning.encrypted_content` has no effect:
    reasoning is in the answer as it is. Others are about tools that are dropped, and named in the header
    `x-folio-ignored-fields`."""
    reasoning: Reasoning | None = None
    """How much the model reasons."""
    thinking_token_budget: Annotated[int | None, Field(ge=0)] = None
    """The most tokens of reasoning; then its end is forced."""
    truncation: Literal["auto", "disabled"] | None = None
    """A conversation that is too long is an error. "auto" is named in the header `x-folio-ignored-fields`."""
    n: Annotated[int | None, Field(ge=1, le=1)] = None
    """A response has one output."""
    prompt_logprobs: Annotated[None, unsupported_field("responses have no field for them; use /v1/completions")] = None
    """Refused: a response has no field for them."""
    background: Annotated[
        Literal[False] | None,
        unsupported_field("a response lives as long as its connection here; leave it out, or use `stream`", False),
    ] = None
    """Refused when true: a response lives as long as its connection."""
    conversation: Annotated[
        None,
        unsupported_field("conversations are not stored here; use previous_response_id, or send all of it as input"),
    ] = None
    """Refused: use `previous_response_id`."""
    prompt: Annotated[None, unsupported_field("prompt templates are not stored here; use instructions and input")] = (
        None
    )
    """Refused: use `instructions` and `input`."""

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

    @property
    def items(self) -> list[InputItem]:
        """The input as items."""
        if isinstance(self.input, str):
            return [InputMessage(type="message", role="user", content=self.input)]
        return self.input or []

    @cached_property
    def shown_tools(self) -> ShownTools:
        return ShownTools(self.tools or (), self.tool_choice)

    @property
    def ignored_fields(self) -> list[str]:
        """Names of fields and items that have no effect on the answer, each once."""
        found = list(self.shown_tools.ignored)
        for item in self.items:
            if isinstance(item, OtherItem):
                found.append(f"input[].{item.type}")
            elif isinstance(item, ItemReference):
                found.append("input[].item_reference")
            elif isinstance(item, InputMessage) and isinstance(item.content, list):
                others = (part for part in item.content if isinstance(part, OtherPart))
                found += [f"input[].content[].{part.type}" for part in others]
            elif isinstance(item, CallOutput):
                found += [f"input[].output[].{kind}" for kind in item.left_out]
        known = (_LOGPROBS, "reasoning.encrypted_content")
        found += [f"include.{plain_name(name)}" for name in self.include or () if name not in known]
        if self.truncation == "auto":
            found.append("truncation")
        return list(dict.fromkeys(found))

    def as_chat(self) -> ChatCompletionRequest:
        """The chat completion with the same output.

        Raises:
            RequestError: there is no conversation, or there are too many messages or tools.
        """
        messages = messages_of(self.instructions, self.items)
        if not messages:
            raise RequestError("input is empty; it needs an item, or send instructions", "input")
        shown = self.shown_tools
        for param, what, number, most in (
            ("input", "messages", len(messages), MAX_MESSAGES),
            ("tools", "tools in all namespaces", len(shown.tools), MAX_TOOLS),
        ):
            if number > most:
                raise RequestError(f"there are {number} {what}; at most {most} are allowed", param)
        shared = {name: getattr(self, name) for name in _SHARED}
        return ChatCompletionRequest(
            **shared,
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs or None,
            top_logprobs=self.top_logprobs,
            tools=shown.tools or None,
            tool_choice=shown.choice,
            parallel_tool_calls=False if self.max_tool_calls == 1 else self.parallel_tool_calls,
            response_format=self._response_format(),
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            thinking_token_budget=self.thinking_token_budget,
        )

    def _response_format(self) -> ResponseFormat | None:
        given = self.text.format if self.text is not None else None
        if not isinstance(given, NamedSchemaFormat):
            return given
        return JsonSchemaFormat(
            type="json_schema", json_schema=JsonSchema.model_validate({"name": given.name, "schema": given.schema_})
        )


# Fields that a chat completion has, too, by the same names.
_SHARED = (*GenerationBody.model_fields, *TemplateFields.model_fields)


in_terms_of_responses = partial(
    in_terms_of, {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
)
