"""The page `/docs`: Swagger UI over `/openapi.json`. Its files come with Folio; a browser loads none from elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import FileResponse

_FOLDER = Path(__file__).parent / "swagger_ui"
_FILES = ("swagger-ui.css", "swagger-ui-bundle.js", "start.js")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",  # asks whether a file has changed: an update replaces it under the same name
}


def add_docs_page(api: FastAPI) -> None:
    """Add the page and its files. The page's links are relative, so that they hold under any route prefix."""
    for path, name in (("/docs", "index.html"), *((f"/docs/{name}", name) for name in _FILES)):
        api.add_route(path, _answer_with(_FOLDER / name), methods=["GET"], include_in_schema=False)


def _answer_with(file: Path) -> Callable[[Request], Awaitable[FileResponse]]:
    async def answer(request: Request) -> FileResponse:
        return FileResponse(file, headers=_HEADERS)

    return answer
