"""Batches from their creation to their end, over a service that echoes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from folio.app.api.batches.endpoints import LAST_PRIORITY
from folio.app.api.batches.replies import BatchObject
from folio.app.api.batches.requests import MOST_FAILURES
from folio.app.api.batches.runner import MOST_RUNNING
from folio.app.api.batches.store import BatchRecord, BatchStore
from folio.app.api.operators.replies import LoadReport
from folio.app.config.http import BatchSettings
from folio.app.errors import (
    EngineError,
    ForbiddenError,
    NoReplicaError,
    OverloadedError,
    RateLimitError,
    RequestError,
    UnavailableError,
)

from .fake import (
    ALICE,
    BOB,
    QUICK,
    Clock,
    FakeCallers,
    FakeService,
    add_batch,
    check_answered_once,
    ended,
    eventually,
    jsonl,
    lines_of,
    load_of,
    request_line,
    running,
    store_in,
)

IDS = [f"r{i}" for i in range(20)]
CONTENT = jsonl(*(request_line(name, f"text {name}") for name in IDS))


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return store_in(tmp_path)


async def finished(
    store: BatchStore, service: FakeService, callers: FakeCallers | None = None, content: bytes = CONTENT, **fields: Any
) -> BatchObject:
    """A batch that has ended."""
    batch_id = add_batch(store, ALICE, content, **fields)
    async with running(store, service, callers):
        return await ended(store, batch_id)


def counts(batch: BatchObject) -> tuple[str, int, int]:
    """(Status, completed requests, failed ones)."""
    return batch.status, batch.request_counts.completed, batch.request_counts.failed


def first_error(batch: BatchObject) -> str:
    assert (batch.status, batch.errors is None) == ("failed", False)
    return batch.errors.data[0].code  # type: ignore[union-attr]


async def test_every_request_is_answered_with_the_last_priority(store: BatchStore) -> None:
    service = FakeService()
    batch = await finished(store, service, metadata={"night": "1"})
    assert (counts(batch), batch.request_counts.total) == (("completed", 20, 0), 20)
    assert batch.metadata == {"night": "1"}
    assert batch.error_file_id is None
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(times, key=lambda at: at or 0)
    lines = lines_of(store, ALICE, batch.output_file_id)
    check_answered_once(store, batch, IDS)
    for line in lines:
        assert line["error"] is None
        assert line["id"].startswith("batch_req_")
        assert line["response"]["status_code"] == 200
        assert line["response"]["request_id"]
        message = line["response"]["body"]["choices"][0]["message"]
        assert message["content"] == f"echo text {line['custom_id']}"
    assert {body.priority for body in service.bodies} == {LAST_PRIORITY}
    await eventually(lambda: not store.open_batches())  # its mark goes after its last record


async def test_invalid_requests_fail_alone(store: BatchStore) -> None:
    service = FakeService()
    service.errors["text r3"] = [RequestError("too hot", "temperature")]
    service.errors["text r4"] = [ForbiddenError("not this model", "model")]
    service.errors["text r5"] = [ZeroDivisionError("secret")]
    batch = await finished(store, service)
    assert counts(batch) == ("completed", 17, 3)
    check_answered_once(store, batch, IDS)
    errors = {line["custom_id"]: line["response"] for line in lines_of(store, ALICE, batch.error_file_id)}
    assert {name: found["status_code"] for name, found in errors.items()} == {"r3": 400, "r4": 403, "r5": 500}
    assert errors["r3"]["body"]["error"]["param"] == "temperature"
    assert "secret" not in str(errors["r5"])


@pytest.mark.parametrize(
    ("error", "is_refusal"),
    [
        (OverloadedError("full", 0.01), True),
        (RateLimitError("too fast", 0.01), True),
        (NoReplicaError("none", 0.01), True),
        (EngineError("a step failed"), False),
        (UnavailableError("gone", 0.01), False),
    ],
)
async def test_refused_requests_wait_and_those_that_make_engines_fail_are_given_up(
    store: BatchStore, error: Exception, is_refusal: bool
) -> None:
    service = FakeService()
    service.errors = {"text r3": [error] * (MOST_FAILURES + 3), "text r4": [error]}
    batch = await finished(store, service)
    assert counts(batch) == ("completed", 20, 0) if is_refusal else ("completed", 19, 1)
    assert service.asked["text r3"] == MOST_FAILURES + (4 if is_refusal else 0)
    assert service.asked["text r4"] == 2
    check_answered_once(store, batch, IDS)


async def test_limits_of_a_caller_hold_by_waiting_and_delay_nobody_else(store: BatchStore) -> None:
    service, callers = FakeService(), FakeCallers()
    callers.errors[ALICE] = [RateLimitError("slow down", 30.0)] * 8  # all requests that begin at once
    alices = add_batch(store, ALICE, CONTENT)
    bobs = add_batch(store, BOB, CONTENT)
    async with running(store, service, callers):
        batch = await ended(store, bobs, BOB)
        assert batch.request_counts.completed == 20
        assert set(callers.begun) == {BOB}
        assert store.batch(ALICE, alices).status == "in_progress"


async def test_requests_of_a_deleted_key_fail(store: BatchStore) -> None:
    callers = FakeCallers()
    callers.errors[ALICE] = [ForbiddenError("the key is gone") for _ in IDS]
    assert counts(await finished(store, FakeService(), callers)) == ("completed", 0, 20)


NOBODY = load_of().model_copy(update={"num_replicas": 0, "replicas": []})


@pytest.mark.parametrize(("report", "number"), [(load_of(), 3), (NOBODY, 1), (load_of(slots=64, busy=60), 0)])
async def test_a_bound_of_requests_at_the_same_time(store: BatchStore, report: LoadReport, number: int) -> None:
    """Without a replica one request wakes one; while the replicas are busy none begins."""
    service = FakeService(hold_from=0, report=report)
    batch_id = add_batch(store, ALICE, CONTENT)
    async with running(store, service, concurrent_lines=3):
        await eventually(lambda: store.batch(ALICE, batch_id).status == "in_progress")
        await eventually(lambda: service.num_running == number)
        await asyncio.sleep(0.2)
        assert service.most_running == number
        service.report = load_of(slots=64, busy=40)
        service.held.set()
        assert counts(await ended(store, batch_id)) == ("completed", 20, 0)
    assert service.most_running <= 3


async def test_a_short_batch_passes_a_long_one_of_another_owner(store: BatchStore) -> None:
    service = FakeService()
    long = add_batch(store, ALICE, jsonl(*(request_line(f"a{i}", f"a{i}") for i in range(500))))
    short = add_batch(store, BOB, jsonl(request_line("b0", "b0"), request_line("b1", "b1")))
    async with running(store, service, concurrent_lines=1):
        await ended(store, short, BOB)
        assert list(service.asked).index("b1") < 20
        await ended(store, long)


async def test_cancellation_is_prompt_and_keeps_answers(store: BatchStore) -> None:
    service = FakeService(hold_from=9)
    batch_id = add_batch(store, ALICE, CONTENT)
    async with running(store, service, concurrent_lines=4) as runner:
        await eventually(lambda: service.asked.total() == 13)
        begun_at = asyncio.get_running_loop().time()
        batch = store.cancel_batch(ALICE, batch_id)
        assert (batch.status, batch.cancelling_at is None) == ("cancelling", False)
        runner.wake()
        batch = await ended(store, batch_id)
        assert asyncio.get_running_loop().time() - begun_at < 2.0
        assert service.num_cancelled == 4
        assert service.num_running == 0
    assert batch.status == "cancelled"
    assert batch.cancelling_at is not None
    assert batch.cancelled_at is not None
    lines = lines_of(store, ALICE, batch.output_file_id)
    assert len(lines) == batch.request_counts.completed
    assert 5 <= len(lines) <= 9  # those that are being written may be lost
    with pytest.raises(RequestError, match="has ended"):
        store.cancel_batch(ALICE, batch_id)


async def test_waiting_batches_of_an_owner_begin_later_and_can_be_cancelled(store: BatchStore) -> None:
    service = FakeService(hold_from=0)
    batches = [add_batch(store, ALICE, CONTENT) for _ in range(MOST_RUNNING + 1)]
    async with running(store, service):
        first = store.open_batches()[:MOST_RUNNING]
        await eventually(lambda: all(store.record(r).batch.status == "in_progress" for r in first))  # type: ignore[union-attr]
        [last] = set(batches) - {record.batch.id for record in first}
        assert store.batch(ALICE, last).status == "validating"
        store.cancel_batch(ALICE, last)
        batch = await ended(store, last)
        assert (batch.status, batch.output_file_id) == ("cancelled", None)
        service.held.set()
        for record in first:
            assert (await ended(store, record.batch.id)).status == "completed"


async def test_expired_batches_tell_what_was_not_computed(tmp_path: Path) -> None:
    clock, service = Clock(), FakeService(hold_from=5)
    store = store_in(tmp_path, clock)
    batch_id = add_batch(store, ALICE, CONTENT)
    async with running(store, service, concurrent_lines=2):
        await eventually(lambda: service.asked.total() == 7)
        clock.now += 86401
        batch = await ended(store, batch_id)
    assert batch.status == "expired"
    assert batch.expired_at is not None
    check_answered_once(store, batch, IDS)
    errors = lines_of(store, ALICE, batch.error_file_id)
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert batch.request_counts.failed == len(errors) >= 15


async def test_a_faulty_file_fails_the_batch(store: BatchStore) -> None:
    batch = await finished(store, FakeService(), content=jsonl(request_line("a"), "{", request_line("a")))
    assert first_error(batch) == "invalid_json"
    assert batch.errors is not None
    assert [(error.line, error.code) for error in batch.errors.data][1:] == [(3, "duplicate_custom_id")]
    assert batch.output_file_id is None
    assert batch.failed_at is not None


async def test_a_full_store_fails_the_batch_with_its_answers(tmp_path: Path) -> None:
    store = store_in(tmp_path, max_bytes_per_key=3 << 20)
    content = jsonl(*(request_line(f"r{i}", "x" * 200_000 + str(i)) for i in range(10)))
    batch_id = add_batch(store, ALICE, content)
    async with running(store, FakeService(), concurrent_lines=1):
        batch = await ended(store, batch_id)
    assert first_error(batch) == "store_full"
    assert 0 < len(lines_of(store, ALICE, batch.output_file_id)) == batch.request_counts.completed < 10
    assert store.used_bytes() < 4 << 20


async def test_the_input_may_not_be_deleted_meanwhile(store: BatchStore) -> None:
    service = FakeService(hold_from=0)
    batch_id = add_batch(store, ALICE, CONTENT)
    file_id = store.batch(ALICE, batch_id).input_file_id
    async with running(store, service):
        await eventually(lambda: service.num_running)
        with pytest.raises(RequestError, match=batch_id):
            store.delete_file(ALICE, file_id)
        service.held.set()
        await ended(store, batch_id)
    store.delete_file(ALICE, file_id)


async def test_a_lost_input_fails_the_batch(store: BatchStore) -> None:
    """An operator has deleted it in the store."""
    batch_id = add_batch(store, ALICE, CONTENT)
    store.content_path(ALICE, store.batch(ALICE, batch_id).input_file_id).unlink()
    async with running(store, FakeService()):
        assert first_error(await ended(store, batch_id)) == "input_missing"


async def test_one_runner_at_a_time_and_the_next_takes_over(store: BatchStore) -> None:
    first, second = FakeService(hold_from=0), FakeService()
    batch_id = add_batch(store, ALICE, CONTENT)
    async with running(store, first):
        await eventually(lambda: first.num_running)
        async with running(store, second):
            await asyncio.sleep(0.2)
            assert not second.asked
    async with running(store, second):
        batch = await ended(store, batch_id)
    assert batch.status == "completed"
    assert second.asked.total() == 20
    check_answered_once(store, batch, IDS)


async def test_a_broken_disk_stops_a_batch_for_a_while_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class FullStore(BatchStore):
        is_full = False

        def save(self, record: BatchRecord) -> None:
            if self.is_full:
                raise OSError(28, "No space left on device")
            super().save(record)

    store = FullStore(tmp_path, BatchSettings(store=tmp_path))
    batch_id = add_batch(store, ALICE, CONTENT)
    store.is_full = True
    async with running(store, FakeService(), intervals=replace(QUICK, retry_s=0.05)):
        await eventually(lambda: caplog.text.count("No space left") >= 2)
        store.is_full = False
        batch = await ended(store, batch_id)
    check_answered_once(store, batch, IDS)
