"""What every HTTP request passes on its way in and out: limits, keys, quotas, headers, the log.

Puts the guard around an application.
"""

from __future__ import annotations

import json
import logging
import time

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.config.http import HttpSettings, RateLimits
from app.edge.keys import KeyRing
from app.edge.limits import IngressLimits
from app.edge.quota import AddressQuotas, Quota
from app.edge.request_body import ClientGone, Head, check_size, read_body, read_head, replay
from app.edge.request_log import log_request
from app.errors import RateLimitError
from app.exchange import EdgeObserver, RequestContext, reset_context, set_context
from app.http_errors import Headers, HttpRefusal, error_response

logger = logging.getLogger(__name__)

# Of a busy server's mean answering time: each new answer counts so much.
_WEIGHT = 0.1


class Guard:
    """ASGI middleware. Answers pass through as they come; nothing runs beside a request.

    Args:
        app: what is guarded.
        keys: who may call; `None`: everybody.
        echoes_id: answers carry `x-request-id`; not where something in front, such as Serve's server, sees to that.
        ingress_limits: of this ingress, whose limits hold over several; `None`: over this one.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: HttpSettings,
        keys: KeyRing | None = None,
        *,
        echoes_id: bool = True,
        watcher: EdgeObserver | None = None,
        ingress_limits: IngressLimits | None = None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._echoes_id = echoes_id
        self._watcher = watcher or EdgeObserver()
        self._addresses = None
        if settings.address_limits != RateLimits():
            self._addresses = AddressQuotas(settings.address_limits, settings.max_addresses, ingress_limits)
        self._num_running = 0
        self._mean_s = 1.0  # that an answer takes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        head = read_head(scope)
        exchange = RequestContext(self._settings, head.request_id, head.attempt_of)
        reply = _Reply(send, exchange, self._echoes_id)
        is_limited = _path_of(scope) not in self._settings.open_paths
        is_running = False
        token = set_context(exchange)
        try:
            check_size(scope, head, self._settings)
            if is_limited:
                await self._let_in(scope, head, exchange)
                self._num_running += 1
                is_running = True
            if head.has_body:
                body = await read_body(receive, self._settings.max_body_bytes, self._settings.body_timeout_s)
                exchange.num_body_bytes = len(body)
                receive = replay(body, receive)
            await self._app(scope, receive, reply)
        except (ClientGone, ClientDisconnect):
            pass  # there is nobody to tell
        except HttpRefusal as refusal:
            self._watcher.on_refused(refusal.answer.error.code or "")
            await reply.refuse(refusal)
        except Exception as error:
            if reply.is_gone:
                return
            logger.error("request %s failed: %s %s", head.request_id, scope["method"], scope["path"], exc_info=error)
            if exchange.status is not None:  # the client must not take what it has for whole
                raise
            await reply.refuse(HttpRefusal(*error_response(error)))
        finally:
            reset_context(token)
            exchange.end()
            if is_running:
                self._num_running -= 1
                self._mean_s += _WEIGHT * (time.monotonic() - exchange.begun_at - self._mean_s)
            if self._settings.log_requests:
                log_request(scope, exchange, reply.is_complete)

    async def _let_in(self, scope: Scope, head: Head, exchange: RequestContext) -> None:
        """Raises `Refusal` when its caller may not call, or not now."""
        quota = await self._quota_of(scope, head, exchange)
        most = self._settings.max_concurrent_requests
        if most is not None and self._num_running >= most:
            raise HttpRefusal.too_busy(most, self._mean_s / most)
        if quota is not None:
            try:
                exchange.begin(quota)
            except RateLimitError as error:
                raise HttpRefusal.from_error(error) from None

    async def _quota_of(self, scope: Scope, head: Head, exchange: RequestContext) -> Quota | None:
        if self._keys is None:
            return self._quota_at(scope)
        await self._keys.refresh()
        key = None if head.key is None else self._keys.find(head.key)
        if key is not None:
            exchange.key = key.entry
            if not key.entry.operator and self._is_for_operators(_path_of(scope)):
                raise HttpRefusal.not_operator()
            return key.quota
        quota = self._quota_at(scope)
        if quota is not None:  # who tries keys may do so as often as somebody may call who needs none
            try:
                exchange.begin(quota)
            except RateLimitError as error:
                raise HttpRefusal.from_error(error) from None
        raise HttpRefusal.no_key(presented=head.key is not None)

    def _is_for_operators(self, path: str) -> bool:
        return any(path == own or path.startswith(own + "/") for own in self._settings.operator_paths)

    def _quota_at(self, scope: Scope) -> Quota | None:
        """Of the client's address."""
        if self._addresses is None:
            return None
        client = scope.get("client")
        return self._addresses.quota_of(client[0] if client else "unknown")


class _Reply:
    """`send` for the application: adds headers to the answer, and takes down how far it got."""

    __slots__ = ("_echoes_id", "_exchange", "_send", "is_complete", "is_gone")

    def __init__(self, send: Send, exchange: RequestContext, echoes_id: bool) -> None:
        self._send = send
        self._exchange = exchange
        self._echoes_id = echoes_id
        self.is_complete = False  # all was sent
        self.is_gone = False  # nobody takes it any more

    async def __call__(self, message: Message) -> None:
        exchange = self._exchange
        more = message.get("more_body", False)
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._headers()]}
        elif more and exchange.first_byte_at is None:
            exchange.first_byte_at = time.monotonic()
        try:
            await self._send(message)
        except OSError:
            self.is_gone = True
            raise
        self.is_complete = message["type"] == "http.response.body" and not more

    async def refuse(self, refusal: HttpRefusal) -> None:
        self._exchange.error_code = refusal.answer.error.code
        content = json.dumps(refusal.answer.model_dump(mode="json")).encode()
        headers: Headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(content)),
            *refusal.headers,
        ]
        await self({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await self({"type": "http.response.body", "body": content})

    def _headers(self) -> Headers:
        headers = [(b"x-content-type-options", b"nosniff"), *self._exchange.headers()]
        if self._echoes_id:
            headers.append((b"x-request-id", self._exchange.request_id.encode()))
        return headers


def _path_of(scope: Scope) -> str:
    """Within the application, which may be mounted somewhere."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


# Browsers show these to a page only when they are named.
_EXPOSED = [
    "x-request-id",
    "retry-after",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
]


def protect(
    api: FastAPI,
    settings: HttpSettings,
    *,
    echoes_id: bool = True,
    watcher: EdgeObserver | None = None,
    ingress_limits: IngressLimits | None = None,
) -> FastAPI:
    """Add the middleware to it, as in `Guard`. Raises `ConfigError` when the API keys cannot be read."""
    keys = (
        None if settings.api_keys is None else KeyRing(settings.api_keys, settings.key_limits, watcher, ingress_limits)
    )
    api.add_middleware(
        Guard, settings=settings, keys=keys, echoes_id=echoes_id, watcher=watcher, ingress_limits=ingress_limits
    )
    if settings.cors_origins:  # outside of the guard: browsers ask without a key first, and want to read refusals
        api.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
            max_age=3600,
        )
    return api
