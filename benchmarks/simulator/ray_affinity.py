"""Ray's `PrefixCacheAffinityRouter` as a policy of the simulator: its prefix tree, and its decisions written again."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.simulator.traffic import block_of
from folio.app.fleet.fleet import RoutedRequest

_MODULE = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree"
_MATCH_RATE = 0.1


def prefix_tree() -> Any:
    """An empty tree of Ray's. Raises `ImportError` where this Ray has none."""
    return importlib.import_module(_MODULE).PrefixTree()


class RayAffinity:
    """Decides as `ray.llm`'s `prefix_aware_router.py`: among the replicas with the longest match the one with the
    shortest queue; for a match below a tenth of the prompt, among those with the fewest characters in the tree; when
    queues differ by more than a threshold, the better of two random ones.

    The tree matches text. Here a unit of hundreds of tokens is one character.

    Args:
        tree: `prefix_tree`, shared by all routers.
        queue_len: present number of unfinished requests of a replica, which Serve asks of the replicas.
    """

    def __init__(
        self, tree: Any, queue_len: Callable[[str], int], rng: random.Random, *, imbalanced_threshold: float
    ) -> None:
        self._tree = tree
        self._queue_len = queue_len
        self._rng = rng
        self._imbalanced_threshold = imbalanced_threshold

    def rank_replicas(self, request: RoutedRequest, replica_ids: Sequence[str], now: float) -> list[str]:
        self._tree.add_tenants([r for r in replica_ids if r not in self._tree.tenant_to_char_count], now)
        text = "".join(map(_character, request.keys))
        queues = {r: self._queue_len(r) for r in replica_ids}
        candidates = self._matching(text, replica_ids) if not self._is_imbalanced(queues) else []
        candidates = candidates or self._rng.sample(replica_ids, min(2, len(replica_ids)))
        shortest = min(queues[r] for r in candidates)
        chosen = self._rng.choice([r for r in candidates if queues[r] == shortest])
        self._tree.insert(text, chosen, now)
        return [chosen, *(r for r in replica_ids if r != chosen)]

    def _is_imbalanced(self, queues: dict[str, int]) -> bool:
        return max(queues.values()) - min(queues.values()) > self._imbalanced_threshold

    def _matching(self, text: str, replica_ids: Sequence[str]) -> list[str]:
        matched, tenants = self._tree.prefix_match(text, list(replica_ids))
        if not text or len(matched) / len(text) < _MATCH_RATE:
            tenants = self._tree.get_smallest_tenants()
        return list(tenants or [])


def _character(key: bytes) -> str:
    code = block_of(key) + 1
    return chr(code if code < 0xD800 else code + 0x800)  # without surrogates
