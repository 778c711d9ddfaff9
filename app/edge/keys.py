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

from folio.app.config.http import KeyEntry, KeyFile, KeySource, RateLimits
from folio.app.edge.limits import IngressLimits
from folio.app.edge.quota import Quota
from folio.app.errors import ConfigError
from folio.app.http.request_context import EdgeObserver

logger = logging.getLogger(__name__)

# Period of checks for a changed file; a check is one `stat`.
CHECK_PERIOD_S = 1.0
_STRUCTURED = {".yaml", ".yml", ".json"}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """SHA-256 of a key, its permissions and its quota."""

    digest: bytes
    entry: KeyEntry
    quota: Quota


class KeyRing:
    """The valid API keys.

    A changed file that has an error, or cannot be read, leaves the keys as they were; `problem` and the log say why.

    Raises:
        ConfigError: at the start, the file has an error or cannot be read.
    """

    def __init__(
        self,
        source: KeySource,
        default_limits: RateLimits,
        observer: EdgeObserver | None = None,
        ingress_limits: IngressLimits | None = None,
        check_period_s: float = CHECK_PERIOD_S,
    ) -> None:
        self._source, self._check_period_s = source, check_period_s
        self._default_limits = default_limits
        self._ingress_limits = ingress_limits or IngressLimits()
        self._observer = observer or EdgeObserver()
        self._read_signature = self._signature()
        self._checked_at = time.monotonic()
        self._reading: asyncio.Task[None] | None = None
        self._keys: tuple[ApiKey, ...] = ()
        self._replace_keys(self._read())
        self._set_problem(None)

    def find(self, presented: str) -> ApiKey | None:
        """The key that was presented. Compares all keys in constant time, so that timing reveals nothing."""
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def named(self, name: str) -> ApiKey | None:
        """The key of this name."""
        return next((key for key in self._keys if key.entry.name == name), None)

    async def refresh(self) -> None:
        """Read a changed file again, in a thread. Other requests use the old keys meanwhile, and cancelling the request
        that started the reading does not end it."""
        now = time.monotonic()
        if self._source.file is None or now < self._checked_at + self._check_period_s:
            return
        if self._reading is not None and not self._reading.done():
            return
        self._checked_at = now
        signature = self._signature()
        if signature == self._read_signature:
            self._observer.on_keys_read(self.problem)  # again, because gauges expire
            return
        self._reading = asyncio.create_task(self._read_again(signature))
        await asyncio.shield(self._reading)

    async def _read_again(self, signature: tuple[int, ...] | None) -> None:
        """The signature counts as read only at the end, when the outcome is known."""
        try:
            self._replace_keys(await asyncio.to_thread(self._read))
        except Exception as error:  # noqa: BLE001 - requests go on with the old keys
            # Messages of other errors may quote a key.
            problem = str(error) if isinstance(error, ConfigError) else f"reading them failed ({type(error).__name__})"
            self._set_problem(problem)
            logger.error("the API keys stay as they were: %s", problem)
        else:
            self._set_problem(None)
            logger.info("%d API keys from %s", len(self._keys), self._source.file)
        self._read_signature = signature

    def _set_problem(self, problem: str | None) -> None:
        self.problem = problem
        self._observer.on_keys_read(problem)

    def _replace_keys(self, entries: Sequence[KeyEntry]) -> None:
        """A key keeps its quota if its name stays."""
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
        """Identity and version of the file that a path or link leads to; `None` without one."""
        try:
            found = None if self._source.file is None else os.stat(self._source.file)
        except OSError:
            return None
        return found and (found.st_mtime_ns, found.st_ino, found.st_size, found.st_dev)

    def _read(self) -> Sequence[KeyEntry]:
        if self._source.file is not None:
            return read_keys(self._source.file)
        assert self._source.env is not None
        text = os.environ.get(self._source.env)
        if text is None:
            raise ConfigError(
                f"http.api_keys.env is {self._source.env!r}, which the ingress does not have in its environment: "
                "set it (runtime_env, env_vars), or use a file"
            )
        return key_list(text.replace(",", "\n").splitlines(), self._source.env)


def read_keys(path: Path) -> Sequence[KeyEntry]:
    """The keys in a file: YAML or JSON by its name, otherwise one key a line.

    Raises:
        ConfigError: the file cannot be read, has an error, or has no key. The message quotes nothing of the file.
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
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'file'}: {fault['msg'].removeprefix('Value error, ')}"
            for fault in found[:5]
        )
        raise ConfigError(f"the API keys in {path} have errors: {faults}") from None
    _check_distinct(entries, str(path))
    return entries


def key_list(lines: Iterable[str], where: str) -> Sequence[KeyEntry]:
    """A key on each line, with all permissions; empty lines and lines that begin with # are skipped. A key's name is
    the beginning of its SHA-256, so that it does not depend on other keys.

    Raises:
        ConfigError: a line is no key, or there is no key.
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
                f"key {number} in {where} is not valid (it has {len(key)} characters); use 16 to 512 characters of "
                "visible ASCII"
            ) from None
    if not entries:
        raise ConfigError(f"{where} has no API key, so no request could be answered: add one, or omit http.api_keys")
    _check_distinct(entries, where)
    return entries


def _parsed(text: str, path: Path) -> Any:
    """Parse without the parsers' own messages, which quote the text."""
    try:
        return json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        line = error.lineno
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # none for a character that YAML does not allow
        line = mark.line + 1 if mark is not None else 1
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:  # PyYAML lets them through
        raise ConfigError(
            f"the API keys in {path} cannot be parsed ({type(error).__name__}): a value has another type than it "
            "should, such as a date that does not exist (quote it), or the file nests too deep"
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
