"""Admission control of an ingress: load shedding from a request's head, draining, requests in flight."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from folio.app.edge.request_body import path_of
from folio.app.errors import OverloadedError, UnavailableError
from folio.app.fleet.overload import LoadShedder
from folio.app.http.error_json import error_json
from folio.app.http.errors import HttpRefusal, whole_seconds
from folio.app.http.operations import OPERATIONS
from folio.app.http.request_context import EdgeObserver

# `Retry-After` while the server drains: by then another server may answer at its address.
_DRAINED_AFTER_S = 5.0
# Paths of requests that become work for engines.
_PATHS = frozenset(path for operation in OPERATIONS if operation.is_shed for path in operation.paths)


@dataclass(slots=True)
class _Ticket:
    """A request that was admitted from its head."""

    is_used: bool = False


_TICKET: ContextVar[_Ticket | None] = ContextVar("ticket", default=None)


class AdmissionControl:
    """Refuses requests before they are read while all replicas are full, and when the server drains."""

    def __init__(self, shedder: LoadShedder) -> None:
        self._shedder = shedder
        self.num_in_flight = 0
        self._is_draining = False

    @contextmanager
    def try_admit(self) -> Iterator[float | None]:
        """Admit a request from its head: yields `None`, and `admitted` asks no second time; or refuse it: yields the
        seconds until it may enter."""
        retry_after_s = self._shedder.admission_delay_s(time.monotonic())
        if retry_after_s is not None:
            yield retry_after_s
            return
        ticket = _Ticket()
        token = _TICKET.set(ticket)
        try:
            yield None
        finally:
            _TICKET.reset(token)
            if not ticket.is_used:  # the request was invalid: another one may use its place
                self._shedder.return_admission()

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request as in flight within this context.

        Raises:
            UnavailableError: the server is draining.
            OverloadedError: all replicas are full, and as many requests as they can take were admitted.
        """
        self.check_open()
        ticket = _TICKET.get()
        if ticket is not None and not ticket.is_used:
            ticket.is_used = True
        elif (retry_after_s := self._shedder.admission_delay_s(time.monotonic())) is not None:
            raise overloaded_error(retry_after_s)
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1

    def start_draining(self) -> None:
        """Refuse all further requests."""
        self._is_draining = True

    @property
    def is_open(self) -> bool:
        """Whether the server takes requests: false while it drains."""
        return not self._is_draining

    def check_open(self) -> None:
        """Raise `UnavailableError` while the server drains."""
        if self._is_draining:
            raise UnavailableError(
                "the server is draining: it finishes requests in flight and takes no new ones; send the request again",
                _DRAINED_AFTER_S,
            )


class LoadSheddingMiddleware:
    """ASGI middleware around everything that costs more than a refusal.

    The HTTP server (uvicorn) discards the body of a refused request, so that a client that still sends gets its answer
    and keeps its connection. Requests with an `Origin` pass and are refused inside: a browser's page can read an answer
    only with CORS headers.
    """

    def __init__(self, app: ASGIApp, gate: AdmissionControl, observer: EdgeObserver) -> None:
        self._app = app
        self._gate = gate
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not _is_sheddable(scope):
            await self._app(scope, receive, send)
            return
        with self._gate.try_admit() as retry_after_s:
            if retry_after_s is None:
                await self._app(scope, receive, send)
                return
        start, body = _answer(path_of(scope), whole_seconds(retry_after_s))
        self._observer.on_refused("overloaded")
        await send(dict(start))  # copies, because servers may change a message
        await send(dict(body))


def overloaded_error(retry_after_s: float) -> OverloadedError:
    """The error of a request that is shed."""
    again = f"send the request again in {whole_seconds(retry_after_s)} s"
    return OverloadedError(f"queue full on every engine replica (max_queued_requests); {again}", retry_after_s)


def _is_sheddable(scope: Scope) -> bool:
    return path_of(scope) in _PATHS and all(name != b"origin" for name, _ in scope["headers"])


@lru_cache(maxsize=256)
def _answer(path: str, retry_after_s: int) -> tuple[Message, Message]:
    refusal = HttpRefusal.from_error(overloaded_error(retry_after_s))
    refusal.headers.append((b"x-content-type-options", b"nosniff"))
    return refusal.messages(error_json(path, refusal.status, refusal.answer))
