"""Loads and budgets of several replicas, some of which do not answer; and tokens. Without a cluster."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from folio.app.api.openai.token_bodies import DetokenizeRequest, TokenizeRequest
from folio.app.api.operators.bodies import BudgetRequest, DrainRequest, PinRequest
from folio.app.api.operators.replies import DrainReport
from folio.app.errors import RequestError, UnavailableError, UnknownReplicaError
from folio.app.serving import ingress as ingress_module
from tests.fakes.fleet import Fleet, answers, hangs, status
from tests.fakes.replicas import TOKENIZER, Engines, ingress_with


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas have little time, and their load is kept for long."""
    for name, seconds in (("STATUS_TIMEOUT_S", 0.1), ("_LOAD_FRESH_S", 60.0)):
        monkeypatch.setattr(ingress_module, name, seconds)


async def test_the_load_of_those_that_answer() -> None:
    """One that is gone, one that hangs, and one whose engine has stopped are counted only."""
    others = (answers(ActorDiedError()), hangs, answers(UnavailableError("stopped")))
    fleet = Fleet(answers(status("b", 2)), *others, answers(status("a", 1)))
    report = await ingress_with(fleet).load()
    assert (report.num_replicas, report.num_silent) == (5, 3)
    assert [replica.name for replica in report.replicas] == ["a", "b"]
    for field, value in report.total:
        assert value == sum(getattr(replica, field) for replica in report.replicas), field
    assert report.least_queued_s == report.replicas[0].queued_s
    first = report.replicas[0]
    load, memory = (one := status("a", 1)).load, one.memory
    assert (first.name, first.ready_s, first.prompt_tokens, first.cached_tokens) == (
        *("a", 0.5),
        *(memory.queried_tokens, memory.hit_tokens),
    )
    of_load = {"num_running", "num_waiting", "queued_tokens", "queued_s", "busy_share", "max_num_seqs"}
    of_load |= {"free_tokens", "total_tokens"}
    of_memory = {f"{kind}_bytes" for kind in ("budget", "physical", "active", "cached", "pinned", "swapped")}
    assert {name: getattr(first, name) for name in of_load} == {name: getattr(load, name) for name in of_load}
    assert {name: getattr(first, name) for name in of_memory} == {name: getattr(memory, name) for name in of_memory}
    others = {"name", "ready_s", "prompt_tokens", "cached_tokens", "models"}
    assert {*of_load, *of_memory, *others} == set(type(first).model_fields)
    [model] = first.models
    assert (model.queued_tokens, model.queued_s) == (load.queued_tokens, load.queued_s)
    assert (model.name, model.state, model.num_waiting, model.wake_s) == ("m", "asleep", 3, 0.5)
    assert (model.weight_bytes, model.kv_bytes, model.error) == (0, 1, None), "it has no weights on the device now"
    nobody = await ingress_with(Fleet(hangs)).load()
    assert (nobody.num_silent, nobody.least_queued_s, nobody.total.free_tokens) == (1, None, 0)
    assert (await ingress_with(Fleet()).load()).num_replicas == 0


@pytest.mark.parametrize(
    ("fleet", "outcome"),
    [
        ((False, True), DrainReport(replica="a", draining=False)),
        ((False,), UnknownReplicaError),
        ((), UnknownReplicaError),
        ((False, UnavailableError("busy")), UnavailableError),
    ],
)
async def test_draining_reaches_the_replica_that_is_meant(fleet: Any, outcome: Any) -> None:
    asked = Fleet(*map(answers, fleet))
    draining = ingress_with(asked).drain_replica(DrainRequest(replica="a", draining=False))
    if isinstance(outcome, DrainReport):
        assert await draining == outcome
    else:
        with pytest.raises(outcome):
            await draining
    assert asked.broadcasts == [("set_draining", ("a", False))]


async def test_pickers_get_the_present_load_of_all_replicas() -> None:
    """Calls within 50 ms share an answer: replicas are asked once."""
    fleet = Fleet(answers(status("a", 1)), answers(status("b", 2)))
    ingress = ingress_with(fleet)
    pages = await asyncio.gather(*(ingress.load_metrics() for _ in range(3)))
    assert fleet.broadcasts == [("status", ())]
    assert set(pages) == {pages[0]}
    values = dict(re.findall(r'^(vllm:\w+)\{model_name="m"\} (\S+)$', pages[0], re.MULTILINE))
    waiting = sum(status("x", factor).load.num_waiting for factor in (1, 2))
    assert float(values["vllm:num_requests_waiting"]) == waiting > 0


async def test_pickers_get_an_error_when_a_replica_hangs() -> None:
    """Without its queue the server would seem idle. The error is not kept: the next call asks again."""
    fleet = Fleet(answers(status("a", 1)), hangs)
    ingress = ingress_with(fleet)
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await ingress.load_metrics()
    assert len(fleet.broadcasts) == 2


async def test_without_any_replica() -> None:
    """Regression: Serve raises then, and the report was an internal error."""
    ingress = ingress_with(Fleet())
    assert (await ingress.load()).replicas == []
    assert (await ingress.pins()).data == []
    with pytest.raises(UnavailableError):
        await ingress.unpin("a")
    with pytest.raises(UnavailableError):
        await ingress.pin(PinRequest(name="rules", prompt=[1, 2]))


async def test_errors_that_are_bugs_are_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        await ingress_with(Fleet(answers(ZeroDivisionError()))).load()


async def test_tokens_there_and_back() -> None:
    ingress = ingress_with(Engines())
    whole = await ingress.tokenize(TokenizeRequest(prompt="Hello you", return_token_strs=True))
    assert whole.tokens == TOKENIZER.encode("Hello you")
    assert (whole.count, whole.max_model_len, "".join(whole.token_strs)) == (len(whole.tokens), 64, "Hello you")
    assert (await ingress.detokenize(DetokenizeRequest(tokens=whole.tokens))).prompt == "Hello you"
    user = {"role": "user", "content": "Hi"}
    chat = await ingress.tokenize(TokenizeRequest.model_validate({"messages": [user], "model": "pirate"}))
    assert TOKENIZER.decode(chat.tokens) == "<|user|>Hi<|end|><|assistant|>"
    open_ended = TokenizeRequest.model_validate({"messages": [user], "add_generation_prompt": False})
    assert (await ingress.tokenize(open_ended)).tokens == chat.tokens[:-1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": []}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "x", "model": "poet"}, "model"),
    ],
)
async def test_what_cannot_be_tokenised(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        await ingress_with(Engines()).tokenize(TokenizeRequest.model_validate(fields))
    assert caught.value.param == param
    with pytest.raises(RequestError, match=f"below {len(TOKENIZER)}"):
        await ingress_with(Engines()).detokenize(DetokenizeRequest(tokens=[len(TOKENIZER)]))


@pytest.mark.parametrize(("revisions", "expected"), [((0, 0), 1), ((3, 5), 6)])
async def test_a_budget_takes_the_next_revision(revisions: tuple[int, ...], expected: int) -> None:
    fleet = Fleet(*(Budgeted(revision) for revision in revisions))
    report = await ingress_with(fleet).change_budget(BudgetRequest(budget_bytes=7))
    assert (report.budget_bytes, report.revision, report.answers) == (7, expected, ["applied"] * 2)


async def test_a_budget_is_tried_again_after_another_change() -> None:
    replica = Budgeted(2)
    replica.others = 2
    report = await ingress_with(Fleet(replica)).change_budget(BudgetRequest(budget_bytes=7))
    assert (report.revision, report.answers) == (5, ["applied"])
    replica.others = 100
    with pytest.raises(UnavailableError, match="during each of 5 attempts"):
        await ingress_with(Fleet(replica)).change_budget(BudgetRequest(budget_bytes=7))


async def test_a_given_revision_is_kept() -> None:
    report = await ingress_with(Fleet(Budgeted(4))).change_budget(BudgetRequest(budget_bytes=7, revision=4))
    assert (report.revision, report.answers) == (4, ["stale"])


class Budgeted:
    """A replica with a budget, changed by others after each of the next `others` reports."""

    others = 0

    def __init__(self, revision: int) -> None:
        self._revision = revision

    async def __call__(self, method: str, args: tuple[Any, ...]) -> Any:
        if method == "status":
            [model] = (found := status("a", 1)).models
            memory = replace(found.memory, budget_revision=self._revision)
            if self.others:
                self.others -= 1
                self._revision += 1
            return replace(found, models=(replace(model, memory=memory),))
        _, revision = args
        if revision <= self._revision:
            return "stale"
        self._revision = revision
        return "applied"
