"""What a server's processes write down: not what was asked or answered."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator

from app.errors import (
    ConfigError,
    DeadlineError,
    ForbiddenError,
    ModelError,
    OverloadedError,
    RequestError,
    UnavailableError,
)

# Serve's own, whose records do not come to the root logger's handlers. It logs what a replica's methods raise.
_SERVE_LOGGER = "ray.serve"
# Refusals: the client is told, the ingress's line of the request has them, and nothing is wrong with the server.
_REFUSALS = (RequestError, ForbiddenError, OverloadedError, DeadlineError)
# Their messages quote settings, files and numbers. Others' may quote a prompt, or what a model made of it.
_HARMLESS = (OSError, MemoryError, ConfigError, ModelError, OverloadedError, DeadlineError, UnavailableError)
_WITHHELD = "(message withheld: it may quote a request; logging_config: {log_level: DEBUG} of the deployment shows it)"


def configure_logs() -> None:
    """For the process of a replica: what `app` says from INFO on, to stderr. Of exceptions, also those that Serve logs,
    only the type and the place are written, unless their messages are harmless, or Serve's log level is DEBUG. What a
    client did wrong is no error of the replica, though its method raises it."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("app").setLevel(logging.INFO)
    for name in (None, _SERVE_LOGGER):
        for handler in logging.getLogger(name).handlers:
            if not any(isinstance(present, WithheldMessages) for present in handler.filters):
                handler.addFilter(WithheldMessages())
                handler.addFilter(DropRefusals())


class WithheldMessages(logging.Filter):
    """For a handler: tracebacks are written without the messages of exceptions."""

    def filter(self, record: logging.LogRecord) -> bool:
        shows = logging.getLogger(_SERVE_LOGGER).isEnabledFor(logging.DEBUG)
        if record.exc_info and record.exc_info[1] is not None and not shows:
            record.exc_text = describe(record.exc_info[1])  # which formatters take if it is there
        return True


class DropRefusals(logging.Filter):
    """For a handler: Serve has an error with a traceback for whatever a replica's method raises, also for refusals."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.name != _SERVE_LOGGER or not record.exc_info or not isinstance(record.exc_info[1], _REFUSALS)


def describe(error: BaseException) -> str:
    """A traceback as Python writes it, where messages that may quote a request are left out."""
    return "\n".join(_lines(error, set())).rstrip("\n")


def _lines(error: BaseException, seen: set[int]) -> Iterator[str]:
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        yield from _lines(before, seen)
        yield "\nwhich led to:\n"
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):"
        yield "".join(traceback.format_tb(error.__traceback__)).rstrip("\n")
    message = str(error) if isinstance(error, _HARMLESS) else _WITHHELD
    yield f"{type(error).__module__}.{type(error).__qualname__}: {message}"
    for part in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield "\none of its parts:\n"
        yield from _lines(part, seen)
