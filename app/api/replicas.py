"""Interface through which the API calls engine replicas."""

from __future__ import annotations

from typing import Any, Protocol

from folio.app.fleet.messages import ServedPooling

# Timeout of calls for replicas' statuses, which a replica answers at once.
STATUS_TIMEOUT_S = 2.0


class Replicas(Protocol):
    """All engine replicas, see `folio.app.serving.calls.ReplicaClient`. Every method raises `FolioError`s."""

    async def max_model_len(self, model: str) -> int: ...
    async def pooling(self, model: str) -> ServedPooling: ...
    async def call_all(self, method: str, *args: Any) -> list[Any]: ...
    async def call_each(self, method: str, *args: Any, timeout_s: float) -> list[Any]: ...
