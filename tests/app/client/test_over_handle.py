"""The client within a Ray cluster, over a fake handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, RayServeException

import folio.app.client
from folio.app.client import (
    CompletionRequest,
    EngineError,
    Folio,
    OverloadedError,
    PinRequest,
    RequestError,
    UnavailableError,
    over_handle,
)
from folio.app.client import folio as folio_module
from tests.processes import until_async

REQUEST = CompletionRequest(model="m", prompt="x")


class Response:
    def __init__(self, answer: Any, hangs: bool = False) -> None:
        self.cancelled = False
        self.awaited = asyncio.Event()
        self._answer, self._hangs = answer, hangs

    def __await__(self) -> Any:
        return self._whole().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield 1
        yield await self._whole()

    def cancel(self) -> None:
        self.cancelled = True

    async def _whole(self) -> Any:
        self.awaited.set()
        if self._hangs:
            await asyncio.Event().wait()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


class Handle:
    """A handle of an application that gives these answers in turn."""

    app_name = "folio"

    def __init__(self, *answers: Any, hangs: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.responses: list[Response] = []
        self._answers, self._hangs, self._method, self._stream = list(answers), hangs, "", False

    def options(self, stream: bool) -> Handle:
        self._stream = stream
        return self

    def __getattr__(self, name: str) -> Handle:
        self._method = name
        return self

    def remote(self, *args: Any) -> Response:
        self.calls.append((self._method, self._stream, *args))
        self._stream = False
        self.responses.append(Response(self._answers.pop(0), self._hangs))
        return self.responses[-1]


def folio_with(handle: Handle) -> Folio:
    return Folio(handle)  # type: ignore[arg-type]


async def test_each_method_calls_that_of_the_ingress() -> None:
    folio = folio_with(handle := Handle("whole", "last", {"r": 1}, None))
    answer: Any = await folio.generate(REQUEST, "session")
    chunks: list[Any] = [chunk async for chunk in folio.chat_stream(REQUEST)]  # type: ignore[arg-type]
    report: Any = await folio.report()
    await folio.pin(pin := PinRequest(name="p", prompt="x"))
    assert (answer, chunks, report) == ("whole", [1, "last"], {"r": 1})
    assert handle.calls == [
        ("generate", False, REQUEST, "session"),
        ("chat_stream", True, REQUEST, None),
        ("reports", False),
        ("pin", False, pin),
    ]
    assert not any(response.cancelled for response in handle.responses)


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (RayTaskError("f", "traceback", RequestError("too long", "prompt")), RequestError, "too long"),
        (RayTaskError("f", "traceback", OverloadedError("full", 2.5)).as_instanceof_cause(), OverloadedError, "full"),
        (RayTaskError("f", "traceback", ValueError("x")), EngineError, "'folio' failed"),
        (BackPressureError(num_queued_requests=3, max_queued_requests=2), OverloadedError, "2"),
        (ActorDiedError(), UnavailableError, "send the request again"),
        (WorkerCrashedError(), UnavailableError, "send the request again"),
        (asyncio.CancelledError(), UnavailableError, "was lost"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_are_those_of_the_application(
    raised: BaseException, kind: type, message: str, stream: bool
) -> None:
    folio = folio_with(Handle(raised))
    with pytest.raises(kind, match=message) as caught:
        await (all_of(folio) if stream else folio.generate(REQUEST))
    assert type(caught.value) is kind  # and nothing of Ray's


async def test_calls_that_are_given_up_are_cancelled() -> None:
    """A closed stream, and a stream and a call whose tasks are cancelled."""
    folio = folio_with(handle := Handle("next", "next", "next", hangs=True))
    async with aclosing(folio.generate_stream(REQUEST)) as chunks:
        async for _ in chunks:
            break
    assert handle.responses[0].cancelled
    for number, call in enumerate((all_of(folio), folio.generate(REQUEST)), start=1):
        task = asyncio.create_task(call)
        await until_async(lambda number=number: handle.responses[number:] and handle.responses[number].awaited.is_set())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert handle.responses[number].cancelled


async def all_of(folio: Folio) -> None:
    async for _ in folio.generate_stream(REQUEST):
        pass


def test_ready_waits_for_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """The application may start after its caller, and its replicas even later."""
    handle = Handle(RayTaskError("ready", "traceback", EngineError("not yet")), None)
    found: list[Any] = [RayServeException("there is none"), handle]

    def find(name: str) -> Any:
        assert name == "folio"
        if isinstance(answer := found.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(over_handle.serve, "get_app_handle", find)
    monkeypatch.setattr(folio_module, "_READY_POLL_S", 0.0)
    asyncio.run(Folio("folio").ready())
    assert [call[0] for call in handle.calls] == ["ready", "ready"]
    found.append(RayServeException("there is none"))
    with pytest.raises(UnavailableError, match="not ready after 0 s"):
        asyncio.run(Folio("folio").ready(timeout_s=0))


def test_public_names_exist() -> None:
    for name in folio.app.client.__all__:
        assert hasattr(folio.app.client, name)
