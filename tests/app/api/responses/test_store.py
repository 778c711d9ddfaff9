"""Stored responses: conversations that go on from them, their routes, and the folder's bounds."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from folio.app.api.input.translate import Translator
from folio.app.api.responses.answers import document_key
from folio.app.api.responses.replies import ResponseObject
from folio.app.api.responses.store import ResponseStore, open_store
from folio.app.config.http import HttpSettings, ResponseSettings
from folio.app.errors import ConfigError, RequestError, UnknownResponseError
from tests.app.api.asking import PATCH, SMALL_FUNCTION, Long, X, ask, call_of, prompt_of
from tests.fakes.replicas import TOKENIZER, ingress_with
from tests.local_server import guarded_api

KEYS = {"alice": "alice-alice-alice", "bob": "bob-bob-bob-bob-bob"}


def clients_of(engines: Long, folder: Path, *names: str, **settings: Any) -> list[Any]:
    """A client for each name, all of them with an ingress of their own."""
    keys = folder / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": name, "key": key} for name, key in KEYS.items()]}))
    responses = ResponseSettings(store=folder / "store", **settings)
    http = HttpSettings.model_validate({"api_keys": {"file": str(keys)}, "responses": responses})
    return [client_of(engines, http, KEYS[name]) for name in names]


def client_of(engines: Long, http: HttpSettings, key: str = "-", **settings: Any) -> Any:
    api = TestClient(guarded_api(ingress_with(engines, http=http, **settings), http), base_url="http://folio")
    return openai.OpenAI(base_url="http://folio/v1", api_key=key, max_retries=0, http_client=api)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_at_another_ingress(stream: bool, tmp_path: Path) -> None:
    engines = Long("Well.", call_of("apply_patch", input="x"))
    one, other, bob = clients_of(engines, tmp_path, "alice", "alice", "bob")
    first = one.responses.create(model="m", input="Who?", instructions="Be brief.", tools=[PATCH], stream=stream)
    if stream:
        *_, last = first
        first = last.response
    assert (first.store, first.previous_response_id) == (True, None)
    result = {"type": "custom_tool_call_output", "call_id": first.output[1].call_id, "output": "done"}
    second = other.responses.create(model="m", input=[result], tools=[PATCH], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    prompt = prompt_of(engines)
    assert "<|user|>Who?" in prompt
    assert "<|assistant|>Well.\n<tool_call>" in prompt
    assert prompt.index("done") > prompt.index("apply_patch")
    assert "Be brief." not in prompt  # instructions are of one request

    assert other.responses.retrieve(first.id) == first
    items = other.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.type for item in items.data] == ["message", "message"]
    assert [item.type for item in items] == ["message", "message", "custom_tool_call", "custom_tool_call_output"]
    assert len({item.id for item in items}) == 4
    assert next(iter(other.responses.input_items.list(second.id))).type == "custom_tool_call_output"

    for call in (bob.responses.retrieve, bob.responses.delete, bob.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="no stored response"):
            call(first.id)
    with pytest.raises(openai.BadRequestError, match="send the whole conversation") as caught:
        bob.responses.create(model="m", input="x", previous_response_id=first.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")

    one.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(first.id)
    third = other.responses.create(model="m", input="More?", previous_response_id=second.id)  # holds all of it
    assert "<|user|>Who?" in prompt_of(engines)
    assert third.store


WHO = X | {"content": "Who?"}


def test_items_are_referred_to_by_their_ids(tmp_path: Path) -> None:
    """As the AI SDK does: without `store: false` it sends only the ids of earlier items."""
    engines = Long("<think>so</think>", "Well.", call_of("f", x=1), encodes=True)
    responses = ResponseSettings(store=tmp_path / "s")
    create = client_of(engines, HttpSettings(responses=responses), reasoning_parser="qwen3").responses.create
    first = create(model="m", input="Who?", tools=[SMALL_FUNCTION])
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "five"}
    create(model="m", input=[WHO, *references, result], tools=[SMALL_FUNCTION])
    referred = engines.calls[-1].prompt_token_ids
    create(model="m", input=[WHO, *first.output, result], tools=[SMALL_FUNCTION])
    assert referred == engines.calls[-1].prompt_token_ids
    unknown = {"type": "item_reference", "id": first.output[1].id[:-1] + "9"}
    with pytest.raises(openai.BadRequestError, match="`store: false`"):
        create(model="m", input=[unknown])
    create(model="m", input=[{"type": "item_reference", "id": "rs_1"}, X])


def test_a_long_stored_conversation_is_not_translated_in_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of a hundred bytes may continue one of megabytes."""
    [client] = clients_of(Long("x"), tmp_path, "alice")
    threads: list[str] = []

    def translated(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return translate(*args)

    translate = Translator.translate_response
    monkeypatch.setattr(Translator, "translate_response", translated)
    first = client.responses.create(model="m", input="x" * 500)
    long = client.responses.create(model="m", input="x " * 1000, previous_response_id=first.id)
    client.responses.create(model="m", input="x", previous_response_id=long.id)
    assert [name.startswith("translator") for name in threads] == [False, True, True]


def test_nothing_is_stored_unless_it_is_asked_for(tmp_path: Path) -> None:
    [client] = clients_of(engines := Long("x"), tmp_path, "alice")
    kept = client.responses.create(model="m", input="x")
    dropped = client.responses.create(model="m", input="x", store=False)
    assert (kept.store, dropped.store) == (True, False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(dropped.id)
    [off] = clients_of(engines, tmp_path, "alice", max_bytes=0)
    raw = off.responses.with_raw_response.create(model="m", input="x", store=True)
    assert (raw.parse().store, raw.headers["x-folio-ignored-fields"]) == (False, "store")
    with pytest.raises(openai.NotFoundError, match=r"http\.responses"):
        off.responses.retrieve(kept.id)
    with pytest.raises(openai.BadRequestError, match=r"http\.responses") as caught:
        off.responses.create(model="m", input="x", previous_response_id=kept.id)
    assert caught.value.code == "previous_response_not_found"
    [small] = clients_of(engines, tmp_path, "alice", max_bytes=100)
    assert not small.responses.create(model="m", input="x").store  # there is no room, and the answer says so
    assert TOKENIZER.decode(engines.calls[0].prompt_token_ids) == prompt_of(engines)


@functools.cache
def answered() -> Any:
    return ask(Long("x")).json()


def stored(name: str, num_bytes: int = 0) -> tuple[ResponseObject, list[dict[str, Any]]]:
    return ResponseObject.model_validate(answered() | {"id": name}), [{"id": "x", "text": "x" * num_bytes}]


def test_a_full_store_loses_the_oldest_of_the_largest_owner(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "s", ResponseSettings(max_bytes=100_000))
    store.add("small", *stored("resp-s", 9_000))
    begun = time.time() - 1000
    for number in range(12):
        store.add("large", *stored(f"resp-{number}", 9_000))
        for path in tmp_path.glob(f"s/*/{document_key(f'resp-{number}')}.*"):
            os.utime(path, (begun + number, begun + number))
    store.delete_old()
    left = {number for number in range(12) if _has(store, "large", f"resp-{number}")}
    assert left
    assert left == set(range(min(left), 12))
    assert min(left) > 0
    assert _has(store, "small", "resp-s")
    assert len(list(tmp_path.glob("s/*/*"))) == 2 * (len(left) + 1)  # a response loses both files
    assert sum(path.stat().st_size for path in tmp_path.glob("s/*/*")) <= 100_000


def test_a_conversation_that_is_too_long_for_a_body_is_not_stored(tmp_path: Path) -> None:
    """Each request could add a body of reasoning that no prompt shows: requests with a few bytes then read 100 MiB,
    and the event loop stood still for two seconds."""
    http = HttpSettings(max_body_bytes=20_000, responses=ResponseSettings(store=tmp_path / "store"))
    create = client_of(Long("x"), http).responses.create
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "x" * 12_000}
    first = create(model="m", input=[X, hidden])
    second = create(model="m", input=[X, hidden], previous_response_id=first.id)
    assert (first.store, second.status, second.store) == (True, "completed", False)
    with pytest.raises(openai.BadRequestError, match="too long"):
        create(model="m", input=[X, hidden], previous_response_id=second.id)
    assert sum(path.stat().st_size for path in tmp_path.glob("store/*/*/*")) <= 20_000


def test_items_that_are_too_long_together_are_refused(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "s", ResponseSettings(), max_conversation_bytes=20_000)
    ids = [f"item_{document_key(f'resp-{number}')}_i0" for number in range(3)]
    for number, item_id in enumerate(ids):
        response, _ = stored(f"resp-{number}")
        assert store.add("a", response, [{"id": item_id, "text": "x" * 9_000}])
    assert set(store.items("a", ids[:2])) == set(ids[:2])
    with pytest.raises(RequestError, match="more than 20000 bytes"):
        store.items("a", ids)


def _has(store: ResponseStore, owner: str, name: str) -> bool:
    try:
        store.response(owner, name)
    except UnknownResponseError:
        return False
    return True


def test_responses_that_are_too_old_or_broken_are_not_there(tmp_path: Path) -> None:
    now = [time.time()]
    store = ResponseStore(tmp_path / "s", ResponseSettings(keep_s=60.0), lambda: now[0])
    store.add("a", *stored("resp-1"))
    assert _has(store, "a", "resp-1")
    store.add("a", *stored("broken"))
    next(tmp_path.glob(f"s/*/{document_key('broken')}.json")).write_text("{")
    assert not _has(store, "a", "broken")
    now[0] += 100
    assert not _has(store, "a", "resp-1")
    store.add("a", *stored("resp-2"))  # more than a sweep's period later
    assert len(list(tmp_path.glob("s/*/*"))) == 0  # by this clock both are old


def test_the_folder_is_the_servers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = open_store(HttpSettings(), "a/b")
    assert store is not None
    store.add("o", *stored("resp-1"))
    [document] = tmp_path.glob("folio-responses-*/app-a%2Fb/*/*.json")
    for path in [document.parent, document.parent.parent, document.parent.parent.parent]:
        assert path.stat().st_mode & 0o077 == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    top = document.parents[2]
    top.rename(tmp_path / "moved")
    top.symlink_to(elsewhere)  # another user may have made it
    assert open_store(HttpSettings(), "a") is None
    assert os.listdir(elsewhere) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"http\.responses\.store"):
        open_store(HttpSettings(responses=ResponseSettings(store=tmp_path / "file")), "a")
