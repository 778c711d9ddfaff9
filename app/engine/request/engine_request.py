"""Engine request: what an engine is asked to compute, as one value from the HTTP API to the engine's intake."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from folio.app.engine.request.pooled import PoolingParams
from folio.app.engine.request.turn import COMPLETION, Turn
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import RequestError


@dataclass(frozen=True, slots=True)
class BegunOutput:
    """What another engine has generated of output `index` of a request, and delivered.

    Attributes:
        num_inherited: of a fork, the first tokens, which its parent has generated. They are not delivered again, and
            count neither for `max_tokens` nor for stop strings.
        structure_from: tokens before the output's structure begins.
    """

    index: int
    token_ids: Sequence[int]
    num_inherited: int = 0
    structure_from: int = 0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt and how to continue it.

    Attributes:
        request_id: the caller's name for the request. `AsyncEngine` adds an id of its own, because a request may be
            sent twice.
        priority: lower numbers begin first and are preempted last.
        cache_salt: only requests with the same salt share cached prefixes.
        adapter: name or id of the LoRA adapter.
        tenant: with `fair_tenants` each tenant gets the same share; with `isolate_tenants` only its requests share
            cached prefixes.
        user: replaces a missing tenant, for fair shares only.
        owner: the only owner whose calls may fork the request (`AsyncEngine.fork`); `None`: only calls without one.
        timeout_s: seconds until the request ends with `DeadlineError`.
        turn: the kind of request, which tells how likely the prefix is used again.
        cache_ttl_s: keep the prefix cached for this long after the end, at most `max_cache_ttl_s`, if the quota allows.
        expected_cached_tokens: prompt tokens that the router expects in the cache, for the load report and for the
            order of prompts.
        pooling: return a vector of the prompt, and generate nothing.
        prefix_keys: keys of its prefixes (`folio.app.engine.request.prefix_keys`), instead of those that follow from
            salt, adapter and tenant.
        held_at: where the engine that has begun it offers its blocks: `folio.vmem.prefix.store.handover`.
        begun: all outputs of the request that have not ended, if another engine has begun it. They continue where they
            are, with `params.seed`; nothing is delivered a second time. Empty: the request begins here.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    tenant: str | None = None
    user: str | None = None
    owner: str | None = None
    timeout_s: float | None = None
    turn: Turn = COMPLETION
    cache_ttl_s: float | None = None
    expected_cached_tokens: int | None = None
    pooling: PoolingParams | None = None
    prefix_keys: tuple[str, ...] | None = None
    held_at: str = ""
    begun: tuple[BegunOutput, ...] = ()


def check_timeout(timeout_s: float | None) -> None:
    """Raise `RequestError` unless the timeout is positive and finite, or `None`."""
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise RequestError(
            f"timeout_s is {timeout_s}; it must be above 0 and finite, or left out for no limit", "timeout_s"
        )
