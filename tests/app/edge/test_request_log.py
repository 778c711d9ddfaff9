"""Log of requests: one line each."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from folio.app.http.request_context import current_context, note_error
from tests.app.edge.asgi import ALICE, answer_of, bearer, call, echo, gone, guarded, scope_of


@pytest.fixture
def line(caplog: pytest.LogCaptureFixture) -> Any:
    """The fields of the line written since the last call."""
    caplog.set_level(logging.INFO, "folio.app.edge.request_log")

    def last() -> dict[str, str]:
        [record] = [record for record in caplog.records if record.name == "folio.app.edge.request_log"]
        caplog.clear()
        method, path, status, total_ms, unit, end, *named = record.getMessage().split(" ")
        assert unit == "ms"
        fields = {"method": method, "path": path, "status": status, "total_ms": total_ms, "end": end}
        fields |= dict(part.split("=", 1) for part in named)
        assert fields == {name: str(value) for name, value in record.__dict__["request"].items()}
        return fields

    return last


def test_an_answer(line: Any, tmp_path: Path) -> None:
    async def generate(scope: Any, receive: Any, send: Any) -> None:
        context = current_context()
        assert context is not None
        tenant, _ = context.authorize("cmpl-1", model="m", tenant=None, priority=0, pins=False, timeout_s=None)
        assert tenant == "acme co"
        context.count_prompt(5)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        context.begun_at -= 2.0
        context.count_output(2, 3)
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        first_byte_at = context.first_byte_at
        context.count_output(2, 3)
        await send({"type": "http.response.body", "body": b"y", "more_body": True})
        assert context.first_byte_at == first_byte_at
        await send({"type": "http.response.body", "body": b""})

    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: [{{name: alice, key: {ALICE}, tenant: acme co}}]")
    answer_of(guarded(generate, path), "POST", headers=[*bearer(ALICE), ("x-request-id", "r1")])
    fields = line()
    assert 2000 <= int(fields.pop("ttft_ms")) <= int(fields.pop("total_ms")) < 60_000
    assert fields == {
        "request_id": "r1",
        "method": "POST",
        "path": "/v1/models",
        "status": "200",
        "end": "finished",
        "generation": "cmpl-1",
        "prompt_tokens": "5",
        "cached_tokens": "3",
        "output_tokens": "4",
        "key": "alice",
        "tenant": "acme%20co",
    }


def test_refusals_and_errors(line: Any) -> None:
    answer_of(guarded(max_body_bytes=1), "POST", body=b"xx")
    assert {"status": "413", "end": "error", "error": "body_too_large"}.items() <= line().items()

    async def breaks_off(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        note_error("engine_error")
        await send({"type": "http.response.body", "body": b"data: error"})

    answer_of(guarded(breaks_off))
    fields = line()
    assert {"status": "200", "end": "error", "error": "engine_error"}.items() <= fields.items()
    assert "ttft_ms" not in fields  # it came at once


async def test_disconnected_clients(line: Any) -> None:
    begun = asyncio.Event()

    async def hangs(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        if scope["path"] == "/cancelled":
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(call(guarded(hangs), path="/cancelled"))
    await begun.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert line()["end"] == "disconnected"
    await call(guarded(hangs))
    assert line()["end"] == "disconnected"

    await call(guarded(), "POST", receive=gone)
    assert {"end": "disconnected", "status": "0"}.items() <= line().items()


def test_a_broken_connection_is_no_error(line: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(message: dict[str, Any]) -> None:
        raise OSError("connection lost")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(guarded()(scope_of("GET", "/"), receive, broken))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert line()["end"] == "disconnected"


def test_lines_cannot_be_forged(line: Any) -> None:
    answer_of(guarded(), path="/v1/x\n2026 INFO all is well%0a" + "y" * 500, headers=[("x-request-id", "a\tb")])
    fields = line()
    assert fields["path"].startswith("/v1/x%0A2026%20INFO")
    assert len(fields["path"]) == 200
    assert len(fields["request_id"]) == 32


def test_pickers_are_logged_when_they_are_refused(line: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """They ask many times a second."""
    assert answer_of(guarded(), path="/metrics/load").status == 200
    assert not caplog.records
    (tmp_path / "keys").write_text(ALICE)
    assert answer_of(guarded(keys=tmp_path / "keys"), path="/metrics/load").status == 401
    assert line()["status"] == "401"


def test_the_log_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "folio.app.edge.request_log")
    answer_of(guarded(echo, log_requests=False))
    assert not caplog.records
