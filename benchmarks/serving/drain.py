"""Drain: the time until replicas are gone that have long streams.

A Ray Serve application on three replicas. Seeded streams run, and `num_replicas` becomes 1: the streams of two replicas
move to the third one. With the built-in model every text must be the one that the stream has without that; with the
real default model prompts are long. Beside the measured time stands how long the replicas would have stayed with their
last streams: a server without moves waits.

Then the time to the first token of a prompt that another engine has begun, with its blocks and without, in turn: as
between replicas of one machine, and over TCP.

--quick: shorter streams and prompts.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness, real_models
from benchmarks.served import served
from folio.app.config.engine import EngineConfig
from folio.app.engine import LLM, SamplingParams
from folio.app.engine.engine import Engine
from folio.app.engine.model.tokenizer import load_tokenizer
from folio.app.engine.request.engine_request import EngineRequest
from folio.app.engine.startup import warm_up
from folio.app.models.named import SMOLLM2

NAME = "folio-drain"
NUM_STREAMS, NUM_REPLICAS = 32, 3
PROMPT, DTYPE = "What is Folio?", "float32"
TIMEOUT_S = 300.0
REAL_STREAMS, VOCABULARY = 12, range(1000, 40_000)


@dataclass
class Stream:
    """A stream. `times`: of its events, by `time.monotonic`; `error`: what it said instead of its end."""

    seed: int
    prompt: str | list[int] = PROMPT
    text: str = ""
    times: list[float] = field(default_factory=list)
    error: str = ""

    def read(self, url: str, num_tokens: int) -> None:
        import httpx

        # `min_tokens`: tokens that end an output have no text, and a stream with many of them would seem to pause.
        body = {
            "model": "m",
            "prompt": self.prompt,
            "max_tokens": num_tokens,
            "min_tokens": num_tokens,
            "stream": True,
        }
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body | {"seed": self.seed}, timeout=TIMEOUT_S
        ) as answer:
            line = ""
            for line in answer.iter_lines():
                if '"choices":[{' in line:
                    self.text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    self.times.append(time.monotonic())
                elif '"error"' in line:
                    self.error = line
            if line != "" or not self.times:
                self.error = self.error or f"{answer.status_code}: {line}"


def run(streams: list[Stream], num_tokens: int, **engine: Any) -> dict[str, float]:
    """Fills the streams; returns figures."""
    engine |= {"kv_memory_bytes": 1 << 30, "max_num_seqs": len(streams)}
    with served(NAME, {"engine": engine, "model_name": "m"}) as app:
        app.deploy(timeout_s=TIMEOUT_S, num_replicas=NUM_REPLICAS)
        threads = [threading.Thread(target=stream.read, args=(app.url, num_tokens)) for stream in streams]
        for thread in threads:
            thread.start()
        app.wait_until(lambda: all(len(stream.times) > 2 for stream in streams), TIMEOUT_S)
        begun = time.monotonic()
        app.deploy(timeout_s=TIMEOUT_S, num_replicas=1)
        app.wait_until(lambda: len(app.processes()) == 1, TIMEOUT_S)
        gone_s = time.monotonic() - begun
        for thread in threads:
            thread.join()
        all_s = time.monotonic() - begun
        num_bytes = app.counted("folio_received_bytes")
    pauses = sorted(
        max((b - max(a, begun) for a, b in itertools.pairwise(stream.times) if b > begun), default=0.0)
        for stream in streams
    )
    for stream in streams:
        if stream.error:
            print(stream.error)
    return {
        "gone_s": gone_s,
        "streams_end_s": all_s,
        "moved_mib": num_bytes / (1 << 20),
        "broken": sum(bool(stream.error) for stream in streams),
        "pause_p50_s": pauses[len(pauses) // 2],
        "pause_p99_s": pauses[-1],
    }


def num_wrong(streams: list[Stream], num_tokens: int) -> int:
    """Streams whose texts an engine alone does not give."""
    tokenizer: Any = load_tokenizer("builtin")
    prompt = tokenizer(PROMPT)["input_ids"]
    with LLM("builtin", dtype=DTYPE, kv_memory_bytes=64 << 20) as llm:
        params = [SamplingParams(seed=stream.seed, max_tokens=num_tokens, min_tokens=num_tokens) for stream in streams]
        texts = [output.text for output in llm.generate([prompt] * NUM_STREAMS, params)]
    return sum(stream.text != text for stream, text in zip(streams, texts, strict=True) if not stream.error)


def random_prompt(num_tokens: int, numbers: random.Random) -> list[int]:
    return [numbers.choice(VOCABULARY) for _ in range(num_tokens)]


def first_tokens(model: Path, num_tokens: int, repeats: int) -> dict[str, list[float]]:
    """Seconds to the first token of prompts that another engine has in its cache, by the way that their blocks come."""
    config = EngineConfig(model=str(model), kv_memory_bytes=1 << 30)
    numbers, found = random.Random(0), dict[str, list[float]]()
    engines = [Engine(config), Engine(config)]
    try:
        for engine in engines:
            warm_up(engine)
        giver, receiver = (engine.handover for engine in engines)
        assert giver is not None
        assert receiver is not None
        ways = {"machine": giver.address(), "computed": ""}
        giver.giver.listen("127.0.0.1")
        ways["network"], receiver.receiver.host = giver.address(), "127.0.0.2"
        assert receiver.receiver.is_remote(ways["network"])
        for _ in range(repeats + 1):  # the first one warms up
            for way, held_at in ways.items():
                prompt = random_prompt(num_tokens, numbers)
                first_token_s(engines[0], prompt, "")
                found.setdefault(way, []).append(first_token_s(engines[1], prompt, held_at))
    finally:
        for engine in engines:
            engine.close()
    return {way: times[1:] for way, times in found.items()}


def first_token_s(engine: Engine, prompt: list[int], held_at: str) -> float:
    """Seconds; all prefixes are dropped before."""
    engine.memory.prefixes.evict_prefixes(())
    begun, params = time.perf_counter(), SamplingParams(temperature=0, max_tokens=1)
    engine.prepare(EngineRequest("r", prompt, params, held_at=held_at))("r")
    while engine.has_work:
        engine.step()
    return time.perf_counter() - begun


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    harness.needs("ray", "httpx", "psutil")
    num_tokens, prompt_tokens, repeats = (1000, 200, 2) if args.quick else (2500, 1000, 9)
    streams = [Stream(seed) for seed in range(NUM_STREAMS)]
    figures = run(streams, num_tokens, model="builtin", dtype=DTYPE)
    figures["wrong"] = num_wrong(streams, num_tokens)
    raw: dict[str, Any] = {}
    if (model := real_models.fetched(SMOLLM2)) is not None:
        numbers = random.Random(0)
        long = [Stream(seed, random_prompt(prompt_tokens, numbers)) for seed in range(REAL_STREAMS)]
        figures |= {f"real_{name}": value for name, value in run(long, num_tokens // 5, model=str(model)).items()}
        raw = first_tokens(model, 2 * prompt_tokens, repeats)
        figures |= {f"first_token_{way}_s": statistics.median(times) for way, times in raw.items()}
    harness.finish("drain", args, figures, raw)
    harness.fail_if_any(figures, "broken", "wrong")


if __name__ == "__main__":
    main()
