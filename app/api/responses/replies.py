"""Replies of `/v1/responses`: the response object and the events of its stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from folio.app.api.base import Omitted
from folio.app.api.openai.chat_body import ReasoningEffort
from folio.app.api.openai.replies import ChatTokenLogprob
from folio.app.api.openai.sampling_body import JsonObjectFormat, TextFormat
from folio.app.api.responses.tools import AllowedToolSet, CustomTool, FunctionTool, NamedTool, NamespaceTool

ItemStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class OutputFunctionCall(BaseModel):
    """`arguments` is JSON as text. The function's output refers to `call_id`. `namespace`: the tool's, if there is
    one."""

    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    namespace: Omitted[str] = None
    name: str
    arguments: str
    status: ItemStatus


class OutputCustomCall(BaseModel):
    """A call of a custom tool with a text. The tool's output refers to `call_id`."""

    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    call_id: str
    namespace: Omitted[str] = None
    name: str
    input: str
    status: ItemStatus


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class SummaryText(BaseModel):
    type: Literal["summary_text"] = "summary_text"
    text: str


class OutputReasoning(BaseModel):
    """The whole reasoning, in `summary` if the request asks for a summary, which clients show, and else in
    `content`."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    status: ItemStatus


OutputItem = OutputMessage | OutputFunctionCall | OutputCustomCall | OutputReasoning


class InputTokensDetails(BaseModel):
    """`cached_tokens` of the input were found in the prefix cache. `cache_write_tokens` are not counted: always 0."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """`reasoning_tokens`: those of the output's tokens that are reasoning."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class FailureDetail(BaseModel):
    """The error of a response that had begun."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt", "context_length_exceeded"]
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class SchemaFormatEcho(BaseModel):
    """The schema format of the request."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    type: Literal["json_schema"] = "json_schema"
    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextEcho(BaseModel):
    format: TextFormat | JsonObjectFormat | SchemaFormatEcho = TextFormat(type="text")
    verbosity: Literal["low", "medium", "high"] = "medium"


class ReasoningEcho(BaseModel):
    effort: ReasoningEffort | None = None
    summary: str | None = None


class ResponseObject(BaseModel):
    """A response, and the settings of its request. Its `id` can be forked while it runs and shortly after. With `store`
    it can be read, and continued with `previous_response_id`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: FailureDetail | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    metadata: dict[str, str]
    max_output_tokens: int | None
    max_tool_calls: int | None
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    top_logprobs: int
    text: TextEcho
    tools: list[FunctionTool | CustomTool | NamespaceTool]
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolSet
    reasoning: ReasoningEcho
    truncation: Literal["auto", "disabled"]
    background: Literal[False] = False
    store: bool = False
    previous_response_id: str | None = None
    service_tier: Literal["default"] = "default"
    prompt_cache_key: str | None
    safety_identifier: str | None
    user: str | None

    @property
    def has_ended(self) -> bool:
        return self.status != "in_progress"


class _Event(BaseModel):
    sequence_number: int
    type: str


class ResponseEvent(_Event):
    """The response has begun, or ended in one of three ways."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class ItemEvent(_Event):
    """Item `output_index` of the output begins, or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _OfItem(_Event):
    item_id: str
    output_index: int


class _OfContent(_OfItem):
    content_index: Literal[0] = 0


class _OfSummary(_OfItem):
    summary_index: Literal[0] = 0


class PartEvent(_OfContent):
    """The only part of a message or of reasoning begins, or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class TextDeltaEvent(_OfContent):
    """More text of a message."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDoneEvent(_OfContent):
    """All text of a message."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDeltaEvent(_OfContent):
    """More of the reasoning."""

    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    delta: str


class ReasoningDoneEvent(_OfContent):
    """All of the reasoning."""

    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    text: str


class SummaryPartEvent(_OfSummary):
    """The only part of a reasoning's summary begins, or is complete."""

    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    part: SummaryText


class SummaryDeltaEvent(_OfSummary):
    """More of the reasoning, as its summary."""

    type: Literal["response.reasoning_summary_text.delta"] = "response.reasoning_summary_text.delta"
    delta: str


class SummaryDoneEvent(_OfSummary):
    """All of the reasoning, as its summary."""

    type: Literal["response.reasoning_summary_text.done"] = "response.reasoning_summary_text.done"
    text: str


class ArgumentsDeltaEvent(_OfItem):
    """More of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    delta: str


class ArgumentsDoneEvent(_OfItem):
    """All of a call's arguments."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    name: str
    arguments: str


class InputDeltaEvent(_OfItem):
    """More of a custom call's text."""

    type: Literal["response.custom_tool_call_input.delta"] = "response.custom_tool_call_input.delta"
    delta: str


class InputDoneEvent(_OfItem):
    """All of a custom call's text."""

    type: Literal["response.custom_tool_call_input.done"] = "response.custom_tool_call_input.done"
    input: str


class ErrorEvent(_Event):
    """The server failed before it could build a failed response."""

    type: Literal["error"] = "error"
    code: str | None
    message: str
    param: str | None


StreamEvent = (
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | SummaryPartEvent
    | SummaryDeltaEvent
    | SummaryDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
    | InputDeltaEvent
    | InputDoneEvent
    | ErrorEvent
)


class ResponseDeleted(BaseModel):
    """A stored response has been deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    """The conversation before a stored response, without its instructions."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
