"""A new engine begins with the prefixes that those beside it have: what is pinned, and what is asked for most."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.config import EngineConfig
from app.engine.model_loader import LoadedModel
from vmem import CachedPrefix

# An engine tells of its hot prefixes so many at most, and of so many tokens: a megabyte.
MOST_TOLD_PREFIXES, MOST_TOLD_TOKENS = 256, 1 << 17


@dataclass(frozen=True, slots=True)
class Restored:
    """What came of it. `failed`: prefixes that could not be computed; `late`: for which there was no time."""

    pinned: int = 0
    hot: int = 0
    failed: int = 0
    late: int = 0

    def __str__(self) -> str:
        return (
            f"{self.pinned} pinned and {self.hot} hot prefixes restored, {self.failed} could not be, for {self.late} "
            "there was no time"
        )


def prefix_fingerprint(config: EngineConfig, model: LoadedModel) -> str:
    """What engines must have in common for token ids and keys of one's prefixes to mean the same in another. Weights
    may differ: prefixes are computed anew."""
    tokenizer = model.tokenizer
    common = [
        config.model,
        model.module.config.model_type,
        model.vocab_size,
        config.isolate_tenants,
        None if tokenizer is None else [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template],
    ]
    return hashlib.blake2b(json.dumps(common).encode(), digest_size=16).hexdigest()


def worth_restoring(told: Sequence[Sequence[CachedPrefix]], most_tokens: int) -> list[CachedPrefix]:
    """What several engines tell as one: what is pinned first, then what is hit most, all of them counted together.

    Args:
        most_tokens: of hot prefixes.
    """
    pinned: dict[str, CachedPrefix] = {}
    hot: dict[tuple[tuple[str, ...], tuple[int, ...]], CachedPrefix] = {}
    for prefix in (prefix for prefixes in told for prefix in prefixes):
        if prefix.pin_name is not None:
            pinned.setdefault(prefix.pin_name, prefix)
            continue
        key = prefix.keys, prefix.token_ids
        hits = prefix.hits + (hot[key].hits if key in hot else 0)
        hot[key] = replace(prefix, hits=hits)
    chosen: list[CachedPrefix] = []
    for prefix in sorted(hot.values(), key=lambda prefix: -prefix.hits):
        if len(prefix.token_ids) <= most_tokens:
            most_tokens -= len(prefix.token_ids)
            chosen.append(prefix)
    return [*pinned.values(), *chosen]
