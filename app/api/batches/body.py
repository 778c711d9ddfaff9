"""Body of `POST /v1/batches`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from folio.app.api.base import Metadata, StrictBody, Text

# OpenAI's bounds of `expires_after`.
LEAST_KEEP_S, MOST_KEEP_S = 3600, 30 * 86400


class ExpiresAfter(StrictBody):
    """The time after which a file is deleted, at most the server's `batches.keep_s`."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=LEAST_KEEP_S, le=MOST_KEEP_S)]


class BatchRequest(StrictBody):
    """`POST /v1/batches`."""

    input_file_id: Annotated[Text, Field(max_length=256)]
    """A file of the purpose "batch": one request a line."""
    endpoint: Annotated[Text, Field(max_length=256, examples=["/v1/chat/completions"])]
    """The route of all requests."""
    completion_window: Literal["24h"]
    """The batch expires after this time; answers until then are kept."""
    metadata: Metadata | None = None
    """Notes of the client, repeated in answers."""
    output_expires_after: ExpiresAfter | None = None
    """When the files of answers are deleted; by default after the server's `batches.keep_s`."""
