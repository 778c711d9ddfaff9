"""Sessions with pauses against a real Ray Serve: the built-in model, and a cache that holds a part of them.

A session is a conversation of growing prompts (`/v1/completions`), with a pause after each turn; beside the sessions
come completions that never return. In turn, the server decides by itself, and sessions send `cache_ttl_s`. The mean
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
# Longer than a pause with its turn.
_TTL_S = 20.0
_REPEATS, _SESSIONS, _TURNS, _PAUSE_S = 3, 6, 6, 3.0
_FIRST_WORDS, _TURN_WORDS, _COMPLETION_WORDS = 500, 60, 500
_WORDS = ["the", "key", "room", "hotel", "night", "porter", "is", "open", "and", "letter", "sea", "north", "tower"]


def measure(*, quick: bool) -> tuple[dict[str, float], Any]:
    repeats, turns = (1, 3) if quick else (_REPEATS, _TURNS)
    engine = {"model": "builtin", "kv_memory_bytes": _KV_BYTES, "retain_quota": 0.75, "max_model_len": 2048}
    runs: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    with served("agents", {"engine": engine}) as server:
        server.deploy()
        _run(server, "warm-up", turns, None)
        for number in range(repeats):
            for name, ttl_s in (("without", None), ("with", _TTL_S)):
                runs[name].append(_run(server, f"{number} {name}", turns, ttl_s))
                print(
                    f"{name:8s} cache_ttl_s: {runs[name][-1]['hit_share']:.1%} of later turns' prompts cached, "
                    f"TTFT {1e3 * runs[name][-1]['ttft_s']:.0f} ms",
                    flush=True,
                )
            time.sleep(_TTL_S)  # what this round retained must not take the cache from the next one
    ttfts_s = {name: [run["ttft_s"] for run in of] for name, of in runs.items()}
    return {
        "hit_share": statistics.fmean(run["hit_share"] for run in runs["without"]),
        "hit_share_retained": statistics.fmean(run["hit_share"] for run in runs["with"]),
        "next_turn_ttft_retained_vs_not": harness.median_ratio(ttfts_s["with"], ttfts_s["without"]),
    }, runs


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
