"""Failures: a call that serves one request and fails ends that request, and not the step.

The client gets a `RequestError` as it is. Of any other failure the client gets a fixed sentence, and the log the cause.
An inconsistent memory and a lost rank are no request's failure; they stop the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from app.engine.request import Request
from app.errors import ConfigError, EngineError, FolioError, UnavailableError
from kernels import KernelError
from vmem import IntegrityError

logger = logging.getLogger(__name__)

FAILED = "the request failed in the engine; the server's log says why"


class SequenceFailure(Exception):
    """A call for one sequence has failed before the step computed anything; `__cause__` is its error."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.request_id)
        self.request = request


class attribute_failures:  # noqa: N801 - read as a clause: `with attribute_failures(request):`
    """Raise `SequenceFailure` with the request for a failure in the block. No generator: it is on the hot path."""

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
    """Whether an error in a call for one request can be the request's. A panic in Rust (parser, tokenizer) is no
    `Exception`."""
    if isinstance(error, IntegrityError | UnavailableError):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def failure_of(request_id: str, error: BaseException) -> FolioError:
    """Log a failure, and return the error that the request ends with. Raises it again if it is no request's."""
    if not is_request_failure(error):
        raise error
    if isinstance(error, SequenceFailure) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, FolioError) and not isinstance(error, EngineError):
        return error
    logger.error("request %s failed", request_id, exc_info=error)
    return EngineError(FAILED)


@contextmanager
def kernel_errors_as_config_errors() -> Iterator[None]:
    """Raise `ConfigError` for a configured kernel that is missing, or cannot read the cache."""
    try:
        yield
    except Exception as error:
        cause = error if isinstance(error, KernelError) else error.__cause__
        if isinstance(cause, KernelError) and not isinstance(error, ConfigError):
            raise ConfigError(f"these settings do not work here: {error}") from error
        raise


def start_error(error: BaseException) -> Exception:
    """An `Exception` for the constructor's caller: a library may call `sys.exit`, or panic in Rust."""
    if isinstance(error, Exception):
        return error
    failure = EngineError(f"the engine cannot start: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
