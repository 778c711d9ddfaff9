"""Input items of `/v1/responses`: messages, and the calls, outputs and reasoning of earlier answers.

Items that mean nothing here, such as a web search that ran on another server, are dropped, and named in the header of
ignored fields (`OtherItem`).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from folio.app.api.base import (
    JsonObject,
    ListOf,
    OtherKind,
    StrictBody,
    Text,
    at_most,
    by_type,
    joined_text,
    json_text,
    left_out_kind,
    only_text,
    text_or,
)
from folio.app.api.openai.chat_body import MAX_PARTS
from folio.app.api.tools.bodies import Arguments, CallId


class OtherPart(OtherKind):
    """A part that is dropped. The text of an image or a file says that it was left out."""

    @property
    def text(self) -> str:
        return left_out_kind({"type": self.type})[1]


class OtherItem(OtherKind):
    """An item that is dropped."""


class InputText(StrictBody):
    type: Literal["input_text", "text"] = "input_text"
    text: Text


class GivenOutputText(StrictBody):
    """Text of an earlier answer. Annotations and log probabilities are ignored."""

    type: Literal["output_text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class GivenRefusal(StrictBody):
    """An earlier answer's refusal, which the model sees as its text."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


_PART_TYPES = ("input_text", "text", "output_text", "refusal")


def _readable(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    return OtherPart(type=kind) if isinstance(kind, str) and kind not in _PART_TYPES else part


Part = Annotated[
    Annotated[InputText, Tag("input_text")]
    | Annotated[InputText, Tag("text")]
    | Annotated[GivenOutputText, Tag("output_text")]
    | Annotated[GivenRefusal, Tag("refusal")]
    | Annotated[OtherPart, Tag("other")],
    by_type(*_PART_TYPES),
    only_text,
]


class _Item(StrictBody):
    id: Text | None = None
    status: Text | None = None


class InputMessage(_Item):
    """A message of the client, or of an earlier answer."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[Text, Tag("text")] | Annotated[ListOf[Part], at_most(MAX_PARTS, "parts"), Tag("parts")],
            text_or("parts"),
        ]
        | None
    ) = None
    phase: Text | None = None
    """Not shown to the model."""
    tool_call_id: Text | None = None
    """The call that a tool's message answers, as in chat completions."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, fields: Any) -> Any:
        """An image of the user is refused. Other ones stay in the history for good, and must not end it."""
        if isinstance(fields, dict) and fields.get("role") != "user" and isinstance(fields.get("content"), list):
            return fields | {"content": [_readable(part) for part in fields["content"]]}
        return fields

    @property
    def text(self) -> str:
        return joined_text(self.content)


class _Call(_Item):
    call_id: CallId
    name: Text
    namespace: Text | None = None
    """The tool's namespace, if it has one."""


class GivenFunctionCall(_Call):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    arguments: Arguments = ""


class GivenCustomCall(_Call):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    input: Text


class GivenAction(_Item):
    """A call of one of OpenAI's own tools that clients run, in an answer of another server."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call", "computer_call"]
    call_id: Text | None = None
    action: JsonObject | None = None
    actions: Annotated[ListOf[JsonObject] | None, at_most(MAX_PARTS, "actions")] = None
    operation: JsonObject | None = None


class GivenMcpCall(StrictBody):
    """A call that another server has made, with its result."""

    type: Literal["mcp_call"]
    id: Text
    server_label: Text | None = None
    name: Text
    arguments: Arguments
    output: Text | None = None
    error: JsonObject | Text | None = None
    approval_request_id: Text | None = None
    status: Text | None = None

    @property
    def result(self) -> str:
        if self.output is not None or self.error is None:
            return self.output or ""
        return self.error if isinstance(self.error, str) else json.dumps(self.error, ensure_ascii=False)


def _readable_output(value: Any) -> Any:
    """A tool's value as text or parts. Some clients send other JSON instead of a text."""
    is_parts = isinstance(value, list) and all(isinstance(part, dict) for part in value)
    return value if is_parts or isinstance(value, str | dict | None) else json_text(value)


class CallOutput(_Item):
    """The value that a tool has returned: a text, or parts of which images and files are left out."""

    type: Literal[
        "function_call_output",
        "custom_tool_call_output",
        "local_shell_call_output",
        "shell_call_output",
        "apply_patch_call_output",
        "computer_call_output",
    ]
    call_id: Text | None = None
    output: Annotated[
        Annotated[
            Annotated[Text, Tag("text")]
            | Annotated[ListOf[JsonObject], at_most(MAX_PARTS, "parts"), Tag("parts")]
            | Annotated[JsonObject, Tag("object")],
            Discriminator(lambda value: {list: "parts", dict: "object"}.get(type(value), "text")),
        ]
        | None,
        BeforeValidator(_readable_output),
    ] = None
    name: Text | None = None

    @model_validator(mode="after")
    def _check_call(self) -> CallOutput:
        if "call_id" not in self.model_fields_set and self.id is None:
            raise ValueError("call_id is missing")
        return self

    @property
    def text(self) -> str:
        if self.output is None or isinstance(self.output, str):
            return self.output or ""
        return "".join(map(_text_of_output, self._parts))

    @property
    def left_out(self) -> list[str]:
        """The kinds of parts that the model cannot read."""
        return [kind for kind, text in map(left_out_kind, self._parts) if text]

    @property
    def _parts(self) -> list[dict[str, Any]]:
        return self.output if isinstance(self.output, list) else [self.output] if isinstance(self.output, dict) else []


def _text_of_output(part: dict[str, Any]) -> str:
    text = part.get("text")
    return text if isinstance(text, str) else left_out_kind(part)[1] or json.dumps(part, ensure_ascii=False)


class ReasoningPart(StrictBody):
    type: Text
    text: Text


class GivenReasoning(_Item):
    """Reasoning of an earlier answer. Encrypted reasoning is ignored."""

    type: Literal["reasoning"]
    summary: Annotated[ListOf[ReasoningPart] | None, at_most(MAX_PARTS, "parts")] = None
    content: Annotated[ListOf[ReasoningPart] | None, at_most(MAX_PARTS, "parts")] = None
    encrypted_content: Text | None = None


class ItemReference(StrictBody):
    """An item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: Text


_Typed = GivenFunctionCall | GivenCustomCall | GivenAction | GivenMcpCall | CallOutput | GivenReasoning
_TYPES = [kind for one in get_args(_Typed) for kind in get_args(one.model_fields["type"].annotation)]


def _tag_of_item(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind is None:
        is_reference = isinstance(item, dict) and "role" not in item and "id" in item
        return "item_reference" if is_reference or isinstance(item, ItemReference) else "message"
    return "typed" if kind in _TYPES else kind if kind in ("message", "item_reference") else "other"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[_Typed, Field(discriminator="type"), Tag("typed")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_tag_of_item),
]
