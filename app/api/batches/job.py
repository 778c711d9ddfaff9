"""One open batch: its states on disk, its requests and its answers.

    validating ──> in_progress ──> finalizing ──> completed, expired or cancelled
        └───────────────┴────────> failed

Every change of state replaces one record on disk, and the steps before it are idempotent. After a crash a batch goes on
from its last record: it is validated again, or the answers on disk are kept and the other requests computed, or its
files are shown to the owner again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

from pydantic import BaseModel

from folio.app.api.batches.answer_log import AnswerLog
from folio.app.api.batches.endpoints import ENDPOINTS, Endpoint
from folio.app.api.batches.lines import InputReader, LinePlace, places_in, unanswered_line
from folio.app.api.batches.replies import BatchError, BatchErrors, RequestCounts
from folio.app.api.batches.store import BatchRecord, BatchStore, Ending, StoreFullError
from folio.app.api.unknown_fields import UnknownFields

# The input file is validated in pieces of this size, in a thread that leaves the interpreter to others in between.
_PIECE_BYTES = 64 << 10


class Job:
    """A batch in the runner's process. Times are the store's.

    Attributes:
        record: as it is on disk.
        places: the batch's requests, once it is in progress.
        stops_as: how the batch ends, if it ends before all requests are answered.
    """

    def __init__(self, store: BatchStore, record: BatchRecord, unknown: UnknownFields) -> None:
        self._store = store
        self._unknown = unknown
        self._lock = threading.Lock()  # of the record on disk
        self._is_closed = False
        self._log: AnswerLog | None = None
        self._errors: list[BatchError] = []
        self.record = record
        self.places: list[LinePlace] = []
        self.stops_as: Ending | None = None
        self.work: asyncio.Task[None] | None = None

    @property
    def owner(self) -> str:
        return self.record.owner

    @property
    def endpoint(self) -> Endpoint:
        return ENDPOINTS[self.record.batch.endpoint]

    def stop(self, ending: Ending, *errors: BatchError) -> None:
        """End the batch before all requests are answered. Only the first ending counts."""
        if self.stops_as is None and self.record.ends_as is None:
            self.stops_as = ending
            self._errors = list(errors)
            if self.work is not None:
                self.work.cancel()

    async def validate(self, max_line_bytes: int) -> bool:
        """Check the input file. Returns false if it has faults; the batch has then failed."""
        batch = self.record.batch
        with self._store.content_path(self.owner, batch.input_file_id).open("rb") as file:
            reader = InputReader(file, batch.endpoint, max_line_bytes, self._unknown)
            begun_at = time.monotonic()
            while await asyncio.to_thread(reader.read_some, _PIECE_BYTES):
                await asyncio.sleep(time.monotonic() - begun_at)
                begun_at = time.monotonic()
        if reader.errors:
            self.stops_as, self._errors = "failed", reader.errors
            return False
        if reader.dropped:
            self._unknown.note(sorted(reader.dropped), "a batch")
        self.places = reader.places
        counts = RequestCounts(total=len(self.places))
        await asyncio.to_thread(self._change, status="in_progress", in_progress_at=self._now, request_counts=counts)
        return True

    def load(self) -> bool:
        """Read the record again; false if the batch has ended."""
        record = self._store.record(self.record)
        if record is None or record.batch.has_ended:
            self._store.close_batch(self.record)
            return False
        self.record = record
        return True

    def open_log(self) -> None:
        """Read the answers on disk, and the requests if `validate` has not. Idempotent.

        Raises:
            FileNotFoundError: the input file is gone.
        """
        if self._log is not None:
            return
        owner, record = self.owner, self.record
        if not self.places:
            self.places = list(places_in(self._store.content_path(owner, record.batch.input_file_id)))
        self._log = AnswerLog(
            self._store.content_path(owner, record.output_id),
            self._store.content_path(owner, record.error_id),
            [place.custom_id for place in self.places],
            lambda num_bytes: self._store.check_room(owner, num_bytes),
        )

    @property
    def is_open(self) -> bool:
        """Whether requests may still be computed: false once the batch is being finalised."""
        return self.record.ends_as is None

    def unanswered(self) -> list[LinePlace]:
        assert self._log is not None
        return [place for place in self.places if place.custom_id not in self._log.answered]

    def read(self, place: LinePlace) -> BaseModel:
        """The body of a request. Raises `RequestValidationError` or `FileNotFoundError`."""
        with self._store.content_path(self.owner, self.record.batch.input_file_id).open("rb") as file:
            return self.endpoint.read(place.read(file).body, self._unknown)[0]

    def add_answer(self, custom_id: str, line: bytes, *, is_error: bool) -> None:
        """Append an answer to the batch's files. Raises `StoreFullError`, `OSError`, or `ValueError` after `close`."""
        assert self._log is not None
        self._log.append(custom_id, line, is_error=is_error)

    def save_progress(self) -> None:
        """Save the numbers of answered requests."""
        if self._counts != self.record.batch.request_counts:
            self._change(request_counts=self._counts)

    def finish(self) -> None:
        """Finalise the batch: show its files to the owner and write its last record."""
        if self.record.ends_as is None:
            self._finalize(self.stops_as or "completed")
        record, batch_id = self.record, self.record.batch.id
        if not record.batch.has_ended:
            assert record.ends_as is not None
            cancelled_at = self._store.cancelled_at(record) if record.ends_as == "cancelled" else None
            self._change(
                output_file_id=self._shown(record.output_id, f"{batch_id}_output.jsonl"),
                error_file_id=self._shown(record.error_id, f"{batch_id}_error.jsonl"),
                cancelling_at=None if cancelled_at is None else int(cancelled_at),
                status=record.ends_as,
                completed_at=self._now if record.ends_as == "completed" else None,
                failed_at=self._now if record.ends_as == "failed" else None,
                expired_at=self._now if record.ends_as == "expired" else None,
                cancelled_at=self._now if record.ends_as == "cancelled" else None,
            )
        self._store.close_batch(self.record)

    def _finalize(self, ending: Ending) -> None:
        if self._log is not None:
            if ending == "expired":
                self._add_expired(self._log)
            self._log.flush()
        self._change(
            ends_as=ending,
            status="finalizing" if self._log is not None else self.record.batch.status,
            finalizing_at=self._now if self._log is not None else None,
            request_counts=self._counts,
            errors=BatchErrors(data=self._errors) if self._errors else None,
        )

    def close(self) -> None:
        """Make later writes by threads of this job fail."""
        if self._log is not None:
            self._log.close()
        with self._lock:
            self._is_closed = True

    def _add_expired(self, log: AnswerLog) -> None:
        message = "the request was not computed before the batch's completion window ended"
        with suppress(StoreFullError):  # the remaining requests get no line
            for place in self.unanswered():
                log.append(place.custom_id, unanswered_line(place.custom_id, "batch_expired", message), is_error=True)

    def _shown(self, file_id: str, name: str) -> str | None:
        """Show a file of answers to the owner; returns its id if there is an answer in it."""
        path = self._store.content_path(self.owner, file_id)
        if not path.exists():
            return None
        if not path.stat().st_size:
            path.unlink()
            return None
        return self._store.describe_file(self.owner, file_id, name, "batch_output", self.record.keep_s).id

    @property
    def _counts(self) -> RequestCounts:
        if self._log is None:
            return self.record.batch.request_counts
        failed = self._log.num_failed
        return RequestCounts(total=len(self.places), completed=len(self._log.answered) - failed, failed=failed)

    @property
    def _now(self) -> int:
        return int(self._store.clock())

    def _change(self, *, ends_as: Ending | None = None, **fields: Any) -> None:
        with self._lock:
            if self._is_closed:
                raise ValueError("the job is closed")
            changed: dict[str, Any] = {"batch": self.record.batch.model_copy(update=fields)}
            if ends_as is not None:
                changed["ends_as"] = ends_as
            record = self.record.model_copy(update=changed)
            self._store.save(record)
            self.record = record
