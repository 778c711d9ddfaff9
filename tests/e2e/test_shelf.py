"""Several models on one real server: chat, states, keys, models added and removed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from ray import serve

from app.builtin import resolve_model
from app.main import AppArgs, build
from tests.e2e.conftest import deleted_at_the_end
from tests.processes import until

NAME, PREFIX = "shelf", "/shelf"
OPERATOR, LIMITED = "an-operators-key-0", "a-key-for-one-model"
ENGINE: dict[str, Any] = {"model": "builtin", "dtype": "float32", "kv_memory_bytes": 32 << 20, "warm_up": False}


@dataclass(frozen=True)
class Server:
    url: str

    def call(self, method: str, path: str, body: Any = None, key: str = OPERATOR) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.request(method, f"{self.url}{path}", json=body, headers=headers, timeout=120)

    def chat(self, model: str, key: str = OPERATOR) -> httpx.Response:
        messages = [{"role": "user", "content": "What is the moon?"}]
        body = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0}
        return self.call("POST", "/v1/chat/completions", body, key)

    def states(self) -> dict[str, str]:
        return {card["id"]: card["state"] for card in self.call("GET", "/v1/models").json()["data"]}


@pytest.fixture(scope="module")
def server(cluster_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("shelf")
    shutil.copytree(resolve_model("builtin"), folder / "models" / "third")
    keys = [{"name": "op", "key": OPERATOR, "operator": True}, {"name": "one", "key": LIMITED, "models": ["first"]}]
    (folder / "keys.yaml").write_text(json.dumps({"keys": keys}))
    args = {
        "models": [
            {"name": "first", "engine": ENGINE},
            {"name": "second", "engine": ENGINE | {"max_model_len": 256}, "keep": 600, "slo": {"ttft_s": 2}},
        ],
        "device_memory_bytes": 256 << 20,
        "weights_dir": str(folder / "weights"),
        "models_dir": str(folder / "models"),
        "http": {"api_keys": {"file": str(folder / "keys.yaml")}},
    }
    with deleted_at_the_end(NAME):
        serve.run(build(AppArgs.model_validate(args)), name=NAME, route_prefix=PREFIX)
        yield Server(cluster_url + PREFIX)


def test_models_are_loaded_when_they_are_asked_for(server: Server) -> None:
    assert server.states() == {"first": "new", "second": "new"}
    assert server.call("GET", "/ready").status_code == 200
    first = server.chat("first").json()
    assert first["model"] == "first"
    assert server.states() == {"first": "awake", "second": "new"}
    second = server.chat("second").json()
    assert second["choices"][0]["message"] == first["choices"][0]["message"]
    cards = {card["id"]: card["max_model_len"] for card in server.call("GET", "/v1/models").json()["data"]}
    assert cards["second"] == 256
    assert cards["first"] > 256


def test_unknown_models_and_keys_of_others(server: Server) -> None:
    unknown = server.chat("fourth")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert server.chat("first", LIMITED).status_code == 200
    assert server.chat("second", LIMITED).status_code == 403


def test_a_model_is_added_and_removed(server: Server) -> None:
    body = {"name": "third", "path": "third", "keep": "auto", "dtype": "float32"}
    assert server.call("POST", "/v1/models", body, LIMITED).status_code == 403
    bad = server.call("POST", "/v1/models", body | {"path": "gone"})
    assert bad.status_code == 400
    assert "no such folder in models_dir" in bad.json()["error"]["message"]
    assert "third" not in server.states()

    def added() -> bool:  # a registry that has just started settles first
        answer = server.call("POST", "/v1/models", body)
        assert answer.status_code in (200, 503), answer.text
        return answer.status_code == 200

    until(added)
    assert server.states()["third"] == "new"
    assert server.chat("third").json()["choices"] == server.chat("first").json()["choices"]
    assert server.call("DELETE", "/v1/models/third").json()["deleted"]
    assert server.chat("third").status_code == 404
    assert "third" not in server.states()
    assert server.call("DELETE", "/v1/models/first").status_code == 400
    assert server.chat("first").status_code == 200
