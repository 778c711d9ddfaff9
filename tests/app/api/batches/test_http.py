"""The routes, with OpenAI's client and with faulty requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from folio.app.api.batches.runner import BatchRunner
from folio.app.api.batches.store import BatchStore
from folio.app.api.http import build_api
from folio.app.api.unknown_fields import UnknownFields
from folio.app.config.http import BatchSettings, HttpSettings, KeySource
from folio.app.edge.callers import Callers
from folio.app.edge.guard import key_ring, protect

from .fake import CHAT, QUICK, FakeService, jsonl, load_of, request_line, store_in

KEYS = """
keys:
  - {name: alice, key: alice-alice-alice}
  - {name: bob, key: bob-bob-bob-bob-bob}
"""
CONTENT = jsonl(*(request_line(f"r{i}", f"t{i}") for i in range(5)))
IN_FORM = 'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
FILE_PART = 'Content-Disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n{}'


class Client:
    def __init__(self, api: Any) -> None:
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://folio")
        self.service = FakeService()

    def openai(self, name: str) -> openai.AsyncOpenAI:
        key = {"alice": "alice-alice-alice", "bob": "bob-bob-bob-bob-bob"}[name]
        return openai.AsyncOpenAI(base_url="http://folio/v1", api_key=key, http_client=self.http, max_retries=0)


def runner_of(store: BatchStore, service: FakeService, http: HttpSettings, keys: Any = None) -> BatchRunner:
    callers, bounds = Callers(http, keys), {"concurrent_lines": 4, "max_line_bytes": http.max_body_bytes}
    return BatchRunner(store, service, callers, **bounds, unknown=UnknownFields(), intervals=QUICK)


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Client]:
    """The API with two keys and a runner."""
    (folder / "keys.yaml").write_text(KEYS)
    batches = BatchSettings(store=folder / "store", max_file_bytes=1 << 20)
    http = HttpSettings(api_keys=KeySource(file=folder / "keys.yaml"), batches=batches, **settings)
    keys, service = key_ring(http), FakeService()
    store = store_in(folder / "store")
    runner = runner_of(store, service, http, keys)
    runner.start()
    any_service: Any = service
    client = Client(protect(build_api(any_service, batches=runner), http, keys=keys))
    client.service = service
    try:
        yield client
    finally:
        runner.stop()
        await runner.stopped()
        await client.http.aclose()


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(20):
        while (batch := await client.batches.retrieve(batch_id)).status not in ("completed", "failed", "cancelled"):
            await asyncio.sleep(0.02)
    return batch


async def test_a_batch_with_openais_client(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        alice, bob = client.openai("alice"), client.openai("bob")
        expiry: Any = {"anchor": "created_at", "seconds": 7200}
        file = await alice.files.create(file=("in.jsonl", CONTENT), purpose="batch", expires_after=expiry)
        assert (file.filename, file.bytes, file.purpose) == ("in.jsonl", len(CONTENT), "batch")
        assert file.expires_at == file.created_at + 7200
        assert (await alice.files.content(file.id)).content == CONTENT
        batch = await alice.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
        )
        batch = await ended(alice, batch.id)
        assert batch.status == "completed"
        assert batch.output_file_id is not None
        lines = (await alice.files.content(batch.output_file_id)).text.splitlines()
        assert len(lines) == 5
        assert set(client.service.owners) == {"alice"}, "charged to the key that made the batch"
        assert [found.id async for found in alice.batches.list(limit=1)] == [batch.id]
        assert [found.id async for found in alice.files.list(purpose="batch")] == [file.id]
        # Another key sees nothing.
        assert [found async for found in bob.files.list()] == []
        assert [found async for found in bob.batches.list()] == []
        for call in (
            bob.files.retrieve(file.id),
            bob.files.content(batch.output_file_id),
            bob.files.delete(file.id),
            bob.batches.retrieve(batch.id),
            bob.batches.cancel(batch.id),
            bob.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert (await alice.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await alice.files.retrieve(file.id)


async def test_cancel_with_openais_client(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        client.service.report = load_of(busy=64)
        alice = client.openai("alice")
        file = await alice.files.create(file=("in.jsonl", CONTENT), purpose="batch")
        batch = await alice.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert (await alice.batches.cancel(batch.id)).status == "cancelling"
        assert (await ended(alice, batch.id)).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="has ended"):
            await alice.batches.cancel(batch.id)


async def test_pages_of_a_list(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        alice = client.openai("alice")
        made = {(await alice.files.create(file=(f"{i}", b"{}"), purpose="batch")).id for i in range(5)}
        page = await alice.files.list(limit=2)
        assert (len(page.data), page.has_more) == (2, True)
        assert {file.id async for file in page} == made
        with pytest.raises(openai.BadRequestError, match="after"):
            await alice.files.list(after="file-x")
        with pytest.raises(openai.BadRequestError, match="limit"):
            await alice.files.list(limit=0)


def form(*parts: str, end: str = "--b--\r\n") -> bytes:
    return "".join(f"--b\r\n{part}\r\n" for part in parts).encode() + end.encode()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (form(FILE_PART, IN_FORM), 200, ""),
        (form(FILE_PART), 400, "purpose is None"),
        (form(FILE_PART, IN_FORM.replace("batch", "vision")), 400, "purpose is 'vision'"),
        (form(IN_FORM), 400, "no part file"),
        (form(IN_FORM, FILE_PART, FILE_PART), 400, "two parts 'file'"),
        (form(IN_FORM, IN_FORM, FILE_PART), 400, "two parts 'purpose'"),
        (form(IN_FORM, FILE_PART.removesuffix("{}")), 400, "empty"),
        (form(IN_FORM, FILE_PART, IN_FORM.replace('"purpose"', '"other"')), 400, "a part 'other'"),
        (form(IN_FORM, FILE_PART, "\r\nx"), 400, "a part ''"),
        (form(IN_FORM, FILE_PART, end=""), 400, "no end"),
        (form(IN_FORM + "x" * 2000, FILE_PART), 400, "longer than 1024"),
        (
            form(IN_FORM, FILE_PART, IN_FORM.replace("purpose", "expires_after[seconds]").replace("batch", "1")),
            400,
            "anch",
        ),
        (b"no form at all", 400, "not a form"),
        (b"", 400, "no end"),
        (form("x: " + "y" * 100_000 + "\r\n\r\n"), 400, "not a form"),
        (form(IN_FORM, FILE_PART + "x" * (2 << 20)), 413, "batches.max_file_bytes=1048576"),
    ],
)
async def test_forms(tmp_path: Path, body: bytes, status: int, message: str) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b", "authorization": "Bearer alice-alice-alice"}
    async with serving(tmp_path) as client:
        answer = await client.http.post("/v1/files", content=body, headers=headers)
        assert answer.status_code == status, answer.text
        if status != 200:
            assert message in answer.json()["error"]["message"]
            assert not list((tmp_path / "store").glob("*/*/*"))

        async def in_pieces() -> AsyncIterator[bytes]:  # without a length
            for i in range(0, len(body), max(len(body) // 20, 7)):
                yield body[i : i + max(len(body) // 20, 7)]

        answer = await client.http.post("/v1/files", content=in_pieces(), headers=headers)
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 415),
        ({"content-type": "multipart/form-data"}, 400),
        ({"content-type": "multipart/form-data; boundary=" + "b" * 1000}, 400),
        ({}, 415),
        ({"content-type": "multipart/form-data; boundary=b", "x-api-key": "wrong-wrong-wrong-wrong"}, 401),
    ],
)
async def test_heads_of_uploads(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    async with serving(tmp_path) as client:
        headers = {"x-api-key": "alice-alice-alice"} | headers
        answer = await client.http.post("/v1/files", content=form(IN_FORM, FILE_PART), headers=headers)
        assert answer.status_code == status


async def test_web_pages_cannot_upload_without_a_preflight_request(tmp_path: Path) -> None:
    """A form is sent to another origin without asking, also to a server without keys. Pages of others are refused there
    in any case."""
    store = store_in(tmp_path)
    http = HttpSettings(batches=BatchSettings(store=tmp_path))
    service: Any = FakeService()
    client = Client(protect(build_api(service, batches=runner_of(store, service, http)), http))
    headers = {"content-type": "multipart/form-data; boundary=b", "origin": "https://evil.example"}
    body = form(IN_FORM, FILE_PART)
    assert (await client.http.post("/v1/files", content=body, headers=headers)).status_code == 403
    assert (await client.http.post("/v1/files", content=body, headers=headers | {"x-api-key": "k"})).status_code == 403
    headers = {"content-type": headers["content-type"], "x-api-key": "k"}
    assert (await client.http.post("/v1/files", content=body, headers=headers)).status_code == 200
    await client.http.aclose()


async def test_without_a_store_the_setting_is_named(tmp_path: Path) -> None:
    service: Any = FakeService()
    client = Client(protect(build_api(service), HttpSettings()))
    batch = {"input_file_id": "x", "endpoint": CHAT, "completion_window": "24h"}
    for answer in (
        await client.http.get("/v1/files"),
        await client.http.get("/v1/files/x/content"),
        await client.http.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"}),
        await client.http.post("/v1/batches", json=batch),
        await client.http.post("/v1/batches/x/cancel"),
    ):
        assert answer.status_code == 404
        assert "http.batches.store" in answer.json()["error"]["message"]
    await client.http.aclose()


@pytest.mark.parametrize(
    "change",
    [{"completion_window": "1h"}, {"endpoint": "/v1/audio"}, {"input_file_id": 1}, {"output_expires_after": {}}],
)
async def test_faulty_batches(tmp_path: Path, change: dict[str, Any]) -> None:
    async with serving(tmp_path) as client:
        file = await client.openai("alice").files.create(file=("x", CONTENT), purpose="batch")
        body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | change
        answer = await client.http.post("/v1/batches", json=body, headers={"x-api-key": "alice-alice-alice"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == next(iter(change))
