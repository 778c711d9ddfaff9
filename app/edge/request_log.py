"""The log of requests: one line each, with nothing of what was asked or answered.

POST /v1/completions 200 1204 ms finished request_id=6f1c… ttft_ms=89 prompt_tokens=12 cached_tokens=0 …
"""

from __future__ import annotations

import logging
import time
from urllib.parse import quote

from starlette.types import Scope

from app.exchange import RequestContext

logger = logging.getLogger(__name__)

_LONGEST_PATH = 200


def log_request(scope: Scope, exchange: RequestContext, is_complete: bool) -> None:
    """Write the line. `is_complete`: the whole answer was sent."""
    if not logger.isEnabledFor(logging.INFO):
        return
    now = time.monotonic()
    first: dict[str, str | int] = {
        "method": scope["method"] if scope["method"].isalpha() else "?",
        "path": quote(scope["path"])[:_LONGEST_PATH],  # escaped: line breaks would forge lines
        "status": exchange.status if exchange.status is not None else 0,
        "total_ms": round(1000 * (now - exchange.begun_at)),
        "end": _end_of(exchange, is_complete),
    }
    fields: dict[str, str | int] = {"request_id": exchange.request_id}
    if exchange.first_byte_at is not None:
        fields["ttft_ms"] = round(1000 * (exchange.first_byte_at - exchange.begun_at))
    if exchange.generation_id is not None:
        fields["generation"] = exchange.generation_id
        fields["prompt_tokens"] = exchange.prompt_tokens
        fields["cached_tokens"] = exchange.cached_tokens
        fields["output_tokens"] = exchange.output_tokens
    if exchange.key is not None:
        fields["key"] = exchange.key.name
        if exchange.key.tenant is not None:
            fields["tenant"] = quote(exchange.key.tenant)
    if exchange.error_code is not None:
        fields["error"] = exchange.error_code
    logger.info(
        "%s %s %s %s ms %s %s",
        *first.values(),
        " ".join(f"{name}={value}" for name, value in fields.items()),
        extra={"request": first | fields},
    )


def _end_of(exchange: RequestContext, is_complete: bool) -> str:
    if not is_complete:
        return "disconnected"
    failed = exchange.error_code is not None or exchange.status is None or exchange.status >= 400
    return "error" if failed else "finished"
