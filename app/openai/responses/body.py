"""Body of `POST /v1/responses`, and its conversion to a chat completion."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from app.openai.base import (
    JsonObject,
    ListOf,
    StrictBody,
    Text,
    at_most,
    in_terms_of,
    joined_text,
    only_text,
    text_or,
    unsupported_field,
)
from app.openai.bodies import GenerationBody
from app.openai.chat_body import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOP_LOGPROBS,
    ChatCompletionRequest,
    Message,
    ReasoningEffort,
    TemplateFields,
)
from app.openai.sampling_body import JsonObjectFormat, JsonSchema, JsonSchemaFormat, ResponseFormat, TextFormat
from app.openai.tools.bodies import (
    MAX_TOOLS,
    AllowedToolChoice,
    AllowedTools,
    ChosenFunction,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    Tool,
    ToolCall,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(StrictBody):
    type: Literal["input_text"]
    text: Text


class GivenOutputText(StrictBody):
    """Text of an earlier answer. Annotations and log probabilities are ignored."""

    type: Literal["output_text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Part = Annotated[InputText | GivenOutputText, Field(discriminator="type"), only_text]


class InputMessage(StrictBody):
    """A message of the client, or of an earlier answer."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[Text, Tag("text")] | Annotated[ListOf[Part], at_most(MAX_PARTS, "parts"), Tag("parts")],
        text_or("parts"),
    ]
    id: Text | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    """Not shown to the model."""


class GivenFunctionCall(StrictBody):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    id: Text | None = None
    status: ItemStatus | None = None


class FunctionCallOutput(StrictBody):
    """The value that a function has returned."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[ListOf[Annotated[InputText, only_text]], at_most(MAX_PARTS, "parts"), Tag("parts")],
        text_or("parts"),
    ]
    id: Text | None = None
    status: ItemStatus | None = None


class ReasoningPart(StrictBody):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


class GivenReasoning(StrictBody):
    """Reasoning of an earlier answer. Encrypted reasoning is ignored."""

    type: Literal["reasoning"]
    summary: Annotated[ListOf[ReasoningPart] | None, at_most(MAX_PARTS, "parts")] = None
    content: Annotated[ListOf[ReasoningPart] | None, at_most(MAX_PARTS, "parts")] = None
    encrypted_content: Text | None = None
    id: Text | None = None
    status: ItemStatus | None = None


def _type_of(item: object) -> object:
    if isinstance(item, dict):
        return item.get("type") or "message"
    return getattr(item, "type", None) or "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[GivenFunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[GivenReasoning, Tag("reasoning")],
    Discriminator(
        _type_of,
        custom_error_type="unknown_item",
        custom_error_message="items here are of the type 'message', 'reasoning', 'function_call' or "
        "'function_call_output'",
    ),
]


class FunctionTool(StrictBody):
    """A function that may be called: `FunctionDefinition`, one level less deep."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class NamedFunction(StrictBody):
    type: Literal["function"]
    name: FunctionName


class AllowedFunctions(StrictBody):
    """The functions that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[ListOf[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS), at_most(MAX_TOOLS, "tools")]


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
    """The reasoning itself is in the answer, whatever is asked for."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name of `summary`."""


class ResponsesRequest(GenerationBody, TemplateFields):
    """`POST /v1/responses`. Nothing is stored, so every request has its whole conversation in `input`."""

    input: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[ListOf[InputItem], Field(min_length=1), at_most(MAX_MESSAGES, "items"), Tag("items")],
        text_or("items"),
        Field(examples=["What is Folio?"]),
    ]
    """The user's text, or the conversation so far: messages, calls of functions, and their return values."""
    instructions: Text | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    """Tokens to generate at most; by default as many as the context has room for."""
    text: TextConfig | None = None
    """The form of the answer."""
    tools: Annotated[ListOf[FunctionTool] | None, Field(max_length=MAX_TOOLS), at_most(MAX_TOOLS, "tools")] = None
    """Functions that the model may call. No tools run on the server."""
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedFunction | AllowedFunctions, Field(discriminator="type")]
        | None
    ) = None
    """"none": the prompt does not show tools; "auto", the default: the model decides; "required", or a function's name:
    the answer is a call."""
    parallel_tool_calls: bool | None = None
    """Whether a forced answer may have several calls. True by default."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """Log probabilities of each token, with this number of alternatives."""
    include: (
        Annotated[
            ListOf[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], at_most(MAX_PARTS, "names")
        ]
        | None
    ) = None
    """`message.output_text.logprobs`: log probabilities of each token. The other one has no effect."""
    reasoning: Reasoning | None = None
    """How much the model reasons."""
    thinking_token_budget: Annotated[int | None, Field(ge=0)] = None
    """Tokens of reasoning at most; then its end is forced."""
    truncation: Literal["auto", "disabled"] | None = None
    """No effect: a conversation that is too long is an error."""
    n: Annotated[int | None, Field(ge=1, le=1)] = None
    """A response has one output."""
    prompt_logprobs: Annotated[None, unsupported_field("responses have no field for them; use /v1/completions")] = None
    """Refused: a response has no field for them."""
    background: Annotated[
        Literal[False] | None, unsupported_field("a response lives as long as its connection here; leave it out", False)
    ] = None
    """Refused when true: a response lives as long as its connection."""
    previous_response_id: Annotated[
        None, unsupported_field("nothing is stored here; send the whole conversation as input")
    ] = None
    """Refused: nothing is stored."""
    conversation: Annotated[None, unsupported_field("nothing is stored here; send the whole conversation as input")] = (
        None
    )
    """Refused: nothing is stored."""
    prompt: Annotated[None, unsupported_field("prompt templates are not stored here; use instructions and input")] = (
        None
    )
    """Refused: nothing is stored."""
    max_tool_calls: int | None = None
    """The most calls of tools that run on the server, of which there are none."""

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())

    def as_chat(self) -> ChatCompletionRequest:
        """The chat completion with the same output."""
        shared = {name: getattr(self, name) for name in _SHARED}
        return ChatCompletionRequest(
            **shared,
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs or None,
            top_logprobs=self.top_logprobs,
            **_tool_fields(self.tools or (), self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self._response_format(),
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            thinking_token_budget=self.thinking_token_budget,
        )

    def _messages(self) -> list[Message]:
        messages = [Message(role="system", content=self.instructions)] if self.instructions is not None else []
        if isinstance(self.input, str):
            return [*messages, Message(role="user", content=self.input)]
        answering: Message | None = None  # the assistant's message to which an item that follows belongs
        for item in self.input:
            if isinstance(item, GivenReasoning):
                text = joined_text(item.content or item.summary)
                if answering is None or answering.content is not None or answering.tool_calls is not None:
                    answering = Message(role="assistant", reasoning_content=text)
                    messages.append(answering)
                else:
                    answering.reasoning_content = (answering.reasoning_content or "") + text
            elif isinstance(item, GivenFunctionCall):
                call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
                if answering is None:
                    answering = Message(role="assistant", tool_calls=[call])
                    messages.append(answering)
                else:
                    answering.tool_calls = [*(answering.tool_calls or ()), call]
            elif isinstance(item, FunctionCallOutput):
                answering = None
                messages.append(Message(role="tool", content=joined_text(item.output), tool_call_id=item.call_id))
            elif item.role == "assistant" and answering is not None and answering.content is None:
                answering.content = joined_text(item.content)
            else:
                messages.append(Message(role=item.role, content=joined_text(item.content)))
                answering = messages[-1] if item.role == "assistant" else None
        return messages

    def _response_format(self) -> ResponseFormat | None:
        given = self.text.format if self.text is not None else None
        if not isinstance(given, NamedSchemaFormat):
            return given
        return JsonSchemaFormat(
            type="json_schema", json_schema=JsonSchema.model_validate({"name": given.name, "schema": given.schema_})
        )


# Fields that a chat completion has, too, by the same names.
_SHARED = (*GenerationBody.model_fields, *TemplateFields.model_fields)


def _tool_fields(
    tools: Sequence[FunctionTool], choice: str | NamedFunction | AllowedFunctions | None
) -> dict[str, Any]:
    """The fields of a chat completion. Clients send "auto" and "none" also without tools."""
    functions = [tool.model_dump(exclude={"type"}) for tool in tools]
    chosen: Any = choice
    if isinstance(choice, NamedFunction):
        chosen = _named(choice)
    elif isinstance(choice, AllowedFunctions):
        allowed = AllowedTools(mode=choice.mode, tools=[_named(function) for function in choice.tools])
        chosen = AllowedToolChoice(type="allowed_tools", allowed_tools=allowed)
    return {
        "tools": [Tool(type="function", function=FunctionDefinition(**function)) for function in functions] or None,
        "tool_choice": chosen,
    }


def _named(function: NamedFunction) -> NamedToolChoice:
    return NamedToolChoice(type="function", function=ChosenFunction(name=function.name))


in_terms_of_responses = partial(
    in_terms_of, {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
)
