"""Three small models of one shelf, and what tests ask of them."""

from __future__ import annotations

from typing import Any

from folio.app.api.openai.bodies import CompletionRequest
from folio.app.config.shelf import ShelfConfig
from folio.app.engine import SamplingParams
from folio.app.fleet.messages import GenerateRequest
from folio.app.serving.replica import EngineReplica
from tests.local_server import a_model

SETTINGS: dict[str, Any] = {"kv_memory_bytes": 16 << 20, "max_num_batched_tokens": 512, "warm_up": False}
MODELS = (
    a_model("first", dtype="float32", **SETTINGS),
    a_model("second", max_model_len=512, dtype="float32", isolate_tenants=True, **SETTINGS),
    a_model("third", max_model_len=512, **SETTINGS),
)
SHELF = ShelfConfig(models=MODELS, device_memory_bytes=256 << 20)


def completion(model: str = "first", **fields: Any) -> CompletionRequest:
    body = {"model": model, "prompt": "The moon", "max_tokens": 4, "temperature": 0} | fields
    return CompletionRequest.model_validate(body)


async def say(replica: EngineReplica, model: str) -> str:
    call = GenerateRequest("r", [300, 301], SamplingParams(max_tokens=8, temperature=0), model=model, whole=True)
    [[piece]] = [item async for item in replica.generate_stream(call) if item and isinstance(item, list)]
    return piece.text


async def states(server: Any) -> dict[str, str]:
    return {card.id: card.state for card in (await server.models()).data}
