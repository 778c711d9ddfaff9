"""What calls of a deployment fail with, in Folio's own errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from app.errors import EngineError, FolioError, OverloadedError, UnavailableError

# What awaiting a call raises when it failed at the other side, cannot be delivered, or is refused by Serve itself.
FAILURES = (RayError, DeploymentUnavailableError, BackPressureError, grpc.aio.AioRpcError)
# gRPC says so when a replica's process is gone, or is about to end and takes no more calls.
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_REPLICA = "the engine replica"


def call_broken_error(callee: str = _REPLICA) -> UnavailableError:
    """A call has ended without its answer."""
    return UnavailableError(f"{callee} has broken off; send the request again")


def unwrap(error: Exception, callee: str = _REPLICA) -> FolioError:
    """What really happened. `error`: one of `FAILURES`."""
    if isinstance(error, BackPressureError):
        return OverloadedError(str(error), error.retry_after_s)
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, FolioError):
            return cause
    elif not isinstance(error, grpc.aio.AioRpcError) or error.code() in _GONE:
        # All else that Ray raises is about its processes, nodes and objects, not about what was asked.
        return UnavailableError(f"{callee} cannot be reached; send the request again")
    return EngineError(f"{callee} failed; its log says more")


@contextmanager
def translate_failures(callee: str = _REPLICA) -> Iterator[None]:
    """What a call fails with becomes the `FolioError` that it means."""
    try:
        yield
    except FAILURES as error:
        raise unwrap(error, callee) from error
    except asyncio.CancelledError:
        # Serve has a call end as if this task had been cancelled when a replica that is stopped breaks it off.
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise call_broken_error(callee) from None
        raise
