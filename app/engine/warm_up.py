"""What a first request would wait for is done before there is one.

Some of it is compiled, loaded or allocated when it is first used: kernels for a shape, a product's plan, threads, the
compiler of structures, pages and mappings. So requests like the ones to come are run, of random tokens: prompts that
fill a step, and decodes of several batch sizes, greedy and sampled. The thread that will run the engine has to do it,
because threads that compute together belong to the one that started them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from app.engine.params import SamplingParams, Structure

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
