"""Models and adapters answer under their names."""

from __future__ import annotations

import pytest

from folio.app.api.openai.chat_body import ChatCompletionRequest
from folio.app.api.openai.token_bodies import DetokenizeRequest, TokenizeRequest
from folio.app.engine.lora.source import AdapterSource
from folio.app.errors import UnknownModelError
from folio.app.fleet.loaded import LoadedTable
from tests.app.serving.registry import patched_cluster
from tests.fakes.replicas import Engines, completion, ingress_with
from tests.local_server import a_model, ingress_of


async def test_adapters_are_models() -> None:
    ingress = ingress_with(engines := Engines())
    cards = (await ingress.models()).data
    assert [(card.id, card.parent) for card in cards] == [("m", None), ("pirate", "m")]
    assert "`folio pull smollm2` fetches a real model" in cards[0].description  # the model is the built-in one
    assert cards[1].description is None
    answer = await ingress.chat(
        ChatCompletionRequest.model_validate(
            {"model": "pirate", "messages": [{"role": "user", "content": "x"}], "user": "u"}
        )
    )
    assert answer.model == "pirate"
    assert (engines.calls[0].adapter, engines.calls[0].tenant, engines.calls[0].user) == ("pirate", None, "u")
    with pytest.raises(UnknownModelError, match="'m', 'pirate'"):
        await ingress.generate(completion(model="poet"))


async def test_an_ingress_learns_of_adapters_that_another_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first request for one: it need not wait for the next exchange of tables."""
    registry = patched_cluster(monkeypatch).registry
    ingress = ingress_of(engines := Engines(), a_model("m", adapters={"pirate": "x/pirate"}, adapter_dir="/adapters"))
    with pytest.raises(UnknownModelError, match="'m', 'pirate'"):
        await ingress.generate(completion(model="legal"))
    registry.restore(LoadedTable(1, (AdapterSource("legal", "/a", "1"),)))
    assert (await ingress.generate(completion(model="legal"))).model == "legal"
    assert (engines.calls[0].adapter, engines.calls[0].adapter_key) == ("legal", "legal@1")
    await ingress.generate(completion(model="pirate"))
    assert (engines.calls[1].adapter, engines.calls[1].adapter_key) == ("pirate", None)
    registry.restore(LoadedTable(2, (AdapterSource("poet", "/b", "2"),)))
    cards = (await ingress.models()).data
    assert [(card.id, card.parent) for card in cards] == [("m", None), ("pirate", "m"), ("poet", "m")]
    with pytest.raises(UnknownModelError):
        await ingress.generate(completion(model="legal"))
    for name, loaded in (("ode", 3), ("sonnet", 4), ("haiku", 5)):
        registry.restore(LoadedTable(loaded, (AdapterSource(name, "/c", "3"),)))
        if name == "ode":
            assert (await ingress.model(name)).id == name
        elif name == "sonnet":
            await ingress.tokenize(TokenizeRequest(model=name, prompt="x"))
        else:
            await ingress.detokenize(DetokenizeRequest(model=name, tokens=[5]))
