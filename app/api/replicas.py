"""The engine replicas, as the API's parts ask them."""

from __future__ import annotations

from typing import Any, Protocol

from folio.app.fleet.messages import ServedPooling

# Bound of the wait for replicas' statuses, of which each is ready at once.
STATUS_TIMEOUT_S = 2.0


class Replicas(Protocol):
    """All engine replicas, see `folio.app.serving.calls.ReplicaClient`. Every method raises `FolioError`s."""

    async def max_model_len(self, model: str) -> int: ...
    async def pooling(self, model: str) -> ServedPooling: ...
    async def call_all(self, method: str, *args: Any) -> list[Any]: ...
    async def call_each(self, method: str, *args: Any, timeout_s: float) -> list[Any]: ...
