"""Runner of batches, in one ingress of the cluster: the one that holds the store's lock."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from folio.app.api.batches.endpoints import BatchService
from folio.app.api.batches.gate import LineGate, spare_lines
from folio.app.api.batches.job import Job
from folio.app.api.batches.lines import LinePlace
from folio.app.api.batches.replies import BatchError
from folio.app.api.batches.requests import BatchCallers, BatchRequests
from folio.app.api.batches.store import BatchRecord, BatchStore, Ending, StoreFullError
from folio.app.api.unknown_fields import UnknownFields
from folio.app.errors import FolioError

logger = logging.getLogger(__name__)

_DELETE_S = 600.0
# Batches of one owner that run at the same time; the later ones wait.
MOST_RUNNING = 4


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals of polls for other ingresses' new and cancelled batches and for load reports, of saved progress, of
    attempts to become the runner, and until a batch that stopped at a fault of the disk or the program goes on."""

    look_s: float = 0.5
    save_s: float = 1.0
    lock_s: float = 2.0
    retry_s: float = 10.0


class BatchRunner:
    """Runs the batches of a store while this process holds the store's lock. In one event loop.

    Requests have the last priority of the engines' queues, begin only while replicas have room (`spare_lines`), and
    wait while replicas or their caller's limits refuse them. Owners take turns.

    Args:
        service: computes requests.
        callers: to whom requests are charged.
        concurrent_lines: requests of all batches at the same time.
        max_line_bytes: of an input file.
        unknown: policy for unknown fields of requests.
    """

    def __init__(
        self,
        store: BatchStore,
        service: BatchService,
        callers: BatchCallers,
        *,
        concurrent_lines: int,
        max_line_bytes: int,
        unknown: UnknownFields,
        intervals: Intervals = Intervals(),
    ) -> None:
        self.store = store
        self.callers = callers
        self._service = service
        self._gate = LineGate()
        self._requests = BatchRequests(service, callers, self._gate)
        self._concurrent_lines = concurrent_lines
        self._max_line_bytes = max_line_bytes
        self._unknown = unknown
        self._intervals = intervals
        self._jobs: dict[str, Job] = {}
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(_log_failure)

    def stop(self) -> None:
        """Stop; requests that are being computed are computed again by the next runner."""
        if self._task is not None:
            self._task.cancel()

    async def stopped(self) -> None:
        """Return when the runner has stopped, and its lock is free."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def wake(self) -> None:
        """Look for new and cancelled batches now."""
        self._woken.set()

    async def _run(self) -> None:
        lock = await self._locked()
        try:
            logger.info("this ingress holds the lock of the batch store and runs batches")
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_load())
                tasks.create_task(self._delete_old())
                while True:
                    await self._look(tasks)
                    self._woken.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._intervals.look_s):
                            await self._woken.wait()
        finally:
            lock.close()

    async def _locked(self) -> IO[bytes]:
        while (lock := self.store.try_lock_runner()) is None:
            await asyncio.sleep(self._intervals.lock_s)
        return lock

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Start open batches, and stop those that are cancelled or have expired."""
        try:
            records = await asyncio.to_thread(self.store.open_batches)
            endings = await asyncio.to_thread(self._endings, records)
        except OSError:
            logger.exception("cannot read open batches; trying again in %g s", self._intervals.look_s)
            return
        num_running = Counter(job.owner for job in self._jobs.values())
        for record in records:
            batch_id, ending = record.batch.id, endings.get(record.batch.id)
            job = self._jobs.get(batch_id)
            if job is None and (ending is not None or num_running[record.owner] < MOST_RUNNING):
                job = self._jobs[batch_id] = Job(self.store, record, self._unknown)
                num_running[record.owner] += 1
                tasks.create_task(self._run_job(job))
            if job is not None and ending is not None:
                job.stop(ending)

    def _endings(self, records: list[BatchRecord]) -> dict[str, Ending]:
        endings: dict[str, Ending] = {}
        for record in records:
            if self.store.cancelled_at(record) is not None:
                endings[record.batch.id] = "cancelled"
            elif record.batch.expires_at <= self.store.clock():
                endings[record.batch.id] = "expired"
        return endings

    async def _watch_load(self) -> None:
        """Keep the limit of requests at what replicas have room for."""
        while True:
            limit = 0
            if self._gate.has_waiting or self._gate.num_inside:
                num_inside = self._gate.num_inside
                with suppress(FolioError):  # no answer: none may begin
                    limit = spare_lines(await self._service.load(), num_inside, self._concurrent_lines)
            self._gate.set_limit(limit)
            await asyncio.sleep(self._intervals.look_s)

    async def _delete_old(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.store.delete_old)
            except OSError:
                logger.exception("cannot delete expired files; trying again in %g s", _DELETE_S)
            await asyncio.sleep(_DELETE_S)

    # ---- one batch ----

    async def _run_job(self, job: Job) -> None:
        batch_id = job.record.batch.id
        try:
            if not await asyncio.to_thread(job.load):
                return
            if job.is_open and job.stops_as is None:
                await self._work(job)
            if job.is_open and job.record.batch.status == "in_progress":
                with suppress(FileNotFoundError):  # without the input the answers stay as they are
                    await asyncio.to_thread(job.open_log)
            await asyncio.to_thread(job.finish)
            counts = job.record.batch.request_counts
            numbers = counts.completed, counts.failed, counts.total
            logger.info("%s is %s: %d answers, %d errors, %d requests", batch_id, job.record.batch.status, *numbers)
            self._woken.set()  # another batch of the owner may begin
        except Exception:  # a disk or a program at fault must not stop the other batches
            logger.exception("%s stopped by an error; it goes on from disk in %g s", batch_id, self._intervals.retry_s)
            await asyncio.sleep(self._intervals.retry_s)
        finally:
            job.close()
            del self._jobs[batch_id]

    async def _work(self, job: Job) -> None:
        """Compute until all is answered, or the job is stopped."""
        job.work = asyncio.create_task(self._compute(job))
        try:
            await asyncio.wait({job.work})
        except asyncio.CancelledError:
            job.work.cancel()
            await asyncio.wait({job.work})
            raise
        if not job.work.cancelled():
            job.work.result()

    async def _compute(self, job: Job) -> None:
        try:
            if job.record.batch.status == "validating" and not await job.validate(self._max_line_bytes):
                return
            await asyncio.to_thread(job.open_log)
            async with asyncio.TaskGroup() as tasks:
                saving = tasks.create_task(self._save_progress(job))
                places = asyncio.Semaphore(self._concurrent_lines)
                async with asyncio.TaskGroup() as lines:
                    for place in job.unanswered():
                        await places.acquire()
                        lines.create_task(self._answer(job, place)).add_done_callback(lambda _: places.release())
                saving.cancel()
        except* FileNotFoundError:
            job.stop("failed", BatchError(code="input_missing", message="the input file is gone; upload it again"))

    async def _save_progress(self, job: Job) -> None:
        while True:
            await asyncio.sleep(self._intervals.save_s)
            await asyncio.to_thread(job.save_progress)

    async def _answer(self, job: Job, place: LinePlace) -> None:
        """Compute a request until it has an answer, and append that to the batch's files."""
        line, is_error = await self._requests.answer(job, place)
        try:
            await asyncio.to_thread(job.add_answer, place.custom_id, line, is_error=is_error)
        except StoreFullError as error:
            job.stop("failed", BatchError(code=StoreFullError.code, message=str(error)))


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the batch runner failed; this ingress runs no more batches", exc_info=error)
