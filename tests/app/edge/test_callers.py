"""Callers of batches' requests: their keys, limits, and what is left to their other requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from folio.app.config.http import HttpSettings, KeySource
from folio.app.edge.callers import Callers
from folio.app.edge.guard import key_ring
from folio.app.edge.keys import KeyRing
from folio.app.errors import ForbiddenError, RateLimitError
from folio.app.http.request_context import CURRENT

KEYS = """
keys:
  - {name: alice, key: alice-alice-alice, limits: {requests_per_minute: 4, concurrent_requests: 8}}
  - {name: bob, key: bob-bob-bob-bob-bob, limits: {concurrent_requests: 4}}
"""


@pytest.fixture
def settings(tmp_path: Path) -> HttpSettings:
    (tmp_path / "keys.yaml").write_text(KEYS)
    return HttpSettings(api_keys=KeySource(file=tmp_path / "keys.yaml"), max_timeout_s=5.0, default_timeout_s=1.0)


async def test_half_of_a_callers_limits_is_left_to_other_requests(settings: HttpSettings) -> None:
    keys = key_ring(settings)
    assert keys is not None
    callers = Callers(settings, keys)
    for _ in range(3):  # 4, 3 and 2 are left before
        await callers.begin("alice", "r", 10)
    with pytest.raises(RateLimitError) as caught:
        await callers.begin("alice", "r", 10)
    assert 0 < (caught.value.retry_after_s or 0) <= 15.0  # a quarter of a minute for one request
    key = keys.named("alice")
    assert key is not None
    key.quota.begin()  # a client's own request


async def test_places_come_back(settings: HttpSettings) -> None:
    callers = Callers(settings, key_ring(settings))
    begun = [await callers.begin("bob", "r", 10) for _ in range(3)]
    with pytest.raises(RateLimitError):
        await callers.begin("bob", "r", 10)
    begun[0].end()
    await callers.begin("bob", "r", 10)


async def test_requests_have_the_keys_permissions_and_no_timeout_of_the_server(settings: HttpSettings) -> None:
    callers = Callers(settings, key_ring(settings))
    context = await callers.begin("bob", "r", 10)
    assert context.key is not None
    assert (context.key.name, context.request_id, context.num_body_bytes) == ("bob", "r", 10)
    allowed = context.authorize("g", model="m", tenant=None, priority=0, pins=False, timeout_s=None)
    assert allowed == (None, None)


async def test_a_deleted_key(settings: HttpSettings, tmp_path: Path) -> None:
    keys = KeyRing(KeySource(file=tmp_path / "keys.yaml"), settings.key_limits, check_period_s=0.0)
    callers = Callers(settings, keys)
    (tmp_path / "keys.yaml").write_text(KEYS.replace("alice", "carol"))
    with pytest.raises(ForbiddenError, match="does not exist"):
        await callers.begin("alice", "r", 10)


async def test_without_keys_there_is_one_caller() -> None:
    callers = Callers(HttpSettings(), None)
    assert callers.current_name() == ""
    context = await callers.begin("", "r", 10)
    context.end()
    token = CURRENT.set(context)
    assert callers.current_name() == ""
    CURRENT.reset(token)
