"""Calls of engine replicas: awaited, streamed, cancelled, and what they fail with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError

from app.errors import EngineError, FolioError, UnavailableError
from app.openai.pieces import Piece
from app.serving.messages import ForkCall, GenerateRequest

# What awaiting a call of a replica raises when the call failed, the replica is gone, or none can be had.
_FAILURES = (RayTaskError, RayActorError, DeploymentUnavailableError)


async def pieces_of(method: Any, call: GenerateRequest | ForkCall) -> AsyncGenerator[Piece, None]:
    """What a replica's stream brings, up to its end. Nothing is sent before the first piece is asked for: what has been
    sent has to be cancelled."""
    response = method.remote(call)
    finished = False
    try:
        async for piece in response:
            finished = piece.ends_request
            yield piece
    except _FAILURES as error:
        raise unwrap(error) from error
    finally:
        if not finished:  # dropping the generator would not stop the replica
            response.cancel()


async def results_of(responses: Sequence[Any]) -> list[Any]:
    """Await calls of replicas; when one fails, the others are cancelled."""
    try:
        return await asyncio.gather(*map(result_of, responses))
    except BaseException:
        for response in responses:
            response.cancel()
        raise


async def result_of(response: Any) -> Any:
    """Await a call of a replica, or of all. When this task is cancelled Serve cancels the call."""
    try:
        return await response
    except _FAILURES as error:
        raise unwrap(error) from error


def unwrap(error: Exception) -> FolioError:
    """What really happened at the replica."""
    if isinstance(error, RayActorError | DeploymentUnavailableError):
        return UnavailableError("the engine replica cannot be reached; send the request again")
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, FolioError) else EngineError(f"the engine replica failed: {error}")
