"""The ingress with replicas that answer at once, without a cluster."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.exceptions import RayTaskError

from folio.app.api.input import translate as translator
from folio.app.api.input.text_encoder import TextEncoder
from folio.app.api.input.translate import Translator
from folio.app.api.openai.bodies import ForkRequest
from folio.app.api.openai.chat_body import ChatCompletionRequest
from folio.app.api.openai.token_bodies import TokenizeRequest
from folio.app.api.responses.body import ResponsesRequest
from folio.app.compat.ray import folio_error
from folio.app.config.http import HttpSettings, KeyEntry
from folio.app.engine.sampling.token_logprobs import TokenLogprobs
from folio.app.errors import (
    ContextLengthError,
    DeadlineError,
    FolioError,
    ForbiddenError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownRequestError,
)
from folio.app.fleet.messages import ForkCall, Piece
from folio.app.http.request_context import CURRENT, RequestContext
from folio.app.serving.ingress import STARTING_TIMEOUT_S
from tests.fakes.replicas import CALL, TOKENIZER, Engines, collect, completion, ingress_with


@pytest.mark.parametrize("stream", [True, False])
async def test_a_deadline_counts_from_the_arrival(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: what tokenising took came on top."""

    def slowly(prepare: Callable[..., Any], *args: Any) -> Any:
        time.sleep(0.1)
        return prepare(*args)

    ingress = ingress_with(engines := Engines())
    translator = ingress._models.first.translator
    monkeypatch.setattr(translator, "translate_completion", partial(slowly, translator.translate_completion))
    for timeout_s in (60.0, 0.05):
        request = completion(timeout_s=timeout_s)
        answer = collect(ingress.generate_stream(request)) if stream else ingress.generate(request)
        if timeout_s > 1:
            await answer
            assert 50.0 < engines.calls[0].timeout_s <= 59.9
        else:
            with pytest.raises(DeadlineError):
                await answer
    assert len(engines.calls) == 1


async def test_a_batch_is_a_call_for_each_prompt() -> None:
    ingress = ingress_with(engines := Engines())
    request = completion(prompt=["a b", "c"], n=2, tenant="t", user="", timeout_s=1.0, priority=3, cache_salt="s")
    whole = await ingress.generate(request, "session")
    assert [choice.text for choice in whole.choices] == ["00", "01", "10", "11"]
    assert [call.prompt_token_ids for call in engines.calls] == [TOKENIZER.encode("a b"), TOKENIZER.encode("c")]
    assert len({call.request_id for call in engines.calls}) == 2
    for call in engines.calls:
        assert (call.tenant, call.user, call.priority) == ("t", None, 3)
        assert 0.5 < call.timeout_s < 1.0  # what is left of it
        assert call.cache_salt == "s"
        assert (call.session, call.adapter, call.params.n) == ("session", None, 2)
    assert whole.usage.prompt_tokens == sum(len(call.prompt_token_ids) for call in engines.calls)
    assert (whole.usage.completion_tokens, whole.usage.prompt_tokens_details.cached_tokens) == (4, 2)
    chunks = await collect(ingress.generate_stream(completion(prompt=[[5], [6, 7]], n=2)))
    texts = {chunk.choices[0].index: chunk.choices[0].text for chunk in chunks}
    assert texts == {0: "20", 1: "21", 2: "30", 3: "31"}


async def test_prompts_have_only_so_many_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 6 KB had an answer of 53 MB, and the event loop stood still for seconds while it was made."""
    monkeypatch.setattr(translator, "MAX_PROMPT_LOGPROBS", 60)
    ingress = ingress_with(engines := Engines())
    few = {"prompt": [5] * 10, "logprobs": 1, "echo": True}
    await ingress.generate(completion(n=3, **few))
    for many in (few | {"n": 4}, few | {"n": 3, "prompt_logprobs": 0}, few | {"prompt": [[5] * 10] * 4}):
        with pytest.raises(RequestError, match="log probabilities of prompts; at most 60"):
            await ingress.generate(completion(**many))
    with pytest.raises(RequestError, match="at most 60"):
        await ingress.chat(
            ChatCompletionRequest.model_validate(
                {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "prompt_logprobs": 20}
            )
        )
    assert len(engines.calls) == 1


async def test_long_answers_are_made_outside_of_the_event_loop() -> None:
    """Those with many log probabilities held it."""
    threads = []

    def note(outputs: object) -> str:
        threads.append(threading.current_thread())
        return "answer"

    whole = Translator(TOKENIZER, "m", ()).build_answer
    for num_tokens in (1, 1000):
        tokens = (TokenLogprobs(5, -1.0, 1, ()),) * num_tokens
        assert await whole(note, [[Piece("", (5,) * num_tokens, logprobs=tokens)]]) == "answer"
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threads[0]


async def test_an_echo_begins_with_the_prompt() -> None:
    ingress = ingress_with(Engines())
    whole = await ingress.generate(completion(prompt=TOKENIZER.encode("Hello<|end|> you"), echo=True))
    assert whole.choices[0].text == "Hello you00"
    nothing = await ingress.generate(completion(prompt=["Hello", "x"], echo=True, max_tokens=0))
    assert [choice.text for choice in nothing.choices] == ["Hello", "x"]


@pytest.mark.parametrize(
    ("key", "owner"), [(None, None), ({"name": "k"}, "key:k"), ({"name": "k", "tenant": "t"}, "tenant:t")]
)
async def test_calls_name_the_owner(key: dict[str, str] | None, owner: str | None) -> None:
    """And forks have the timeouts of the settings."""
    ingress = ingress_with(engines := Engines())
    entry = None if key is None else KeyEntry(key="sk-0123456789abcdef", models=frozenset({"m"}), **key)
    settings = HttpSettings(default_timeout_s=5, max_timeout_s=9)
    token = CURRENT.set(RequestContext(settings, "id", key=entry))
    try:
        first = await ingress.generate(completion())
        fork = ForkRequest(model="m", request_id=first.id)
        await ingress.fork(fork)
        assert [call.owner for call in engines.calls] == [owner, owner]
        assert engines.calls[1].timeout_s == 5
        with pytest.raises(RequestError, match="max_timeout_s"):
            await ingress.fork(fork.model_copy(update={"timeout_s": 10.0}))
        if key is not None:
            with pytest.raises(ForbiddenError, match="does not allow the model"):
                await ingress.fork(fork.model_copy(update={"model": "pirate"}))
        assert len(engines.calls) == 2
    finally:
        CURRENT.reset(token)


async def test_a_fork_goes_to_the_replica_in_the_id() -> None:
    ingress = ingress_with(engines := Engines())
    first = await ingress.generate(completion())
    fork = ForkRequest(model="m", request_id=first.id, n=2, index=0, max_tokens=3)
    forks = await ingress.fork(fork)
    [begun, call] = engines.calls
    params = replace(fork.sampling_params(), seed=call.params.seed)
    assert call == ForkCall(call.request_id, begun.request_id, 0, "r7", params, model="m", whole=True)
    assert call.request_id != begun.request_id
    assert [choice.text for choice in forks.choices] == ["10", "11"]
    assert (forks.usage.prompt_tokens, forks.usage.completion_tokens) == (0, 2)
    chunks = await collect(ingress.fork_stream(fork.model_copy(update={"request_id": forks.id})))
    assert [chunk.choices[0].text for chunk in chunks] == ["20", "21"]
    assert engines.calls[2].fork_of == call.request_id  # forks can be forked
    batch = await ingress.generate(completion(prompt=["a", "b"]))
    with pytest.raises(UnknownRequestError, match="one prompt"):
        await ingress.fork(ForkRequest(model="m", request_id=batch.id))


async def test_texts_that_cannot_fit_are_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "word " * 10_000
    messages = [{"role": "user", "content": long}]

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was tokenised")

    ingress = ingress_with(Engines())
    monkeypatch.setattr(TextEncoder, "encode", fail)
    chat = ChatCompletionRequest.model_validate({"model": "m", "messages": messages})
    response = ResponsesRequest.model_validate({"model": "m", "input": long})
    for asked, param in (
        (ingress.generate(completion(prompt=long)), "prompt"),
        (ingress.chat(chat), "messages"),
        (ingress.responses(response), "input"),
        (ingress.tokenize(TokenizeRequest.model_validate({"prompt": long})), "prompt"),
        (ingress.tokenize(TokenizeRequest.model_validate({"messages": messages})), "messages"),
    ):
        with pytest.raises(
            ContextLengthError, match=rf"length is 64 tokens\. .* {param} resulted in at least"
        ) as refused:
            await asked
        assert refused.value.param == param


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]


@pytest.mark.parametrize("choice", ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}])
async def test_tools(choice: Any) -> None:
    ingress = ingress_with(engines := Engines(text=CALL, context=400))
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": choice}
    request = ChatCompletionRequest.model_validate(body)
    [whole] = (await ingress.chat(request)).choices
    is_called = choice != "none"
    assert (whole.finish_reason, whole.message.content) == (("tool_calls", None) if is_called else ("stop", CALL))
    assert ("<tools>" in TOKENIZER.decode(engines.calls[0].prompt_token_ids)) == is_called
    assert (engines.calls[0].params.structure is None) == (choice in ("none", "auto"))
    if is_called:
        assert whole.message.tool_calls[0].function.arguments == '{"x": 1}'
        [chunk] = await collect(ingress.chat_stream(request))
        [call] = chunk.choices[0].delta.tool_calls
        assert (call.function.name, call.function.arguments) == ("f", '{"x": 1}')


@pytest.mark.parametrize(
    "error",
    [
        OverloadedError("full", 2.5),
        OverloadedError("full"),
        DeadlineError("late"),
        ContextLengthError("long", "prompt"),
        UnknownRequestError("gone", "request_id"),
        UnavailableError("stopped"),
    ],
)
@pytest.mark.parametrize("dual", [False, True])
def test_errors_survive_rays_pickling(error: FolioError, dual: bool) -> None:
    """Ray sends what a call raised as the cause of its own error, which may be of the same type, too."""
    sent = RayTaskError("generate", "traceback", error)
    raised = sent.as_instanceof_cause() if dual else sent
    arrived = folio_error(pickle.loads(cloudpickle.dumps(raised)))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


async def test_ready_does_not_wait_while_the_server_starts() -> None:
    """It took ten seconds to say that there was no replica yet. The question goes on: it may be what starts one."""
    ingress, there, asked = ingress_with(engines := Engines()), asyncio.Event(), 0

    async def ready() -> None:
        nonlocal asked
        asked += 1
        await there.wait()

    engines.ready = SimpleNamespace(remote=ready)
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await ingress.ready()
    there.set()
    await ingress.ready()
    assert asked == 1
    there.clear()
    later = asyncio.create_task(ingress.ready())
    await asyncio.sleep(STARTING_TIMEOUT_S)
    there.set()
    await later  # a busy replica is given time
    assert asked == 2
