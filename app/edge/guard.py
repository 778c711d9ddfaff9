"""Guard: sizes, hosts and origins, API keys, quotas, headers and the log, around every HTTP request."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from folio.app.config.http import HttpSettings, RateLimits
from folio.app.edge.keys import KeyRing
from folio.app.edge.limits import IngressLimits
from folio.app.edge.origins import OriginPolicy
from folio.app.edge.quota import AddressQuotas, Quota
from folio.app.edge.request_body import (
    BodyBounds,
    Head,
    check_coding,
    check_size,
    limited,
    path_of,
    read_body,
    read_head,
    replay,
)
from folio.app.edge.request_log import log_request
from folio.app.errors import ForbiddenError, RateLimitError
from folio.app.http.error_json import error_json, is_anthropic
from folio.app.http.errors import HttpRefusal, error_response
from folio.app.http.request_context import CURRENT, EdgeObserver, RequestContext

logger = logging.getLogger(__name__)

# Weight of a new answer in the mean answering time.
_MEAN_WEIGHT = 0.1
# Headers that browsers show to a page only when they are named.
_EXPOSED = [
    "x-request-id",
    "request-id",
    "retry-after",
    "x-folio-ignored-fields",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
]
# The dashboard's files need no key, so that its page can ask for one. Its data need the same key as `/v1/load`.
_PAGE, _PAGE_FILES, _DATA, _LOAD = frozenset({"/", "/dashboard"}), "/dashboard/static/", "/dashboard/", "/v1/load"


class Guard:
    """ASGI middleware. Answers pass through piece by piece; no task runs beside a request.

    Args:
        app: the guarded application.
        keys: valid API keys; `None`: no key is needed.
        ingress_limits: of this ingress; `None`: address limits hold for this guard alone.
        bound_to: the address at which the server listens; `None`: unknown, and any host's name is taken by default.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: HttpSettings,
        keys: KeyRing | None = None,
        *,
        observer: EdgeObserver | None = None,
        ingress_limits: IngressLimits | None = None,
        bound_to: str | None = None,
    ) -> None:
        self._app = app
        self._origins = OriginPolicy.of(settings, bound_to)
        self._settings = settings
        self._keys = keys
        self._observer = observer or EdgeObserver()
        self._addresses = None
        if settings.address_limits != RateLimits():
            self._addresses = AddressQuotas(
                settings.address_limits, settings.max_addresses, ingress_limits or IngressLimits()
            )
        self._num_running = 0
        self._mean_answer_s = 1.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        head = read_head(scope)
        context = RequestContext(self._settings, head.request_id, head.attempt_of)
        reply = _Reply(send, context, scope["path"])
        is_running = False
        token = CURRENT.set(context)
        try:
            check_size(scope, head, self._settings)
            self._origins.check(scope)
            if not self._is_open(_secured_path(scope)):
                await self._admit(scope, head, context)
                self._num_running += 1
                is_running = True
            if head.has_body:
                bounds, timeout_s = BodyBounds.of(scope, self._settings), self._settings.body_timeout_s
                check_coding(head.coding, bounds)
                if bounds.is_streamed:
                    receive = limited(receive, bounds, self._settings.max_body_bytes, timeout_s)
                else:
                    body = await read_body(scope, receive, bounds, timeout_s, head.coding)
                    context.num_body_bytes = len(body)
                    receive = replay(body, receive)
            await self._app(scope, receive, reply)
        except ClientDisconnect:
            pass
        except HttpRefusal as refusal:
            self._observer.on_refused(refusal.answer.error.code or "")
            await reply.refuse(refusal)
        except Exception as error:
            if reply.is_disconnected:
                return
            logger.error("request %s failed: %s %s", head.request_id, scope["method"], scope["path"], exc_info=error)
            if context.status is not None:  # break the connection: the client must not take the answer for complete
                raise
            await reply.refuse(HttpRefusal(*error_response(error)))
        finally:
            CURRENT.reset(token)
            context.end()
            if is_running:
                self._num_running -= 1
                self._mean_answer_s += _MEAN_WEIGHT * (time.monotonic() - context.begun_at - self._mean_answer_s)
            if self._settings.log_requests:
                log_request(scope, context, reply.is_complete)

    def _is_open(self, path: str) -> bool:
        if self._settings.dashboard and (path in _PAGE or path.startswith(_PAGE_FILES)):
            return True
        return is_below(path, self._settings.open_paths)

    async def _admit(self, scope: Scope, head: Head, context: RequestContext) -> None:
        """Raise `HttpRefusal` if the caller may not call, or not now."""
        quota = await self._quota_of(scope, head, context)
        most = self._settings.max_concurrent_requests
        if most is not None and self._num_running >= most:
            raise HttpRefusal.too_busy(most, self._mean_answer_s / most)
        _begin(context, quota)

    async def _quota_of(self, scope: Scope, head: Head, context: RequestContext) -> Quota | None:
        if self._keys is None:
            return self._address_quota(scope)
        await self._keys.refresh()
        key = None if head.key is None else self._keys.find(head.key)
        if key is None:
            _begin(context, self._address_quota(scope))  # guesses of keys count towards the address's limits
            raise HttpRefusal.no_key(presented=head.key is not None)
        context.key = key.entry
        if not key.entry.operator and is_below(_secured_path(scope), self._settings.operator_paths):
            error = ForbiddenError("this path is for operators; send an operator's API key")
            raise HttpRefusal.from_error(error)
        return key.quota

    def _address_quota(self, scope: Scope) -> Quota | None:
        if self._addresses is None:
            return None
        client = scope.get("client")
        return self._addresses.quota_of(client[0] if client else "unknown")


def is_below(path: str, paths: Collection[str]) -> bool:
    """Whether a path is one of the paths, or below one."""
    return any(path == own or path.startswith(own + "/") for own in paths)


def _secured_path(scope: Scope) -> str:
    """The path whose protection holds for the request."""
    path = path_of(scope)
    return _LOAD if path.startswith(_DATA) and not path.startswith(_PAGE_FILES) else path


def _begin(context: RequestContext, quota: Quota | None) -> None:
    try:
        if quota is not None:
            context.begin(quota)
    except RateLimitError as error:
        raise HttpRefusal.from_error(error) from None


@dataclass(slots=True)
class _Reply:
    """`send` for the application: add headers to the answer and note its progress.

    Attributes:
        is_complete: the whole answer was sent.
        is_disconnected: sending failed.
    """

    _send: Send
    _context: RequestContext
    _path: str
    is_complete: bool = False
    is_disconnected: bool = False

    async def __call__(self, message: Message) -> None:
        context = self._context
        more = message.get("more_body", False)
        if message["type"] == "http.response.start":
            context.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._headers()]}
        elif more and context.first_byte_at is None:
            context.first_byte_at = time.monotonic()
        try:
            await self._send(message)
        except OSError:
            self.is_disconnected = True
            raise
        self.is_complete = message["type"] == "http.response.body" and not more

    async def refuse(self, refusal: HttpRefusal) -> None:
        self._context.error_code = refusal.answer.error.code
        for message in refusal.messages(error_json(self._path, refusal.status, refusal.answer)):
            await self(message)

    def _headers(self) -> Iterator[tuple[bytes, bytes]]:
        yield b"x-content-type-options", b"nosniff"
        if is_anthropic(self._path):
            yield b"request-id", self._context.request_id.encode()
        yield from self._context.headers()


def key_ring(
    settings: HttpSettings, observer: EdgeObserver | None = None, ingress_limits: IngressLimits | None = None
) -> KeyRing | None:
    """The API keys of the settings; `None`: no key is needed. Raises `ConfigError` for unreadable ones."""
    if settings.api_keys is None:
        return None
    return KeyRing(settings.api_keys, settings.key_limits, observer, ingress_limits)


def protect(
    api: FastAPI,
    settings: HttpSettings,
    *,
    keys: KeyRing | None = None,
    observer: EdgeObserver | None = None,
    ingress_limits: IngressLimits | None = None,
    bound_to: str | None = None,
) -> FastAPI:
    """Add guard and CORS to an application; arguments as of `Guard`. Raises `ConfigError` for unreadable API keys.

    Args:
        keys: by default `key_ring` of the settings.
    """
    if keys is None:
        keys = key_ring(settings, observer, ingress_limits)
    api.add_middleware(
        Guard, settings=settings, keys=keys, observer=observer, ingress_limits=ingress_limits, bound_to=bound_to
    )
    if settings.cors_origins:  # around the guard: preflights have no key, and pages must be able to read refusals
        api.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
            max_age=3600,
        )
    return api
