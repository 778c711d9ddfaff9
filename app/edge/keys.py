"""API keys: read from a file or the environment, compared in constant time, read again when the file changes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from app.config.http import KeyEntry, KeyFile, KeySource, RateLimits
from app.edge.limits import IngressLimits
from app.edge.quota import Quota
from app.errors import ConfigError
from app.exchange import EdgeObserver

logger = logging.getLogger(__name__)

# How soon a changed file is noticed. One `stat` in this time is all that it costs.
CHECK_PERIOD_S = 1.0
_STRUCTURED = {".yaml", ".yml", ".json"}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key's SHA-256, what it allows, and what is left of that."""

    digest: bytes
    entry: KeyEntry
    quota: Quota


class KeyRing:
    """The keys that are valid now.

    A file that cannot be read, or has an error, when it changes leaves the keys as they were: `problem` says so, and
    the log.

    Raises:
        ConfigError: it cannot be read, or has an error, at the start.
    """

    def __init__(
        self,
        source: KeySource,
        default_limits: RateLimits,
        watcher: EdgeObserver | None = None,
        ingress_limits: IngressLimits | None = None,
    ) -> None:
        self._source = source
        self._default_limits = default_limits
        self._ingress_limits = ingress_limits or IngressLimits()
        self._watcher = watcher or EdgeObserver()
        self._seen = self._signature()
        self._checked_at = time.monotonic()
        self._reading: asyncio.Task[None] | None = None
        self._keys: tuple[ApiKey, ...] = ()
        self._adopt(self._read())
        self._note(None)

    def find(self, presented: str) -> ApiKey | None:
        """Whose key that is. It is compared with all, and each time as a whole, so that the time tells nothing."""
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    async def refresh(self) -> None:
        """Read the file again if it has changed, in a thread; callers meanwhile go by the old keys. The reading goes on
        when the request that has begun it is cancelled."""
        now = time.monotonic()
        if self._source.file is None or now < self._checked_at + CHECK_PERIOD_S:
            return
        if self._reading is not None and not self._reading.done():
            return
        self._checked_at = now
        signature = self._signature()
        if signature == self._seen:
            self._watcher.on_keys_read(self.problem)  # again: gauges that nobody sets are forgotten
            return
        self._reading = asyncio.create_task(self._read_again(signature))
        await asyncio.shield(self._reading)

    async def _read_again(self, signature: tuple[int, ...] | None) -> None:
        """What has `signature` counts as seen only when it is clear what has become of it."""
        try:
            self._adopt(await asyncio.to_thread(self._read))
        except Exception as error:  # noqa: BLE001 - requests are answered whatever it is, and somebody is told
            # Others than our own may quote a key.
            problem = str(error) if isinstance(error, ConfigError) else f"reading them failed ({type(error).__name__})"
            self._note(problem)
            logger.error("the API keys stay as they were: %s", problem)
        else:
            self._note(None)
            logger.info("%d API keys from %s", len(self._keys), self._source.file)
        self._seen = signature

    def _note(self, problem: str | None) -> None:
        self.problem = problem
        self._watcher.on_keys_read(problem)

    def _adopt(self, entries: Sequence[KeyEntry]) -> None:
        """Keys that keep their name keep what they have used."""
        old = {key.entry.name: key.quota for key in self._keys}
        keys = []
        for entry in entries:
            limits = entry.limits or self._default_limits
            quota = old.pop(entry.name, None)
            if quota is None:
                quota = Quota(limits, self._ingress_limits, f"key:{entry.name}")
            elif quota.limits != limits:
                quota.set_limits(limits)
            keys.append(ApiKey(_digest_of(entry), entry, quota))
        self._keys = tuple(keys)
        for quota in old.values():
            quota.close()

    def _signature(self) -> tuple[int, ...] | None:
        """Of the file; `None` when it is not there. A link that is turned to another file changes it, too."""
        if self._source.file is None:
            return None
        try:
            found = os.stat(self._source.file)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size, found.st_dev

    def _read(self) -> Sequence[KeyEntry]:
        if self._source.file is None:
            assert self._source.env is not None
            text = os.environ.get(self._source.env)
            if text is None:
                raise ConfigError(
                    f"http.api_keys.env is {self._source.env!r}, which the ingress does not have in its environment: "
                    "set it (runtime_env, env_vars), or use a file"
                )
            return key_list(text.replace(",", "\n").splitlines(), self._source.env)
        return read_keys(self._source.file)


def read_keys(path: Path) -> Sequence[KeyEntry]:
    """The keys in a file: YAML or JSON by its name, otherwise one key a line.

    Raises:
        ConfigError: it cannot be read, has an error, or no key. The message has nothing of the file's content.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"the API keys in {path} cannot be read: {reason}") from None
    if path.suffix.lower() not in _STRUCTURED:
        return key_list(text.splitlines(), str(path))
    try:
        entries = KeyFile.model_validate(_parsed(text, path)).keys
    except ValidationError as error:
        found = error.errors(include_input=False, include_url=False, include_context=False)
        faults = "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'file'}: {fault['msg']}" for fault in found[:5])
        raise ConfigError(f"the API keys in {path} have errors: {faults}") from None
    _check_distinct(entries, str(path))
    return entries


def key_list(lines: Iterable[str], where: str) -> Sequence[KeyEntry]:
    """A key on each line, good for everything; empty lines and those that begin with # are left out. A key's name is
    the beginning of its SHA-256, so that it stays the same when others come and go.

    Raises:
        ConfigError: a line is no key, or none is.
    """
    entries = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        try:
            name = f"key-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
            entries.append(KeyEntry(name=name, key=key, operator=True))
        except ValidationError:
            raise ConfigError(
                f"key {number} in {where} has {len(key)} characters, or others than visible ASCII; keys have 16 to 512 "
                "of these"
            ) from None
    if not entries:
        raise ConfigError(f"{where} has no API key, so that nobody could call: add one, or leave out http.api_keys")
    _check_distinct(entries, where)
    return entries


def _parsed(text: str, path: Path) -> Any:
    """The parsers' own messages quote what they have read."""
    try:
        return json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        line = error.lineno
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
    except yaml.YAMLError:  # a character that YAML does not allow
        line = 1
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:  # PyYAML lets them through
        raise ConfigError(
            f"the API keys in {path} cannot be parsed ({type(error).__name__}): a value is not what it looks like, "
            "such as a date that does not exist, which quotes make a text; or it nests too deep"
        ) from None
    raise ConfigError(f"the API keys in {path} cannot be parsed; the error is near line {line}")


def _check_distinct(entries: Sequence[KeyEntry], where: str) -> None:
    names: set[str] = set()
    digests: set[bytes] = set()
    for entry in entries:
        digest = _digest_of(entry)
        if entry.name in names or digest in digests:
            raise ConfigError(f"{where} has two keys named {entry.name!r}, or its key twice; keep one")
        names.add(entry.name)
        digests.add(digest)


def _digest_of(entry: KeyEntry) -> bytes:
    if entry.sha256 is not None:
        return bytes.fromhex(entry.sha256)
    assert entry.key is not None
    return hashlib.sha256(entry.key.encode()).digest()
