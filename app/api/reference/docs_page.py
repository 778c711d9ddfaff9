"""The page `/docs`: Swagger UI over `/openapi.json`. Its files come with Folio; a browser loads none from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI

from folio.app.http.static_files import add_files

_FOLDER = Path(__file__).parent / "swagger_ui"
_FILES = ("swagger-ui.css", "swagger-ui-bundle.js", "start.js")
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}


def add_docs_page(api: FastAPI) -> None:
    """Add the page and its files. The page's links are relative, so that they hold under any route prefix."""
    files = {f"/docs/{name}": _FOLDER / name for name in _FILES}
    add_files(api, {"/docs": _FOLDER / "index.html", **files}, _HEADERS)
