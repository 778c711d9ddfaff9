"""Batch-invariant mode: how many texts stay the same where a request goes on elsewhere, and what the mode costs.

SmolLM2-135M-Instruct as it is pulled ("packed", Q4_1), and its dequantised weights in bfloat16, each with
`batch_invariant` and without. Prompts are pieces of this repository's documentation; prefixes are not cached.

Equal: half of the requests are greedy and half have a seed. Each runs alone, then again from a random place on, as on a
replica that takes it over: its prompt and the tokens so far are computed as one prompt. Then all run at once. The
figures are shares of texts that equal the one of the request alone.

Price: tokens per second with the mode over those without, both engines in one process, in turn. Decode: steps of 1 and
16 sequences after prompts of 128 tokens, and of 4 after 1,024. Prefill: a prompt of 1,024 tokens.

--quick: few requests, one repeat.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import harness, real_models
from benchmarks.quality.text import prose
from folio.app.engine import LLM, SamplingParams
from folio.app.engine.request.engine_request import BegunOutput
from folio.app.models.named import SMOLLM2

PROMPT_WORDS = (8, 160)
TEMPERATURES = {"greedy": 0.0, "seeded": 0.8}
MODES = ("default", "invariant")
# Scenario → sequences, tokens of a prompt.
DECODES = {"decode1": (1, 128), "decode16": (16, 128), "decode4_long": (4, 1024)}
PREFILL = 1024

Rates = dict[str, dict[str, list[float]]]  # scenario → mode → of each repeat


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size of the measurements. `requests`: of each kind; `decoded`: tokens of a sequence whose time is measured."""

    requests: int = 24
    new_tokens: int = 64
    repeats: int = 5
    decoded: int = 32


QUICK = Sizes(requests=2, new_tokens=16, repeats=1, decoded=4)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and after how many tokens it goes on elsewhere."""

    prompt: list[int]
    params: SamplingParams
    cut: int


def make_requests(llm: LLM, sizes: Sizes) -> dict[str, list[Asked]]:
    """Requests by kind: texts of some length from anywhere in the documentation."""
    rng, words = random.Random(0), prose(20_000).split(" ")
    made: dict[str, list[Asked]] = {}
    tokenizer = llm.engine.model.tokenizer
    assert tokenizer is not None
    for kind, temperature in TEMPERATURES.items():
        made[kind] = []
        for i in range(sizes.requests):
            length = rng.randint(*PROMPT_WORDS)
            start = rng.randrange(len(words) - length)
            prompt = tokenizer.encode(" ".join(words[start : start + length]))
            params = SamplingParams(max_tokens=sizes.new_tokens, temperature=temperature, ignore_eos=True, seed=i)
            made[kind].append(Asked(prompt, params, rng.randrange(1, sizes.new_tokens)))
    return made


def texts(llm: LLM, asked: Sequence[Asked], delivered: Sequence[Sequence[int]] | None = None) -> list[list[int]]:
    """The requests' tokens, all at once. Args: `delivered`: tokens of each that it has had already."""
    engine, found = llm.engine, [list(tokens) for tokens in delivered or [()] * len(asked)]
    for i, (request, before) in enumerate(zip(asked, found, strict=True)):
        begun = (BegunOutput(0, list(before)),) if before else ()
        engine.submit(str(i), request.prompt, request.params, begun=begun)
    while engine.has_work:
        for delta in engine.step():
            found[int(delta.request_id)] += delta.token_ids
    return found


def measure_texts(llm: LLM, sizes: Sizes) -> dict[str, float]:
    """Shares of texts that equal those of the requests alone."""
    shares = {}
    for kind, asked in make_requests(llm, sizes).items():
        alone = [texts(llm, [request])[0] for request in asked]
        continued = [
            texts(llm, [request], [tokens[: request.cut]])[0] for request, tokens in zip(asked, alone, strict=True)
        ]
        for what, others in (("continued", continued), ("batch", texts(llm, asked))):
            shares[f"{kind}_{what}"] = sum(map(list.__eq__, others, alone)) / len(asked)
    return shares


def rate(llm: LLM, num_prompts: int, prompt_tokens: int, new_tokens: int) -> float:
    """Tokens per second of decode steps after the prompts, or without new tokens those of the prompts."""
    engine = llm.engine
    rng, params = (
        random.Random(time.time_ns()),
        SamplingParams(max_tokens=new_tokens + 2, temperature=0.0, ignore_eos=True),
    )
    begun: set[str] = set()
    start = time.perf_counter()
    for i in range(num_prompts):
        engine.submit(str(i), rng.choices(range(1000, 40_000), k=prompt_tokens), params)
    while len(begun) < num_prompts:
        begun |= {delta.request_id for delta in engine.step() if delta.token_ids}
    if not new_tokens:
        seconds = time.perf_counter() - start
        engine.cancel_all()
        return num_prompts * prompt_tokens / seconds
    start, count = time.perf_counter(), 0
    while engine.has_work:
        count += sum(len(delta.token_ids) for delta in engine.step())
    return count / (time.perf_counter() - start)


def measure_rates(llms: Mapping[str, LLM], sizes: Sizes) -> tuple[dict[str, float], Rates]:
    """Ratio of each scenario's tokens per second, with the mode over without; and all rates."""
    scenarios: dict[str, Callable[[LLM], float]] = {
        name: partial(rate, num_prompts=count, prompt_tokens=length, new_tokens=sizes.decoded)
        for name, (count, length) in DECODES.items()
    }
    scenarios["prefill"] = partial(rate, num_prompts=1, prompt_tokens=PREFILL, new_tokens=0)
    ratios: dict[str, float] = {}
    rates: Rates = {}
    for name, measure in scenarios.items():
        found = harness.alternate({mode: partial(measure, llm) for mode, llm in llms.items()}, sizes.repeats)
        ratios[name], rates[name] = harness.median_ratio(found["invariant"], found["default"]), found
    return ratios, rates


def main() -> None:
    args: argparse.Namespace = harness.arguments(__doc__).parse_args()
    sizes = QUICK if args.quick else Sizes()
    file = real_models.fetched(SMOLLM2)
    if file is None:
        raise SystemExit("the model is not there")
    figures: dict[str, float] = {}
    raw: dict[str, Rates] = {}
    with tempfile.TemporaryDirectory() as folder:
        real_models.write_dequantised(file, Path(folder))
        for form, model in (("packed", str(file)), ("bfloat16", folder)):
            with ExitStack() as closing:
                llms = {
                    mode: closing.enter_context(
                        LLM(model, dtype="bfloat16", batch_invariant=mode == "invariant", prefix_cache=False)
                    )
                    for mode in MODES
                }
                for mode, llm in llms.items():
                    harness.note_engine(llm)
                    shares = measure_texts(llm, sizes)
                    print(form, mode, shares, flush=True)
                    figures |= {f"{form}_{name}_equal_{mode}": share for name, share in shares.items()}
                ratios, raw[form] = measure_rates(llms, sizes)
                figures |= {f"{form}_{name}_vs_default": ratio for name, ratio in ratios.items()}
    for key, value in figures.items():
        print(f"{key:45} {value:.3f}")
    harness.finish("batch_invariance", args, figures, raw)


if __name__ == "__main__":
    main()
