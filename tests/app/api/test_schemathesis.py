"""Requests generated from the API's own OpenAPI page: every answer is one that the page allows.

CI tries about a hundred; `pytest --hypothesis-profile=nightly tests/app/api/test_schemathesis.py` thousands.
"""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.local_server import LocalServer
from tests.nightly import examples

# Checks of each operation. Not checked:
# - `positive_data_acceptance`: a page cannot say that a model's name must be known, a schema must compile, or a prompt
#   must fit into the context;
# - `response_headers_conformance`, `use_after_free`, `ensure_resource_availability`, `ignored_auth`: there are no such
#   headers, resources and keys here.
CHECKS: list[CheckFunction] = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
MOST_TOKENS = 8


@pytest.fixture(scope="module")
def description(local_server: LocalServer) -> Any:
    """Of all but what Ray's agents have, and an answer that goes on for minutes."""
    found = schemathesis.openapi.from_asgi("/openapi.json", local_server.api, timeout=60)
    found = found.exclude(path="/metrics").exclude(path="/dashboard/events")
    rejected_with = found.config.checks.negative_data_rejection
    rejected_with.expected_statuses = [*rejected_with.expected_statuses, "414"]  # a query that is too long as well
    return found


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_answer_is_as_described(description: Any, mode: GenerationMode) -> None:
    for result in description.get_all_operations():
        operation = result.ok()
        if mode.is_negative and not (operation.body or operation.query or operation.headers):
            continue  # nothing could be invalid
        several = examples(6, nightly=200) if operation.body else examples(2, nightly=30)

        @settings(
            max_examples=several,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Case) -> None:
            _make_answerable(case)
            is_lenient = _has_message_of_history(case)
            case.call_and_validate(checks=[c for c in CHECKS if c is not negative_data_rejection or not is_lenient])

        check()


def _make_answerable(case: Case) -> None:
    """Give valid bodies the served model's name and small limits: otherwise no request would generate tokens."""
    if not isinstance(case.body, dict) or "model" not in case.body or not _is_good(case):
        return
    case.body["model"] = "builtin"
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(case.body.get(name), int):
            case.body[name] = min(max(case.body[name], 1), MOST_TOKENS)
    if "messages" in case.body:
        case.body["max_completion_tokens"] = MOST_TOKENS
    if "input" in case.body:
        case.body["max_output_tokens"] = 16


def _has_message_of_history(case: Case) -> bool:
    """Whether a message is an answer or a tool's result. Other servers' forms of these are accepted, and a result may
    be any JSON; the page names only the usual forms."""
    messages = case.body.get("messages") if isinstance(case.body, dict) else None
    roles = ("assistant", "tool", "function")
    return isinstance(messages, list) and any(isinstance(m, dict) and m.get("role") in roles for m in messages)


def _is_good(case: Case) -> bool:
    return case.meta is not None and case.meta.generation.mode.is_positive
