"""How long streams wait beside a long prompt, and what the bound of that wait costs the prompt.

Random weights in the shape of SmolLM2-135M. A few sequences decode; then a prompt of thousands of tokens arrives.
Engines with and without `max_mixed_step_s` in turn: the longest and the median time of a step while the prompt is
computed, over the usual step before it, and the prompt's time to first token.

--quick: a shorter prompt, once.
"""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks import checkpoints, harness
from folio.app.config.engine import EngineConfig
from folio.app.engine import LLM, SamplingParams
from folio.app.engine.schedule.mixed_steps import STRETCH

NUM_STREAMS, STREAM_TOKENS, SEED = 3, 60, 3
PROMPT_TOKENS, QUICK_PROMPT_TOKENS, REPEATS = 7000, 700, 5
BEFORE = 30  # steps of which the usual one is the median
BOUND_S = EngineConfig(model="").max_mixed_step_s or 0.0
ENGINES = {"bounded": BOUND_S, "unbounded": None}


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds of steps, and of the prompt's first token from its arrival."""

    usual_s: float
    mixed_s: list[float]
    ttft_s: float

    def over_bound(self) -> float:
        """The longest step over what it may take: `BOUND_S`, or 4 usual steps if that is longer."""
        return max(self.mixed_s) / max(BOUND_S, STRETCH * self.usual_s)


def measure(llm: LLM, prompt_tokens: int, seed: int) -> Run:
    """One prompt beside streams that go on until it is computed."""
    engine, rng = llm.engine, random.Random(seed)
    for number in range(NUM_STREAMS):
        engine.submit(f"stream {number}", _ids(rng, STREAM_TOKENS), _greedy(8000))
    usual: list[float] = []
    mixed: list[float] = []
    while len(usual) < BEFORE + NUM_STREAMS:
        usual.append(_step(llm))
    begun = time.perf_counter()
    engine.submit("prompt", _ids(rng, prompt_tokens), _greedy(1))
    while any(name == "prompt" for name in engine.requests):
        mixed.append(_step(llm))
    ttft_s = time.perf_counter() - begun
    engine.cancel_all()
    return Run(median(usual[NUM_STREAMS:]), mixed, ttft_s)


def _step(llm: LLM) -> float:
    start = time.perf_counter()
    llm.engine.step()
    return time.perf_counter() - start


def _ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 49152) for _ in range(length)]


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def main() -> None:
    args = harness.arguments(__doc__, devices=("cpu", "cuda")).parse_args()
    prompt_tokens = QUICK_PROMPT_TOKENS if args.quick else PROMPT_TOKENS
    runs: dict[str, list[Run]] = {name: [] for name in ENGINES}
    with tempfile.TemporaryDirectory() as folder:
        config = checkpoints.config_of("smollm2-135m", max_position_embeddings=8192, dtype="bfloat16")
        config.save_pretrained(folder)
        llms = {name: _llm(folder, args.device, bound) for name, bound in ENGINES.items()}
        for number in range(1 if args.quick else REPEATS):
            for name, llm in llms.items():
                if not number:
                    harness.note_engine(llm)
                    measure(llm, QUICK_PROMPT_TOKENS, SEED - 1)  # the first steps of a kind are slower
                runs[name].append(run := measure(llm, prompt_tokens, SEED + number))
                print(f"{name}: longest step {max(run.mixed_s):.3f} s, first token {run.ttft_s:.2f} s", flush=True)
        for llm in llms.values():
            llm.close()
    harness.finish("stalls", args, _figures(runs), {name: [asdict(r) for r in of] for name, of in runs.items()})


def _llm(folder: str, device: str, bound: float | None) -> LLM:
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "prefix_cache": False, "kv_memory_bytes": 1 << 30}
    return LLM(folder, device=device, max_mixed_step_s=bound, **settings)


def _figures(runs: dict[str, list[Run]]) -> dict[str, float]:
    figures = {"usual_step_ms": 1e3 * median([run.usual_s for of in runs.values() for run in of])}
    for name, of in runs.items():
        figures[f"{name}_longest_step_ms"] = 1e3 * median([max(run.mixed_s) for run in of])
        figures[f"{name}_step_ms"] = 1e3 * median([median(run.mixed_s) for run in of])
        figures[f"{name}_ttft_s"] = median([run.ttft_s for run in of])
    figures["longest_over_bound"] = median([run.over_bound() for run in runs["bounded"]])
    pairs = [[run.ttft_s for run in runs[name]] for name in ENGINES]
    return figures | {"ttft_vs_unbounded": harness.median_ratio(*pairs)}


if __name__ == "__main__":
    main()
