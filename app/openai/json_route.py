"""How bodies are read: what is no JSON is an error that says so, before anybody looks at its fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response


class JsonRoute(APIRoute):
    """A route whose body, if it has one, is JSON, and is said to be: a web page of another origin cannot send that
    without being asked for its origin first."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_json(request: Request) -> Response:
            given = request.headers.get("content-type", "")
            kind = given.partition(";")[0].strip().lower()
            if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
                said = f"content-type is {given[:100]!r}" if given else "there is no content-type"
                raise HTTPException(415, f"{said}; send JSON as application/json")
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


class _JsonRequest(Request):
    async def json(self) -> Any:
        """Raises `json.JSONDecodeError`, which FastAPI expects, also for what is not UTF-8, nested more than 200 deep,
        or has `NaN`, which Python would take. Of equal keys the last counts."""
        body = await self.body()
        try:
            return from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error
