"""Fields of OpenAI's bodies that clients send, and that change no output here: taken where that is the truth."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from app.openai.strict import StrictBody
from app.openai.tool_bodies import Text

MAX_METADATA = 16


def _not_stored(store: bool | None) -> bool | None:
    if store:
        raise ValueError("answers are not stored here; leave it out or send false")
    return store


Name = Annotated[Text, Field(min_length=1, max_length=256)]
Metadata = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]], Field(max_length=MAX_METADATA)
]


class ClientFields(StrictBody):
    """What any body of OpenAI's may have."""

    metadata: Metadata | None = None
    """Notes of the client's. Nothing is stored: only `/v1/responses` says them again in its answer."""
    store: Annotated[bool | None, AfterValidator(_not_stored)] = None
    """Answers are never stored: `true` is refused."""
    service_tier: Literal["auto", "default"] | None = None
    """There is one tier. How urgent a request is, `priority` says."""
    safety_identifier: Annotated[Text | None, Field(max_length=256)] = None
    """Whom the request comes from. Nothing is done with it."""
    prompt_cache_key: Name | None = None
    """Requests with the same one go to the same replica where that costs little, like those with the same
    `X-Session-Id`. Cached prefixes are found without it."""
    prompt_cache_retention: Literal["in_memory"] | None = None
    """Cached prefixes are kept in memory, for as long as the server's settings say."""
