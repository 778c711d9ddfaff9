"""Batch-invariant mode: how many texts stay the same where a request goes on elsewhere, and what the mode costs.

SmolLM2-135M-Instruct as it is pulled ("packed", Q4_1), and its dequantised weights in bfloat16, each with
`batch_invariant` and without. Prompts are pieces of this repository's documentation; prefixes are not cached.

Equal: half of the requests are greedy and half have a seed. Each runs alone, then again from a random place on, as on a
replica that takes it over: its prompt and the tokens so far are computed as one prompt. Then all run at once. The
figures are shares of texts that equal the one of the request alone.

Price: tokens per second with the mode over those without: medians of pairs of steps, of both engines in one process in
turn. Decode: steps of 1 and 16 sequences after prompts of 128 tokens, and of 4 after 1,024. Prefill: a prompt of 1,024.

--quick: packed weights only, few requests and steps, short prompts.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
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

Seconds = dict[str, dict[str, list[float]]]  # scenario → mode → times


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size of the measurements. `requests`: of each kind; `steps` and `prefills` of each engine are timed; prompts of
    steps and prefills have the `prompt_part`th part of their tokens."""

    requests: int = 16
    new_tokens: int = 64
    steps: int = 100
    prefills: int = 9
    prompt_part: int = 1


QUICK = Sizes(requests=1, new_tokens=8, steps=5, prefills=1, prompt_part=8)


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


def begin(llm: LLM, num_prompts: int, prompt_tokens: int) -> None:
    """Compute random prompts, up to the first token of the last one."""
    engine, begun = llm.engine, set[str]()
    rng, params = random.Random(time.time_ns()), SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    for i in range(num_prompts):
        engine.submit(str(i), rng.choices(range(1000, 40_000), k=prompt_tokens), params)
    while len(begun) < num_prompts:
        begun |= {delta.request_id for delta in engine.step() if delta.token_ids}


def end(llm: LLM) -> None:
    llm.engine.cancel_all()
    while llm.engine.has_work:
        llm.engine.step()


def decode_seconds(llms: Mapping[str, LLM], num_prompts: int, prompt_tokens: int, steps: int) -> dict[str, list[float]]:
    """Seconds of decode steps, one of each engine in turn."""
    seconds: dict[str, list[float]] = {mode: [] for mode in llms}
    for llm in llms.values():
        begin(llm, num_prompts, prompt_tokens)
    for _ in range(steps):
        for mode, llm in llms.items():
            start = time.perf_counter()
            llm.engine.step()
            seconds[mode].append(time.perf_counter() - start)
    for llm in llms.values():
        end(llm)
    return seconds


def prefill_seconds(llm: LLM, prompt_tokens: int) -> float:
    start = time.perf_counter()
    begin(llm, 1, prompt_tokens)
    seconds = time.perf_counter() - start
    end(llm)
    return seconds


def measure_speed(llms: Mapping[str, LLM], sizes: Sizes) -> tuple[dict[str, float], Seconds]:
    """Ratio of each scenario's tokens per second, with the mode over without; and all times."""
    seconds = {
        name: decode_seconds(llms, num_prompts, prompt_tokens // sizes.prompt_part, sizes.steps)
        for name, (num_prompts, prompt_tokens) in DECODES.items()
    }
    prefills = {mode: partial(prefill_seconds, llm, PREFILL // sizes.prompt_part) for mode, llm in llms.items()}
    seconds["prefill"] = harness.alternate(prefills, sizes.prefills)
    return {name: harness.median_ratio(of["default"], of["invariant"]) for name, of in seconds.items()}, seconds


def main() -> None:
    args: argparse.Namespace = harness.arguments(__doc__).parse_args()
    sizes = QUICK if args.quick else Sizes()
    file = real_models.fetched(SMOLLM2)
    if file is None:
        raise SystemExit("the model is not there")
    figures: dict[str, float] = {}
    raw: dict[str, Seconds] = {}
    with tempfile.TemporaryDirectory() as folder:
        forms = {"packed": str(file)}
        if not args.quick:
            real_models.write_dequantised(file, Path(folder))
            forms["bfloat16"] = folder
        for form, model in forms.items():
            with ExitStack() as closing:
                llms = {
                    mode: closing.enter_context(
                        LLM(model, dtype="bfloat16", batch_invariant=mode == "invariant", prefix_cache=False)
                    )
                    for mode in MODES
                }
                ratios, raw[form] = measure_speed(llms, sizes)
                print(form, ratios, flush=True)
                figures |= {f"{form}_{name}_vs_default": ratio for name, ratio in ratios.items()}
                for mode, llm in llms.items():
                    harness.note_engine(llm)
                    shares = measure_texts(llm, sizes)
                    print(form, mode, shares, flush=True)
                    figures |= {f"{form}_{name}_equal_{mode}": share for name, share in shares.items()}
    for key, value in figures.items():
        print(f"{key:45} {value:.3f}")
    harness.finish("batch_invariance", args, figures, raw)


if __name__ == "__main__":
    main()
