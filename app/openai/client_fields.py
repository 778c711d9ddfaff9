"""Fields of OpenAI's bodies that clients send, and that change no output here: taken where that is the truth."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from app.openai.strict import StrictBody, Text, at_most, refused

MAX_METADATA = 16


Name = Annotated[Text, Field(min_length=1, max_length=256)]
Metadata = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    at_most(MAX_METADATA, "notes"),
]


class ClientFields(StrictBody):
    """What any body of OpenAI's may have."""

    metadata: Metadata | None = None
    """Notes of the client's. Nothing is stored: only `/v1/responses` says them again in its answer."""
    store: Annotated[
        Literal[False] | None, refused("answers are not stored here; leave it out or send false", False)
    ] = None
    """Answers are never stored: `true` is refused."""
    service_tier: Annotated[
        Literal["auto", "default"] | None,
        refused("there is one tier, the default; leave it out, or say priority", "auto", "default"),
    ] = None
    """There is one tier. How urgent a request is, `priority` says."""
    safety_identifier: Annotated[Text | None, Field(max_length=256)] = None
    """Whom the request comes from. Nothing is done with it."""
    prompt_cache_key: Name | None = None
    """Requests with the same one go to the same replica where that costs little, like those with the same
    `X-Session-Id`. Cached prefixes are found without it."""
    prompt_cache_retention: Annotated[
        Literal["in_memory"] | None,
        refused("cached prefixes are kept in memory only; leave it out, or say pin", "in_memory"),
    ] = None
    """Cached prefixes are kept in memory, for as long as the server's settings say."""
