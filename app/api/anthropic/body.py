"""Bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, and their conversion to chat completions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from folio.app.api.anthropic.blocks import Cacheable, CacheControl, LeftOutBlock, TextBlocks, ToolResultBlock
from folio.app.api.anthropic.conversation import MessageParam, chat_messages
from folio.app.api.base import JsonObject, ListOf, StrictBody, Text, at_most, in_terms_of, unsupported_field
from folio.app.api.openai.bodies import GenerationBody
from folio.app.api.openai.chat_body import MAX_MESSAGES, ChatCompletionRequest, ReasoningEffort, Thinking
from folio.app.api.openai.sampling_body import JsonSchema, JsonSchemaFormat
from folio.app.api.tools.bodies import (
    MAX_TOOLS,
    ChosenFunction,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    OtherTool,
    Tool,
)
from folio.app.engine.sampling.params import MAX_STOP_STRINGS
from folio.app.errors import RequestError, UnknownThreadError


class ToolParam(Cacheable):
    """A tool that the client runs."""

    name: FunctionName
    input_schema: JsonObject
    """JSON schema of the input, of type object."""
    description: Text | None = None
    type: Text | None = None
    """Ignored: a tool with an input_schema is run by the client."""
    strict: bool | None = None
    """All calls follow the schema. Otherwise only forced calls do."""
    eager_input_streaming: bool | None = None
    """No effect: inputs are streamed as they are generated."""
    defer_loading: bool | None = None
    """No effect: the prompt shows all tools."""
    input_examples: list[JsonObject] | None = None
    """Ignored."""
    allowed_callers: list[Text] | None = None
    """Ignored: the model itself is the only caller."""


def _tag_of_tool(tool: Any) -> str:
    if not isinstance(tool, dict):
        return "other" if isinstance(tool, OtherTool) else "custom"
    return "custom" if tool.get("type") in (None, "custom", "function") or "input_schema" in tool else "other"


AnyTool = Annotated[
    Annotated[ToolParam, Tag("custom")] | Annotated[OtherTool, Tag("other")], Discriminator(_tag_of_tool)
]


class ToolChoiceParam(StrictBody):
    """Whether tools are used: "auto": the model decides; "any": it calls at least one; "tool": the named one; "none":
    the prompt does not show tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    """The tool to call."""
    disable_parallel_tool_use: bool | None = None
    """With "any": one call only. With "auto" it has no effect."""

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoiceParam:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("a choice of the type 'tool' needs a name, and no other may have one")
        return self

    @property
    def as_chat(self) -> Literal["none", "auto", "required"] | NamedToolChoice:
        if self.name is not None:
            return NamedToolChoice(type="function", function=ChosenFunction(name=self.name))
        return "required" if self.type == "any" else "none" if self.type == "none" else "auto"


class ThinkingConfig(StrictBody):
    """Whether the model reasons before it answers, where its chat template lets one choose."""

    type: Literal["enabled", "adaptive", "disabled"]
    """"adaptive" is "enabled": the model decides how much."""
    budget_tokens: Annotated[int | None, Field(ge=0)] = None
    """The most tokens of reasoning; then its end is forced."""
    display: Text | None = None
    """"omitted": blocks of reasoning have no text. With any other value the text is the reasoning itself."""


class JsonOutputFormat(StrictBody):
    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(StrictBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """`reasoning_effort` of chat completions; "max" is "xhigh"."""
    format: JsonOutputFormat | None = None
    """JSON that follows the schema."""


class UserMetadata(StrictBody):
    user_id: Annotated[Text | None, Field(max_length=1024)] = None
    """The end user, as `user` of chat completions."""


class ThreadParam(StrictBody):
    """Conversations that the server stores. None are stored here: "continue" is answered 404, whereupon Anthropic's
    client sends the whole conversation again."""

    type: Literal["create", "continue"]
    previous_message_id: Text | None = None
    """The message to continue from."""


class ConversationBody(StrictBody):
    """Fields from which the prompt is made, and fields of Anthropic's API without effect here."""

    messages: Annotated[
        ListOf[MessageParam],
        Field(min_length=1, examples=[[{"role": "user", "content": "What is Folio?"}]]),
        at_most(MAX_MESSAGES, "messages"),
    ]
    """The conversation so far. If its last message is the assistant's, the answer continues that message."""
    system: TextBlocks | None = None
    """The system prompt: text, or a list of text blocks. A first line `x-anthropic-billing-header: …`, which Claude
    Code changes with every request, is left out."""
    tools: Annotated[ListOf[AnyTool] | None, at_most(MAX_TOOLS, "tools")] = None
    """Tools that the model may call. No tools run on the server: those of Anthropic's servers are left out."""
    tool_choice: ToolChoiceParam | None = None
    """Whether tools are used. By default the model decides."""
    thinking: ThinkingConfig | None = None
    """Whether the model reasons. By default as its chat template says."""
    output_config: OutputConfig | None = None
    """Effort and form of the answer."""
    cache_control: CacheControl | None = None
    """A hint that the prompt will be sent again."""
    context_management: JsonObject | None = None
    """No effect: the model sees the whole conversation."""
    speed: Literal["standard", "fast"] | None = None
    """No effect: there is one speed."""
    inference_geo: Text | None = None
    """No effect."""
    diagnostics: JsonObject | None = None
    """No effect."""
    user_profile_id: Text | None = None
    """No effect."""
    workspace_id: Text | None = None
    """No effect."""
    thread: ThreadParam | None = None
    """"create" has no effect."""
    container: JsonObject | Text | None = None
    """Dropped: no tools run on the server."""
    mcp_servers: Annotated[ListOf[JsonObject] | None, at_most(MAX_TOOLS, "servers")] = None
    """Dropped: no tools run on the server."""

    @property
    def _chat_thinking(self) -> Thinking | None:
        if (given := self.thinking) is None:
            return None
        return Thinking(type="disabled" if given.type == "disabled" else "enabled", budget_tokens=given.budget_tokens)

    @property
    def _chat_tools(self) -> list[Any] | None:
        return [tool if isinstance(tool, OtherTool) else _as_chat(tool) for tool in self.tools or ()] or None

    def chat_fields(self) -> dict[str, Any]:
        """Fields of the chat completion with the same prompt and form of output. Raises `RequestError`."""
        if self.thread is not None and self.thread.type == "continue":
            raise UnknownThreadError(
                f"no message {self.thread.previous_message_id!r} is stored here; send the whole conversation", "thread"
            )
        config, choice = self.output_config or OutputConfig(), self.tool_choice
        messages = chat_messages(self.system, self.messages)
        if not messages:
            raise RequestError("messages have no content; at least one needs some", "messages")
        return {
            "messages": messages,
            "continue_final_message": (messages[-1].role == "assistant" and bool(messages[-1].text.strip())) or None,
            "tools": self._chat_tools,
            "tool_choice": None if choice is None else choice.as_chat,
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "thinking": self._chat_thinking,
            "reasoning_effort": _EFFORTS[config.effort] if config.effort is not None else None,
            "response_format": None if config.format is None else _response_format(config.format),
        }

    @property
    def ignored_fields(self) -> list[str]:
        """Names of fields, and of blocks of the history, that were left out."""
        found = {name: None for name in ("container", "mcp_servers") if getattr(self, name)}
        for block in (
            block for message in self.messages if isinstance(message.content, list) for block in message.content
        ):
            if isinstance(block, LeftOutBlock):
                found[f"messages[].content[].{block.kind}"] = None
            elif isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                kinds = (inner.kind for inner in block.content if isinstance(inner, LeftOutBlock))
                found |= dict.fromkeys(f"messages[].content[].content[].{kind}" for kind in kinds)
        return list(found)

    def retention_s(self) -> float | None:
        """Seconds for which to keep the prompt: the longest of all hints."""
        return max((hint.ttl_s for hint in self._hints()), default=None)

    def _hints(self) -> Iterator[CacheControl]:
        places: list[Any] = [self, *(self.tools or ()), *_listed(self.system)]
        for block in (block for message in self.messages for block in message.blocks):
            places += [block, *_listed(getattr(block, "content", None))]
        for place in places:
            if (hint := getattr(place, "cache_control", None)) is not None:
                yield hint


class CountTokensRequest(ConversationBody):
    """`POST /v1/messages/count_tokens`."""

    model: Annotated[Text, Field(max_length=256, examples=["builtin"])]
    """The served model, or an adapter of it."""

    def as_chat(self) -> ChatCompletionRequest:
        """The chat completion with the same prompt."""
        return ChatCompletionRequest(model=self.model, **self.chat_fields())


class MessagesRequest(GenerationBody, ConversationBody):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    """The most tokens to generate; fewer if the context has less room."""
    stop_sequences: Annotated[ListOf[Text] | None, at_most(MAX_STOP_STRINGS, "strings")] = None
    """Strings that end the output."""
    temperature: Annotated[float | None, Field(ge=0, le=1)] = None
    """Logits are divided by it; 0 is greedy. 1 by default."""
    metadata: UserMetadata | None = None  # type: ignore[assignment]  # not OpenAI's notes
    """The end user."""
    service_tier: Literal["auto", "standard_only"] | None = None  # type: ignore[assignment]  # not OpenAI's tiers
    """There is one tier. Use `priority` for urgent requests."""
    stop: Annotated[None, unsupported_field("it is stop_sequences here")] = None
    """Refused: use `stop_sequences`."""
    n: Annotated[int | None, Field(ge=1, le=1)] = None
    """A message has one output."""
    prompt_logprobs: Annotated[None, unsupported_field("messages have no field for them; use /v1/completions")] = None
    """Refused: messages have no field for them."""

    def as_chat(self) -> ChatCompletionRequest:
        """The chat completion with the same output. Raises `RequestError`."""
        shared: dict[str, Any] = {name: getattr(self, name) for name in GenerationBody.model_fields.keys() - _OWN}
        if self.metadata is not None and self.metadata.user_id:
            shared["user"] = self.metadata.user_id
        if self.cache_ttl_s is None:
            shared["cache_ttl_s"] = self.retention_s()
        return ChatCompletionRequest(
            **shared | self.chat_fields(), stop=self.stop_sequences, max_completion_tokens=self.max_tokens
        )

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"


# Fields with another meaning than a chat completion's fields of the same name.
_OWN = {"metadata", "service_tier", "stop"}
_EFFORTS: dict[str, ReasoningEffort] = {
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "xhigh",
    "max": "xhigh",
}


def _listed(content: object) -> list[Any]:
    return content if isinstance(content, list) else []


def _as_chat(tool: ToolParam) -> Tool:
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _response_format(given: JsonOutputFormat) -> JsonSchemaFormat:
    schema = JsonSchema.model_validate({"name": "answer", "schema": given.schema_})
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


in_terms_of_messages = partial(
    in_terms_of,
    {
        "stop": "stop_sequences",
        "response_format": "output_config",
        "max_completion_tokens": "max_tokens",
        "continue_final_message": "messages",
    },
)
