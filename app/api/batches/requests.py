"""Requests of batches: computed by the service, charged to the batch's owner, retried while they are refused."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Protocol

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

from folio.app.api.batches.endpoints import BatchService
from folio.app.api.batches.gate import LineGate
from folio.app.api.batches.job import Job
from folio.app.api.batches.lines import LinePlace, answer_line
from folio.app.errors import EngineError, FolioError, NoReplicaError, OverloadedError, RateLimitError, UnavailableError
from folio.app.http.errors import ErrorBody, error_response, validation_error
from folio.app.http.request_context import CURRENT, RequestContext

logger = logging.getLogger(__name__)

# A request fails after this many failures of engines, because it may be their cause.
MOST_FAILURES = 3
# Pause after an error without `retry_after_s`.
_PAUSE_S = 2.0


class BatchCallers(Protocol):
    """The methods of `folio.app.edge.callers.Callers` that batches call; this package does not import `edge`."""

    def current_name(self) -> str: ...

    async def begin(self, name: str, request_id: str, num_body_bytes: int) -> RequestContext: ...


class BatchRequests:
    """Computes requests of all batches, as the gate lets them in."""

    def __init__(self, service: BatchService, callers: BatchCallers, gate: LineGate) -> None:
        self._service = service
        self._callers = callers
        self._gate = gate

    async def answer(self, job: Job, place: LinePlace) -> tuple[bytes, bool]:
        """Compute a request. Returns its line, and whether it belongs in the error file. Retries while the request
        is refused for a reason that passes."""
        num_failures, again = 0, False
        while True:
            await self._gate.enter(job.owner, again=again)
            again = True
            request_id = uuid.uuid4().hex
            try:
                status, body = await self._compute(job, place, request_id)
                return answer_line(place.custom_id, request_id, status, body), status != 200
            except RateLimitError as error:
                self._gate.pause(error.retry_after_s or _PAUSE_S, job.owner)
            except (OverloadedError, NoReplicaError) as error:
                self._gate.pause(error.retry_after_s or _PAUSE_S)
            except EngineError as error:
                num_failures += 1
                if num_failures == MOST_FAILURES:
                    status, body = error_response(error)
                    return answer_line(place.custom_id, request_id, status, body), True
                if isinstance(error, UnavailableError):
                    self._gate.pause(error.retry_after_s or _PAUSE_S)
            finally:
                self._gate.leave()

    async def _compute(self, job: Job, place: LinePlace, request_id: str) -> tuple[int, BaseModel]:
        """Status and body of an answer. Raises `OverloadedError` or `EngineError` if the request may be retried."""
        try:
            body = await asyncio.to_thread(job.read, place)
            context = await self._callers.begin(job.owner, request_id, place.num_bytes)
        except RequestValidationError as error:  # it was valid when the batch began: the server has changed since
            return 400, validation_error(error.errors(), error.body)
        except FolioError as error:
            return _answer_of(error)
        token = CURRENT.set(context)
        try:
            answer = await job.endpoint.call(self._service, body)
            context.status = 200
            return 200, answer
        except Exception as error:  # the boundary of a request: the error becomes its answer
            context.status, _ = error_response(error)
            if not isinstance(error, FolioError):
                logger.error("request %s of %s failed", request_id, job.record.batch.id, exc_info=error)
            return _answer_of(error)
        finally:
            CURRENT.reset(token)
            context.end()


def _answer_of(error: Exception) -> tuple[int, ErrorBody]:
    if isinstance(error, OverloadedError | EngineError):
        raise error
    return error_response(error)
