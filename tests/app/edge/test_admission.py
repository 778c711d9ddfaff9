"""Admission control: load shedding from the head of a request, requests in flight, draining."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlparse

import pytest
from fastapi import FastAPI, Request

from folio.app.edge.admission import AdmissionControl, LoadSheddingMiddleware
from folio.app.errors import OverloadedError, UnavailableError
from folio.app.fleet.overload import LoadShedder
from folio.app.http.operations import OPERATIONS
from tests.app.edge.asgi import Codes, call, echo
from tests.local_server import listening

PATH = "/v1/completions"


class Gate(AdmissionControl):
    """A gate with one answer for all requests."""

    def __init__(self, retry_after_s: float | None) -> None:
        super().__init__(LoadShedder())
        self.retry_after_s = retry_after_s

    @contextmanager
    def try_admit(self) -> Iterator[float | None]:
        yield self.retry_after_s


async def never() -> dict[str, Any]:
    raise AssertionError("the body of a refused request was asked for")


def test_a_refusal_reads_no_body() -> None:
    """Regression: bodies were read, parsed and validated first."""
    observer = Codes()
    shedding = LoadSheddingMiddleware(echo, Gate(2.3), observer)
    shed = [operation for operation in OPERATIONS if operation.is_shed and operation.name != "messages"]
    paths = [path for operation in shed for path in operation.paths]
    assert len(paths) == 9
    for path in paths:
        for _ in range(2):  # a server's changes to an answer must not be in the next one
            answer = asyncio.run(call(shedding, "POST", path, [("content-length", "1000000")], receive=never))
            found = answer.status, answer.error["code"], answer.error["type"]
            assert found == (429, "overloaded", "rate_limit_error")
            assert answer.headers["retry-after"] == "3"
            assert "3 s" in answer.error["message"]
            assert int(answer.headers["content-length"]) == len(answer.body)
            answer.messages[0]["headers"] = []
            answer.messages[0]["status"] = 200
    assert observer.codes == ["overloaded"] * 18


def test_a_refusal_in_anthropics_form() -> None:
    shedding = LoadSheddingMiddleware(echo, Gate(2.3), Codes())
    answer = asyncio.run(call(shedding, "POST", "/v1/messages", receive=never))
    assert (answer.status, answer.headers["retry-after"]) == (429, "3")
    body = json.loads(answer.body)
    assert (body["type"], body["error"]["type"]) == ("error", "overloaded_error")


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", PATH, []),
        ("POST", "/v1/pins", []),
        *(("POST", operation.path, []) for operation in OPERATIONS if not operation.is_shed),
        ("POST", PATH + "/", []),
        ("POST", PATH, [("origin", "https://a.page")]),  # the page could not read a refusal without CORS headers
    ],
)
def test_other_requests_pass(method: str, path: str, headers: list[tuple[str, str]]) -> None:
    answer = asyncio.run(call(LoadSheddingMiddleware(echo, Gate(2.0), Codes()), method, path, headers, b"x"))
    assert (answer.status, answer.body) == (200, b"x")


async def test_a_mounted_application() -> None:
    shedding = LoadSheddingMiddleware(echo, Gate(2.0), Codes())
    assert (await call(shedding, "POST", "/mounted" + PATH, receive=never, root_path="/mounted")).status == 429


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Gate, str, int]]:
    """(gate, host, port) of an application behind uvicorn, the HTTP server of Serve."""
    gate, api = Gate(1.0), FastAPI()

    @api.post(PATH)
    async def length(request: Request) -> dict[str, int]:
        return {"length": len(await request.body())}

    api.add_middleware(LoadSheddingMiddleware, gate=gate, observer=Codes())
    with listening(api) as url:
        host, port = urlparse(url).hostname, urlparse(url).port
        assert host is not None
        assert port is not None
        yield gate, host, port


@pytest.mark.parametrize("size", [0, 1000, 8 << 20])
def test_a_client_that_still_sends_gets_its_answer_and_keeps_its_connection(
    served: tuple[Gate, str, int], size: int
) -> None:
    """A connection closed while the client sends is an error of its system, and the answer is lost."""
    gate, host, port = served
    client = http.client.HTTPConnection(host, port, timeout=60)
    client.connect()
    connection = client.sock
    for retry_after_s, status in ((1.0, 429), (1.0, 429), (None, 200), (1.0, 429)):
        gate.retry_after_s = retry_after_s
        client.request("POST", PATH, b"x" * size)
        answer = client.getresponse()
        body = json.loads(answer.read())
        assert answer.status == status
        assert status == 429 or body == {"length": size}
        assert client.sock is connection
    client.close()


def test_the_answer_comes_before_the_body(served: tuple[Gate, str, int]) -> None:
    """A client that asks first (Expect: 100-continue) need not send its body."""
    gate, host, port = served
    gate.retry_after_s = 1.0
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n".encode()
    with socket.create_connection((host, port), timeout=60) as client:
        client.sendall(head)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 429 ")
        gate.retry_after_s = None
        client.sendall(b"12345" + head + b"12345")  # the rest of the one, and the next one
        received = b""
        while not received.endswith(b'{"length":5}'):
            more = client.recv(1 << 16)
            assert more, received
            received += more
    assert b" 200 OK" in received


# ---- admission ----


def test_requests_are_in_flight_until_their_end() -> None:
    admission = AdmissionControl(LoadShedder())

    def fail() -> None:
        with admission.admitted(), admission.admitted():
            assert admission.num_in_flight == 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert admission.num_in_flight == 0


@pytest.fixture
def full() -> LoadShedder:
    """Of a fleet whose only replica is full for 40 s."""
    shedder, now = LoadShedder(), time.monotonic()
    shedder.note_refusal("a", 40.0, 8, now)
    shedder.note_all_refused(now)
    return shedder


def test_requests_are_shed_while_all_replicas_are_full(full: LoadShedder) -> None:
    admission = AdmissionControl(full)
    with pytest.raises(OverloadedError) as refused, admission.admitted():
        pass
    assert 30 < refused.value.retry_after_s <= 40  # type: ignore[operator]
    assert admission.num_in_flight == 0
    admission.check_open()  # full is not draining


def test_a_request_is_admitted_once(full: LoadShedder) -> None:
    """From its head, and not again with its body. The place of an invalid request is given back."""
    admission = AdmissionControl(full)
    full.return_admission()  # room for one
    with admission.try_admit() as retry_after_s:
        assert retry_after_s is None  # its body is invalid
    with admission.try_admit() as retry_after_s:
        assert retry_after_s is None
        with admission.admitted():
            assert admission.num_in_flight == 1
        with pytest.raises(OverloadedError), admission.admitted():  # the ticket was for one request
            pass
    with admission.try_admit() as retry_after_s:
        assert retry_after_s is not None


def test_draining_admits_none_and_finishes_all() -> None:
    admission = AdmissionControl(LoadShedder())
    with admission.admitted():
        admission.start_draining()
        assert admission.num_in_flight == 1
        with pytest.raises(UnavailableError, match="draining") as refused, admission.admitted():
            pass
        assert refused.value.retry_after_s
        with pytest.raises(UnavailableError, match="draining"):
            admission.check_open()
    assert admission.num_in_flight == 0
