"""Tables that processes share: one actor for each, which its users make again when it has died.

The first process that finds no actor of a table's name makes and owns it. The actor ends with that process, at the
latest with the application; then another user makes a new one. Nothing is stored: a new actor gets the table from its
users' copies and reports.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray
from ray.exceptions import RayError

from folio.app.errors import UnavailableError

logger = logging.getLogger(__name__)

# Ray namespace of the actors: the same for replicas of every driver and controller.
NAMESPACE = "folio"
# Time in which missing answers are not logged: an actor takes some seconds to start.
_STARTS_S = 15.0


class SharedTable:
    """A process's client of a shared table. It logs once when answers stop, and once when they return.

    Args:
        kind: the actor's class.
        name: unique in the cluster.
        what: the table's contents, in the plural, for errors and the log.
        without: what happens without an answer, for the log.
        answer_timeout_s: of each call.
    """

    def __init__(self, kind: type, name: str, what: str, without: str, answer_timeout_s: float) -> None:
        self._kind, self._name, self._what, self._without = kind, name, what, without
        self._answer_timeout_s = answer_timeout_s
        self._actor: Any = None
        self._is_silent = False
        self._logs_from = time.monotonic() + _STARTS_S

    async def exists(self, *, creates: bool) -> bool:
        """Whether there is an actor; `creates`: if there is none, make one. It may have died since."""
        if self._actor is None:
            self._actor = await asyncio.to_thread(self._find, creates)
        return self._actor is not None

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the actor. After an error the call may have had its effect, or have it later.

        Raises:
            UnavailableError: there is no answer in time, or the actor has died.
        """
        await self.exists(creates=True)
        try:
            # Not `wait_for`: before Python 3.12 it drops a cancellation that comes with the answer.
            async with asyncio.timeout(self._answer_timeout_s):
                return self._answered(await asyncio.wrap_future(self._sent(method, *args).future()))
        except (RayError, TimeoutError) as error:
            raise self._lost(error) from error

    def fetch(self, method: str, *args: Any, timeout_s: float) -> Any:
        """`call` for threads that may wait for an actor that starts."""
        self._actor = self._find(creates=True)
        try:
            return self._answered(ray.get(self._sent(method, *args), timeout=timeout_s))
        except (RayError, TimeoutError) as error:
            raise self._lost(error) from error

    def _find(self, creates: bool) -> Any:
        try:
            if not creates:
                return ray.get_actor(self._name, NAMESPACE)
            # It is never restarted: after its owner's death, too, its users make a new one.
            options: dict[str, Any] = {"get_if_exists": True, "num_cpus": 0, "max_restarts": 0}
            return ray.remote(self._kind).options(name=self._name, namespace=NAMESPACE, **options).remote()
        except (RayError, ValueError):  # there is none, or another process made one that has died since
            return None

    def _sent(self, method: str, *args: Any) -> Any:
        if self._actor is None:
            raise RayError("the actor has just died")
        return getattr(self._actor, method).remote(*args)

    def _answered(self, answer: Any) -> Any:
        if self._is_silent:
            logger.info("%s are shared again", self._what)
        self._is_silent, self._logs_from = False, 0.0
        return answer

    def _lost(self, error: Exception) -> UnavailableError:
        if not isinstance(error, TimeoutError):  # its process has died, or was found dead
            self._actor = None  # after a timeout it stays: Ray ends a starting actor whose owner has no handle
        if not self._is_silent and time.monotonic() >= self._logs_from:
            name = "no answer" if isinstance(error, TimeoutError) else type(error).__name__
            logger.warning("%s are not shared (%s): %s", self._what, name, self._without)
            self._is_silent = True
        return UnavailableError(f"the registry of {self._what} does not answer; send the request again")
