"""`args.http` of the YAML: what protects the HTTP interface."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RateLimits(_Settings):
    """What one caller may ask of all ingress replicas together (see `shares.py`); `None`: as much as it likes.

    Attributes:
        requests_per_minute: may also come at once after a minute without any.
        tokens_per_minute: of prompts, counted when they are known, and of outputs, counted as they are generated.
        concurrent_requests: that are being answered.
    """

    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    concurrent_requests: PositiveInt | None = None


class KeySource(_Settings):
    """Where API keys are: in a file, which is read again when it changes, or in an environment variable. Both are those
    of the ingress replica, on its node."""

    file: Path | None = None
    env: str | None = None

    @model_validator(mode="after")
    def _check_one(self) -> KeySource:
        if (self.file is None) == (self.env is None):
            raise ValueError("api_keys needs either file, a path, or env, the name of an environment variable")
        return self


class HttpSettings(_Settings):
    """Protection of the HTTP interface. Limits of callers hold over all ingress replicas, other ones for each of them.

    Attributes:
        api_keys: who may call; `None`: everybody who can reach the port.
        open_paths: these need no key and count towards no limit.
        operator_paths: these, and what is below them, need a key that is an operator's, if `api_keys` is set.
        key_limits: of each key that has none of its own.
        address_limits: of each client address, where there are no keys, and of those that send a wrong one.
        max_addresses: as many are told apart; when more call at once, the further ones share the limits of one.
        max_concurrent_requests: of all callers together, in one ingress replica; more are answered 503.
        max_body_bytes: of a request; longer ones are answered 413.
        body_timeout_s: a body that has not arrived after so long is answered 408.
        max_headers: number of header lines, and
        max_header_bytes: their size; more is answered 431.
        max_url_bytes: path and query; longer ones are answered 414.
        default_timeout_s: `timeout_s` of requests that name none; by default `max_timeout_s`.
        max_timeout_s: requests that name a longer one are refused.
        cors_origins: web pages of these origins may call from a browser; "*": of all.
        log_requests: one line for each request in the log, without any of its text.
    """

    api_keys: KeySource | None = None
    open_paths: frozenset[str] = frozenset({"/health", "/ready"})
    operator_paths: frozenset[str] = frozenset({"/metrics", "/v1/load", "/v1/pins"})
    key_limits: RateLimits = RateLimits()
    address_limits: RateLimits = RateLimits()
    max_addresses: PositiveInt = 10_000
    max_concurrent_requests: PositiveInt | None = None
    max_body_bytes: PositiveInt = 8 << 20
    body_timeout_s: PositiveFloat = 30.0
    max_headers: PositiveInt = 100
    max_header_bytes: PositiveInt = 32 << 10
    max_url_bytes: PositiveInt = 8 << 10
    default_timeout_s: PositiveFloat | None = None
    max_timeout_s: PositiveFloat | None = None
    cors_origins: tuple[str, ...] = ()
    log_requests: bool = True

    @model_validator(mode="after")
    def _check_timeouts(self) -> HttpSettings:
        default, most = self.default_timeout_s, self.max_timeout_s
        if default is not None and most is not None and default > most:
            raise ValueError(f"default_timeout_s is {default} and max_timeout_s {most}; the former must not be longer")
        return self


class KeyEntry(_Settings):
    """One API key in a file.

    Attributes:
        name: appears in the log, never the key.
        key: itself, at least 16 characters; or
        sha256: of the key, in hexadecimal, so that the file need not hold it.
        tenant: whose requests these are; bodies that name another are refused. `None`: bodies may name any.
        models: models and adapters that may be asked for; `None`: all.
        operator: whether it is good for `operator_paths`, too.
        best_priority: bodies may not ask for a lower `priority`, which would go first.
        limits: instead of `key_limits`.
    """

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.@-]+$")
    key: str | None = Field(default=None, min_length=16, max_length=512, pattern=r"^[!-~]+$")
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{64}$")
    tenant: str | None = Field(default=None, min_length=1, max_length=256)
    models: frozenset[str] | None = None
    operator: bool = False
    best_priority: int | None = None
    limits: RateLimits | None = None

    @model_validator(mode="after")
    def _check_one(self) -> KeyEntry:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("needs either key or sha256")
        return self


class KeyFile(_Settings):
    """A YAML or JSON file of API keys."""

    keys: tuple[KeyEntry, ...] = Field(min_length=1)
