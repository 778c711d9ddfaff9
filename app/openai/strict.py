"""What request bodies have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictBody(BaseModel):
    """Types are strict, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)
