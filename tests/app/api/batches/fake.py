"""A service that echoes, callers by name, and a store with its runner, in one process."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from folio.app.api.base import joined_text
from folio.app.api.batches.body import BatchRequest
from folio.app.api.batches.replies import BatchObject
from folio.app.api.batches.runner import BatchRunner, Intervals
from folio.app.api.batches.store import BatchStore
from folio.app.api.openai.bodies import CompletionRequest
from folio.app.api.openai.chat_body import ChatCompletionRequest
from folio.app.api.openai.replies import AssistantMessage, ChatChoice, ChatCompletion, Completion
from folio.app.api.operators.replies import LoadFigures, LoadReport, ReplicaLoad
from folio.app.api.pooled.bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from folio.app.api.pooled.replies import EmbeddingList, PooledUsage, Ranking, ScoreList
from folio.app.api.responses.body import ResponsesRequest
from folio.app.api.responses.replies import ResponseObject
from folio.app.api.unknown_fields import UnknownFields
from folio.app.config.http import BatchSettings, HttpSettings
from folio.app.http.request_context import RequestContext, current_context
from tests.app.api.fake_service import USAGE

ALICE, BOB = "alice", "bob"
CHAT = "/v1/chat/completions"
QUICK = Intervals(look_s=0.02, save_s=0.02, lock_s=0.02)


def request_line(custom_id: str, text: str = "hi", **changes: Any) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **changes.pop("body", {})}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | changes)


def jsonl(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def load_of(slots: int = 64, busy: int = 0, **figures: int) -> LoadReport:
    """The load of one replica with so many slots, of which `busy` run."""
    zeros = dict.fromkeys(LoadFigures.model_fields, 0)
    known = zeros | {"num_running": busy, "free_tokens": 1000, "total_tokens": 1000, "budget_bytes": 1000} | figures
    replica = ReplicaLoad(name="r", queued_s=0.0, busy_share=0.0, max_num_seqs=slots, ready_s=0.0, **known)
    return LoadReport(num_replicas=1, num_silent=0, total=LoadFigures(**known), least_queued_s=0.0, replicas=[replica])


class FakeService:
    """Echoes the last message.

    Attributes:
        errors: raised first, by text.
        held: set it to answer requests from number `hold_from` on.
        asked: number of computations of each text.
        most_running: at the same time.
    """

    def __init__(self, hold_from: int = 10**9, report: LoadReport | None = None, **errors: Exception) -> None:
        self.asked: Counter[str] = Counter()
        self.bodies: list[ChatCompletionRequest] = []
        self.owners: list[str | None] = []
        self.errors: dict[str, list[Exception]] = {text: [error] for text, error in errors.items()}
        self.held = asyncio.Event()
        self.hold_from = hold_from
        self.report = report or load_of()
        self.num_running = self.most_running = self.num_cancelled = 0

    async def chat(self, request: ChatCompletionRequest) -> ChatCompletion:
        text = joined_text(request.messages[-1].content)
        self.asked[text] += 1
        number = self.asked.total()
        self.bodies.append(request)
        context = current_context()
        self.owners.append(None if context is None or context.key is None else context.key.name)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(0)
            if self.errors.get(text):
                raise self.errors[text].pop(0)
            if number > self.hold_from:
                await self.held.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        choice = ChatChoice(message=AssistantMessage(content=f"echo {text}"))
        return ChatCompletion(id="c", created=0, model="m", choices=[choice], usage=USAGE)

    async def generate(self, request: CompletionRequest) -> Completion:
        return Completion(id="c", created=0, model=request.model, choices=[], usage=USAGE)

    async def responses(self, request: ResponsesRequest) -> ResponseObject:
        raise NotImplementedError

    async def embed(self, request: EmbeddingRequest) -> EmbeddingList:
        return EmbeddingList(data=[], model="m", usage=PooledUsage(prompt_tokens=1, total_tokens=1))

    async def score(self, request: ScoreRequest) -> ScoreList:
        raise NotImplementedError

    async def rerank(self, request: RerankRequest) -> Ranking:
        raise NotImplementedError

    async def load(self) -> LoadReport:
        return self.report


class FakeCallers:
    """The caller is `name`. `errors` are raised first, by name."""

    def __init__(self, name: str = ALICE) -> None:
        self.name = name
        self.errors: dict[str, list[Exception]] = {}
        self.begun: list[str] = []

    def current_name(self) -> str:
        return self.name

    async def begin(self, name: str, request_id: str, num_body_bytes: int) -> RequestContext:
        if self.errors.get(name):
            raise self.errors[name].pop(0)
        self.begun.append(name)
        return RequestContext(HttpSettings(), request_id, num_body_bytes=num_body_bytes)


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def store_in(folder: Path, clock: Callable[[], float] = time.time, **settings: Any) -> BatchStore:
    return BatchStore(folder, BatchSettings(store=folder, **settings), clock)


def add_file(store: BatchStore, owner: str, content: bytes, name: str = "in.jsonl") -> str:
    with store.new_upload(owner) as upload:
        upload.write(content)
        return upload.keep(name, "batch", None).id


def add_batch(store: BatchStore, owner: str, content: bytes, **fields: Any) -> str:
    request = {"input_file_id": add_file(store, owner, content), "endpoint": CHAT, "completion_window": "24h"} | fields
    return store.create_batch(owner, BatchRequest.model_validate(request)).id


def lines_of(store: BatchStore, owner: str, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a file that its owner sees."""
    if file_id is None:
        return []
    store.file(owner, file_id)
    return [json.loads(line) for line in store.content_path(owner, file_id).read_bytes().splitlines()]


def check_answered_once(store: BatchStore, batch: BatchObject, custom_ids: Sequence[str], owner: str = ALICE) -> None:
    """Every request has one line in the output or the error file."""
    lines = lines_of(store, owner, batch.output_file_id) + lines_of(store, owner, batch.error_file_id)
    assert sorted(line["custom_id"] for line in lines) == sorted(custom_ids)


@asynccontextmanager
async def running(
    store: BatchStore, service: FakeService, callers: FakeCallers | None = None, **settings: Any
) -> AsyncIterator[BatchRunner]:
    """A runner with a store."""
    usual = {"concurrent_lines": 8, "max_line_bytes": 1 << 20, "unknown": UnknownFields(), "intervals": QUICK}
    runner = BatchRunner(store, service, callers or FakeCallers(), **usual | settings)
    runner.start()
    try:
        yield runner
    finally:
        runner.stop()
        await runner.stopped()


async def eventually(done: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """Wait until `done` returns something true; returns that."""
    async with asyncio.timeout(timeout_s):
        while not (found := done()):
            await asyncio.sleep(0.01)
    return found


async def ended(store: BatchStore, batch_id: str, owner: str = ALICE) -> BatchObject:
    await eventually(lambda: store.batch(owner, batch_id).has_ended)
    return store.batch(owner, batch_id)
