"""Types of Ray Serve without a public name, for tests of code that Serve calls with them (Ray 2.60)."""

from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
    TimeSeries,
    TimeStampedValue,
)

__all__ = ["DeploymentHandleSource", "DeploymentID", "ReplicaID", "RequestMetadata", "TimeSeries", "TimeStampedValue"]
