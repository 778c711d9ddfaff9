"""Transport within a Ray cluster, through Serve's handle of the application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from folio.app.compat.ray import translate_failures
from folio.app.errors import UnavailableError


class OverHandle:
    """Calls by handle, from any process of the cluster and any event loop.

    Args:
        application: a handle, or a name, which is looked up at the first call, so that applications may start in any
            order.
    """

    def __init__(self, application: str | DeploymentHandle[Any]) -> None:
        self._name = application if isinstance(application, str) else application.app_name
        self._callee = f"the application {self._name!r}"
        self._handle = None if isinstance(application, str) else application

    async def call(self, method: str, answer: Any, *args: Any) -> Any:
        handle = await self._connected()
        response = getattr(handle, method).remote(*args)
        try:
            with translate_failures(self._callee):
                return await response
        except asyncio.CancelledError:
            response.cancel()  # outside of a deployment Serve does not cancel the request
            raise

    async def stream(self, method: str, item: Any, *args: Any) -> AsyncGenerator[Any, None]:
        handle = await self._connected()
        response = getattr(handle.options(stream=True), method).remote(*args)
        finished = False
        try:
            with translate_failures(self._callee):
                async for chunk in response:
                    yield chunk
            finished = True
        finally:
            if not finished:  # dropping the generator would not cancel the request
                response.cancel()

    async def close(self) -> None:
        """Does nothing: Serve owns the handles."""

    async def _connected(self) -> DeploymentHandle[Any]:
        if self._handle is None:
            self._handle = await asyncio.to_thread(_find, self._name)
        return self._handle


def _find(name: str) -> DeploymentHandle[Any]:
    """Ask Serve's controller; blocks."""
    try:
        return serve.get_app_handle(name)
    except RayServeException as error:
        raise UnavailableError(f"there is no application {name!r} in this Ray cluster: {error}") from error
