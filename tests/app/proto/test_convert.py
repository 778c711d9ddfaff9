"""Messages and the HTTP bodies that they correspond to."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from grpc_tools import protoc
from pydantic import BaseModel

from folio.app.api.base import ClientFields
from folio.app.api.openai import chat_body, replies
from folio.app.api.openai.bodies import CompletionRequest, TokenFields
from folio.app.api.operators import bodies
from folio.app.api.operators import replies as operator_replies
from folio.app.api.tools import bodies as tool_bodies
from folio.app.client import LoadReport, MemoryReport, PinCard, PinList
from folio.app.errors import RequestError
from folio.app.proto import convert
from folio.app.proto import folio_pb2 as pb
from folio.vmem import GroupReport, PinReport

ROOT = Path(__file__).parents[3]
# Fields for HTTP only: OpenAI's that change no output or are refused, and those by which vLLM's clients are served.
VLLMS = {*TokenFields.model_fields, *chat_body.TemplateFields.model_fields} | {
    *("allowed_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    *("structured_outputs", "truncate_prompt_tokens", "request_id", "token_ids", "prompt_token_ids", "service_tier"),
}
HTTP_ONLY = {*ClientFields.model_fields, *VLLMS, "stream", "stream_options", "suffix"} | {
    *("modalities", "reasoning", "thinking", "verbosity", "functions", "function_call", "audio", "prediction"),
    *("refusal", "annotations", "parsed", "provider_specific_fields"),
}
# Of one route only.
HTTP_ONLY_OF: dict[Any, set[str]] = {CompletionRequest: {"response_format"}, chat_body.ChatCompletionRequest: {"echo"}}
# Fields of another shape in messages, with their names there.
SHAPES = {
    "prompt": {"text", "token_ids", "texts", "token_id_lists"},
    "tool_choice": {"tool_choice", "called_tool"},
    "stop_reason": {"stop_string", "stop_token_id"},
}


def fields_of(kind: Any) -> set[str]:
    if issubclass(kind, BaseModel):
        return set(kind.model_fields)
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("kind", "message", "also"),
    [
        (CompletionRequest, pb.GenerateRequest, {"unlimited", "include_usage", "session"}),
        (chat_body.ChatCompletionRequest, pb.ChatRequest, {"include_usage", "session"}),
        (bodies.PinRequest, pb.PinRequest, set()),
        (chat_body.Message, pb.Message, set()),
        (tool_bodies.FunctionDefinition, pb.Tool, set()),
        (tool_bodies.ToolCall, pb.ToolCall, set()),
        (tool_bodies.FunctionCall, pb.FunctionCall, set()),
        (replies.Completion, pb.Completion, set()),
        (replies.CompletionChoice, pb.CompletionChoice, set()),
        (replies.ChatCompletion, pb.ChatCompletion, set()),
        (replies.ChatChoice, pb.ChatChoice, set()),
        (replies.AssistantMessage, pb.AssistantMessage, set()),
        (replies.ChatCompletionChunk, pb.ChatCompletionChunk, set()),
        (replies.ChatChunkChoice, pb.ChatChunkChoice, set()),
        (replies.ChatDelta, pb.ChatDelta, set()),
        (tool_bodies.ToolCallDelta, pb.ToolCallDelta, set()),
        (replies.ChatTokenLogprob, pb.TokenLogprob, {"text_offset"}),
        (replies.TopLogprob, pb.TopLogprob, set()),
        (replies.PromptLogprob, pb.PromptLogprob, {"token_id"}),
        (replies.Usage, pb.Usage, set()),
        (replies.PromptTokensDetails, pb.PromptTokensDetails, set()),
        (operator_replies.LoadFigures, pb.LoadFigures, set()),
        (operator_replies.ReplicaLoad, pb.ReplicaLoad, set()),
        (operator_replies.ModelLoad, pb.ModelLoad, set()),
        (LoadReport, pb.LoadReport, set()),
        (PinCard, pb.PinCard, set()),
        (PinList, pb.PinList, set()),
        (MemoryReport, pb.MemoryReport, set()),
        (PinReport, pb.PinReport, set()),
        (GroupReport, pb.GroupReport, set()),
    ],
)
def test_messages_have_every_field(kind: Any, message: Any, also: set[str]) -> None:
    """A field added to a body is added to its message, too."""
    expected: set[str] = set()
    for name in fields_of(kind) - HTTP_ONLY - HTTP_ONLY_OF.get(kind, set()) - {"object"}:
        ours = SHAPES.get(name, {name})
        expected |= {"text", "token_ids"} if name == "prompt" and kind is bodies.PinRequest else ours
    found: set[str] = set()
    for field in message.DESCRIPTOR.fields:
        grouped = field.name in ("sampling", "scheduling")
        found |= {inner.name for inner in field.message_type.fields} if grouped else {field.name}
    assert found == expected | also


def test_the_generated_code_is_that_of_the_proto(tmp_path: Path) -> None:
    """Run `make proto` after a change of folio.proto."""
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    assert protoc.main(["protoc", f"-I{ROOT}", *outputs, f"{ROOT}/folio/app/proto/folio.proto"]) == 0
    for name in ("folio_pb2.py", "folio_pb2.pyi", "folio_pb2_grpc.py"):
        generated = (tmp_path / "folio/app/proto" / name).read_text()
        ours = re.sub("request_deserializer=.*,", "request_deserializer=None,", generated)
        assert (ROOT / "app/proto" / name).read_text() == ours


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": 2**63}, "seed"),
        ({"n": "two"}, "n: "),
        ({"n": 2**31}, "n: "),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"stop": ["\ud800"]}, "stop"),
        ({"weather": "fine"}, "weather cannot be sent over gRPC"),
    ],
)
def test_values_that_messages_cannot_have_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    """They are not cut, rounded or left out."""
    with pytest.raises(RequestError, match=message):
        convert.generate_message({"model": "m", "prompt": "a"} | fields)


def test_the_type_of_a_tool_call_is_optional() -> None:
    called = pb.ToolCall(id="c", function=pb.FunctionCall(name="f", arguments="{}"))
    message = pb.ChatRequest(model="m", messages=[pb.Message(role="assistant", tool_calls=[called])])
    body = chat_body.ChatCompletionRequest.model_validate(convert.chat_body(message))
    [sent] = body.messages
    assert sent.tool_calls is not None
    assert sent.tool_calls[0].type == "function"


def test_values_that_messages_would_drop_are_refused() -> None:
    with pytest.raises(RequestError, match="guided_choice"):
        convert.generate_message({"model": "m", "prompt": "x", "guided_choice": []})
    form = pb.ResponseFormat(type="json_object", schema="{}")
    with pytest.raises(RequestError, match="only json_schema has schema"):
        convert.chat_body(pb.ChatRequest(model="m", response_format=form))
