"""Sessions with pauses against a real Ray Serve: the built-in model, and a cache that holds a part of them.

A session is a conversation of growing prompts (`/v1/completions`), with a pause after each turn; beside the sessions
come completions that never return. Two runs: the server decides by itself, and sessions send `cache_ttl_s`. The mean
TTFT of the turns after a session's first, and the cached share of their prompts by the usage.
"""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from typing import Any

from benchmarks import harness
from benchmarks.served import Served, served

# Tokens of the cache: half of what the sessions and the completions of a pause need.
_KV_BYTES = 24 << 20
_SESSIONS, _TURNS, _PAUSE_S = 6, 6, 3.0
_FIRST_WORDS, _TURN_WORDS, _COMPLETION_WORDS = 500, 60, 500
_WORDS = ["the", "key", "room", "hotel", "night", "porter", "is", "open", "and", "letter", "sea", "north", "tower"]


def measure(*, quick: bool) -> tuple[dict[str, float], Any]:
    turns = 3 if quick else _TURNS
    args = {
        "engine": {"model": "builtin", "kv_memory_bytes": _KV_BYTES, "retain_quota": 0.75, "max_model_len": 2048},
    }
    raw: dict[str, Any] = {}
    with served("agents", args) as server:
        server.deploy()
        for name, ttl_s in (("warm-up", None), ("without", None), ("with", 60.0)):
            raw[name] = _run(server, name, turns, ttl_s)
            print(
                f"{name:8s} cache_ttl_s: {raw[name]['hit_share']:.1%} of later turns' prompts cached, "
                f"TTFT {1e3 * raw[name]['ttft_s']:.0f} ms"
            )
    without, retained = raw["without"], raw["with"]
    return {
        "hit_share": without["hit_share"],
        "hit_share_retained": retained["hit_share"],
        "next_turn_ttft_retained_vs_not": retained["ttft_s"] / without["ttft_s"],
    }, raw


def _run(server: Served, name: str, turns: int, ttl_s: float | None) -> dict[str, float]:
    import httpx

    found: list[tuple[int, int, float]] = []  # of each later turn: prompt tokens, cached ones, TTFT
    sessions_end = threading.Event()

    def session(number: int) -> None:
        rng = random.Random(f"{name} {number}")
        prompt = _text(rng, _FIRST_WORDS)
        with httpx.Client(timeout=120.0) as client:
            for turn in range(turns):
                time.sleep(_PAUSE_S * rng.uniform(0.5, 1.5))
                outcome = _ask(client, server.url, prompt, ttl_s)
                if turn:
                    found.append(outcome)
                prompt += " " + _text(rng, _TURN_WORDS)

    def completions() -> None:
        rng = random.Random(f"{name} completions")
        with httpx.Client(timeout=120.0) as client:
            while not sessions_end.is_set():
                _ask(client, server.url, _text(rng, _COMPLETION_WORDS), None)
                time.sleep(0.1)

    beside = threading.Thread(target=completions)
    clients = [threading.Thread(target=session, args=(number,)) for number in range(_SESSIONS)]
    beside.start()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    sessions_end.set()
    beside.join()
    prompt_tokens, cached_tokens, ttfts_s = zip(*found, strict=True)
    return {
        "hit_share": sum(cached_tokens) / sum(prompt_tokens),
        "ttft_s": statistics.fmean(ttfts_s),
        "num_turns": len(found),
    }


def _ask(client: Any, url: str, prompt: str, ttl_s: float | None) -> tuple[int, int, float]:
    """Prompt tokens, cached ones, and TTFT of a streamed completion."""
    body = {
        "model": "builtin",
        "prompt": prompt,
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_ttl_s": ttl_s,
    }
    begun, first_at, usage = time.perf_counter(), None, None
    with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            first_at = first_at or time.perf_counter()
            usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
    assert first_at is not None
    assert usage is not None
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], first_at - begun


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=num_words))


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    figures, raw = measure(quick=args.quick)
    harness.finish("agents_real", args, figures, raw)


if __name__ == "__main__":
    main()
