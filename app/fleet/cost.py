"""Routing cost model: a request's expected time to first token at a replica, and its harm to others, in seconds.

    cost    = TTFT + harm
    TTFT    = queue + P + steps * decode_s + wait for room in the cache and in the batch + wake + others
    harm    = P * (work + even * min(share / mean share, 2)) + the wake that the request begins

    P       seconds to compute the prompt without what is cached there
    share   of the last minute that this router's requests take at the replica
    wake    seconds until the model is awake there, more where that displaces other models; 0 where it is awake
    others  wait for queued prompts of other models, which share the device's time: at most queue + P for each of them

- `work`: computing the prompt takes compute from all other requests. A prompt leaves its prefix when the queue there is
  longer by more than `1 + work` times the saving.
- `even`: later requests find the replica busier. Replicas with empty queues cost this request the same; without this
  term chance decides between them, and work piles up on some. In the simulator, on the Mooncake trace, the busiest
  replica computed 1.29 times the mean of 64, and 1.87 times that of 256; with the term, 1.09 and 1.28 (`work` was 4).

- A wake takes memory from other models; one more request for a model that is already waking takes none. So requests for
  a model gather where it is awake or waking, until the queue there is longer by twice its wake time.

The other terms of harm are proportional to P: the model's speed does not matter, and a replica with the prefix keeps
its advantage. Rates are measured by the replicas (`StepTimes`, `freed_tokens_per_s`). Two more harms brought nothing in
the simulator: eviction of cached blocks, and the delay of decodes by the prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from folio.app.engine.report import attended_tokens

Array = np.ndarray[Any, np.dtype[np.float64]]

# Cap of `share / mean share`. On a quiet fleet a lone session is all of the work, and must not leave its prefix.
_MOST_OF_MEAN = 2.0
# Expected turnover time of a full cache until a replica has measured it.
_TURNOVER_S = 60.0


@dataclass(frozen=True, slots=True)
class LoadArrays:
    """Figures of `ReplicaReport`s as arrays over the replicas, `[num_replicas]` each.

    `queued_tokens`, `queued_s` and `num_requests` include requests that this router has sent since the report.
    `assigned_share` is the share of the last minute that this router's requests were expected to take. `sleeping_s` is
    `wake_s` where a request would begin the wake, and 0 elsewhere.
    """

    fixed_s: Array
    token_s: Array
    attended_s: Array
    step_tokens: Array
    queued_tokens: Array
    queued_s: Array
    decode_s: Array
    num_requests: Array
    max_num_seqs: Array
    free_tokens: Array
    total_tokens: Array
    freed_tokens_per_s: Array
    wake_s: Array
    sleeping_s: Array
    others_s: Array
    num_others: Array
    assigned_share: Array


LOAD_FIELDS = tuple(field.name for field in fields(LoadArrays))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostWeights:
    """Weights of the harm to others against the request's own time to first token.

    Measured by `benchmarks/routing.py --sweep`.

    Attributes:
        work: weight of the prefill seconds. At 0 prompts leave their prefix too readily: they wait a little less, and a
            second copy evicts other prefixes.
        even: weight of the prefill seconds at a replica to which this router has assigned the mean amount of work.
    """

    work: float = 5.0
    even: float = 1.0


def prefill_seconds(loads: LoadArrays, num_tokens: int, cached: Array) -> Array:
    """Seconds to compute a prompt at each replica, given its cached tokens, `[num_replicas]`."""
    new = num_tokens - cached
    num_steps = np.ceil(new / loads.step_tokens)
    return num_steps * loads.fixed_s + new * loads.token_s + attended_tokens(new, cached) * loads.attended_s


def request_cost(loads: LoadArrays, num_tokens: int, cached: Array, weights: CostWeights) -> tuple[Array, Array]:
    """Expected time to first token and harm to others in seconds, `[num_replicas]` each.

    Args:
        num_tokens: length of the prompt.
        cached: cached tokens of the prompt at each replica, `[num_replicas]`.
    """
    new = num_tokens - cached
    own_s = prefill_seconds(loads, num_tokens, cached)
    num_steps = np.ceil((loads.queued_tokens + new) / loads.step_tokens)
    room_s = _wait_for_room(loads, new)
    ttft_s = loads.queued_s + own_s + num_steps * loads.decode_s + room_s + loads.wake_s
    if loads.num_others.any():
        ttft_s += np.minimum(loads.others_s, loads.num_others * (loads.queued_s + own_s))

    mean_share = loads.assigned_share.mean()
    shares = np.minimum(loads.assigned_share / mean_share, _MOST_OF_MEAN) if mean_share > 0 else loads.assigned_share
    harm_s = (weights.work + weights.even * shares) * own_s + loads.sleeping_s
    return ttft_s, harm_s


def _wait_for_room(loads: LoadArrays, new: Array) -> Array:
    """Seconds until running requests have made room for another one, in the cache and in the batch."""
    freed_per_s = np.maximum(loads.freed_tokens_per_s, loads.total_tokens / _TURNOVER_S)
    short_tokens = np.maximum(loads.queued_tokens + new - loads.free_tokens, 0.0)
    short_seqs = np.maximum(loads.num_requests + 1 - loads.max_num_seqs, 0.0)
    tokens_per_seq = (loads.total_tokens - loads.free_tokens) / np.maximum(loads.num_requests, 1.0)
    wait_s: Array = np.maximum(short_tokens, short_seqs * tokens_per_seq) / freed_per_s
    return wait_s
