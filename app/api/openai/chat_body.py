"""Request body of `/v1/chat/completions`, and the messages of a conversation."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, Tag, model_validator

from folio.app.api.base import (
    JsonObject,
    ListOf,
    StrictBody,
    Text,
    at_most,
    joined_text,
    json_text,
    left_out_kind,
    none_if_empty,
    only_text,
    text_or,
    unsupported_field,
)
from folio.app.api.openai.bodies import GenerationBody, TokenFields
from folio.app.api.openai.sampling_body import ResponseFormat, structure_of
from folio.app.api.output.plan import OutputPlan
from folio.app.api.tools.bodies import ToolCall, ToolChoice, Tools
from folio.app.api.tools.choice import GivenTools
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import RequestError

MAX_MESSAGES = 4096
# The most parts of one message, and the most tool calls.
MAX_PARTS = 1024
MAX_TOP_LOGPROBS = 20
# Text parts of `/v1/responses`, in histories that clients have converted.
_TEXTS = ("input_text", "output_text")
_ANSWERING = ("assistant", "tool")
MAX_TEMPLATE_VARIABLES, MAX_DOCUMENTS = 64, 1024


class TextPart(StrictBody):
    type: Literal["text"] = "text"
    text: Text

    dropped = frozenset({"cache_control"})


class LeftOutPart(TextPart):
    """A part of an unsupported type, in an answer or a tool's result; its text tells the model what was left out."""

    kind: str


def _readable(part: Any, role: Any) -> Any:
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind == "text" and role in _ANSWERING and not isinstance(part.get("text"), str):
        return part | {"text": json_text(part.get("text"))}
    if not isinstance(kind, str) or kind == "text":
        return part
    if kind == "refusal":
        return {"type": "text", "text": json_text(part.get("refusal"))}
    if kind in _TEXTS or (role not in _ANSWERING and isinstance(part.get("text"), str)):
        return {"type": "text", "text": part.get("text")}
    kind, text = left_out_kind(part)
    # An image of the user is refused. Other ones stay in the history for good, and must not end the conversation.
    return part if text and role not in _ANSWERING else LeftOutPart(type="text", text=text, kind=kind)


def _are_parts(content: Any) -> bool:
    if not isinstance(content, list):
        return False
    return all(isinstance(part, BaseModel) or (isinstance(part, dict) and "type" in part) for part in content)


Content = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[ListOf[Annotated[TextPart, only_text]], at_most(MAX_PARTS, "parts"), Tag("parts")],
    text_or("parts"),
]


class Message(StrictBody):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """`developer` is `system` by another name."""
    content: Content | None = None
    """Text, or a list of parts. An assistant's message may have `tool_calls` instead or as well."""
    name: str | None = None
    """Name of the speaker. Chat templates get that of a tool whose call is not known."""
    tool_calls: Annotated[ListOf[ToolCall] | None, at_most(MAX_PARTS, "calls"), none_if_empty] = None
    """The assistant's calls."""
    tool_call_id: Text | None = None
    """The call that a tool's message answers; by default the first one without an answer."""
    reasoning_content: Text | None = None
    """The assistant's reasoning. Chat templates decide how much of it the model sees again."""
    reasoning: Text | None = None
    """Another name of `reasoning_content`."""
    refusal: Text | None = None
    """The text of an earlier answer without content."""
    annotations: list[Any] | None = None
    """Annotations of an earlier answer. Ignored."""
    audio: JsonObject | None = None
    """Audio of an earlier answer. It is left out, and named in the header `x-folio-ignored-fields`."""
    function_call: Annotated[None, unsupported_field("it is deprecated and not known here; use tool_calls")] = None
    """The assistant's one call, in the API before `tool_calls`."""

    # Added to answers by OpenAI's client and LiteLLM, and to messages for Anthropic's models.
    dropped = frozenset({"parsed", "provider_specific_fields", "cache_control"})

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, fields: Any) -> Any:
        """Convert fields of other servers' messages to those of this model."""
        if not isinstance(fields, dict):
            return fields
        changes: dict[str, Any] = {}
        role, content = fields.get("role"), fields.get("content")
        if role == "function":  # of the API before tools
            role = changes["role"] = "tool"
        if role == "tool" and not _are_parts(content):
            changes["content"] = json_text(content)
        elif isinstance(content, list):
            changes["content"] = [_readable(part, role) for part in content]
        if role == "assistant" and fields.get("function_call") is not None and not fields.get("tool_calls"):
            changes |= {"function_call": None, "tool_calls": [{"id": None, "function": fields["function_call"]}]}
        return fields | changes if changes else fields

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"only an assistant's message may have tool_calls; the role is {self.role}")
        if self.tool_call_id and self.role != "tool":
            raise ValueError(f"only a tool's message may have a tool_call_id; the role is {self.role}")
        if self.reasoning_text and self.role != "assistant":
            raise ValueError(f"only an assistant's message may have reasoning; the role is {self.role}")
        if "content" not in self.model_fields_set and self.role not in ("assistant", "tool"):
            raise ValueError("content is missing")
        return self

    @property
    def text(self) -> str:
        return joined_text(self.content) or self.refusal or ""

    @property
    def reasoning_text(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Thinking(StrictBody):
    """Whether the model reasons before it answers, where its chat template lets one choose."""

    type: Literal["enabled", "adaptive", "disabled"]
    """"adaptive" is "enabled": the model decides how much."""
    budget_tokens: Annotated[int | None, Field(ge=0)] = None
    """The most tokens of reasoning."""


Messages = Annotated[ListOf[Message], at_most(MAX_MESSAGES, "messages")]


class TemplateFields(StrictBody):
    """Input of the chat template besides messages and tools."""

    chat_template_kwargs: Annotated[JsonObject | None, at_most(MAX_TEMPLATE_VARIABLES, "variables")] = None
    """Variables of the model's chat template, such as `enable_thinking`."""
    documents: Annotated[ListOf[JsonObject] | None, at_most(MAX_DOCUMENTS, "documents"), none_if_empty] = None
    """Documents for chat templates that show documents, mostly with `title` and `text`."""
    add_generation_prompt: bool | None = None
    """Add the text with which the template begins an answer. True by default."""
    continue_final_message: bool | None = None
    """The answer continues the last message. `add_generation_prompt` is then false."""
    chat_template: Annotated[None, unsupported_field("the model's own template is used; leave it out")] = None
    """Refused: the model's own template is used."""


class ChatCompletionRequest(GenerationBody, TokenFields, TemplateFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[Messages, Field(examples=[[{"role": "user", "content": "What is Folio?"}]])]
    """The conversation so far."""
    max_tokens: int | None = None
    """The older name of `max_completion_tokens`."""
    max_completion_tokens: int | None = None
    """The most tokens to generate; by default as many as the context has room for."""
    logprobs: bool | None = None
    """Log probabilities of each token."""
    top_logprobs: int | None = None
    """Number of alternatives for each token, between 0 and 20."""
    echo: bool | None = None
    """Begin the answer with the text of the assistant's last message, which `continue_final_message` continues."""
    tools: Tools = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """"none": the prompt does not show tools; "auto", the default: the model decides; "required", or a function's name:
    the answer is a call."""
    parallel_tool_calls: bool | None = None
    """Whether a forced answer may have several calls. True by default."""
    response_format: ResponseFormat | None = None
    """The form of the answer: text, a JSON object, or JSON that follows a schema."""
    modalities: Annotated[ListOf[Literal["text"]] | None, unsupported_field("answers are text here", ["text"])] = None
    """Answers are text."""
    reasoning_effort: ReasoningEffort | None = None
    """How much the model reasons before it answers. The chat template gets it; "none" switches reasoning off where the
    template can."""
    thinking: Thinking | bool | None = None
    """Whether the model reasons, for templates that let one choose."""
    thinking_token_budget: Annotated[int | None, Field(ge=0)] = None
    """The most tokens of reasoning; then its end is forced. Another name of `thinking.budget_tokens`."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """No effect: ask for a length in the prompt."""
    functions: Annotated[None, unsupported_field("it is deprecated and not known here; use tools")] = None
    """Refused: use `tools`."""
    function_call: Annotated[None, unsupported_field("it is deprecated and not known here; use tool_choice")] = None
    """Refused: use `tool_choice`."""
    audio: Annotated[None, unsupported_field("answers are text here; leave it out")] = None
    """Refused: answers are text."""
    prediction: JsonObject | None = None
    """No effect: the server's settings decide about speculation."""

    def sampling_params(self, output: OutputPlan | None = None) -> SamplingParams:
        """The sampling parameters, with the structure of `output` forced. Raises `RequestError`, see `params`."""
        return self.params(
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            output=output,
            response_format=structure_of(self.response_format),
        )

    @property
    def ignored_fields(self) -> list[str]:
        """Names of parts of messages, and of tools, that were left out."""
        contents = (message.content for message in self.messages if isinstance(message.content, list))
        kinds = (part.kind for content in contents for part in content if isinstance(part, LeftOutPart))
        audio = ["messages[].audio"] if any(message.audio for message in self.messages) else []
        return [*(f"messages[].content[].{kind}" for kind in dict.fromkeys(kinds)), *audio, *self.given_tools.ignored]

    @cached_property
    def given_tools(self) -> GivenTools:
        return GivenTools.of(self.tools, self.tool_choice)

    @property
    def template_settings(self) -> dict[str, Any]:
        """Variables of the chat template that decide about reasoning."""
        reasons: bool | None = None
        if self.reasoning_effort is not None:
            reasons = self.reasoning_effort != "none"
        if self.thinking is not None:
            reasons = self.thinking if isinstance(self.thinking, bool) else self.thinking.type != "disabled"
        settings: dict[str, Any] = {} if reasons is None else {"enable_thinking": reasons, "thinking": reasons}
        if self.reasoning_effort is not None:
            settings["reasoning_effort"] = self.reasoning_effort
        return settings

    @property
    def continued_text(self) -> str | None:
        """The text of the last message if the answer continues it."""
        return self.messages[-1].text if self.continue_final_message else None

    @property
    def reasoning_budget(self) -> int | None:
        """The reasoning budget in tokens. Raises `RequestError` if two different ones are given."""
        budget = self.thinking.budget_tokens if isinstance(self.thinking, Thinking) else None
        if budget is None or self.thinking_token_budget in (None, budget):
            return self.thinking_token_budget if budget is None else budget
        raise RequestError(
            f"thinking_token_budget is {self.thinking_token_budget} and thinking.budget_tokens {budget}; leave one out",
            "thinking_token_budget",
        )

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each token; `None`: no log probabilities. Raises `RequestError`."""
        if self.top_logprobs is None:
            return 0 if self.logprobs else None
        if not self.logprobs and self.top_logprobs == 0:
            return None
        if not self.logprobs:
            raise RequestError(f"top_logprobs is {self.top_logprobs}, but logprobs is not true", "top_logprobs")
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs}; it must be between 0 and {MAX_TOP_LOGPROBS}", "top_logprobs"
            )
        return self.top_logprobs
