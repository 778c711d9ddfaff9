"""Conversion between the messages of `folio.proto` and the JSON of the HTTP API.

Messages have the fields of the JSON bodies by the same names. Where a message cannot have the JSON's shape, such as a
value of several types, pairs of functions change the shape and change it back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from folio.app.errors import RequestError
from folio.app.proto import folio_pb2 as pb

M = TypeVar("M")
Fields = dict[str, Any]

# Fields of JSON that say what the type of a message says, or another field.
_IMPLIED = ("object", "deleted", "reasoning")
_EARLY_STOPPING = {"true": True, "false": False}
_SAMPLING = frozenset(field.name for field in pb.Sampling.DESCRIPTOR.fields)
_SCHEDULING = frozenset(field.name for field in pb.Scheduling.DESCRIPTOR.fields)


# Requests: clients write messages, servers read them.


def generate_message(body: Fields, session: str | None = None) -> pb.GenerateRequest:
    """The message of a `CompletionRequest` as JSON. Raises `RequestError` for fields that messages do not have."""
    fields = _without_stream(body)
    if "max_tokens" in fields and fields["max_tokens"] is None:
        fields["unlimited"] = True
    return filled(pb.GenerateRequest(), _grouped(_with_prompt(fields), session))


def generate_body(message: pb.GenerateRequest) -> Fields:
    """The `CompletionRequest` of a message, as JSON."""
    fields = _ungrouped(plain(message))
    if fields.pop("unlimited"):
        fields["max_tokens"] = None
    return _without_kind_of_prompt(fields)


def chat_message(body: Fields, session: str | None = None) -> pb.ChatRequest:
    """The message of a `ChatCompletionRequest` as JSON. Raises `RequestError` for fields that messages do not have."""
    fields = _without_stream(body)
    fields["messages"] = [_message(message) for message in fields["messages"]]
    if fields.get("tools"):
        fields["tools"] = [_with_text(tool["function"], "parameters") for tool in fields["tools"]]
    if isinstance(choice := fields.get("tool_choice"), dict):
        if choice.get("type") != "function":
            raise RequestError("tool_choice: only one function can be named over gRPC", "tool_choice")
        fields["tool_choice"], fields["called_tool"] = None, choice["function"]["name"]
    if fields.get("response_format"):
        schema = fields["response_format"].get("json_schema") or {}
        fields["response_format"] = {"type": fields["response_format"]["type"], **_with_text(schema, "schema")}
        fields["response_format"].pop("description", None)  # has no effect, and neither has `strict`
        fields["response_format"].pop("strict", None)
    return filled(pb.ChatRequest(), _grouped(fields, session))


def chat_body(message: pb.ChatRequest) -> Fields:
    """The `ChatCompletionRequest` of a message, as JSON. Raises `RequestError` for texts that should be JSON."""
    fields = _ungrouped(plain(message))
    if tools := fields.get("tools"):
        fields["tools"] = [
            {"type": "function", "function": _with_object(tool, "parameters", f"tools[{i}].parameters")}
            for i, tool in enumerate(tools)
        ]
    if "called_tool" in fields:
        fields["tool_choice"] = {"type": "function", "function": {"name": fields.pop("called_tool")}}
    if form := fields.get("response_format"):
        schema = {name: value for name, value in form.items() if name != "type"}
        fields["response_format"] = {"type": form["type"]}
        if form["type"] == "json_schema":
            fields["response_format"]["json_schema"] = _with_object(schema, "schema", "response_format.schema")
        elif schema:
            raise RequestError(f"response_format: only json_schema has {' and '.join(schema)}", "response_format")
    return fields


def pin_message(body: Fields) -> pb.PinRequest:
    fields = _with_prompt(body)
    if fields.get("messages") is not None:
        fields["messages"] = [_message(message) for message in fields["messages"]]
    return filled(pb.PinRequest(), fields)


def pin_body(message: pb.PinRequest) -> Fields:
    return _without_kind_of_prompt(plain(message))


# Answers: servers write messages, clients read them.


def answer_message(message: M, answer: Fields) -> M:
    """Fill the message of a completion, a chat completion or a chunk from JSON."""
    choices = [_choice_fields(choice) for choice in answer["choices"]]
    return filled(message, _with_prompt_tokens(answer) | {"choices": choices})


def answer_fields(message: Any) -> Fields:
    """A completion, a chat completion or a chunk as JSON, without `object`."""
    return _with_prompt_logprobs(plain(message)) | {"choices": [_choice(choice) for choice in message.choices]}


def reports_fields(message: pb.MemoryReports) -> dict[str, Fields]:
    return {name: {"pins": [], "groups": []} | plain(report) for name, report in message.replicas.items()}


# Any message.


def plain(message: Any) -> Fields:
    """The fields of a message as JSON, without those that are not set and empty lists."""
    fields: Fields = {}
    for field in message.DESCRIPTOR.fields:
        name = field.name
        if field.is_repeated:
            values = getattr(message, name)
            if not values:
                continue
            if field.message_type is None:
                fields[name] = list(values)
            elif field.message_type.GetOptions().map_entry:
                fields[name] = {str(key): value for key, value in values.items()}
            else:
                fields[name] = [plain(value) for value in values]
        elif not field.has_presence:
            fields[name] = getattr(message, name)
        elif message.HasField(name):
            value = getattr(message, name)
            fields[name] = value if field.message_type is None else plain(value)
    return fields


def filled(message: M, fields: Mapping[str, Any]) -> M:
    """Fill a message with fields of JSON, without nulls and `_IMPLIED`. Raises `RequestError` for unknown fields, and
    for values out of range or of another type."""
    known: Any = message
    for name, value in fields.items():
        if value is None or name in _IMPLIED:
            continue
        if name not in known.DESCRIPTOR.fields_by_name:
            raise RequestError(f"{name} cannot be sent over gRPC; leave it out, or use http://", name)
        try:
            if isinstance(value, dict):
                _fill_object(known, name, value)
            elif not isinstance(value, list | tuple):
                setattr(known, name, value)
            elif known.DESCRIPTOR.fields_by_name[name].message_type is None:
                getattr(known, name).extend(value)
            else:
                for item in value:
                    filled(getattr(known, name).add(), item)
        except (TypeError, ValueError) as error:  # protobuf's
            raise RequestError(f"{name}: {error}", name) from None
    return message


def _fill_object(message: Any, name: str, value: Fields) -> None:
    kind = message.DESCRIPTOR.fields_by_name[name].message_type
    if not kind.GetOptions().map_entry:
        getattr(message, name).SetInParent()  # present, even if empty
        filled(getattr(message, name), value)
    elif kind.fields_by_name["value"].message_type is not None:
        for key, item in value.items():
            filled(getattr(message, name)[key], item)
    else:  # keys are token ids, which are strings in JSON
        getattr(message, name).update({int(key): item for key, item in value.items()})


def _without_stream(body: Fields) -> Fields:
    """Drop `stream`: streamed answers are another call."""
    fields = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    options = body.get("stream_options") or {}
    return fields | {"include_usage": bool(options.get("include_usage"))}


def _grouped(fields: Fields, session: str | None) -> Fields:
    found: dict[str, Fields] = {"sampling": {}, "scheduling": {"session": session}}
    top = {}
    for name, value in fields.items():
        if name in _SAMPLING:
            found["sampling"][name] = value
        elif name in _SCHEDULING:
            found["scheduling"][name] = value
        else:
            top[name] = value
    sampling = found["sampling"]
    if sampling.get("guided_choice") == []:  # a message cannot tell an empty list from none
        raise RequestError("guided_choice: at least one choice is needed", "guided_choice")
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    if isinstance(sampling.get("early_stopping"), bool):
        sampling["early_stopping"] = json.dumps(sampling["early_stopping"])
    if isinstance(sampling.get("guided_json"), dict):
        sampling["guided_json"] = json.dumps(sampling["guided_json"])
    return top | found


def _ungrouped(fields: Fields) -> Fields:
    """Undo `_grouped`; the session is a header over HTTP."""
    sampling, scheduling = fields.pop("sampling", {}), fields.pop("scheduling", {})
    scheduling.pop("session", None)
    if (given := sampling.get("early_stopping")) is not None:
        sampling["early_stopping"] = _EARLY_STOPPING.get(given, given)
    if fields.pop("include_usage"):
        fields["stream_options"] = {"include_usage": True}
    return fields | sampling | scheduling


def _with_prompt(body: Fields) -> Fields:
    """The prompt by the kind of its first element, as in `folio.app.api.openai.bodies`."""
    fields = {name: value for name, value in body.items() if name != "prompt"}
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        fields["text"] = prompt
    elif prompt is not None:
        if prompt and isinstance(prompt[0], str):
            fields["texts"] = {"texts": prompt}
        elif prompt and isinstance(prompt[0], list):
            fields["token_id_lists"] = {"lists": [{"ids": ids} for ids in prompt]}
        else:
            fields["token_ids"] = {"ids": prompt}
    return fields


def _without_kind_of_prompt(fields: Fields) -> Fields:
    if "text" in fields:
        fields["prompt"] = fields.pop("text")
    if "texts" in fields:
        fields["prompt"] = fields.pop("texts").get("texts", [])
    if "token_ids" in fields:
        fields["prompt"] = fields.pop("token_ids").get("ids", [])
    if "token_id_lists" in fields:
        fields["prompt"] = [ids.get("ids", []) for ids in fields.pop("token_id_lists").get("lists", [])]
    return fields


def _message(message: Fields) -> Fields:
    """Join the parts of the text; drop fields that other servers and clients add to answers."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    names = ("role", "name", "tool_calls", "tool_call_id", "reasoning_content")
    return {name: message[name] for name in names if name in message} | {"content": content}


def _with_text(fields: Fields, name: str) -> Fields:
    return fields | {name: json.dumps(fields[name])} if fields.get(name) is not None else fields


def _with_object(fields: Fields, name: str, where: str) -> Fields:
    if name not in fields:
        return fields
    try:
        return fields | {name: json.loads(fields[name])}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not valid JSON: {error}", where.partition("[")[0].partition(".")[0]) from None


def _choice_fields(choice: Fields) -> Fields:
    fields = _with_prompt_tokens(choice)
    reason = fields.pop("stop_reason", None)
    if reason is not None:
        fields["stop_string" if isinstance(reason, str) else "stop_token_id"] = reason
    if (logprobs := fields.get("logprobs")) is not None:
        tokens = map(_chat_token, logprobs["content"]) if "content" in logprobs else _completion_tokens(logprobs)
        fields["logprobs"] = {"content": list(tokens)}
    return fields


def _choice(message: Any) -> Fields:
    fields = _with_prompt_logprobs(plain(message))
    for name in ("stop_string", "stop_token_id"):
        if name in fields:
            fields["stop_reason"] = fields.pop(name)
    if "logprobs" in fields:
        entries = fields["logprobs"].get("content", [])
        fields["logprobs"] = (
            _completion_logprobs(entries)
            if isinstance(message, pb.CompletionChoice)
            else {"content": [_with_byte_list(entry) for entry in entries]}
        )
    if isinstance(message, pb.ChatChunkChoice):
        fields.setdefault("delta", {})
    if isinstance(message, pb.ChatChoice):
        fields["message"].setdefault("content", None)
    return fields


def _completion_tokens(logprobs: Fields) -> list[Fields]:
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [
        {
            "token": token,
            "logprob": logprob,
            "top_logprobs": [{"token": other, "logprob": value} for other, value in (top or {}).items()],
            "text_offset": offset,
        }
        for token, logprob, top, offset in zip(*(logprobs[name] for name in columns), strict=True)
    ]


def _completion_logprobs(entries: list[Fields]) -> Fields:
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry.get("logprob") for entry in entries],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in entry.get("top_logprobs", [])} if "logprob" in entry else None
            for entry in entries
        ],
        "text_offset": [entry["text_offset"] for entry in entries],
    }


def _chat_token(entry: Fields) -> Fields:
    fields = entry | {"bytes": None if entry["bytes"] is None else bytes(entry["bytes"])}
    if "top_logprobs" in entry:
        fields["top_logprobs"] = [_chat_token(top) for top in entry["top_logprobs"]]
    return fields


def _with_byte_list(entry: Fields) -> Fields:
    fields = entry | {"bytes": list(entry["bytes"]) if "bytes" in entry else None}
    return fields | {"top_logprobs": [_with_byte_list(top) for top in entry.get("top_logprobs", [])]}


def _with_prompt_tokens(fields: Fields) -> Fields:
    if (tokens := fields.get("prompt_logprobs")) is None:
        return dict(fields)
    prompt = [
        {"candidates": [{"token_id": int(token_id)} | entry for token_id, entry in (token or {}).items()]}
        for token in tokens
    ]
    return fields | {"prompt_logprobs": prompt}


def _with_prompt_logprobs(fields: Fields) -> Fields:
    if (tokens := fields.get("prompt_logprobs")) is None:
        return fields
    prompt = [{entry.pop("token_id"): entry for entry in token.get("candidates", [])} or None for token in tokens]
    return fields | {"prompt_logprobs": prompt}
