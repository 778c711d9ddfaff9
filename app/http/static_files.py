"""Files of web pages. Browsers revalidate their copies; a browser that reads slowly takes no memory."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import FileResponse, Response


def add_files(api: FastAPI, files: Mapping[str, Path], headers: Mapping[str, str]) -> None:
    """Add a route for each path of a file. Every answer has these headers."""
    for path, file in files.items():
        api.add_route(path, _answer_with(file, headers), methods=["GET"], include_in_schema=False)


def _answer_with(file: Path, headers: Mapping[str, str]) -> Callable[[Request], Awaitable[Response]]:
    etag = f'"{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"'
    headers = {**headers, "cache-control": "no-cache", "etag": etag}  # an update replaces it under the same name

    async def answer(request: Request) -> Response:
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return FileResponse(file, headers=headers)

    return answer
