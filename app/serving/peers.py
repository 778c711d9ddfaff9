"""Calls to every replica; hot prefixes of peers, which warm the cache of a replica that starts; and blocks that a
decode replica gets while another one computes them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from folio.app.compat.ray import CALL_ERRORS, folio_error, replica_results, streaming_handle, translate_failures
from folio.app.errors import FolioError, UnavailableError
from folio.app.fleet.departures import DEPARTURES
from folio.app.fleet.messages import ForkCall, GenerateRequest, HotPrefixes
from folio.app.fleet.roles import Prefilled, Prefilling
from folio.vmem import CachedPrefix

logger = logging.getLogger(__name__)

# Timeouts of calls to peer replicas: at the start of a replica, and at the load of a model for which requests wait.
STARTING_TIMEOUT_S, LOADING_TIMEOUT_S = 10.0, 1.0
_RETRY_S = 0.1  # between two attempts
# Time in which the requests of a replica that has gone continue elsewhere, and timeout of questions about them.
_CONTINUES_WITHIN_S, _ANSWER_S = 0.5, 2.0


def peer_prefixes(deployment: str, app_name: str, timeout_s: float, fingerprint: str) -> list[Sequence[CachedPrefix]]:
    """The hot prefixes (`EngineReplica.hot_prefixes`) of each running replica of a deployment that has this
    fingerprint, for a replica that starts or loads a model. Errors are logged and never prevent the start. Called in
    threads without an event loop."""
    try:
        if not _num_running(deployment, app_name):  # the first replica would wait for peers until the timeout
            return []
        answers = _broadcast(deployment, app_name, timeout_s, "hot_prefixes", fingerprint)
    except Exception as error:  # any: the deployment may have been deleted just now; the start continues
        unexpected = not isinstance(error, TimeoutError)
        name = type(error).__name__
        logger.warning("peer replicas cannot be asked for hot prefixes: %s: %s", name, error, exc_info=unexpected)
        return []
    found: list[Sequence[CachedPrefix]] = []
    num_others = 0
    for answer in answers:
        if isinstance(answer, Exception):
            logger.warning("no hot prefixes from a peer replica: %s", answer)
        elif isinstance(answer, HotPrefixes) and answer.fingerprint == fingerprint:
            found.append(answer.prefixes)
        else:  # token ids may have other meanings there
            num_others += 1
    if num_others:
        logger.info("%d peer replicas have another model or version; their prefixes are not restored", num_others)
    return found


def _num_running(deployment: str, app_name: str) -> int:
    application = serve.status().applications.get(app_name)
    if application is None or deployment not in application.deployments:
        return 0
    states: Any = application.deployments[deployment].replica_states
    return int(states.get("RUNNING", 0))


def _broadcast(deployment: str, app_name: str, timeout_s: float, method: str, *args: Any) -> list[Any]:
    """Every running replica's answer or exception."""
    # `serve.get_deployment_handle` would keep the handle, and its router would read all load reports for ever.
    handle: DeploymentHandle[Any] = DeploymentHandle(deployment, app_name)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                left_s = max(deadline - time.monotonic(), 0.0)
                return list(handle.broadcast(method, *args).results(timeout_s=left_s, return_exceptions=True))
            except DeploymentUnavailableError:  # a new handle does not know any replica yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
    finally:
        handle.shutdown()


class BlocksAhead:
    """Blocks of a call's prompt, on their way to the replica that will decode it, while another one computes them.

    Attributes:
        replica: the one that gets them; empty if none does, or not yet.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._following: asyncio.Task[None] | None = None
        self.replica = ""

    def note(self, call: GenerateRequest | ForkCall, item: object) -> None:
        """Begin when a replica says that it computes the prompt, and end with the first pieces of another one."""
        if isinstance(call, GenerateRequest) and isinstance(item, Prefilling):
            self._begin(call, item)
        elif isinstance(item, list) and not isinstance(item, Prefilled):
            self.close()

    def _begin(self, call: GenerateRequest, prefills: str) -> None:
        self.close()  # the first replica that computed them is gone
        held_at = DEPARTURES.held_at(prefills, call.model)
        fetching = replace(call, fetches=True, begun_by=prefills, held_at=held_at, share=None, shows_progress=False)
        self._following = asyncio.create_task(self._follow(fetching))

    async def _follow(self, fetching: GenerateRequest) -> None:
        stream: Any = streaming_handle(self._handle, by_value=True).generate_stream.remote(fetching)
        try:
            with translate_failures():
                try:
                    async for item in stream:
                        self.replica = item if isinstance(item, str) else self.replica
                except asyncio.CancelledError:
                    stream.cancel()
                    raise
        except FolioError as error:
            logger.info("blocks are not fetched while they are computed: %s", error)

    def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            self._following = None

    async def __aenter__(self) -> BlocksAhead:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()


async def holder_of(handle: DeploymentHandle[Any], call: ForkCall) -> str | None:
    """The replica, other than `call.replica`, where the output to fork is now; `None` if there is none. If the replica
    of the call is gone, its requests are about to continue elsewhere."""
    for wait_s in (0.0, _CONTINUES_WITHIN_S):
        await asyncio.sleep(wait_s)
        of_output = call.model, call.fork_of, call.index
        answers = await answers_of_each(handle, "has_output", *of_output, timeout_s=_ANSWER_S)
        found: dict[str, bool] = dict(answer for answer in answers if isinstance(answer, tuple))
        if holders := [name for name, has in found.items() if has and name != call.replica]:
            return holders[0]
        if call.replica in found:
            break
    return None


async def answers_of_each(handle: DeploymentHandle[Any], method: str, *args: Any, timeout_s: float) -> list[Any]:
    """Every replica's answer, or the `FolioError` in place of it: `UnavailableError` after `timeout_s`. Empty when
    there is no replica."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    try:
        async with asyncio.timeout_at(deadline):
            results = await replica_results(handle.broadcast(method, *args))
    except DeploymentUnavailableError:
        return []
    except CALL_ERRORS as error:
        raise folio_error(error) from error
    except TimeoutError:
        raise UnavailableError(f"no engine replica could be called within {timeout_s} s") from None
    if not results:
        return []
    answers = [asyncio.ensure_future(result.get_async()) for result in results]
    try:
        await asyncio.wait(answers, timeout=deadline - loop.time())
    finally:
        for answer in answers:
            answer.cancel()  # without effect on those that are done
    return [_answer_of(answer, timeout_s) for answer in answers]


def _answer_of(answer: asyncio.Future[Any], timeout_s: float) -> Any:
    if not answer.done() or answer.cancelled():
        return UnavailableError(f"the engine replica has not answered within {timeout_s} s")
    error = answer.exception()
    if error is None:
        return answer.result()
    if isinstance(error, CALL_ERRORS):
        return folio_error(error)
    raise error
