"""One HTTP request and its answer, as the guard and the ingress both see it.

Who wants to hear what the edge does.
"""

from __future__ import annotations

import time
from contextvars import ContextVar, Token
from typing import NamedTuple, Protocol

from app.config.http import HttpSettings, KeyEntry
from app.errors import ForbiddenError, RequestError


class Quota(Protocol):
    """What a caller may still use; `app.edge.quota` keeps it."""

    def begin(self) -> None:
        """Count a request as running. Raises `RateLimitError`."""
        ...

    def end(self) -> None:
        """Count it as ended."""
        ...

    def take_prompt(self, num_tokens: int) -> None:
        """Charge a prompt. Raises `RateLimitError` or `RequestError`."""
        ...

    def owe_tokens(self, num_tokens: int) -> None:
        """Charge tokens that have been generated; a negative number gives some back."""
        ...

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What an answer says of the caller's limits."""
        ...


class RequestGrant(NamedTuple):
    """What a request goes on with."""

    tenant: str | None
    timeout_s: float | None


class RequestContext:
    """What is known of a request while it is answered: who sent it, what it has used, how it fares.

    The guard makes one; whoever works on the request finds it with `current_exchange`. Requests that come through a
    handle have none: other applications in the cluster are trusted.
    """

    __slots__ = (
        "_is_running",
        "_quota",
        "_settings",
        "attempt_of",
        "begun_at",
        "cached_tokens",
        "error_code",
        "first_byte_at",
        "generation_id",
        "key",
        "num_body_bytes",
        "output_tokens",
        "prompt_tokens",
        "request_id",
        "status",
    )

    def __init__(self, settings: HttpSettings, request_id: str, attempt_of: str | None = None) -> None:
        self._settings = settings
        self._quota: Quota | None = None
        self._is_running = False  # it counts as one of its caller's
        self.request_id = request_id
        self.attempt_of = attempt_of
        self.begun_at = time.monotonic()
        self.first_byte_at: float | None = None  # of an answer that is streamed
        self.status: int | None = None
        self.key: KeyEntry | None = None
        self.num_body_bytes = 0
        self.generation_id: str | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.error_code: str | None = None

    def begin(self, quota: Quota) -> None:
        """Its caller is known. Raises `RateLimitError`."""
        self._quota = quota
        quota.begin()
        self._is_running = True

    def end(self) -> None:
        """It is over, however it ended. A prompt that was refused is given back; not so when time ran out, or the
        client left: it may have been computed."""
        if self._quota is None or not self._is_running:
            return
        self._quota.end()
        refused = self.status is not None and self.status >= 400 and self.status != 408
        if refused and not self.output_tokens:
            self._quota.owe_tokens(-self.prompt_tokens)

    def authorize(
        self,
        generation_id: str,
        *,
        model: str,
        tenant: str | None,
        priority: int,
        pins: bool,
        timeout_s: float | None,
    ) -> RequestGrant:
        """Check what the body asks for against the caller's key.

        Args:
            generation_id: what the engine knows the request by.
            tenant: whose the request says to be.
            pins: whether its prompt is to stay in every replica's cache.

        Raises:
            ForbiddenError: the key does not allow it.
            RequestError: it may not take that long.
        """
        if self.generation_id is None:  # a batch goes by its first
            self.generation_id = generation_id
        key = self.key
        if key is not None:
            self.check_model(model)
            if key.best_priority is not None and priority < key.best_priority:
                raise ForbiddenError(
                    f"priority is {priority}; your API key allows {key.best_priority} and above", "priority"
                )
            if pins and not key.operator:
                raise ForbiddenError("pin is for operators; your API key is not one of theirs", "pin")
            tenant = self.tenant_of(tenant)
        default, most = self._settings.default_timeout_s, self._settings.max_timeout_s
        if timeout_s is None:
            return RequestGrant(tenant, default if default is not None else most)
        if most is not None and timeout_s > most:
            raise RequestError(f"timeout_s is {timeout_s}; it may be at most {most}", "timeout_s")
        return RequestGrant(tenant, timeout_s)

    def check_model(self, model: str) -> None:
        """Raises `ForbiddenError` unless the caller's key allows it."""
        if self.key is not None and self.key.models is not None and model not in self.key.models:
            raise ForbiddenError(f"your API key does not allow the model {model!r}", "model")

    def tenant_of(self, tenant: str | None) -> str | None:
        """Whose the request is, if it says to be this tenant's. Raises `ForbiddenError` if its key is another one's:
        else it could learn from how long an answer takes what that one has cached."""
        if self.key is None or self.key.tenant is None:
            return tenant
        if tenant not in (None, self.key.tenant):
            raise ForbiddenError("tenant is not that of your API key; leave it out", "tenant")
        return self.key.tenant

    def count_prompt(self, num_tokens: int) -> None:
        """It is going to be computed. Raises `RateLimitError` or `RequestError` when the caller may not have that."""
        if self._quota is not None:
            self._quota.take_prompt(num_tokens)
        self.prompt_tokens += num_tokens

    def count_output(self, num_tokens: int, num_cached_tokens: int) -> None:
        """So many tokens were generated; of the prompt so many had been computed before."""
        self.output_tokens += num_tokens
        self.cached_tokens = num_cached_tokens
        if self._quota is not None:
            self._quota.owe_tokens(num_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the answer says of the caller's limits."""
        return [] if self._quota is None else self._quota.headers()


_CURRENT: ContextVar[RequestContext | None] = ContextVar("exchange", default=None)


def current_context() -> RequestContext | None:
    """That of the HTTP request being answered, also in threads and tasks begun for it; `None` outside of one."""
    return _CURRENT.get()


def request_id() -> str:
    """Of the HTTP request being answered, for logs; "of a handle" outside of one."""
    exchange = _CURRENT.get()
    return "of a handle" if exchange is None else exchange.request_id


def note_error(code: str | None) -> None:
    """For the log: the request being answered has failed, perhaps when its status was already sent."""
    if (exchange := current_context()) is not None:
        exchange.error_code = code


def set_context(exchange: RequestContext) -> Token[RequestContext | None]:
    """From here on it is this task's, until `leave`."""
    return _CURRENT.set(exchange)


def reset_context(token: Token[RequestContext | None]) -> None:
    """Back to before `enter`."""
    _CURRENT.reset(token)


class EdgeObserver:
    """Hears it, and does nothing with it. Those that count derive from this."""

    def on_refused(self, code: str) -> None:
        """A request was not let in; `code` is the one of their answers."""

    def on_keys_read(self, problem: str | None) -> None:
        """The API keys are those of the file now; or the file has this problem, and they are those from before."""
