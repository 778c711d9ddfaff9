"""How long an engine took until it could serve, and with what.

What a first request would wait for is done before there is one.

Some of it is compiled, loaded or allocated when it is first used: kernels for a shape, a product's plan, threads, the
compiler of structures, pages and mappings. So requests like the ones to come are run, of random tokens: prompts that
fill a step, and decodes of several batch sizes, greedy and sampled. The thread that will run the engine has to do it,
because threads that compute together belong to the one that started them.

A new engine begins with the prefixes that those beside it have: what is pinned, and what is asked for most.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from app.config.engine import EngineConfig
from app.engine.model.loader import LoadedModel
from app.engine.sampling.params import SamplingParams, Structure
from vmem import CachedPrefix


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds of each phase of a start, in their order.

    Attributes:
        model_s: making the model of the checkpoint's files, packed for its kernels; starting other ranks.
        memory_s: reserving the addresses of the KV cache.
        budget_s: waiting for room beside other replicas on the device.
        self_test_s: compiling kernels, and comparing the model with itself.
        pins_s: trying swaps, and computing the prompts that the settings pin.
        warm_up_s: running what the first requests would otherwise have waited for.
        prefixes_s: asking other replicas for their prefixes, and computing these.
        process_s: how old the process was before all of that: imports, but also time that it was kept waiting.
    """

    model_s: float = 0.0
    memory_s: float = 0.0
    budget_s: float = 0.0
    self_test_s: float = 0.0
    pins_s: float = 0.0
    warm_up_s: float = 0.0
    prefixes_s: float = 0.0
    process_s: float = 0.0

    @property
    def ready_s(self) -> float:
        """Of the engine's whole start, without `process_s`."""
        return sum(seconds for phase, seconds in self.phases().items() if phase != "process")

    def phases(self) -> dict[str, float]:
        """Name of each phase → its seconds."""
        return {field.name.removesuffix("_s"): getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        parts = ", ".join(
            f"{phase.replace('_', ' ')} {seconds:.2f}" for phase, seconds in self.phases().items() if seconds >= 0.005
        )
        return f"{self.ready_s:.2f} s ({parts})"


class StartClock:
    """Takes the times of a start's phases, one after the other."""

    def __init__(self) -> None:
        self._seconds = {"process_s": process_age_s()}
        self._at = time.perf_counter()

    def lap(self, phase: str) -> None:
        """This phase of `StartTimes` ends now."""
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._at
        self._at = now

    @property
    def times(self) -> StartTimes:
        return StartTimes(**self._seconds)


def process_age_s() -> float:
    """Seconds since this process was started."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


# Under these keys no request finds what they leave in the prefix cache: a request's keys say what they are.
KEYS = ("warm-up",)
# Everything is run a second time, so that step times are known without what only the first one costs; not longer.
_MEASURING_S = 5.0
_PROMPT_TOKENS, _NEW_TOKENS = 8, 2

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    seed=0,
    logprobs=1,
    ignore_eos=True,
)
# Needs a tokenizer; any will do: there may be no token of lower-case letters alone.
STRUCTURED = SamplingParams(structure=Structure("regex", r"[\s\S]{1,20}"), stop=["\n\n"], seed=0)

Prompt = tuple[list[int], SamplingParams]


def warm_up(
    run: Callable[[Sequence[Prompt]], None], rounds: Sequence[Sequence[Prompt]], begin_to_measure: Callable[[], None]
) -> None:
    """Run every round, and then, as long as it does not take much longer, again.

    Args:
        run: computes requests to their end.
    """
    for prompts in rounds:
        run(prompts)
    begin_to_measure()
    deadline = time.monotonic() + _MEASURING_S
    for prompts in rounds:
        run(prompts)
        if time.monotonic() > deadline:
            break


def warm_up_rounds(
    *,
    vocab_size: int,
    max_model_len: int,
    max_num_seqs: int,
    step_tokens: int,
    has_structures: bool,
    fits: Callable[[Sequence[int]], bool],
) -> list[list[Prompt]]:
    """What to run, one round after the other: a whole step of prompts, then 1, 4, 16, … sequences.

    Args:
        max_model_len: prompt and output at most, in tokens.
        max_num_seqs: sequences that run at once.
        step_tokens: tokens of a step at most.
        has_structures: whether outputs may have a structure.
        fits: whether sequences of these lengths can run at once.
    """
    new_tokens = min(_NEW_TOKENS, max_model_len - 1)
    longest = max_model_len - new_tokens
    short = min(_PROMPT_TOKENS, longest)
    whole_step = [longest] * (step_tokens // longest) + [n for n in [step_tokens % longest] if n]
    rounds = [[(n, GREEDY) for n in whole_step[:max_num_seqs]]]
    rounds += [[(short, params)] for params in (SAMPLED, *((STRUCTURED,) if has_structures else ()))]
    counts = [4**i for i in range(max_num_seqs.bit_length()) if 4**i < max_num_seqs] + [max_num_seqs]
    rounds += [[(short, (GREEDY, SAMPLED)[i % 2]) for i in range(count)] for count in counts]
    generator = torch.Generator().manual_seed(0)
    prompts: list[list[Prompt]] = []
    for lengths in rounds:
        while len(lengths) > 1 and not fits([n + new_tokens for n, _ in lengths]):
            lengths = lengths[: len(lengths) // 2]
        prompts.append(
            [
                (torch.randint(vocab_size, (n,), generator=generator).tolist(), replace(params, max_tokens=new_tokens))
                for n, params in lengths
            ]
        )
    return prompts


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


def merge_hot_prefixes(told: Sequence[Sequence[CachedPrefix]], most_tokens: int) -> list[CachedPrefix]:
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
