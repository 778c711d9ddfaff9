"""Connection of the command line to a server: options, calls over HTTP, and errors in one line."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.text import printable

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

_CONNECT_S = 10.0
# Silence after which a call fails: a server may compute a long prompt, or a pinned prefix, before its first byte.
_SILENCE_S = 300.0


class Server:
    """A server with the OpenAI API. A context: leaving it closes the connections.

    Args:
        url: without a scheme, http is meant.

    Raises:
        ConfigError: the URL cannot be one.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        from app.errors import ConfigError

        scheme, separator, _ = url.partition("://")
        if not separator:
            url = f"http://{url}"
        elif scheme not in ("http", "https"):
            raise ConfigError(f"--url is {url!r}; it must begin with http:// or https://")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Server:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
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

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of an answer. Raises `FolioError` for other statuses than 200 and without an answer."""
        async with self.answer(method, path, body) as response:
            content = await response.read()
        try:
            return json.loads(content)
        except ValueError:
            raise self._no_such_server(path) from None

    async def stream(self, path: str, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The events of an answer. Raises `FolioError`, also for an error event and a stream without an end."""
        from app.errors import EngineError, UnavailableError
        from app.event_stream import DONE, event_data
        from app.http_errors import error_of

        async with self.answer("POST", path, body) as response:
            async for data in event_data(response.content.iter_any()):
                if data == DONE:
                    return
                try:
                    event = json.loads(data)
                except ValueError:
                    raise UnavailableError(f"{self.url} sent an event that is not JSON: {data[:80]!r}") from None
                if (error := error_of(event)) is not None:
                    raise error
                if "error" in event:
                    raise EngineError(str(event["error"]))
                yield event
        raise UnavailableError(f"{self.url} ended the answer in the middle; send the request again")

    @asynccontextmanager
    async def answer(self, method: str, path: str, body: Any = None) -> AsyncIterator[aiohttp.ClientResponse]:
        """The head of an answer with status 200."""
        import aiohttp

        from app.errors import ConfigError, UnavailableError
        from app.http_errors import error_of_status

        try:
            async with self.session.request(method, self.url + path, json=body) as response:
                if response.status == 404 and not response.content_type.endswith("json"):
                    raise self._no_such_server(path)
                if response.status >= 400:
                    content = await response.read()
                    raise error_of_status(response.status, response.headers.get("Retry-After"), content)
                yield response
        except aiohttp.InvalidURL:
            raise ConfigError(f"--url is {self.url!r}, which is no URL; write http://HOST:PORT") from None
        except aiohttp.ClientConnectorError as error:
            raise self.nothing_there(error) from error
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

    async def choose_model(self, name: str | None) -> str:
        """The name, or that of the server's first model. Raises `FolioError`."""
        from app.errors import UnavailableError

        if name is not None:
            return name
        names = await self.models()
        if not names:
            raise UnavailableError(f"{self.url} lists no models; name one with --model")
        return names[0]

    def nothing_there(self, error: aiohttp.ClientConnectorError) -> Exception:
        from app.errors import UnavailableError

        reason = error.os_error
        if isinstance(reason, ConnectionRefusedError):
            return UnavailableError(
                f"nothing answers at {self.url}: start a server with `folio serve`, or name another one with --url"
            )
        # aiohttp's words repeat the address.
        why = os.strerror(reason.errno) if reason.errno and reason.errno > 0 else printable(str(reason))
        return UnavailableError(f"{self.url} cannot be reached: {why}; check --url")

    def _no_such_server(self, path: str) -> Exception:
        from app.errors import UnavailableError

        return UnavailableError(f"the server at {self.url} has no {path}: it is none of this kind; check --url")
