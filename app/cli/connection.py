"""Connection of the command line to a server: options, calls over HTTP, and errors in one line."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from folio.app.cli.text import printable
from folio.app.errors import ConfigError, EngineError, ForbiddenError, UnavailableError
from folio.app.http.event_stream import DONE, event_data

if TYPE_CHECKING:
    import aiohttp

DEFAULT_URL = "http://127.0.0.1:8000"

Url = Annotated[
    str, typer.Option("--url", envvar="FOLIO_URL", help="The server, with or without /v1.", rich_help_panel="Server")
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="FOLIO_API_KEY", help="For servers with API keys.", rich_help_panel="Server"),
]
Model = Annotated[str | None, typer.Option("--model", help="The model's name; by default the server's first one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_CONNECT_S = 10.0
# Silence after which a call fails: a server may compute a long prompt, or a pinned prefix, before its first byte.
_SILENCE_S = 300.0


class Server:
    """A server with the OpenAI API. A context: leaving it closes the connections.

    Args:
        url: without a scheme, http is meant.
        silence_s: seconds without a byte of the server after which a call fails.

    Raises:
        ConfigError: the URL is invalid, or the key cannot be in a header.
    """

    def __init__(self, url: str, api_key: str | None = None, *, silence_s: float = _SILENCE_S) -> None:
        scheme, separator, _ = url.partition("://")
        if separator and scheme not in ("http", "https"):
            raise ConfigError(f"--url is {url!r}; it must begin with http:// or https://")
        key = (api_key or "").strip()
        if not key.isprintable():
            raise ConfigError("--api-key has control characters; give the key alone")
        self.url = (url if separator else f"http://{url}").rstrip("/").removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._silence_s = silence_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Server:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=self._silence_s)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=self.headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The connections, within the context."""
        assert self._session is not None
        return self._session

    async def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """The JSON object of an answer. Raises `FolioError` for other statuses than 200 and without an answer."""
        async with self.answer(method, path, body) as response:
            answer = _json_object(await response.read())
        if answer is None:
            raise self._no_such_path(path)
        return answer

    async def stream(
        self, path: str, body: Any = None, on_progress: Callable[[dict[str, Any]], None] | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of an answer. Raises `FolioError`, also for an error event.

        Args:
            body: of a POST, whose answer must have an end mark; `None`: a GET, whose answer may just end.
            on_progress: called with the fields of a Folio's comments.
        """
        from folio.app.http.errors import error_of

        async with self.answer("GET" if body is None else "POST", path, body) as response:
            async for data in event_data(response.content.iter_any(), on_progress):
                if data == DONE:
                    return
                if (event := _json_object(data)) is None:
                    raise UnavailableError(f"{self.url} sent an event that is no JSON object: {data[:80]!r}")
                if event.get("error"):
                    raise error_of(event) or EngineError(str(event["error"]))
                yield event
        if body is not None:
            raise UnavailableError(f"{self.url} ended the answer in the middle; send the request again")

    @asynccontextmanager
    async def answer(self, method: str, path: str, body: Any = None) -> AsyncIterator[aiohttp.ClientResponse]:
        """The head of an answer with status 200."""
        import aiohttp

        try:
            async with self.session.request(method, self.url + path, json=body) as response:
                if response.status >= 400:
                    raise self._refusal(path, response, await response.read())
                if response.content_type == "text/html":
                    raise self._no_such_path(path)
                yield response
        except aiohttp.InvalidURL:
            raise ConfigError(f"--url is {self.url!r}, which is no URL; write http://HOST:PORT") from None
        except aiohttp.ClientConnectorError as error:
            raise self._nothing_there(error) from error
        except aiohttp.ServerTimeoutError as error:
            raise UnavailableError(f"{self.url} has not answered in time ({error})") from error
        except aiohttp.ClientError as error:
            raise UnavailableError(
                f"the connection to {self.url} was lost ({printable(str(error))}); send the request again"
            ) from error

    async def models(self) -> list[str]:
        """Names of the served models. Raises `FolioError`."""
        answer = await self.call("GET", "/v1/models")
        return [printable(str(card["id"])) for card in answer.get("data") or ()]

    async def card(self, name: str) -> dict[str, Any]:
        """A model's entry in the server's list; empty for names that it does not list. Raises `FolioError`, also where
        there is no list, as servers of other kinds may have none."""
        answer = await self.call("GET", "/v1/models")
        return next((card for card in answer.get("data") or () if card.get("id") == name), {})

    async def choose_model(self, name: str | None) -> str:
        """The name, or that of the server's first model. Raises `FolioError`."""
        if name is not None:
            return name
        names = await self.models()
        if not names:
            raise UnavailableError(f"{self.url} lists no models; name one with --model")
        return names[0]

    def _refusal(self, path: str, response: aiohttp.ClientResponse, content: bytes) -> Exception:
        from folio.app.http.errors import error_of_status

        error = error_of_status(response.status, response.headers.get("Retry-After"), content)
        if response.status == 401:
            return ForbiddenError(f"{error} (--api-key KEY, or the variable FOLIO_API_KEY)")
        if response.status == 404 and (b'"error"' not in content or getattr(error, "code", None) == "not_found"):
            return self._no_such_path(path)
        return error

    def _nothing_there(self, error: aiohttp.ClientConnectorError) -> Exception:
        import ssl

        reason = error.os_error
        if isinstance(reason, ConnectionRefusedError):
            return UnavailableError(
                f"nothing answers at {self.url}: start a server with `folio serve`, or name another one with --url"
            )
        # aiohttp's words repeat the address. Errors of TLS and of names have numbers of their own.
        number = 0 if isinstance(reason, ssl.SSLError) else reason.errno or 0
        why = os.strerror(number) if number > 0 else printable(reason.strerror or str(reason))
        return UnavailableError(f"{self.url} cannot be reached: {why}; check --url")

    def _no_such_path(self, path: str) -> Exception:
        return UnavailableError(
            f"the server at {self.url} has no {path}: it is of another kind, or its settings turn this off; check --url"
        )


def call(url: str, api_key: str | None, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """The JSON object that a server answers. Raises `FolioError`."""

    async def run() -> dict[str, Any]:
        async with Server(url, api_key) as server:
            return await server.call(method, path, body)

    return asyncio.run(run())


def _json_object(content: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(content)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
