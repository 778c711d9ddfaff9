"""A service without Ray and engine, and calls of its API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.testclient import TestClient

from folio.app import errors
from folio.app.api.base import joined_text
from folio.app.api.openai import replies
from folio.app.api.openai.bodies import CompletionRequest, ForkRequest
from folio.app.api.openai.chat_body import ChatCompletionRequest
from folio.app.api.openai.token_bodies import DetokenizedText, DetokenizeRequest, TokenizeRequest, Tokens
from folio.app.api.operators import bodies
from folio.app.api.operators import replies as operators
from folio.app.api.responses.body import ResponsesRequest
from folio.app.api.responses.replies import ArgumentsDeltaEvent, ResponseObject, StreamEvent
from folio.vmem import MemoryReport

USAGE = replies.Usage(
    prompt_tokens=1,
    completion_tokens=1,
    total_tokens=2,
    prompt_tokens_details=replies.PromptTokensDetails(cached_tokens=0),
)
CARD = operators.ModelCard(id="m", created=0, max_model_len=8)


class FakeService:
    """A service that echoes the prompt. The model's name chooses an error."""

    def __init__(self) -> None:
        self.pinned: list[str] = []
        self.adapters: set[str] = set()

    async def models(self) -> operators.ModelList:
        return operators.ModelList(data=[CARD])

    async def model(self, name: str) -> operators.ModelCard:
        if name != "m":
            raise errors.UnknownModelError(f"no {name}", "model")
        return CARD

    async def ready(self) -> None:
        raise errors.UnavailableError("nobody answers")

    async def metrics(self) -> str:
        return "# HELP x X.\n"

    async def load_metrics(self) -> str:
        return "# HELP y Y.\n"

    async def generate(self, request: CompletionRequest, session: str | None = None) -> replies.Completion:
        request.sampling_params()
        self._fail(request.model)
        return self._completion(str(request.prompt) + (f" of {session}" if session else ""))

    async def generate_stream(
        self, request: CompletionRequest, session: str | None = None
    ) -> AsyncIterator[replies.Completion]:
        if request.model == "late":
            yield self._completion("begun")
            raise errors.EngineError("a step failed")
        self._fail(request.model)
        yield self._completion("a")
        yield self._completion("b")

    async def chat(self, request: ChatCompletionRequest, session: str | None = None) -> replies.ChatCompletion:
        choice = replies.ChatChoice(message=replies.AssistantMessage(content=joined_text(request.messages[0].content)))
        return replies.ChatCompletion(id="c", created=0, model="m", choices=[choice], usage=USAGE)

    async def chat_stream(
        self, request: ChatCompletionRequest, session: str | None = None
    ) -> AsyncIterator[replies.ChatCompletionChunk]:
        choice = replies.ChatChunkChoice(delta=replies.ChatDelta(role="assistant", content="hi"))
        yield replies.ChatCompletionChunk(id="c", created=0, model="m", choices=[choice])

    async def responses(self, request: ResponsesRequest, session: str | None = None) -> ResponseObject:
        raise NotImplementedError  # see tests/app/api/responses/test_responses.py

    async def responses_stream(
        self, request: ResponsesRequest, session: str | None = None
    ) -> AsyncIterator[StreamEvent]:
        yield ArgumentsDeltaEvent(item_id="i", output_index=0, delta="{", sequence_number=4)
        raise ZeroDivisionError("secret detail")

    async def response(self, response_id: str) -> ResponseObject:
        raise errors.UnknownResponseError("no such response", "response_id")

    async def response_input(self, response_id: str) -> list[dict[str, Any]]:
        return [{"id": "msg_1", "type": "message"}]

    async def delete_response(self, response_id: str) -> None:
        return None

    async def fork(self, request: ForkRequest) -> replies.Completion:
        self._fail(request.model)
        return self._completion(f"{request.request_id} {request.index}")

    async def fork_stream(self, request: ForkRequest) -> AsyncIterator[replies.Completion]:
        self._fail(request.model)
        yield self._completion("a")

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        return Tokens(count=1, max_model_len=8, tokens=[5])

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizedText:
        return DetokenizedText(prompt="x" * len(request.tokens))

    async def load(self) -> operators.LoadReport:
        figures = dict.fromkeys(operators.LoadFigures.model_fields, 0)
        return operators.LoadReport(
            num_replicas=1, num_silent=1, total=operators.LoadFigures(**figures), least_queued_s=None, replicas=[]
        )

    async def reports(self) -> dict[str, MemoryReport]:
        return {}

    async def change_budget(self, request: bodies.BudgetRequest) -> operators.BudgetReport:
        return operators.BudgetReport(
            budget_bytes=request.budget_bytes, revision=request.revision or 8, answers=["applied"]
        )

    async def drain_replica(self, request: bodies.DrainRequest) -> operators.DrainReport:
        return operators.DrainReport(replica=request.replica, draining=request.draining)

    async def add_model(self, request: bodies.AddModelRequest) -> operators.ModelCard:
        if request.name in self.adapters:
            raise errors.RequestError("there is a model already", "name")
        self.adapters.add(request.name)
        return operators.ModelCard(id=request.name, created=0, max_model_len=None, state="new")

    async def remove_model(self, name: str) -> None:
        if name not in self.adapters:
            raise errors.UnknownModelError("no such model", "name")
        self.adapters.remove(name)

    async def load_adapter(self, request: bodies.LoadAdapterRequest) -> None:
        if request.lora_name in self.adapters and not request.load_inplace:
            raise errors.RequestError("it has been loaded", "lora_name")
        self.adapters.add(request.lora_name)

    async def unload_adapter(self, request: bodies.UnloadAdapterRequest) -> None:
        if request.lora_name not in self.adapters:
            raise errors.UnknownModelError("no such adapter", "lora_name")
        self.adapters.remove(request.lora_name)

    async def pins(self) -> operators.PinList:
        return operators.PinList(
            data=[
                operators.PinCard(id=name, num_tokens=16, num_bytes=1, num_replicas=1, num_computed=1, model=m)
                for name, m in self.pinned
            ]
        )

    async def pin(self, request: bodies.PinRequest) -> str:
        model = request.model or "m"
        self.pinned.append((request.name, model))
        return model

    async def unpin(self, name: str, model: str | None = None) -> None:
        if (name, model or "m") not in self.pinned:
            raise errors.UnknownPinError(f"no prefix {name}", "name")
        self.pinned.remove((name, model or "m"))

    def _completion(self, text: str) -> replies.Completion:
        return replies.Completion(
            id="c", created=0, model="m", choices=[replies.CompletionChoice(text=text)], usage=USAGE
        )

    def _fail(self, model: str) -> None:
        if model == "engine":
            raise errors.EngineError("a step failed")
        if model == "bug":
            raise ZeroDivisionError("secret detail")
        by_model = {
            "request": errors.RequestError("too long", "prompt"),
            "unknown": errors.UnknownRequestError("no such request", "request_id"),
            "full": errors.OverloadedError("too many"),
            "full for a while": errors.OverloadedError("too many", 2.2),
            "full for a moment": errors.OverloadedError("too many", 0.0),
            "slow": errors.DeadlineError("too late"),
        }
        if model in by_model:
            raise by_model[model]


def complete(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/completions", json={"model": "m", "prompt": "x"} | fields)


def failure(answer: Any) -> tuple[int, str | None]:
    """(Status, code)."""
    return answer.status_code, answer.json()["error"]["code"]


def post_json(client: TestClient, path: str, content: bytes | str) -> Any:
    return client.post(path, content=content, headers={"content-type": "application/json"})
