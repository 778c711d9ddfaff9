"""The door of an ingress: what may come in, and how many are inside.

Load shedding before a body is read: an answer from the head alone, while the door of the ingress is shut.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import OverloadedError, UnavailableError
from app.exchange import EdgeObserver
from app.fleet.overload import LoadShedder
from app.http_errors import HttpRefusal

# How long a client of a server that is stopped should wait: by then another one may answer at its address.
_DRAINED_AFTER_S = 5.0


@dataclass(slots=True)
class _Ticket:
    """Of a request that the door has let in when its head came."""

    is_used: bool = False


_TICKET: ContextVar[_Ticket | None] = ContextVar("ticket", default=None)


class AdmissionControl:
    """Refuses at once what would be refused anyhow: while replicas are full, and when the server is about to stop.

    Args:
        refusals: of the replicas.
    """

    def __init__(self, refusals: LoadShedder) -> None:
        self._refusals = refusals
        self._num_inside = 0
        self._is_draining = False

    @property
    def num_in_flight(self) -> int:
        """Requests that have been let in and have not ended."""
        return self._num_inside

    @contextmanager
    def try_admit(self) -> Iterator[float | None]:
        """See `app.edge.admission.Gate`. Who `enter`s while this is open has been let in already."""
        retry_after_s = self._refusals.admission_delay_s(time.monotonic())
        if retry_after_s is not None:
            yield retry_after_s
            return
        ticket = _Ticket()
        token = _TICKET.set(ticket)
        try:
            yield None
        finally:
            _TICKET.reset(token)
            if not ticket.is_used:  # something was wrong with it: another may come instead
                self._refusals.return_admission()

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """A request is inside while this is open.

        Raises:
            UnavailableError: the server is about to stop.
            OverloadedError: all replicas are full, and as many as they can take have been let in.
        """
        self.check_open()
        ticket = _TICKET.get()
        if ticket is not None and not ticket.is_used:
            ticket.is_used = True
        elif (retry_after_s := self._refusals.admission_delay_s(time.monotonic())) is not None:
            raise overloaded_error(retry_after_s)
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1

    def start_draining(self) -> None:
        """From now on nothing comes in."""
        self._is_draining = True

    def check_open(self) -> None:
        """Raise `UnavailableError` when the server is about to stop."""
        if self._is_draining:
            raise UnavailableError(
                "this server is draining: it finishes what it has begun and takes nothing new; send the request again",
                _DRAINED_AFTER_S,
            )


# Requests that become work for the engines.
_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})


class AdmissionGate(Protocol):
    """What decides."""

    def try_admit(self) -> AbstractContextManager[float | None]:
        """Of a request of which the head is there: `None`, and it may come in while this is open; or when there may be
        room for it, in seconds."""
        ...


class LoadSheddingMiddleware:
    """ASGI middleware, outside of everything that costs more than a refusal does.

    What comes of a refused body is read and thrown away by the HTTP server (uvicorn), so that the client, which may be
    sending still, gets its answer, and the connection is good for its next request. A browser's page could not read
    answers without the headers for its origin: its requests go on, and are refused inside.
    """

    def __init__(self, app: ASGIApp, gate: AdmissionGate, watcher: EdgeObserver) -> None:
        self._app = app
        self._gate = gate
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not _is_sheddable(scope):
            await self._app(scope, receive, send)
            return
        with self._gate.try_admit() as retry_after_s:
            if retry_after_s is None:
                await self._app(scope, receive, send)
                return
        start, body = _answer(max(1, math.ceil(retry_after_s)))
        self._watcher.on_refused("overloaded")
        await send(dict(start))  # servers may write into it
        await send(dict(body))


def overloaded_error(retry_after_s: float) -> OverloadedError:
    """What a refusal by the door says."""
    return OverloadedError(
        f"all engine replicas have as many requests waiting as may; try again in {max(1, math.ceil(retry_after_s))} s",
        retry_after_s,
    )


def _is_sheddable(scope: Scope) -> bool:
    path: str = scope["path"]
    if path.removeprefix(scope.get("root_path", "")) not in _PATHS:
        return False
    return all(name != b"origin" for name, _ in scope["headers"])


@lru_cache(maxsize=256)
def _answer(retry_after_s: int) -> tuple[Message, Message]:
    refusal = HttpRefusal.from_error(overloaded_error(retry_after_s))
    content = json.dumps(refusal.answer.model_dump(mode="json")).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(content)),
        (b"x-content-type-options", b"nosniff"),
        *refusal.headers,
    ]
    return (
        {"type": "http.response.start", "status": refusal.status, "headers": headers},
        {"type": "http.response.body", "body": content},
    )
