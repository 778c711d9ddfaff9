"""Log of requests: one line each, without any text of prompts or outputs.

POST /v1/completions 200 1204 ms finished request_id=6f1c… ttft_ms=89 prompt_tokens=12 cached_tokens=0 …
"""

from __future__ import annotations

import logging
import time
from urllib.parse import quote

from starlette.types import Scope

from folio.app.http.request_context import RequestContext

logger = logging.getLogger(__name__)

_MAX_PATH_CHARS = 200
# Endpoint pickers and probes ask many times a second, so only their failures are logged. A server that is not ready is
# no failure; changes of readiness are logged elsewhere.
_FREQUENT_PATHS = ("/metrics/load", "/ready", "/health", "/ping")
_NOT_READY = 503


def log_request(scope: Scope, context: RequestContext, is_complete: bool) -> None:
    """Write the line. `is_complete`: the whole answer was sent."""
    if not logger.isEnabledFor(logging.INFO):
        return
    failed = context.error_code is not None or context.status is None or context.status >= 400
    if scope["path"].endswith(_FREQUENT_PATHS) and (not failed or context.status == _NOT_READY):
        return
    first: dict[str, str | int] = {
        "method": scope["method"] if scope["method"].isalpha() else "?",
        "path": quote(scope["path"])[:_MAX_PATH_CHARS],  # escaped, because line breaks would forge lines
        "status": context.status if context.status is not None else 0,
        "total_ms": round(1000 * (time.monotonic() - context.begun_at)),
        "end": "disconnected" if not is_complete else "error" if failed else "finished",
    }
    fields = _fields(context)
    named = " ".join(f"{name}={value}" for name, value in fields.items())
    logger.info("%s %s %s %s ms %s %s", *first.values(), named, extra={"request": first | fields})


def _fields(context: RequestContext) -> dict[str, str | int]:
    """The named fields of a request's line, as far as they are known."""
    fields: dict[str, str | int] = {"request_id": context.request_id}
    if context.first_byte_at is not None:
        fields["ttft_ms"] = round(1000 * (context.first_byte_at - context.begun_at))
    if context.generation_id is not None:
        fields["generation"] = context.generation_id
        fields["prompt_tokens"] = context.prompt_tokens
        fields["cached_tokens"] = context.cached_tokens
        fields["output_tokens"] = context.output_tokens
    if context.num_continued:
        fields["continued"] = context.num_continued
    if context.key is not None:
        fields["key"] = context.key.name
        if context.key.tenant is not None:
            fields["tenant"] = quote(context.key.tenant)
    if context.error_code is not None:
        fields["error"] = context.error_code
    return fields
