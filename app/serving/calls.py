"""The engine replicas as the ingress calls them: whole, streamed, cancelled, and what calls fail with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from app.errors import EngineError, FolioError, UnavailableError
from app.openai.pieces import Piece
from app.serving.interleave import interleave
from app.serving.messages import ForkCall, GenerateRequest, ReplicaFacts

# What awaiting a call of a replica raises when the call failed, the replica is gone, or none can be had.
_FAILURES = (RayTaskError, RayActorError, DeploymentUnavailableError)


class Replicas:
    """All engine replicas of the application, behind their handle. Every method raises `FolioError`s."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def generate(self, calls: Sequence[GenerateRequest]) -> list[list[Piece]]:
        """The outputs of each call, each output in one piece. When one call fails, the others are cancelled."""
        return await _results_of([self._handle.generate.remote(call) for call in calls])

    def generate_stream(self, calls: Sequence[GenerateRequest]) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all calls as they come, each with the number of its call. Close it to cancel them."""
        method = self._handle.options(stream=True).generate_stream
        return interleave([_pieces_of(method, call) for call in calls])

    async def fork(self, call: ForkCall) -> list[Piece]:
        """The forks, each in one piece."""
        return cast(list[Piece], await _result_of(self._handle.fork.remote(call)))

    async def fork_stream(self, call: ForkCall) -> AsyncGenerator[Piece, None]:
        """The forks piece by piece. Close it to cancel them."""
        async with aclosing(_pieces_of(self._handle.options(stream=True).fork_stream, call)) as pieces:
            async for piece in pieces:
                yield piece

    async def facts(self) -> ReplicaFacts:
        """What one replica says of the model."""
        return cast(ReplicaFacts, await _result_of(self._handle.facts.remote()))

    async def one(self, method: str, *args: Any) -> Any:
        """What one replica answers."""
        return await _result_of(getattr(self._handle, method).remote(*args))

    async def all(self, method: str, *args: Any) -> list[Any]:
        """What every replica answers."""
        return cast(list[Any], await _result_of(self._handle.broadcast(method, *args).results_async()))


async def _pieces_of(method: Any, call: GenerateRequest | ForkCall) -> AsyncGenerator[Piece, None]:
    """What a replica's stream brings, up to its end. Nothing is sent before the first piece is asked for: what has been
    sent has to be cancelled."""
    response = method.remote(call)
    finished = False
    try:
        async for pieces in response:
            finished = pieces[-1].ends_request
            for piece in pieces:
                yield piece
    except _FAILURES as error:
        raise unwrap(error) from error
    finally:
        if not finished:  # dropping the generator would not stop the replica
            response.cancel()


async def _results_of(responses: Sequence[Any]) -> list[Any]:
    """Await calls of replicas; when one fails, the others are cancelled."""
    try:
        return await asyncio.gather(*map(_result_of, responses))
    except BaseException:
        for response in responses:
            response.cancel()
        raise


async def _result_of(response: Any) -> Any:
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
