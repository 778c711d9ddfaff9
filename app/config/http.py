"""HTTP settings (`args.http` in the YAML): API keys, limits, sizes, timeouts, batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from folio.app.config.sizes import WrittenSize

UnknownFieldsMode = Literal["error", "ignore"]
PositiveBytes = Annotated[PositiveInt, WrittenSize()]
NonNegativeBytes = Annotated[NonNegativeInt, WrittenSize()]


class Settings(BaseModel):
    """Base of settings: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RateLimits(Settings):
    """Limits of one caller over all ingress replicas (`folio.app.edge.limits`); `None`: no limit.

    Attributes:
        requests_per_minute: requests, which may also come at once, after a minute without any.
        tokens_per_minute: tokens of prompts, counted when tokenised, and of outputs, counted as delivered.
        concurrent_requests: requests in flight.
    """

    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    concurrent_requests: PositiveInt | None = None


class KeySource(Settings):
    """Source of API keys on the ingress's node.

    Attributes:
        file: a file of keys, read again when it changes.
        env: an environment variable with keys, separated by commas, read at the start.
    """

    file: Path | None = None
    env: str | None = None

    @model_validator(mode="after")
    def _check_one(self) -> KeySource:
        if (self.file is None) == (self.env is None):
            raise ValueError("set either file, a path, or env, the name of an environment variable")
        return self


def _check_absolute(folder: Path | None) -> Path | None:
    if folder is not None and not folder.is_absolute():
        raise ValueError(f"it is {str(folder)!r}; use an absolute path, because processes have other working folders")
    return folder


Folder = Annotated[Path | None, AfterValidator(_check_absolute)]


class BatchSettings(Settings):
    """`/v1/files` and `/v1/batches`.

    Attributes:
        store: an absolute path of a folder, which is created; `None`: there are no files and batches. With several
            ingress replicas, a folder that all of them share, with file locks (`flock`).
        max_bytes: of everything in the store.
        max_bytes_per_key: of the files and batches of one API key; without keys, of all callers together.
        max_file_bytes: of one file.
        keep_s: files and ended batches are deleted after this time.
        concurrent_lines: lines of all batches that are computed at the same time; fewer while there are other requests.
    """

    store: Folder = None
    max_bytes: PositiveBytes = 8 << 30
    max_bytes_per_key: PositiveBytes = 2 << 30
    max_file_bytes: PositiveBytes = 200 << 20
    keep_s: PositiveFloat = 30 * 86400.0
    concurrent_lines: PositiveInt = 64


class ResponseSettings(Settings):
    """Stored responses of `/v1/responses`.

    Attributes:
        store: an absolute path of a folder, which is created; with ingress replicas on several machines, a folder that
            all of them share. `None`: one of the server's user in the machine's folder for temporary files.
        max_bytes: of all stored responses. A full store deletes the oldest ones of the API key that has most. 0:
            nothing is stored. A response whose conversation exceeds `max_body_bytes` is not stored; `store` is false.
        keep_s: responses are deleted after this time.
    """

    store: Folder = None
    max_bytes: NonNegativeBytes = 256 << 20
    keep_s: PositiveFloat = 86400.0


class HttpSettings(Settings):
    """Protection of the HTTP interface. Limits of callers hold over all ingress replicas, others for each of them.

    Attributes:
        api_keys: valid keys; `None`: everybody who can reach the port may call.
        open_paths: paths that need no key and count towards no limit, and all paths below them.
        operator_paths: paths that need an operator's key, and all paths below them, if `api_keys` is set.
        key_limits: of each key without limits of its own.
        address_limits: of each client address without `api_keys`; with them, of addresses that send a wrong key.
        max_addresses: addresses with limits of their own; while more are active, the others share one address's limits.
        max_concurrent_requests: of all callers together in one ingress replica; further ones are answered 503.
        max_body_bytes: of a request; longer ones are answered 413.
        body_timeout_s: a body that takes longer to arrive is answered 408.
        max_headers, max_header_bytes: number and size of header lines; more is answered 431.
        max_url_bytes: path and query; longer ones are answered 414.
        unknown_fields: of bodies; "ignore": dropped, logged once for each field and client, counted, and named in the
            header `x-folio-ignored-fields`; "error": answered 400, as fields near a known one always are.
        max_tokens: treatment of an output limit beyond the context's room: "cut": the output may fill the room, and
            the header `x-folio-ignored-fields` names the field; "refuse": answered 400.
        default_timeout_s: `timeout_s` of requests without one; by default `max_timeout_s`.
        max_timeout_s: requests with a longer `timeout_s` are refused.
        allowed_hosts: names by which requests may call this server (`Host`), beside localhost; others are answered 403.
            "*": any. By default any, except without keys at a loopback address: that address and this machine's name.
        cors_origins: origins of web pages that may call from a browser; "*": all. Without `api_keys`, requests by pages
            of other sites are answered 403.
        log_requests: one log line for each request, without any of its text.
        vllm_metrics: `/metrics` also has the metrics under vLLM's names, for its dashboards.
        batches: files and batches.
        responses: stored responses.
        dashboard: the live page at `/dashboard`; its data need a key as `/v1/load` does, its files need none.
        dashboard_links: name → URL of pages to which it leads, such as Grafana's and your own documentation's.
    """

    api_keys: KeySource | None = None
    open_paths: frozenset[str] = frozenset({"/health", "/ping", "/ready"})
    operator_paths: frozenset[str] = frozenset(
        {"/metrics", "/v1/load", "/v1/pins", "/v1/budget", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    )
    key_limits: RateLimits = RateLimits()
    address_limits: RateLimits = RateLimits()
    max_addresses: PositiveInt = 10_000
    max_concurrent_requests: PositiveInt | None = None
    max_body_bytes: PositiveBytes = 8 << 20
    body_timeout_s: PositiveFloat = 30.0
    max_headers: PositiveInt = 100
    max_header_bytes: PositiveBytes = 32 << 10
    max_url_bytes: PositiveBytes = 8 << 10
    unknown_fields: UnknownFieldsMode = "ignore"
    max_tokens: Literal["cut", "refuse"] = "cut"
    default_timeout_s: PositiveFloat | None = None
    max_timeout_s: PositiveFloat | None = None
    allowed_hosts: tuple[str, ...] | None = None
    cors_origins: tuple[str, ...] = ()
    log_requests: bool = True
    vllm_metrics: bool = False
    batches: BatchSettings = BatchSettings()
    responses: ResponseSettings = ResponseSettings()
    dashboard: bool = True
    dashboard_links: dict[Annotated[str, Field(min_length=1, max_length=32)], str] = Field(default={}, max_length=8)

    @field_validator("allowed_hosts")
    @classmethod
    def _check_names(cls, hosts: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for host in hosts or ():
            if host != "*" and not re.fullmatch(r"[\w.-]+|\[?[0-9a-fA-F:.]+\]?", host):
                raise ValueError(f"{host!r} is no host's name; write the name alone, such as llm.example.com")
        return hosts

    @field_validator("dashboard_links")
    @classmethod
    def _check_urls(cls, links: dict[str, str]) -> dict[str, str]:
        for url in links.values():
            if not re.fullmatch(r"https?://[!-~]{1,2000}", url):
                raise ValueError(f"{url!r} is no URL of a page; write one such as https://grafana.example.com/d/folio")
        return links

    @model_validator(mode="after")
    def _check_timeouts(self) -> HttpSettings:
        default, most = self.default_timeout_s, self.max_timeout_s
        if default is not None and most is not None and default > most:
            raise ValueError(f"default_timeout_s is {default}; it must not be longer than max_timeout_s, {most}")
        return self


class KeyEntry(Settings):
    """One API key in a file.

    Attributes:
        name: appears in the log in place of the key.
        key: the key itself, at least 16 characters; or
        sha256: its SHA-256 in hexadecimal, so that the file need not hold the key.
        tenant: of all requests with the key; bodies with another tenant are refused. `None`: bodies may name any.
        models: allowed models and adapters; `None`: all.
        operator: `operator_paths` are allowed.
        best_priority: the lowest `priority` allowed; lower ones go first.
        limits: in place of `key_limits`.
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
            raise ValueError("set either key or sha256")
        return self


class KeyFile(Settings):
    """A YAML or JSON file of API keys."""

    keys: tuple[KeyEntry, ...] = Field(min_length=1)
