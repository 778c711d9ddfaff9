"""A tenant's key reaches no other tenant's cached prefixes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from folio.app.api.operators.replies import PinCard, PinList
from folio.app.config.http import HttpSettings
from tests.app.edge.asgi import bearer, call
from tests.fakes.replicas import TOKENIZER, Engines, ingress_with
from tests.local_server import guarded_api

FREE, BOUND = "sk-free-0123456789", "sk-bound-0123456789"


@pytest.mark.parametrize(
    ("key", "tenant", "pinned_for"),
    [(FREE, None, [None]), (FREE, "b", ["b"]), (BOUND, None, ["a"]), (BOUND, "a", ["a"]), (BOUND, "b", [])],
)
async def test_prefixes_are_pinned_for_the_keys_tenant(
    key: str, tenant: str | None, pinned_for: list[str | None], tmp_path: Path
) -> None:
    """A cached prefix is pinned at once: the time would reveal what another tenant has cached."""
    path = tmp_path / "keys.yaml"
    keys = [{"name": "f", "key": FREE}, {"name": "b", "key": BOUND, "tenant": "a"}]
    path.write_text(json.dumps({"keys": [key | {"operator": True} for key in keys]}))
    asked: list[tuple[Any, ...]] = []

    async def results() -> list[None]:
        return [None]

    def broadcast(method: str, *args: Any) -> SimpleNamespace:
        asked.append((method, *args))
        return SimpleNamespace(results_async=results)

    async def pins() -> PinList:
        return PinList(
            data=[PinCard(id="rules", model="m", num_tokens=16, num_bytes=1, num_replicas=1, num_computed=1)]
        )

    engines: Any = Engines()
    engines.broadcast = broadcast
    ingress = ingress_with(engines)
    ingress.pins = pins
    api = guarded_api(ingress, HttpSettings.model_validate({"api_keys": {"file": str(path)}}))
    body = json.dumps({"name": "rules", "prompt": "Be brief. " * 9} | ({} if tenant is None else {"tenant": tenant}))
    headers = [*bearer(key), ("content-type", "application/json")]
    answer = await call(api, "POST", "/v1/pins", headers, body.encode())
    assert answer.status == (200 if pinned_for else 403)
    assert [(call[:2], call[4]) for call in asked] == [(("pin", "rules"), whose) for whose in pinned_for]
    if asked:
        assert asked[0][2] == TOKENIZER.encode("Be brief. " * 9)[: len(asked[0][2])]
