"""Routes for operators, over a service without Ray and engine."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from folio.app.errors import UnavailableError
from tests.app.api.fake_service import FakeService, complete, failure
from tests.local_server import guarded_api


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(guarded_api(FakeService()), raise_server_exceptions=False)


def test_health_and_readiness(client: TestClient) -> None:
    assert failure(client.get("/ready")) == (503, "unavailable")
    assert client.post("/ping").status_code == 200  # SageMaker and vLLM have both methods
    for path, status in (("/health", 200), ("/ping", 200), ("/ready", 503)):
        assert client.get(path).status_code == status
        answer = client.head(path)  # regression: HEAD got 405
        assert (answer.status_code, answer.headers.get("allow")) == (status, None)


def test_probes_are_logged_when_their_answer_changes(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: each probe during a start was a warning and a line for the request, twice a second."""
    service = FakeService()
    answers = iter([UnavailableError("starting")] * 3 + [None] * 2 + [UnavailableError("gone")] * 2 + [None])

    async def ready() -> None:
        if (error := next(answers)) is not None:
            raise error

    service.ready = ready  # type: ignore[method-assign]
    client = TestClient(guarded_api(service), raise_server_exceptions=False)
    with caplog.at_level(logging.INFO, "folio"):
        statuses = [client.get("/ready").status_code for _ in range(8)]
    assert statuses == [503] * 3 + [200] * 2 + [503] * 2 + [200]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "not ready: starting"),
        ("INFO", "ready"),
        ("WARNING", "not ready: gone"),
        ("INFO", "ready"),
    ]


def test_the_version_is_the_packages(client: TestClient) -> None:
    stated = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]["version"]
    assert client.get("/version").json() == {"version": stated}
    assert client.get("/openapi.json").json()["info"]["version"] == stated


def test_adapters_are_loaded_and_unloaded(client: TestClient) -> None:
    body = ADAPTER
    answer = client.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'legal' added successfully.")
    assert failure(client.post("/v1/load_lora_adapter", json=body)) == (400, "invalid_value")
    assert client.post("/v1/load_lora_adapter", json=body | {"load_inplace": True}).status_code == 200
    answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "legal", "lora_int_id": 1})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'legal' removed successfully.")
    refused = client.post("/v1/unload_lora_adapter", json={"lora_name": "legal"})
    assert failure(refused) == (404, "model_not_found")
    assert refused.json()["error"]["param"] == "lora_name"


def test_models_are_added_and_removed(client: TestClient) -> None:
    body: dict[str, Any] = MODEL
    card = client.post("/v1/models", json=body | {"keep": 60, "weight": 2.5, "slo": {"ttft_s": 3}}).json()
    assert (card["id"], card["max_model_len"], card["state"]) == ("org/qwen", None, "new")
    assert "state" not in client.get("/v1/models/m").json()
    assert failure(client.post("/v1/models", json=body)) == (400, "invalid_value")
    assert client.delete("/v1/models/org/qwen").json() == {"id": "org/qwen", "object": "model", "deleted": True}
    assert failure(client.delete("/v1/models/org/qwen")) == (404, "model_not_found")
    assert failure(client.delete("/v1/models/org/qwen%0A")) == (404, "model_not_found")


ADAPTER, MODEL = {"lora_name": "legal", "lora_path": "legal-v1"}, {"name": "org/qwen", "path": "qwen"}


@pytest.mark.parametrize(
    ("path", "body", "change"),
    [
        *(("/v1/load_lora_adapter", ADAPTER, {"lora_name": name}) for name in (None, "", "a/../b", "a\n")),
        *(("/v1/load_lora_adapter", ADAPTER, {"lora_path": folder}) for folder in (None, "", 1)),
        *(("/v1/models", MODEL, {"name": name}) for name in (None, "", "a\n")),
        *(("/v1/models", MODEL, {"path": folder}) for folder in (None, "")),
        *(("/v1/models", MODEL, {"keep": keep}) for keep in ("never", -1)),
        *(("/v1/models", MODEL, {"slo": slo}) for slo in ({"ttft_s": 0}, {"tpot_s": "1"})),
        ("/v1/models", MODEL, {"weight": 0}),
        ("/v1/models", MODEL, {"max_model_len": 0}),
        ("/v1/models", MODEL, {"dtype": "int4"}),
        ("/v1/models", MODEL, {"tool_call_parser": "vim"}),
    ],
)
def test_faulty_models_and_adapters(client: TestClient, path: str, body: Any, change: dict[str, Any]) -> None:
    sent = {name: value for name, value in (body | change).items() if value is not None}
    answer = client.post(path, json=sent)
    assert failure(answer) == (400, "invalid_value")
    assert answer.json()["error"]["param"] == next(iter(change))


def test_operation(client: TestClient) -> None:
    assert client.get("/v1/load").json()["num_silent"] == 1
    assert client.get("/v1/load/memory").json() == {}
    card = client.post("/v1/pins", json={"name": "a/b", "prompt": "x"}).json()
    assert client.get("/v1/pins").json()["data"] == [card]
    assert client.delete("/v1/pins/a/b").json() == {"id": "a/b", "object": "pin", "deleted": True}
    assert failure(client.delete("/v1/pins/a/b")) == (404, "pin_not_found")
    own = [client.post("/v1/pins", json={"name": "a", "prompt": "x", "model": m}).json()["model"] for m in ("m", "é b")]
    assert own == ["m", "é b"]
    assert client.delete("/v1/pins/a", params={"model": "é b"}).status_code == 200
    assert [card["model"] for card in client.get("/v1/pins").json()["data"]] == ["m"]
    client.delete("/v1/pins/a")
    budget = client.put("/v1/budget", json={"budget_bytes": 1 << 30}).json()
    assert budget == {"object": "budget", "budget_bytes": 1 << 30, "revision": 8, "answers": ["applied"]}
    assert client.put("/v1/drain", json={"replica": "r"}).json() == {
        "object": "drain",
        "replica": "r",
        "draining": True,
    }
    for body in ({}, {"replica": ""}, {"replica": 3}, {"replica": "r", "draining": "perhaps"}):
        assert client.put("/v1/drain", json=body).status_code == 400
    for body in ({}, {"budget_bytes": 0}, {"budget_bytes": 1.5}, {"budget_bytes": 1, "revision": 0}):
        assert client.put("/v1/budget", json=body).status_code == 400
    # Regression: with such a revision no other change was possible, and reports by gRPC failed.
    assert client.put("/v1/budget", json={"budget_bytes": 1, "revision": 10**4000}).status_code == 400
    for name in ("\n", "a/..", "."):  # no path has such a name: it could not be unpinned
        pin, completion = client.post("/v1/pins", json={"name": name, "prompt": "x"}), complete(client, pin=name)
        assert [(a.status_code, a.json()["error"]["param"]) for a in (pin, completion)] == [(400, "name"), (400, "pin")]
    assert client.delete("/v1/pins/a/b%0A").status_code == 404


def test_metrics_are_text_or_an_error(client: TestClient) -> None:
    """Prometheus believes an empty page, but not a 503."""
    for path, text in (("/metrics", "# HELP x X.\n"), ("/metrics/load", "# HELP y Y.\n")):
        page = client.get(path)
        assert page.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
        assert page.text == text

    async def gone() -> str:
        raise UnavailableError("an agent does not answer")

    service = FakeService()
    service.metrics = service.load_metrics = gone  # type: ignore[method-assign]
    client = TestClient(guarded_api(service), raise_server_exceptions=False)
    for path in ("/metrics", "/metrics/load"):
        assert failure(client.get(path)) == (503, "unavailable")
