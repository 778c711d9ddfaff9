"""What the OpenAPI page says beside what is read off the routes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from app.openai.replies import ChatCompletionChunk, Completion, ErrorBody
from app.openai.responses_replies import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ErrorEvent,
    ItemEvent,
    PartEvent,
    ResponseEvent,
    TextDeltaEvent,
    TextDoneEvent,
)

DESCRIPTION = (
    "OpenAI's completions, chat completions and responses for one model and its adapters. Unknown fields are errors, "
    "and nulls are defaults. `docs/api.md` says what is beyond OpenAI's API, and what is refused."
)
_RESPONSE_EVENTS: list[type[BaseModel]] = [
    ResponseEvent,
    ItemEvent,
    PartEvent,
    TextDeltaEvent,
    TextDoneEvent,
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ErrorEvent,
]

Responses = dict[int | str, dict[str, Any]]


def _error(description: str) -> dict[str, Any]:
    return {"model": ErrorBody, "description": description}


ERRORS: Responses = {
    400: _error("The request is at fault: `param` says which field."),
    401: _error("There is no API key, or one that is not valid here."),
    403: _error("The API key does not allow what the request asks for."),
    404: _error("There is no such model, request, pinned prefix or route."),
    408: _error("The request has not finished within its `timeout_s`."),
    413: _error("The body is too large."),
    415: _error("The body is not JSON by its content type."),
    429: _error("Too many requests wait, or a client has sent too many. `Retry-After` says when to try again."),
    500: _error("The server is at fault; its log says more."),
    503: _error("No engine can be reached now. Send the request again."),
    "4XX": _error("The request is refused."),
}


def _stream_of(description: str, *data: type[BaseModel], has_end_mark: bool = False) -> Responses:
    """As OpenAPI 3.2 describes sequences: the schema is that of an item, here an event's fields.

    Args:
        data: what an event's data may be, as JSON.
    """
    references = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in data]
    shown: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": references},
    }
    event = {
        "type": "object",
        "description": description,
        "properties": {
            "event": {"type": "string"},
            "data": {"anyOf": [shown, {"const": "[DONE]"}]} if has_end_mark else shown,
        },
        "required": ["data"],
    }
    return {
        200: {
            "description": "The answer. With `stream`, server-sent events.",
            "content": {"text/event-stream": {"itemSchema": event}},
        }
    }


_LAST = "The last event's data is `[DONE]`, or an error."
COMPLETION_STREAM = _stream_of(_LAST, Completion, ErrorBody, has_end_mark=True)
CHAT_STREAM = _stream_of(_LAST, ChatCompletionChunk, ErrorBody, has_end_mark=True)
RESPONSE_STREAM = _stream_of(
    "Events have their `type` as name. The last is `response.completed`, `response.incomplete`, `response.failed` or "
    "`error`.",
    *_RESPONSE_EVENTS,
)


def describe(api: FastAPI) -> None:
    """Add the schemas of what is only streamed to the page."""
    made = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            page = made()
            models: list[type[BaseModel]] = [ChatCompletionChunk, *_RESPONSE_EVENTS]
            _, streamed = models_json_schema(
                [(model, "serialization") for model in models],
                ref_template="#/components/schemas/{model}",
            )
            page["components"]["schemas"] = streamed["$defs"] | page["components"]["schemas"]
        assert api.openapi_schema is not None
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation says it is to be extended
