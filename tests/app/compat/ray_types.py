"""Types of Ray Serve without a public name, and its call of a router, for tests of code that Serve calls with them
(Ray 2.60)."""

from typing import Any

from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
    TimeSeries,
    TimeStampedValue,
)
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

__all__ = ["DeploymentHandleSource", "DeploymentID", "ReplicaID", "RequestMetadata", "TimeSeries", "TimeStampedValue"]


async def choose_replica(router: RequestRouter, pending: PendingRequest, **retry: Any) -> RunningReplica:
    return await router._choose_replica_for_request(pending, **retry)
