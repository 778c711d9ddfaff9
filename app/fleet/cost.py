"""What it costs to send a request to a replica, in seconds: its own expected time to first token, and harm to others.

    cost    = TTFT + harm
    TTFT    = queue + P + steps * decode_s + wait for room in the cache and in the batch
    harm    = P * (work + even * min(share / mean share, 2))

    P       seconds to compute the prompt without what is cached there
    share   of the last minute that this router's requests take there

- `work`: what is computed is as much less for everybody else. A prompt leaves its prefix when the queue there is longer
  by more than `1 + work` times what the prefix saves.
- `even`: later requests find the replica busier. At any moment many replicas have empty queues, equal for this request;
  without this term chance decides among them, and work piles up on some. In the simulator, on the Mooncake trace, the
  replica with the most computed 1.29 times the mean of 64, and 1.87 times that of 256; with it,
  1.09 and 1.28 (`work` was 4 then).

Every term of harm is in proportion to P, so nothing depends on how fast a model is, and a replica that has the prefix
keeps its advantage. Every rate is what replicas have measured (`StepTimes`, `freed_tokens_per_s`). Two more harms were
tried in the simulator, and brought nothing: that cached blocks are given up, and that sequences which generate there
wait while the prompt is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from app.engine.report import attended_tokens

Array = np.ndarray[Any, np.dtype[np.float64]]

# More of a router's work than so many times the mean counts as this. On a quiet fleet a lone session is all the work
# there is, at one replica, and must not be driven from its prefix.
_MOST_OF_MEAN = 2.0
# Until a replica has seen requests end, a cache that is full is expected to turn over in this time.
_TURNOVER_S = 60.0


@dataclass(frozen=True, slots=True)
class LoadArrays:
    """One number a replica of everything, `[num_replicas]` each: see `ReplicaReport` for their meaning.

    `queued_tokens`, `queued_s` and `num_requests` include what this router has sent since the report; `assigned_share`
    is the share of the last minute that this router's requests were expected to take there.
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
    assigned_share: Array


LOAD_FIELDS = tuple(field.name for field in fields(LoadArrays))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostWeights:
    """How much harm to others counts against the request's own time to first token.

    `benchmarks/routing.py --sweep` measures what they do.

    Attributes:
        work: seconds of prefill. Without it prompts leave their prefix too readily: they wait a little less, and there
            are two copies, for which others' are given up.
        even: seconds of prefill, where this router has assigned as much work as to the mean replica.
    """

    work: float = 5.0
    even: float = 1.0


def prefill_seconds(loads: LoadArrays, num_tokens: int, cached: Array) -> Array:
    """Seconds that each replica needs to compute a prompt of which `cached` `[num_replicas]` tokens are there."""
    new = num_tokens - cached
    num_steps = np.ceil(new / loads.step_tokens)
    return num_steps * loads.fixed_s + new * loads.token_s + attended_tokens(new, cached) * loads.attended_s


def request_cost(loads: LoadArrays, num_tokens: int, cached: Array, weights: CostWeights) -> tuple[Array, Array]:
    """Expected time to first token and harm to others in seconds, `[num_replicas]` each.

    Args:
        num_tokens: of the prompt.
        cached: of these, how many each replica has, `[num_replicas]`.
    """
    new = num_tokens - cached
    own_s = prefill_seconds(loads, num_tokens, cached)
    num_steps = np.ceil((loads.queued_tokens + new) / loads.step_tokens)
    room_s = _wait_for_room(loads, new)
    ttft_s = loads.queued_s + own_s + num_steps * loads.decode_s + room_s

    mean_share = loads.assigned_share.mean()
    shares = np.minimum(loads.assigned_share / mean_share, _MOST_OF_MEAN) if mean_share > 0 else loads.assigned_share
    harm_s = (weights.work + weights.even * shares) * own_s
    return ttft_s, harm_s


def _wait_for_room(loads: LoadArrays, new: Array) -> Array:
    """Seconds until requests that run have made room for one more, in the cache and in the batch."""
    freed_per_s = np.maximum(loads.freed_tokens_per_s, loads.total_tokens / _TURNOVER_S)
    short_tokens = np.maximum(loads.queued_tokens + new - loads.free_tokens, 0.0)
    short_seqs = np.maximum(loads.num_requests + 1 - loads.max_num_seqs, 0.0)
    tokens_per_seq = (loads.total_tokens - loads.free_tokens) / np.maximum(loads.num_requests, 1.0)
    wait_s: Array = np.maximum(short_tokens, short_seqs * tokens_per_seq) / freed_per_s
    return wait_s
