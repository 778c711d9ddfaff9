"""Prefill apart from decode against a real Ray Serve: two replicas of SmolLM2 on this machine, a thread each.

In turn, both replicas do both, and one computes prompts for the other (`routing.prefill_share`). Three clients stream
answers of 96 tokens to short questions, one after the other; a fourth one has documents of about 2,000 tokens read,
with answers of 32 tokens, and a pause between them. All prompts differ.

    gap      between two pieces of an answer to a question: the 95th percentile, and the largest
    pause    from a document's first token to its second: with roles the call moves meanwhile, and the last blocks
    ttft     of documents, and of questions

One machine's cores and memory bandwidth are shared by both replicas, so that roles free no device here.
--quick: one round, and a shorter one.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks import harness, real_models
from benchmarks.served import Served, cluster
from folio.app.models.named import SMOLLM2

NAME = "folio-disaggregation"
ROUNDS, ROUND_S, QUICK_ROUND_S, TIMEOUT_S = 3, 45.0, 15.0, 240.0
NUM_QUESTIONERS, QUESTION_WORDS, QUESTION_TOKENS = 3, 20, 96
DOCUMENT_WORDS, DOCUMENT_TOKENS, DOCUMENT_PAUSE_S = 550, 32, 1.0
WAYS: Mapping[str, dict[str, Any]] = {"mixed": {}, "roles": {"prefill_share": 0.5}}


@dataclass
class Answer:
    """A streamed answer. `asked`, `times`: of the request and its pieces, by `time.monotonic`."""

    asked: float
    times: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.asked

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.times)]


def ask(url: str, num_words: int, num_tokens: int) -> Answer:
    import httpx

    rng = random.Random()
    prompt = " ".join(f"{rng.choice(('key', 'room', 'sea', 'tower'))} {rng.randrange(100)}" for _ in range(num_words))
    body = {"model": "model", "prompt": prompt, "max_tokens": num_tokens, "min_tokens": num_tokens, "stream": True}
    answer = Answer(time.monotonic())
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as response:
        for line in response.iter_lines():
            if '"choices":[{' in line:
                answer.times.append(time.monotonic())
    if line or len(answer.times) < 2:
        raise RuntimeError(f"an answer broke off: {response.status_code}, {line}")
    return answer


def run(app: Served, seconds: float) -> dict[str, float]:
    """One round."""
    questions, documents = list[Answer](), list[Answer]()
    ends_at = time.monotonic() + seconds

    def client(answers: list[Answer], pause_s: float, *of_each: int) -> None:
        while time.monotonic() < ends_at:
            answers.append(ask(app.url, *of_each))
            time.sleep(pause_s)

    of_clients: list[tuple[Any, ...]] = [(questions, 0.0, QUESTION_WORDS, QUESTION_TOKENS)] * NUM_QUESTIONERS
    of_clients.append((documents, DOCUMENT_PAUSE_S, DOCUMENT_WORDS, DOCUMENT_TOKENS))
    with ThreadPoolExecutor() as pool:
        for ended in [pool.submit(client, *args) for args in of_clients]:
            ended.result()
    gaps_s = [gap for answer in questions for gap in answer.gaps_s]
    return {
        "gap_p95_s": harness.percentile(gaps_s, 95),
        "gap_max_s": max(gaps_s),
        "pause_s": statistics.median(answer.gaps_s[0] for answer in documents),
        "document_ttft_s": statistics.median(answer.ttft_s for answer in documents),
        "question_ttft_s": statistics.median(answer.ttft_s for answer in questions),
        "num_questions": len(questions),
        "num_documents": len(documents),
    }


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    harness.needs("ray", "httpx", "psutil")
    model = real_models.fetched(SMOLLM2)
    if model is None:
        raise SystemExit("SmolLM2 is not there; `python -m benchmarks.real_models` fetches it")
    engine = {"model": str(model), "kv_memory_bytes": 1 << 30, "max_model_len": 4096, "num_threads": 1}
    seconds, rounds = (QUICK_ROUND_S, 1) if args.quick else (ROUND_S, ROUNDS)
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    received = 0
    with cluster(8) as url:
        for number, way in itertools.product(range(rounds), WAYS):
            app = Served(NAME, url, {"engine": engine, "model_name": "model", "routing": WAYS[way]})
            app.deploy(timeout_s=TIMEOUT_S, num_replicas=2)
            app.wait_until(lambda app=app: len(app.processes()) == 2, TIMEOUT_S)  # type: ignore[misc]
            run(app, 5.0)  # warms up
            before = app.counted("folio_received_bytes")
            runs[way].append(run(app, seconds))
            print(
                f"round {number + 1}, {way}: " + ", ".join(f"{k} {v:.3g}" for k, v in runs[way][-1].items()), flush=True
            )
            if way == "roles":
                received += app.counted("folio_received_bytes") - before
    figures = {f"{key}_{way}": statistics.median(r[key] for r in runs[way]) for way in WAYS for key in runs[way][0]}
    for key in ("gap_p95_s", "gap_max_s", "pause_s", "document_ttft_s", "question_ttft_s"):
        ratio = harness.median_ratio(*([run_of[key] for run_of in runs[way]] for way in ("roles", "mixed")))
        figures[f"{key.removesuffix('_s')}_roles_vs_mixed"] = ratio
    figures["received_mib"] = received / 2**20
    harness.finish("disaggregation_real", args, figures, runs)


if __name__ == "__main__":
    main()
