"""Pins of several replicas, some of which do not answer."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError

from folio.app.api.operators.bodies import PinRequest
from folio.app.errors import DeadlineError, RequestError, UnavailableError, UnknownPinError
from folio.app.serving import calls as calls_module
from folio.vmem import PinReport
from tests.fakes.fleet import Fleet, answers, hangs, status
from tests.fakes.replicas import TOKENIZER, completion, ingress_with


async def test_the_pins_of_all_replicas() -> None:
    """Regression: a prefix that could not be computed again after a wake was listed as one that is in memory."""
    a, b, absent = PinReport("a", 16, 100), PinReport("b", 32, 200), PinReport("b", 32, 0)
    fleet = Fleet(answers(status("x", 1, b, a)), answers(status("y", 1, absent)), answers(UnavailableError("stopped")))
    cards = (await ingress_with(fleet).pins()).data
    assert [card.model_dump(exclude={"object"}) for card in cards] == [
        {"id": "a", "num_tokens": 16, "num_bytes": 100, "num_replicas": 1, "num_computed": 1, "model": "m"},
        {"id": "b", "num_tokens": 32, "num_bytes": 200, "num_replicas": 2, "num_computed": 1, "model": "m"},
    ]
    with pytest.raises(UnavailableError):
        await ingress_with(Fleet(answers(UnavailableError("stopped")))).pins()


async def test_unpinning_where_it_is_pinned() -> None:
    """Replicas that have started later never had it."""
    unknown = answers(UnknownPinError("no prefix", "name"))
    await ingress_with(Fleet(unknown, answers(None))).unpin("a")
    with pytest.raises(UnknownPinError):
        await ingress_with(Fleet(unknown, unknown)).unpin("a")
    with pytest.raises(UnavailableError):
        await ingress_with(Fleet(unknown, answers(None), answers(ActorDiedError()))).unpin("a")


async def test_a_request_pins_its_prompt_everywhere_before_it_is_sent() -> None:
    fleet = Fleet(answers(None), answers(None))
    ingress = ingress_with(fleet)
    request = completion(prompt="Hello you", pin="rules", cache_salt="s", tenant="t")
    await ingress.generate(request)
    async for _ in ingress.generate_stream(request):
        pass
    expected = ("pin", ("rules", TOKENIZER.encode("Hello you"), "s", "t", "m"))
    assert fleet.broadcasts == [expected] * 2
    assert len(fleet.calls) == 2
    await ingress.pin(PinRequest(name="rules", prompt=[1, 2], cache_salt="s", tenant="t"))
    assert fleet.broadcasts[2] == ("pin", ("rules", [1, 2], "s", "t", "m"))
    for wrong in (completion(prompt=["a", "b"], pin="x"), completion(model="pirate", pin="x")):
        with pytest.raises(RequestError) as caught:
            await ingress.generate(wrong)
        assert caught.value.param == "pin"
    refuses = ingress_with(engines := Fleet(answers(RequestError("another prefix", "name"))))
    with pytest.raises(RequestError, match="another prefix") as caught:
        await refuses.generate(request)
    assert caught.value.param == "pin"
    assert engines.calls == []


async def test_a_replica_that_hangs_does_not_hold_a_pin_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    ingress = ingress_with(fleet := Fleet(answers(None), hangs))
    with pytest.raises(DeadlineError, match="not pinned within"):
        await ingress.generate(completion(prompt="Hello you", pin="rules", timeout_s=0.05))
    assert fleet.calls == []
    monkeypatch.setattr(calls_module, "ANSWER_TIMEOUT_S", 0.05)
    with pytest.raises(UnavailableError, match="not all engine replicas"):
        await ingress.pin(PinRequest(name="rules", prompt=[1, 2]))
    await ingress.drain()
    with pytest.raises(UnavailableError, match="draining"):
        await ingress.pin(PinRequest(name="rules", prompt=[1, 2]))
