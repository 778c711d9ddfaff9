"""Fake engine replicas behind a handle, and an ingress in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayTaskError

from folio.app.api.openai.bodies import CompletionRequest
from folio.app.engine.model.tokenizer import load_tokenizer
from folio.app.engine.report import Progress
from folio.app.engine.sampling.token_logprobs import TokenLogprobs
from folio.app.errors import UnavailableError
from folio.app.fleet.messages import ForkCall, GenerateRequest, Piece
from folio.app.fleet.roles import Prefilled
from tests.local_server import a_model, ingress_of

Script = Callable[[Any], list[Any]]


class Response:
    """A handle's streamed response. `items`: pieces, a `Progress`, the call of forks, `Prefilled`, the name of a late
    replica, an exception to raise, seconds before a heartbeat, or `None` to hang."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.cancelled = self.ended = False
        self._cancelling = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled = True
        self._cancelling.set()

    async def __aiter__(self) -> AsyncIterator[list[Piece] | GenerateRequest | Progress | str]:
        try:
            for item in self.items:
                if isinstance(item, Progress | GenerateRequest | Prefilled | str):
                    yield item
                elif isinstance(item, float):
                    await asyncio.sleep(item)
                    yield []
                else:
                    yield [await self._real(item)]
        finally:
            self.ended = True

    async def _real(self, item: Any) -> Piece:
        await asyncio.sleep(0)
        if item is None:
            await self._cancelling.wait()
            raise asyncio.CancelledError
        if isinstance(item, BaseException):
            raise item
        assert isinstance(item, Piece)
        return item


class Handle:
    """Answers each call by the script, and records the calls."""

    deployment_name = "EngineReplica"

    def __init__(self, script: Script) -> None:
        self.calls: list[Any] = []
        self.responses: list[Response] = []
        self.by_reference: list[bool] = []
        self._script = script
        self.generate_stream = SimpleNamespace(remote=self._remote)

    def options(self, *, _by_reference: bool, stream: bool = False) -> Handle:
        if stream:
            self.by_reference.append(_by_reference)
        else:  # calls that wait for one answer need no raylet
            assert not _by_reference
        return self

    def _remote(self, call: GenerateRequest | ForkCall) -> Response:
        self.calls.append(call)
        items = self._script(call)
        if items == ["cannot be sent"]:
            raise RuntimeError("cannot be sent")
        self.responses.append(Response(items))
        return self.responses[-1]


def stopped(replica: str) -> RayTaskError:
    error = UnavailableError("stopped")
    error.replica = replica
    return RayTaskError("generate", "traceback", error)


TOKENIZER = load_tokenizer("builtin")


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


class Engines(Handle):
    """A handle of replicas: each output of call number i is `text`, or i and the output's index."""

    def __init__(
        self,
        error: Exception | None = None,
        fails_at: int = 0,
        hangs: bool = False,
        text: str | None = None,
        context: int = 64,
    ) -> None:
        super().__init__(self._items)
        self._error, self._fails_at, self._hangs, self._text = error, fails_at, hangs, text
        self._context = context
        self.max_model_len = SimpleNamespace(remote=lambda model: self._max_model_len())

    def _items(self, call: GenerateRequest | ForkCall) -> list[Any]:
        number, n = len(self.calls) - 1, call.params.n
        if self._error is not None and number == self._fails_at:
            return [RayTaskError("generate", "traceback", self._error)]
        end: Any = None if self._hangs else "stop"
        pieces = [
            Piece(self._text or f"{number}{i}", (300,), i, end, None, n - 1 - i, num_cached_tokens=1, replica="r7")
            for i in range(n)
        ]
        return [pieces[0], None] if self._hangs else pieces

    async def _max_model_len(self) -> int:
        return self._context


class Pieces(Engines):
    """Fake replicas that send these pieces, and then fail if there is an error."""

    def __init__(
        self,
        *texts: str,
        finish_reason: Any = "stop",
        stop_reason: str | None = None,
        error: Exception | None = None,
        encodes: bool = False,
    ) -> None:
        super().__init__(context=400)
        self._encodes = encodes
        self._texts, self._finish_reason, self._late_error = texts, finish_reason, error
        self._stop_reason = stop_reason

    def _items(self, call: Any) -> list[Any]:
        last = len(self._texts) - 1
        items: list[Any] = []
        for i, text in enumerate(self._texts):
            reason = self._finish_reason if i == last and self._late_error is None else None
            logprobs = (TokenLogprobs(300 + i, -0.5, 1, ()),)
            token_ids = tuple(TOKENIZER.encode(text)) if self._encodes else (300 + i,)
            stop = None if reason is None else self._stop_reason
            piece = Piece(text, token_ids, 0, reason, stop, num_cached_tokens=2, logprobs=logprobs, replica="r7")
            items.append(piece)
        return items if self._late_error is None else [*items, RayTaskError("generate", "traceback", self._late_error)]


def ingress_with(engines: Engines, **settings: Any) -> Any:
    parser: Any = settings.pop("reasoning_parser", "auto")
    model = replace(a_model("m", adapters={"pirate": "x/pirate"}), reasoning_parser=parser)
    return ingress_of(engines, model, **settings)


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "Hello"} | fields)


async def collect(chunks: AsyncIterator[Any]) -> list[Any]:
    return [chunk async for chunk in chunks]
