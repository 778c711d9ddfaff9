"""Forks over HTTP, with a real engine: who may fork which request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from folio.app.config.http import HttpSettings
from tests.local_server import LocalServer, guarded_api, listening

ALICE, ALICES_OTHER, BOB, TEAM_A, TEAM_B = (f"sk-{name}-0123456789" for name in ("alice", "al2", "bob", "t1", "t2"))
KEYS = [
    {"name": "alice", "key": ALICE},
    {"name": "alices-other", "key": ALICES_OTHER, "operator": True},
    {"name": "bob", "key": BOB, "tenant": "alice"},
    {"name": "team-1", "key": TEAM_A, "tenant": "team"},
    {"name": "team-2", "key": TEAM_B, "tenant": "team"},
]


@pytest.fixture(scope="module")
def local() -> Iterator[LocalServer]:
    local = LocalServer(dtype="float32", warm_up=False)
    yield local
    local.close()


@pytest.fixture
def url(local: LocalServer, tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps({"keys": KEYS}))
    settings = HttpSettings.model_validate({"api_keys": {"file": str(path)}, "max_timeout_s": 60})
    with listening(guarded_api(local.ingress, settings)) as url:
        yield url
    local.wait_until_idle()


def post(url: str, key: str, path: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}{path}", json={"model": "builtin"} | body, headers=headers, timeout=60)


def generate(url: str, key: str, max_tokens: int = 4) -> dict[str, Any]:
    body = {"prompt": "Two and two", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer: dict[str, Any] = post(url, key, "/v1/completions", **body).json()
    return answer


def test_a_fork_continues_the_output(url: str) -> None:
    begun = generate(url, ALICE)
    body = {"request_id": begun["id"], "max_tokens": 3, "temperature": 0, "n": 2, "ignore_eos": True}
    whole = post(url, ALICE, "/v1/forks", **body).json()
    texts = [choice["text"] for choice in whole["choices"]]
    longer = generate(url, ALICE, max_tokens=7)["choices"][0]["text"]
    assert [begun["choices"][0]["text"] + text for text in texts] == [longer] * 2
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (0, 6)
    streamed = post(url, ALICE, "/v1/forks", **body, stream=True).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    joined = ["".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == i) for i in (0, 1)]
    assert joined == texts
    again = post(url, ALICE, "/v1/forks", request_id=whole["id"], index=1, max_tokens=2)
    assert again.status_code == 200  # forks can be forked


def test_a_running_request_is_forked(url: str) -> None:
    headers = {"authorization": f"Bearer {ALICE}"}
    body = {"model": "builtin", "prompt": "Two and two", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as stream:
        lines = stream.iter_lines()  # the request ends with it
        first = next(line for line in lines if line.startswith("data: {"))  # not a comment of a busy machine
        request_id = json.loads(first[6:])["id"]
        fork = post(url, ALICE, "/v1/forks", request_id=request_id, max_tokens=3, ignore_eos=True)
        foreign = post(url, BOB, "/v1/forks", request_id=request_id, max_tokens=3)
    assert fork.status_code == 200, fork.text
    assert fork.json()["usage"]["completion_tokens"] == 3
    assert foreign.status_code == 404


def test_only_the_keys_own_requests_or_its_tenants(url: str) -> None:
    """A tenant that is called like another key is not that key; an operator's key is one like others."""
    ids = {key: generate(url, key)["id"] for key in (ALICE, BOB, TEAM_A)}
    for maker, others in ((ALICE, (ALICES_OTHER, BOB, TEAM_A)), (BOB, (ALICE, TEAM_B)), (TEAM_A, (ALICE, BOB))):
        for other in others:
            assert post(url, other, "/v1/forks", request_id=ids[maker], max_tokens=1).status_code == 404
        assert post(url, maker, "/v1/forks", request_id=ids[maker], max_tokens=1).status_code == 200
    forked = post(url, TEAM_B, "/v1/forks", request_id=ids[TEAM_A], max_tokens=1)
    assert forked.status_code == 200
    assert post(url, BOB, "/v1/forks", request_id=forked.json()["id"], max_tokens=1).status_code == 404


def test_foreign_and_unknown_ids_have_the_same_answer(url: str) -> None:
    real = generate(url, ALICE)["id"]
    made_up = f"cmpl-{'0' * 32}.{real.partition('.')[2]}"
    bodies = []
    for request_id in (real, made_up):
        for more in ({}, {"stream": True}, {"index": 5}):
            answer = post(url, BOB, "/v1/forks", request_id=request_id, max_tokens=1, **more)
            assert answer.status_code == 404
            bodies.append(answer.text.replace(request_id.partition(".")[0], "ID"))
    assert len(set(bodies)) == 1, bodies
    assert json.loads(bodies[0])["error"]["code"] == "request_not_found"


def test_forks_obey_the_settings(url: str) -> None:
    begun = generate(url, ALICE)["id"]
    late = post(url, ALICE, "/v1/forks", request_id=begun, max_tokens=400, ignore_eos=True, timeout_s=0.01)
    assert (late.status_code, late.json()["error"]["code"]) == (408, "timeout")
    long = post(url, ALICE, "/v1/forks", request_id=begun, timeout_s=61)
    assert (long.status_code, long.json()["error"]["param"]) == (400, "timeout_s")
    assert httpx.post(f"{url}/v1/forks", json={"model": "builtin", "request_id": begun}).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "body", "setting"),
    [
        ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a"}, "adapter_dir"),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}, "adapter_dir"),
        ("POST", "/v1/models", {"name": "a", "path": "a"}, "models_dir"),
        ("DELETE", "/v1/models/a", None, "models_dir"),
    ],
)
def test_adapters_and_models_are_for_operators(
    url: str, method: str, path: str, body: dict[str, str] | None, setting: str
) -> None:
    """The list of models is for all."""
    users, operators = ({"authorization": f"Bearer {key}"} for key in (ALICE, ALICES_OTHER))
    refused = httpx.request(method, f"{url}{path}", json=body, headers=users)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")
    without = httpx.request(method, f"{url}{path}", json=body, headers=operators)
    assert without.status_code == 403
    assert setting in without.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/models", headers=users).status_code == 200
    assert httpx.get(f"{url}/ping").status_code == httpx.post(f"{url}/ping").status_code == 200
