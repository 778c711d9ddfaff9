"""Logging of a server's processes: no text of prompts or outputs, no tracebacks for refused requests."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator

from folio.app.errors import (
    ConfigError,
    DeadlineError,
    ForbiddenError,
    ModelError,
    OverloadedError,
    RequestError,
    UnavailableError,
)

# Serve's logger has its own handlers and logs every exception of a replica's methods.
_SERVE_LOGGER = "ray.serve"
# Refusals are no errors of the server; the client's answer and the request's log line have them.
_REFUSALS = (RequestError, ForbiddenError, OverloadedError, DeadlineError)
# Their messages quote settings, files and numbers; messages of other errors may quote prompts or outputs.
_HARMLESS = (OSError, MemoryError, ConfigError, ModelError, OverloadedError, DeadlineError, UnavailableError)
_WITHHELD = "(message withheld: it may quote a request; logging_config: {log_level: DEBUG} of the deployment shows it)"


def configure_logs() -> None:
    """Set up the process of a replica: `folio` logs from INFO on to stderr. Exceptions, also those that
    Serve logs, appear without their messages unless these are harmless or Serve's log level is DEBUG. Refusals do
    not appear."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("folio").setLevel(logging.INFO)
    for name in (None, _SERVE_LOGGER):
        for handler in logging.getLogger(name).handlers:
            if not any(isinstance(present, WithheldMessages) for present in handler.filters):
                handler.addFilter(WithheldMessages())
                handler.addFilter(DropRefusals())


class WithheldMessages(logging.Filter):
    """Filter of a handler: tracebacks without the messages of exceptions."""

    def filter(self, record: logging.LogRecord) -> bool:
        shows = logging.getLogger(_SERVE_LOGGER).isEnabledFor(logging.DEBUG)
        if record.exc_info and record.exc_info[1] is not None and not shows:
            record.exc_text = describe(record.exc_info[1])  # formatters use it in place of their own
        return True


class DropRefusals(logging.Filter):
    """Filter of a handler: no record of Serve's for a refusal that a replica's method raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.name != _SERVE_LOGGER or not record.exc_info or not isinstance(record.exc_info[1], _REFUSALS)


def describe(error: BaseException) -> str:
    """Python's traceback, without messages that may quote a request."""
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
