"""Drain: the time until replicas are gone that have long streams.

A Ray Serve application with the built-in model on three replicas. Seeded streams run, and `num_replicas` becomes 1: the
streams of two replicas move to the third one. Every text must be the one that the stream has without that. Beside the
measured time stands how long the replicas would have stayed with their last streams: a server without moves waits.
--quick: shorter streams.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks import harness
from benchmarks.served import served
from folio.app.engine import LLM, SamplingParams
from folio.app.engine.model.tokenizer import load_tokenizer

NAME = "folio-drain"
NUM_STREAMS, NUM_REPLICAS = 32, 3
PROMPT, DTYPE = "What is Folio?", "float32"
TIMEOUT_S = 300.0


@dataclass
class Stream:
    """A stream. `times`: of its events, by `time.monotonic`; `error`: what it said instead of its end."""

    seed: int
    text: str = ""
    times: list[float] = field(default_factory=list)
    error: str = ""

    def read(self, url: str, num_tokens: int) -> None:
        import httpx

        body = {"model": "builtin", "prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
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


def run(num_tokens: int) -> tuple[list[Stream], float, float, float, int]:
    """The streams, when replicas were stopped (`time.monotonic`), the seconds until their processes were gone, and
    until the last stream had ended, and the bytes of KV cache that moved."""
    engine = {"model": "builtin", "dtype": DTYPE, "kv_memory_bytes": 1 << 30, "max_num_seqs": NUM_STREAMS}
    streams = [Stream(seed) for seed in range(NUM_STREAMS)]
    with served(NAME, {"engine": engine}) as app:
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
        return streams, begun, gone_s, all_s, app.counted("folio_received_bytes")


def num_wrong(streams: list[Stream], num_tokens: int) -> int:
    """Streams whose texts an engine alone does not give."""
    tokenizer: Any = load_tokenizer("builtin")
    prompt = tokenizer(PROMPT)["input_ids"]
    with LLM("builtin", dtype=DTYPE, kv_memory_bytes=64 << 20) as llm:
        params = [SamplingParams(seed=stream.seed, max_tokens=num_tokens, ignore_eos=True) for stream in streams]
        texts = [output.text for output in llm.generate([prompt] * NUM_STREAMS, params)]
    return sum(stream.text != text for stream, text in zip(streams, texts, strict=True) if not stream.error)


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    harness.needs("ray", "httpx", "psutil")
    num_tokens = 1000 if args.quick else 2500
    streams, begun, gone_s, all_s, num_bytes = run(num_tokens)
    pauses = sorted(
        max((b - max(a, begun) for a, b in itertools.pairwise(stream.times) if b > begun), default=0.0)
        for stream in streams
    )
    broken = [stream.error for stream in streams if stream.error]
    figures = {
        "gone_s": gone_s,
        "streams_end_s": all_s,
        "moved_mib": num_bytes / (1 << 20),
        "broken": len(broken),
        "wrong": num_wrong(streams, num_tokens),
        "pause_p50_s": pauses[len(pauses) // 2],
        "pause_p99_s": pauses[-1],
    }
    for error in broken:
        print(error)
    harness.finish("drain", args, figures, {"pauses": pauses})
    harness.fail_if_any(figures, "broken", "wrong")


if __name__ == "__main__":
    main()
