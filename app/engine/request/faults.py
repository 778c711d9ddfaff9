"""Failures: a call that serves one request and fails ends that request, and not the step.

The client gets a `RequestError` as it is. Of any other failure the client gets a fixed sentence, and the log the cause.
An inconsistent memory, a lost rank and a lost device are not failures of a request; they stop the engine.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from folio.app.engine.request.request import Sequence
from folio.app.errors import ConfigError, EngineError, FolioError, UnavailableError
from folio.kernels import KernelError
from folio.vmem import IntegrityError

logger = logging.getLogger(__name__)

# Errors of CUDA that no program causes: memory, links, or a device that is gone.
_HARDWARE = re.compile(r"\bECC\b|nvlink|hardware error|unavailable|no CUDA-capable device|unknown error", re.IGNORECASE)

FAILED = "the request failed in the engine; the server's log says why"


class SequenceFailure(Exception):
    """A call for one sequence has failed before the step computed anything; `__cause__` is its error."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(sequence.request_id)
        self.sequence = sequence


class attribute_failures:  # noqa: N801 - read as a clause: `with attribute_failures(sequence):`
    """Raise `SequenceFailure` for an error in the block. A class, because a generator is too slow for the hot path."""

    __slots__ = ("_sequence",)

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_request_failure(error) and not isinstance(error, SequenceFailure):
            raise SequenceFailure(self._sequence) from error


def is_request_failure(error: BaseException) -> bool:
    """Whether an error in a call for one request may be caused by it. A panic in Rust (parser, tokenizer) is not an
    `Exception`."""
    if isinstance(error, IntegrityError | UnavailableError):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def failure_of(request_id: str, error: BaseException) -> FolioError:
    """Log a failure, and return the error that the request ends with. Raises it again if no request caused it."""
    if not is_request_failure(error):
        raise error
    if isinstance(error, SequenceFailure) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, FolioError) and not isinstance(error, EngineError):
        return error
    logger.error("request %s failed", request_id, exc_info=error)
    return EngineError(FAILED)


def device_fault(device: torch.device) -> Exception | None:
    """The error that every call to a lost CUDA device raises, for example after an illegal access; `None` if the device
    works. Waits for the device's queued work."""
    if device.type != "cuda" or not torch.cuda.is_initialized():  # asking would make a context
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:  # torch's own errors are subclasses
        return error
    return None


def is_hardware_fault(error: Exception) -> bool:
    """Whether the hardware, not a request, is the cause of a lost device."""
    return _HARDWARE.search(str(error)) is not None


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
    """Convert a failed start to an `Exception`: a library may call `sys.exit`, or panic in Rust."""
    if isinstance(error, Exception):
        return error
    failure = EngineError(f"the engine cannot start: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
