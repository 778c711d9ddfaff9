"""Failures of calls that serve one request: they end that request, and not the step.

What is the client's fault is told as it is (`RequestError`); of everything else the log has the cause and the client a
fixed sentence. A failure of the memory's books or of a rank is nobody's: it goes on to whoever runs the engine.
"""

from __future__ import annotations

import logging
from types import TracebackType

from app.engine.request import Request
from app.errors import EngineError, FolioError, UnavailableError
from vmem import IntegrityError

logger = logging.getLogger(__name__)

FAILED = "the request failed in the engine; the server's log says why"


class SequenceFailure(Exception):
    """A call for one sequence has failed, before anything of the step was computed; its cause says how."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.request_id)
        self.request = request


class attribute_failures:  # noqa: N801 - read as a clause: `with serving(request):`
    """Says whose fault a failure in its block is. Raises `SequenceFailure` for one."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_request_failure(error) and not isinstance(error, SequenceFailure):
            raise SequenceFailure(self._request) from error


def is_request_failure(error: BaseException) -> bool:
    """Whether a failure in a call for one request can be its own. A panic in Rust (of a parser, of a tokenizer) is no
    `Exception`."""
    if isinstance(error, IntegrityError | UnavailableError):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def failure_of(request_id: str, error: BaseException) -> FolioError:
    """What a request ends with after such a failure. Raises it again if it is not one request's."""
    if not is_request_failure(error):
        raise error
    if isinstance(error, SequenceFailure) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, FolioError) and not isinstance(error, EngineError):
        return error
    logger.error("request %s failed", request_id, exc_info=error)
    return EngineError(FAILED)
