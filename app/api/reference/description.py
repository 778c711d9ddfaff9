"""OpenAPI page: texts, schemas of errors and streams, and example requests, which work with the built-in model:
those for embeddings and scores with `pooling: mean`."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from typing import Any, get_args

from fastapi import FastAPI
from fastapi.openapi.models import Example
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from folio.app.api.anthropic.replies import MessageEvent, MessageObject, TokenCount
from folio.app.api.openai.replies import ChatCompletion, ChatCompletionChunk, Completion
from folio.app.api.responses.replies import ResponseObject, StreamEvent
from folio.app.http.error_json import AnthropicErrorBody
from folio.app.http.errors import ErrorBody

DESCRIPTION = (
    "OpenAI's completions, chat completions and responses, and Anthropic's messages, for the served models. "
    "Nulls are defaults. Unknown fields are dropped, unless the settings say otherwise, and named in the header "
    "`x-folio-ignored-fields`. `docs/reference/http-api.md` lists extensions and refused fields."
)
_RESPONSE_EVENTS: tuple[type[BaseModel], ...] = get_args(StreamEvent)
_MESSAGE_EVENTS: tuple[type[BaseModel], ...] = get_args(get_args(MessageEvent)[0])

Responses = dict[int | str, dict[str, Any]]


def _errors(body: type[BaseModel], descriptions: dict[int | str, str]) -> Responses:
    """Responses with explicit content: FastAPI would give a model the media type of the route's successful answer."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
    return {status: {"description": text, "content": content} for status, text in descriptions.items()}


_DESCRIPTIONS: dict[int | str, str] = {
    400: "The request is invalid: `param` names the field.",
    401: "The API key is missing or invalid.",
    403: "The API key, the host or the origin of the page is not allowed.",
    404: "There is no such model, request, response, pinned prefix, file, batch or route.",
    408: "The request did not finish within its `timeout_s`.",
    413: "The body is too large.",
    415: "The content type is not JSON.",
    429: "The queue is full, or the caller exceeds its limits. `Retry-After` gives the seconds to wait.",
    500: "The server failed; see its log.",
    503: "No engine replica can be reached now. Send the request again.",
    "4XX": "The request is refused.",
}
ERRORS = _errors(ErrorBody, _DESCRIPTIONS)
_ANTHROPIC_ERRORS = _errors(AnthropicErrorBody, _DESCRIPTIONS | {400: "The request is invalid."})


def _stream_of(description: str, *data: type[BaseModel], has_end_mark: bool = False) -> Responses:
    """A stream as OpenAPI 3.2 describes sequences, by the schema of an item: an event's fields.

    Args:
        data: the bodies that an event's data may be.
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
# Model of a route's answer → the route's other answers.
RESPONSES: dict[type[BaseModel], Responses] = {
    ChatCompletion: _stream_of(_LAST, ChatCompletionChunk, ErrorBody, has_end_mark=True),
    Completion: _stream_of(_LAST, Completion, ErrorBody, has_end_mark=True),
    ResponseObject: _stream_of(
        "Events have their `type` as name. The last is `response.completed`, `response.incomplete`, `response.failed` "
        "or `error`.",
        *_RESPONSE_EVENTS,
    ),
    MessageObject: _ANTHROPIC_ERRORS
    | _stream_of(
        "Events have their `type` as name. The last is `message_stop` or `error`.", *_MESSAGE_EVENTS, AnthropicErrorBody
    ),
    TokenCount: _ANTHROPIC_ERRORS,
}


def describe(api: FastAPI, *, allow_unknown: bool) -> None:
    """Add `/openapi.json`, with the schemas of chunks and events, which no route declares. It is built at the first
    request, outside of the event loop: that takes a second. `allow_unknown`: objects may have unknown fields."""
    build_page, lock = api.openapi, threading.Lock()

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            page = build_page()
            models: list[type[BaseModel]] = [ErrorBody, AnthropicErrorBody, ChatCompletionChunk]
            models += [*_RESPONSE_EVENTS, *_MESSAGE_EVENTS]
            _, streamed = models_json_schema(
                [(model, "serialization") for model in models],
                ref_template="#/components/schemas/{model}",
            )
            schemas = page["components"]["schemas"] = streamed["$defs"] | page["components"]["schemas"]
            if allow_unknown:
                for schema in schemas.values():
                    schema.pop("additionalProperties", None)
        assert api.openapi_schema is not None
        return api.openapi_schema

    @functools.cache
    def written(root_path: str) -> bytes:
        servers = {"servers": [{"url": root_path}]} if root_path else {}
        return json.dumps(api.openapi() | servers, ensure_ascii=False, separators=(",", ":")).encode()

    def written_once(root_path: str) -> bytes:
        with lock:
            return written(root_path)

    async def openapi_json(request: Request) -> Response:
        root_path = request.scope.get("root_path", "").rstrip("/")
        return Response(await asyncio.to_thread(written_once, root_path), media_type="application/json")

    api.openapi = openapi  # type: ignore[method-assign]  # the way of FastAPI's documentation
    api.add_route("/openapi.json", openapi_json, include_in_schema=False)


_KEYS = "The key of room 417 is 93. The key of room 256 is 12."
_ROOM: dict[str, Any] = {
    "type": "object",
    "properties": {"room": {"enum": [417, 256]}},
    "required": ["room"],
    "additionalProperties": False,
}
_QUESTION = [{"role": "user", "content": "What is Folio?"}]


def _example(summary: str, **value: Any) -> Example:
    return {"summary": summary, "value": value}


_MESSAGES: dict[str, Any] = {"model": "builtin", "system": _KEYS, "messages": _QUESTION}
_DOCUMENTS = ["A block is 16 positions of one sequence.", "It rains."]
# By the name of the operation.
EXAMPLES: dict[str, dict[str, Example]] = {
    "chat": {
        "question": _example("A question", model="builtin", temperature=0, messages=_QUESTION),
        "stream": _example(
            "Streamed, with the usage at the end",
            model="builtin",
            temperature=0,
            messages=[{"role": "user", "content": [{"type": "text", "text": f"{_KEYS} What is the key of room 256?"}]}],
            stream=True,
            stream_options={"include_usage": True},
        ),
        "tool": _example(
            "A tool that has to be called",
            model="builtin",
            messages=[{"role": "user", "content": "What is the key of room 417?"}],
            tools=[{"type": "function", "function": {"name": "find_key", "parameters": _ROOM}}],
            tool_choice="required",
        ),
        "schema": _example(
            "JSON that follows a schema",
            model="builtin",
            messages=_QUESTION,
            response_format={"type": "json_schema", "json_schema": {"name": "room", "schema": _ROOM}},
        ),
    },
    "generate": {
        "prompt": _example(
            "A prompt", model="builtin", prompt=f"{_KEYS} The key of room 417 is", max_tokens=8, temperature=0
        ),
        "beams": _example(
            "The two likeliest of four beams",
            model="builtin",
            prompt="Folio is",
            max_tokens=8,
            n=2,
            best_of=4,
            use_beam_search=True,
        ),
        "batch": _example("Two prompts as token ids", model="builtin", prompt=[[76, 77], [78, 79, 80]], max_tokens=4),
    },
    "responses": {
        "question": _example("A question", model="builtin", input="What is a block?", temperature=0),
        "stream": _example(
            "Streamed, with instructions",
            model="builtin",
            instructions=_KEYS,
            input=[{"role": "user", "content": [{"type": "input_text", "text": "What is the key of room 417?"}]}],
            temperature=0,
            stream=True,
        ),
    },
    "messages": {
        "question": _example("A question", **_MESSAGES, max_tokens=64, temperature=0),
        "stream": _example("Streamed", **_MESSAGES, max_tokens=64, temperature=0, stream=True),
        "tool": _example(
            "A tool that has to be called",
            **_MESSAGES,
            max_tokens=64,
            tools=[{"name": "find_key", "input_schema": _ROOM}],
            tool_choice={"type": "any"},
        ),
    },
    "count_tokens": {"question": _example("A question", **_MESSAGES)},
    "embed": {
        "texts": _example("Two texts", model="builtin", input=["What is Folio?", "What is a block?"]),
        "tokens": _example("Token ids, as base64", model="builtin", input=[76, 77], encoding_format="base64"),
    },
    "score": {
        "pairs": _example("A text and two others", model="builtin", text_1="What is a block?", text_2=_DOCUMENTS)
    },
    "rerank": {
        "documents": _example(
            "The better of two", model="builtin", query="What is a block?", documents=_DOCUMENTS, top_n=1
        )
    },
    "tokenize": {
        "text": _example("A text", model="builtin", prompt="What is Folio?", return_token_strs=True),
        "conversation": _example("A conversation", model="builtin", messages=_QUESTION),
    },
    "drain": {"a replica": _example("Before its machine is stopped", replica="p3k1x9qa")},
    "budget": {"a gibibyte": _example("1 GiB for each replica", budget_bytes=1 << 30)},
    "pin": {"rules": _example("A text that many prompts begin with", name="rules", prompt=f"{_KEYS} " * 4)},
}
