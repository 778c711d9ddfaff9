"""API keys: entries of files, their faults, and changes while requests come."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from folio.app.config.http import KeyEntry, KeySource, RateLimits
from folio.app.edge import keys
from folio.app.edge.keys import ApiKey, KeyRing, read_keys
from folio.app.errors import ConfigError
from folio.app.http.request_context import EdgeObserver
from tests.processes import until_async

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"
LIMITS = RateLimits(requests_per_minute=5)


def write(path: Path, text: str) -> Path:
    """Replace the file by another, as editors do."""
    new = path.with_name("new")
    new.write_text(text)
    os.replace(new, path)
    return path


def has(ring: KeyRing, *found: str) -> bool:
    """Whether exactly these of Alice's and Bob's keys are valid."""
    return [ring.find(key) is not None for key in (ALICE, BOB)] == [key in found for key in (ALICE, BOB)]


def found(ring: KeyRing, key: str = ALICE) -> ApiKey:
    caller = ring.find(key)
    assert caller is not None
    return caller


def ring_of(path: Path, observer: EdgeObserver | None = None, check_period_s: float = 0.0) -> KeyRing:
    return KeyRing(KeySource(file=path), LIMITS, observer, check_period_s=check_period_s)


def test_lines(tmp_path: Path) -> None:
    ring = ring_of(write(tmp_path / "keys", f"# team\n{ALICE}\n\n  {BOB}  \n"))
    assert has(ring, ALICE, BOB)
    assert found(ring).entry.name == "key-" + hashlib.sha256(ALICE.encode()).hexdigest()[:8]
    assert found(ring).quota.limits == LIMITS
    for wrong in ("", ALICE[:-1], ALICE + "x", "# team", "ä" * 20, "\udcff"):
        assert ring.find(wrong) is None


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_entries(tmp_path: Path, suffix: str) -> None:
    entries = [
        {"name": "alice", "sha256": hashlib.sha256(ALICE.encode()).hexdigest(), "tenant": "a", "models": ["m"]},
        {"name": "bob", "key": BOB, "limits": {"tokens_per_minute": 7}},
    ]
    ring = ring_of(write(tmp_path / f"keys{suffix}", json.dumps({"keys": entries})))  # JSON is YAML
    alice, bob = found(ring).entry, found(ring, BOB)
    assert (alice.name, alice.tenant, alice.models) == ("alice", "a", {"m"})
    assert bob.quota.limits == RateLimits(tokens_per_minute=7)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("keys", "", "no API key"),
        ("keys", "# nothing\n", "no API key"),
        ("keys", "SECRET short", "key 1"),
        ("keys", f"{ALICE}\n{ALICE}\n", "twice"),
        ("keys.yaml", "keys: [", "near line 1"),
        ("keys.yaml", "keys:\n- name: a\n  key: 'SECRET\n", "near line 4"),
        ("keys.yaml", "keys: \x01SECRET", "near line 1"),
        ("keys.json", '{"keys": SECRET}', "near line 1"),
        ("keys.yaml", "keys: [{name: a, tenant: 2024-13-45, key: SECRET-0123456789}]", "ValueError.*date"),
        ("keys.yaml", "keys: [{name: a, key: !!bool SECRET-0123456789}]", "KeyError"),
        ("keys.yaml", "[" * 10_000, "RecursionError.*too deep"),
        ("keys.json", "[" * 100_000, "RecursionError.*too deep"),
        ("keys.json", '{"keys": ' + "1" * 5000 + "}", "ValueError"),
        ("keys.yaml", "SECRET", "KeyFile"),
        ("keys.yaml", "keys: []", "at least 1"),
        ("keys.yaml", "keys: [{name: a, key: SECRET}]", r"keys\.0\.key"),
        ("keys.yaml", "keys: [{name: a, key: SECRET-0123456789, sha256: abc}]", r"keys\.0\.sha256"),
        ("keys.yaml", "keys: [{name: a}]", "either key or sha256"),
        ("keys.yaml", "keys: [{name: a, key: SECRET-0123456789, quota: 1}]", r"keys\.0\.quota"),
        ("keys.yaml", "keys: [{name: a, key: SECRET-0123456789}, {name: a, key: SECRET-9876543210}]", "two keys named"),
    ],
)
def test_errors_name_the_place_and_no_key(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        read_keys(write(tmp_path / name, text))
    assert "SECRET" not in str(refused.value)
    assert ALICE not in str(refused.value)


def test_a_file_that_is_missing_or_binary(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        ring_of(tmp_path / "keys")
    (tmp_path / "keys").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        ring_of(tmp_path / "keys")


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    source = KeySource(env="FOLIO_TEST_KEYS")
    with pytest.raises(ConfigError, match="FOLIO_TEST_KEYS"):
        KeyRing(source, LIMITS)
    monkeypatch.setenv("FOLIO_TEST_KEYS", f"{ALICE},{BOB}")
    assert has(KeyRing(source, LIMITS), ALICE, BOB)


def test_one_source_is_needed() -> None:
    for fields in ({}, {"file": "a", "env": "b"}):
        with pytest.raises(ValidationError, match="either file"):
            KeySource.model_validate(fields)


async def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    ring = ring_of(path := write(tmp_path / "keys", ALICE))
    quota = found(ring).quota
    write(path, f"{ALICE}\n{BOB}")
    await ring.refresh()
    assert has(ring, ALICE, BOB)
    assert found(ring).quota is quota  # its usage is not forgotten
    write(path, BOB)
    await ring.refresh()
    assert has(ring, BOB)


async def test_a_change_is_read_though_the_request_that_saw_it_is_cancelled(tmp_path: Path) -> None:
    """Otherwise a revoked key would stay valid."""
    ring = ring_of(path := write(tmp_path / "keys", ALICE))
    os.mkfifo(tmp_path / "slow")
    os.replace(tmp_path / "slow", path)
    request = asyncio.create_task(ring.refresh())
    slow = await asyncio.to_thread(path.open, "w")  # it is being read
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await ring.refresh()  # neither waits nor reads again
    assert has(ring, ALICE)
    with slow:
        slow.write(BOB)
    await until_async(lambda: has(ring, BOB))


async def test_new_limits_count_running_requests(tmp_path: Path) -> None:
    entry = f"keys: [{{name: a, key: {ALICE}, limits: {{concurrent_requests: "
    ring = ring_of(path := write(tmp_path / "keys.yaml", entry + "2}}]"))
    found(ring).quota.begin()
    write(path, entry + "1}}]")
    await ring.refresh()
    assert found(ring).quota.limits.concurrent_requests == 1
    found(ring).quota.end()  # the request that began before


async def test_a_broken_change_leaves_the_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    problems: list[str | None] = []
    observer = EdgeObserver()
    observer.on_keys_read = problems.append  # type: ignore[method-assign]
    path = write(tmp_path / "keys.yaml", f"keys: [{{name: a, key: {ALICE}}}]")
    ring = ring_of(path, observer)
    write(path, "keys: [")
    await ring.refresh()
    await ring.refresh()
    assert has(ring, ALICE)
    assert ring.problem is not None
    assert [record.levelname for record in caplog.records].count("ERROR") == 1  # once for each change
    path.unlink()
    await ring.refresh()
    assert has(ring, ALICE)
    assert "No such file" in ring.problem
    write(path, f"keys: [{{name: b, key: {BOB}}}]")
    await ring.refresh()
    assert ring.problem is None
    assert has(ring, BOB)
    assert [problem is None for problem in problems] == [True, False, False, False, True]


async def test_any_error_of_a_reading_is_a_problem(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> Sequence[KeyEntry]:
        raise ZeroDivisionError("SECRET")

    ring = ring_of(path := write(tmp_path / "keys", ALICE))
    monkeypatch.setattr(keys, "read_keys", fail)
    write(path, BOB)
    await ring.refresh()
    await ring.refresh()
    assert has(ring, ALICE)
    assert ring.problem is not None
    assert "ZeroDivisionError" in ring.problem
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "SECRET" not in caplog.text


async def test_the_file_is_checked_once_a_period(tmp_path: Path) -> None:
    ring = ring_of(path := write(tmp_path / "keys", ALICE), check_period_s=3600.0)
    write(path, BOB)
    await ring.refresh()
    assert has(ring, ALICE)


def test_every_key_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an early exit, timing would reveal a key's place in the list."""
    compared = []
    compare = keys.hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda a, b: compared.append(a) or compare(a, b))
    ring = ring_of(write(tmp_path / "keys", f"{ALICE}\n{BOB}"))
    assert ring.find(ALICE) is not None
    assert len(compared) == 2
