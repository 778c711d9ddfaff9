"""Context of one HTTP request, shared by the guard, the ingress and the log; observer of the edge's events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from folio.app.config.http import HttpSettings, KeyEntry
from folio.app.errors import ForbiddenError, RequestError

if TYPE_CHECKING:
    from folio.app.engine.report import Progress

# The most characters in the header of ignored fields: proxies bound all headers.
_MOST_IGNORED_CHARS = 1100


class Quota(Protocol):
    """A caller's remaining use, see `folio.app.edge.quota.Quota`; this package does not import `edge`."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def take_prompt(self, num_tokens: int) -> None: ...

    def owe_tokens(self, num_tokens: int) -> None: ...

    def headers(self) -> list[tuple[bytes, bytes]]: ...


@dataclass(slots=True, eq=False)
class RequestContext:
    """The caller, usage and progress of a request, from `current_context()`.

    Requests through a Serve handle have none: other applications in the cluster are trusted.

    Attributes:
        attempt_of: names all of HAProxy's attempts at this request; `None` without HAProxy.
        first_byte_at: when the first byte of a streamed answer was sent.
        num_body_bytes: size of the body and of the stored conversation that it continues.
        generation_id: the engine's id for the request; of several prompts, the first one's.
        error_code: code of a failure, even after the status was sent.
        ignored_fields: value of the header that names dropped parts of the body and of its schemas.
        num_continued: how often a call of this request has continued at another replica.
        checks: under way: of the prompt while it is made, and of each call until a replica has taken it. Each tells
            whether it may still refuse the request.
        progress: the latest progress of the prompt that its replica has reported.
        silent_events: makes the events to send when a stream has been silent; `None`: a comment is sent.
    """

    settings: HttpSettings
    request_id: str
    attempt_of: str | None = None
    begun_at: float = field(default_factory=time.monotonic)
    first_byte_at: float | None = None
    status: int | None = None
    key: KeyEntry | None = None
    num_body_bytes: int = 0
    generation_id: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error_code: str | None = None
    ignored_fields: str | None = None
    num_continued: int = 0
    checks: list[Callable[[], bool]] = field(default_factory=list)
    progress: Progress | None = None
    silent_events: Callable[[], Iterable[Any]] | None = None
    _quota: Quota | None = None
    _is_running: bool = False  # counted by the quota

    def begin(self, quota: Quota) -> None:
        """Charge the request to its caller. Raises `RateLimitError`."""
        self._quota = quota
        quota.begin()
        self._is_running = True

    @property
    def may_be_refused(self) -> bool:
        """Whether the request's error may still have an HTTP status, if the answer does not begin yet."""
        return any(may_refuse() for may_refuse in self.checks)

    def end(self) -> None:
        """Settle the quota. A refused prompt's tokens are given back; not after a timeout or a disconnection, because
        they may have been computed."""
        if self._quota is None or not self._is_running:
            return
        self._quota.end()
        refused = self.status is not None and self.status >= 400 and self.status != 408
        failed = self.error_code not in (None, "timeout")  # in a stream that had begun
        if (refused or failed) and not self.output_tokens:
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
    ) -> tuple[str | None, float | None]:
        """Check the body's fields against the caller's key and the settings; returns tenant and `timeout_s`.

        Args:
            pins: the prompt is to be pinned in every replica's cache.

        Raises:
            ForbiddenError: the key does not allow a field's value.
            RequestError: `timeout_s` is too long.
        """
        if self.generation_id is None:
            self.generation_id = generation_id
        key = self.key
        if key is not None:
            self.check_model(model)
            if key.best_priority is not None and priority < key.best_priority:
                raise ForbiddenError(
                    f"priority is {priority}; your API key allows {key.best_priority} and above", "priority"
                )
            if pins and not key.operator:
                raise ForbiddenError("pin is for operators; leave it out, or use an operator's API key", "pin")
            tenant = self.tenant_of(tenant)
        return tenant, self._bounded(timeout_s)

    def authorize_fork(self, generation_id: str, model: str, timeout_s: float | None) -> float | None:
        """`authorize` for a fork, whose tenant and priority are those of its request; returns `timeout_s`."""
        if self.generation_id is None:
            self.generation_id = generation_id
        self.check_model(model)
        return self._bounded(timeout_s)

    @property
    def owner(self) -> str | None:
        """The caller that may fork this request: the key's tenant, or else the key. `None` without keys."""
        if self.key is None:
            return None
        return f"key:{self.key.name}" if self.key.tenant is None else f"tenant:{self.key.tenant}"

    def _bounded(self, timeout_s: float | None) -> float | None:
        """The request's timeout, or the one of the settings. Raises `RequestError` if it is too long."""
        default, most = self.settings.default_timeout_s, self.settings.max_timeout_s
        if timeout_s is None:
            return default if default is not None else most
        if most is not None and timeout_s > most:
            raise RequestError(f"timeout_s is {timeout_s}; it must be at most {most} (max_timeout_s)", "timeout_s")
        return timeout_s

    def check_operator(self, noun: str) -> None:
        """Raise `ForbiddenError` unless the caller's key is an operator's, or there are no keys."""
        if self.key is not None and not self.key.operator:
            raise ForbiddenError(f"{noun} is for operators; send an operator's API key")

    def check_model(self, model: str) -> None:
        """Raise `ForbiddenError` unless the caller's key allows the model."""
        if self.key is not None and self.key.models is not None and model not in self.key.models:
            raise ForbiddenError(f"your API key does not allow the model {model!r}", "model")

    def tenant_of(self, tenant: str | None) -> str | None:
        """The request's tenant, given the one in its body. Raises `ForbiddenError` if the key is another tenant's:
        response times reveal what a tenant has cached."""
        if self.key is None or self.key.tenant is None:
            return tenant
        if tenant not in (None, self.key.tenant):
            raise ForbiddenError("tenant does not match your API key's; leave it out", "tenant")
        return self.key.tenant

    def count_prompt(self, num_tokens: int) -> None:
        """Charge a prompt before it is computed. Raises `RateLimitError` or `RequestError`."""
        if self._quota is not None:
            self._quota.take_prompt(num_tokens)
        self.prompt_tokens += num_tokens

    def count_output(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Charge generated tokens, and note how many tokens of the prompt were cached."""
        self.output_tokens += num_tokens
        self.cached_tokens = num_cached_tokens
        if self._quota is not None:
            self._quota.owe_tokens(num_tokens)

    def note_ignored(self, fields: Iterable[str]) -> None:
        """Name parts of the body, whose values were dropped or changed, in the answer's header, as far as they fit. The
        names are printable ASCII."""
        named = [] if self.ignored_fields is None else self.ignored_fields.split(", ")
        for name in fields:
            if name not in named and len(header := ", ".join([*named, name])) <= _MOST_IGNORED_CHARS:
                named.append(name)
                self.ignored_fields = header

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The answer's headers about the caller's limits, and about dropped fields of the body."""
        headers = [] if self._quota is None else self._quota.headers()
        if self.ignored_fields is not None:
            headers = [*headers, (b"x-folio-ignored-fields", self.ignored_fields.encode("ascii"))]
        return headers


CURRENT: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)


def current_context() -> RequestContext | None:
    """The context of the HTTP request being answered, also in its tasks and threads; `None` outside of one."""
    return CURRENT.get()


def request_id() -> str:
    """The id of the HTTP request being answered, for logs; "of a handle" outside of one."""
    context = CURRENT.get()
    return "of a handle" if context is None else context.request_id


def note_error(code: str | None) -> None:
    """Note for the log that the request being answered has failed."""
    if (context := CURRENT.get()) is not None:
        context.error_code = code


@contextmanager
def checked(may_refuse: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Within the context, the request may still be refused while `may_refuse()`."""
    context = CURRENT.get()
    checks = [] if context is None else context.checks
    checks.append(may_refuse)
    try:
        yield
    finally:
        checks.remove(may_refuse)


def note_ignored(fields: Sequence[str]) -> None:
    """Name parts of the body that were dropped in the answer's header, in printable ASCII.

    Raises:
        RequestError: the settings refuse unknown fields.
    """
    if not fields or (context := CURRENT.get()) is None:
        return
    if context.settings.unknown_fields == "error":
        raise RequestError(f"{fields[0]} has no meaning here, and unknown fields are refused (unknown_fields)")
    context.note_ignored(fields)


class EdgeObserver:
    """Observer of the edge's events that ignores them; base of the meters."""

    def on_refused(self, code: str) -> None:
        """A request was refused, with this code in its answer."""

    def on_ignored_field(self, name: str) -> None:
        """An unknown field of a body was dropped; `name` is one of a few known names, or "other"."""

    def on_keys_read(self, problem: str | None) -> None:
        """The API keys are up to date; or the file has this problem and the keys are the old ones."""
