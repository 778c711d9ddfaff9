"""Several models on one real server: chat, states, keys, models added and removed, a replica killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from ray import serve
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.served import processes_called
from folio.app.main import AppArgs, build
from folio.app.models.builtin import resolve_model
from tests.cluster import Front, deleted_at_the_end
from tests.processes import SHORT_PAUSE_S, until

pytestmark = pytest.mark.third_day(1)
NAME, PREFIX = "shelf", "/shelf"
OPERATOR, LIMITED = "an-operators-key-0", "a-key-for-one-model"
ENGINE: dict[str, Any] = {"model": "builtin", "dtype": "float32", "kv_memory_bytes": 32 << 20, "warm_up": False}


@dataclass(frozen=True)
class Server:
    url: str
    folder: Path

    def call(self, method: str, path: str, body: Any = None, key: str = OPERATOR) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.request(method, f"{self.url}{path}", json=body, headers=headers, timeout=120)

    def chat(self, model: str, key: str = OPERATOR) -> httpx.Response:
        messages = [{"role": "user", "content": "What is the moon?"}]
        body = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0}
        return self.call("POST", "/v1/chat/completions", body, key)

    def chat_when_ready(self, model: str) -> httpx.Response:
        """The first answer that is not an error."""
        answers: list[httpx.Response] = []

        def succeeds() -> bool:
            answers.append(self.chat(model))
            return answers[-1].is_success

        until(succeeds, state=lambda: (model, answers[-1].status_code, answers[-1].text, len(answers), self.states()))
        return answers[-1]

    def add(self, body: dict[str, Any]) -> bool:
        """Whether a model was added. A registry that has just started settles first."""
        answer = self.call("POST", "/v1/models", body)
        assert answer.status_code in (200, 503), answer.text
        return answer.status_code == 200

    def states(self) -> dict[str, str]:
        return {card["id"]: card["state"] for card in self.call("GET", "/v1/models").json()["data"]}


@pytest.fixture(scope="module")
def server(cluster_url: str, front: Front, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    front.delete()
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
        yield Server(cluster_url + PREFIX, folder)


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
    until(lambda: server.add(body))
    assert server.states()["third"] == "new"
    assert server.chat("third").json()["choices"] == server.chat("first").json()["choices"]
    assert server.call("DELETE", "/v1/models/third").json()["deleted"]
    assert server.chat("third").status_code == 404
    assert "third" not in server.states()
    assert server.call("DELETE", "/v1/models/first").status_code == 400
    assert server.chat("first").status_code == 200


@pytest.mark.daily(1)
@pytest.mark.parametrize("moment", ["it writes the file", "it reads the file"])
def test_the_replica_is_killed_while_it_loads_a_model(moment: str, server: Server) -> None:
    """The next one answers for every model what the first one did, and nothing is left of an unfinished file."""
    name, weights = "wide", server.folder / "weights"
    checkpoint = server.folder / "models" / name
    if not checkpoint.exists():
        shutil.copytree(resolve_model("builtin"), checkpoint)
        config = AutoConfig.from_pretrained(checkpoint, intermediate_size=6000)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(checkpoint)  # 74 MB as the kernels read it
    body = {"name": name, "path": name, "dtype": "float32"}
    until(lambda: server.add(body))
    expected = {model: server.chat(model).json()["choices"] for model in ("first", name)}
    assert server.call("DELETE", f"/v1/models/{name}").json()["deleted"]
    (file,) = weights.glob(f"{name}-*.weights")
    before = file.stat().st_ino
    if moment == "it writes the file":
        file.unlink()
    until(lambda: server.add(body))
    [killed] = processes()
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(server.chat, name)
        if moment == "it writes the file":
            until(lambda: list(weights.glob("*.tmp")), longest_pause_s=SHORT_PAUSE_S)
        else:
            until(lambda: server.states()[name] != "new")
        os.kill(killed, signal.SIGKILL)
        if moment == "it writes the file":
            assert not request.done()
            assert not file.exists()
        answer = request.result()
    assert (answer.status_code, answer.json().get("choices")) in ((200, expected[name]), (503, None))
    until(lambda: killed not in processes() and processes())
    for model in expected:
        answer = server.chat_when_ready(model)
        assert answer.json()["choices"] == expected[model]
    assert list(weights.glob("*.tmp")) == []
    assert (file.stat().st_ino == before) == (moment == "it reads the file")
    assert server.call("DELETE", f"/v1/models/{name}").json()["deleted"]


def processes() -> list[int]:
    return processes_called(f"ray::ServeReplica:{NAME}:EngineReplica")
