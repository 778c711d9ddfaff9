"""Preemption cost: swap against recompute, and the choice of the cost model.

The first part is figure 19 of PagedAttention (Kwon et al., SOSP 2023): for blocks of 1 to 256 tokens and sequences of
8 to 2,000, the time until the state of a preempted sequence is back. *Swapping* copies its blocks to host memory and
back, and maps them. *Recomputing* runs the steps that compute its tokens; the last of them yields the next token too,
for which a swapped sequence needs a decode step more: regret is given without that step and with it
(`…_to_next_token`). In between another sequence allocates the blocks and writes into all of them. The cost model's
choice is recorded before, on an engine that has served ordinary requests of other lengths. What counts as a wrong one
is in `benchmarks.engine.preemption_regret`.

Tokens are compared with those of an undisturbed run by engines in float32 (`tokens_equal`): of sequences that were
swapped and recomputed as above, and of the narrow model's requests in the second part's engines. In bfloat16, in which
times are measured, they differ rightly: a prompt's chunk rounds otherwise than the decode steps that it repeats.

Three models with random weights: Qwen2.5-0.5B's shape with few layers, where copying should win; and two of one layer
whose steps cost little. The *narrow* one has 128 bytes of cache a token, so that short blocks are mostly padding, the
*wide* one 128 KiB, so that a long block copies much for a few tokens; it is measured with at most 256 of them.

The second part is the effect on throughput: the same requests on engines whose KV cache holds half of them and that
swap, recompute, or choose, and on one that holds all of them.

--quick measures fewer cells, on CPUs of the models of one layer only, and less often; --tiny only shows that this
program works.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import abc
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks import checkpoints, harness
from benchmarks.engine.preemption_regret import Cell, Round, print_cells, regrets
from benchmarks.facts import record
from benchmarks.picture import OURS, legend_below, picture, plain_numbers
from folio.app.config.engine import PreemptionPolicy
from folio.app.engine import LLM, SamplingParams
from folio.app.engine.engine import Engine
from folio.app.engine.layers.batch import demands
from folio.app.engine.request.request import Sequence
from folio.app.engine.schedule.preemption import PreemptionMode
from folio.vmem import StepDemand

QWEN, NUM_LAYERS = "Qwen2.5-0.5B", {"cpu": 4, "cuda": 24}
DRAWN = {QWEN: "Qwen2.5-0.5B, 4 layers", "narrow": "one narrow layer", "wide": "one wide layer"}
ONE_LAYER = {"narrow": (1, 32), "wide": (64, 512)}  # heads, and their size
LONGEST = {"wide": 256}
BLOCKS, QUICK_BLOCKS, TINY_BLOCKS = (1, 4, 16, 64, 256), (1, 64), (16,)
LENGTHS, QUICK_LENGTHS, TINY_LENGTHS = (8, 64, 256, 1000, 2000), (8, 256), (8,)
ROUNDS, QUICK_ROUNDS = 15, 5
COMPARED_BLOCK = 16  # tokens of a block where outputs are compared
LEARNT_FROM = (16, 100, 400, 700, 1500)
KV_BYTES = 8 << 30  # on CUDA a block has 2 MiB, whatever its number of tokens
VOCABULARY = 1024
# The second part: requests, tokens of each prompt and output, runs; and the share of all tokens that fit.
PRESSURE, QUICK_PRESSURE, TINY_PRESSURE, FITTING = (24, 128, 96, 3), (12, 64, 48, 1), (4, 8, 40, 1), 0.5
BLOCK_TOKENS, GRANULE_BYTES = {"cpu": 16, "cuda": 64}, {"cpu": 4096, "cuda": 2 << 20}
POLICIES: tuple[PreemptionPolicy, ...] = ("swap", "recompute", "auto")


def main() -> None:
    parser = harness.arguments(__doc__, devices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, on the CPU")
    args = parser.parse_args()
    args.quick |= args.tiny
    blocks = TINY_BLOCKS if args.tiny else QUICK_BLOCKS if args.quick else BLOCKS
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, name) for name in models_of(args)}
        for name, checkpoint in paths.items():
            if name == QWEN:
                checkpoints.write_qwen(checkpoint, NUM_LAYERS[args.device])
            else:
                make_one_layer(checkpoint, *ONE_LAYER[name])
        for name, checkpoint in paths.items():
            for block_tokens in blocks:
                print(f"measuring {name}, blocks of {block_tokens}", flush=True)
                measured = measure_block(args, name, checkpoint, block_tokens)
                for cell in measured:
                    record("preempted sequence", regret=cell.regret(), **asdict(cell))
                cells += measured
        equal = [outputs_equal(args, name, checkpoint) for name, checkpoint in paths.items()]
        pressed = next(iter(paths))
        rates, preempted = measure_pressure(args, pressed, paths[pressed])
        equal.append(pressed_outputs_equal(args, "narrow", paths["narrow"]))

    forced = max(("swap", "recompute"), key=lambda name: statistics.median(rates[name]))
    figures = (
        regrets(cells)
        | by_block(cells)
        | {
            "cells_won_by_swap": sum(cell.better == "swap" for cell in cells),
            "cells_won_by_recompute": sum(cell.better == "recompute" for cell in cells),
            "cells_picked_better": sum(cell.picked == cell.better for cell in cells),
            "swap_prediction_error": median_error((c.expected.swap_s, c.swap_s) for c in cells),
            "recompute_prediction_error": median_error((c.expected.recompute_s, c.recompute_s) for c in cells),
            "tokens_equal": float(all(equal)),
            "auto_vs_best_forced": harness.median_ratio(rates["auto"], rates[forced]),
            "pressured_vs_unpressured": harness.median_ratio(rates["auto"], rates["unpressured"]),
        }
        | {f"{name}_vs_unpressured": harness.median_ratio(rates[name], rates["unpressured"]) for name in POLICIES[:2]}
    )
    print_cells(cells)
    print(f"\nthe same requests at once, room for {FITTING:.0%} of their tokens")
    for name, values in rates.items():
        times = ", ".join(f"{number:.1f} by {way}" for way, number in preempted[name].items())
        print(f"  {name:12s}{statistics.median(values):8.1f} tok/s   preemptions a run: {times}")
    for key, value in figures.items():
        print(f"  {key:28s}{value:8.3f}")
    raw = {"cells": [asdict(cell) for cell in cells], "tokens_per_s": rates, "preempted": preempted}
    harness.finish("preemption", args, figures, raw, draw)


def models_of(args: argparse.Namespace) -> tuple[str, ...]:
    if args.tiny:
        return ("narrow",)
    return tuple(ONE_LAYER) if args.quick and args.device == "cpu" else (QWEN, *ONE_LAYER)


def by_block(cells: abc.Sequence[Cell]) -> dict[str, float]:
    """Figure 19: milliseconds of both ways for the first model's longest sequence, by block size; and the longest time
    of a recomputation over that of a swap."""
    first, longest = cells[0].model, max(cell.num_tokens for cell in cells if cell.model == cells[0].model)
    of_longest = [cell for cell in cells if (cell.model, cell.num_tokens) == (first, longest)]
    figures = {f"swap_ms_blocks_of_{cell.block_tokens}": 1e3 * cell.swap_s for cell in of_longest}
    figures |= {f"recompute_ms_blocks_of_{cell.block_tokens}": 1e3 * cell.recompute_s for cell in of_longest}
    return figures | {"recompute_vs_swap_most": max(cell.recompute_s / cell.swap_s for cell in of_longest)}


def make_one_layer(folder: Path, num_heads: int, dim: int) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    }
    heads: dict[str, Any] = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads, "head_dim": dim}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=4096, tie_word_embeddings=True)
    checkpoints.write_checkpoint(folder, config, seed=19, words=False)


def start_engine(args: argparse.Namespace, checkpoint: Path, **settings: Any) -> LLM:
    """An engine without a prefix cache, which would save recomputation."""
    return LLM(checkpoint, device=args.device, skip_tokenizer_init=True, prefix_cache=False, **settings)


def make_prompt(num_tokens: int) -> list[int]:
    return torch.randint(VOCABULARY, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens)).tolist()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def median_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Median relative error of (expected, measured)."""
    return statistics.median(abs(expected / measured - 1) for expected, measured in pairs)


# ---- block sizes and lengths ----


def lengths_of(args: argparse.Namespace, model: str) -> list[int]:
    lengths = TINY_LENGTHS if args.tiny else QUICK_LENGTHS if args.quick else LENGTHS
    return [n for n in lengths if n <= LONGEST.get(model, n)]


def start_for_cells(args: argparse.Namespace, checkpoint: Path, block_tokens: int, **settings: Any) -> LLM:
    return start_engine(
        args,
        checkpoint,
        max_model_len=LENGTHS[-1] + 64,
        max_num_seqs=4,
        block_tokens=block_tokens,
        kv_memory_bytes=KV_BYTES,
        swap_bytes=KV_BYTES,
        kv_idle_release_s=60,  # under preemption no page is idle
        **settings,
    )


def measure_block(args: argparse.Namespace, model: str, checkpoint: Path, block_tokens: int) -> list[Cell]:
    """Measure all lengths on an engine that has served ordinary requests without preemption."""
    lengths = lengths_of(args, model)
    llm = start_for_cells(args, checkpoint, block_tokens)
    harness.note_engine(llm)
    learnt_from = [make_prompt(n) for n in LEARNT_FROM if n <= lengths[-1]]
    for prompt in learnt_from:
        llm.generate([prompt], greedy(8))
    llm.generate(learnt_from[:3], greedy(8))
    num_rounds = QUICK_ROUNDS if args.quick else ROUNDS
    cells = [measure(llm, model, block_tokens, num_tokens, num_rounds) for num_tokens in lengths]
    llm.engine.check_integrity()
    llm.close()
    return cells


def measure(llm: LLM, model: str, block_tokens: int, num_tokens: int, num_rounds: int) -> Cell:
    """Ask the cost model about a request with this many computed tokens, then preempt it repeatedly in both ways."""
    engine = llm.engine
    sequence = begin(engine, num_tokens)
    assert sequence.memory is not None
    picked = engine.recovery.choose_mode(engine.memory, [sequence])
    expected = engine.recovery.cost([(sequence.num_computed, 0)], engine.memory.swapping.num_bytes([sequence.memory]))
    rounds = []
    for _ in range(num_rounds + 1):
        swap_s, decode_s = swap(engine, sequence), until_next_token(engine, sequence)
        rewind(engine, sequence, num_tokens)
        rounds.append(Round(swap_s, decode_s, recompute(engine, sequence)))
        rewind(engine, sequence, num_tokens)
    engine.cancel("preempted")
    del rounds[0]  # it warms up
    medians = {name: statistics.median(getattr(r, name) for r in rounds) for name in asdict(rounds[0])}
    return Cell(model, block_tokens, num_tokens, picked, expected, **medians, rounds=tuple(rounds))


def outputs_equal(args: argparse.Namespace, model: str, checkpoint: Path) -> bool:
    """Whether preempted sequences have an undisturbed run's tokens, both ways and at all lengths, in float32."""
    llm, equal = start_for_cells(args, checkpoint, COMPARED_BLOCK, dtype="float32"), True
    for num_tokens in lengths_of(args, model):
        sequence = begin(llm.engine, num_tokens)
        outputs = []
        for way in (swap, recompute):
            way(llm.engine, sequence)
            if way is swap:
                until_next_token(llm.engine, sequence)
            outputs.append(rewind(llm.engine, sequence, num_tokens))
        llm.engine.cancel("preempted")
        [undisturbed] = llm.generate([make_prompt(num_tokens - 1)], greedy(4))
        equal &= all(tokens == undisturbed.token_ids[2:] for tokens in outputs)
    llm.engine.check_integrity()
    llm.close()
    return equal


def begin(engine: Engine, num_tokens: int) -> Sequence:
    """A running request with this many computed tokens."""
    engine.submit("preempted", make_prompt(num_tokens - 1), greedy(5))
    sequence = engine.requests["preempted"].sequences[0]
    until_next_token(engine, sequence)
    until_next_token(engine, sequence)  # requests are never swapped in their first step
    return sequence


def rewind(engine: Engine, sequence: Sequence, num_tokens: int) -> list[int]:
    """Let a running request generate another token, then truncate it to `num_tokens` computed tokens. Returns the
    truncated tokens."""
    until_next_token(engine, sequence)
    assert sequence.memory is not None
    tokens = sequence.token_ids[num_tokens + 1 :]
    del sequence.token_ids[num_tokens + 1 :]
    engine.memory.truncate(sequence.memory, num_tokens)
    sequence.num_computed = num_tokens
    return tokens


def swap(engine: Engine, sequence: Sequence) -> float:
    """Seconds to swap a running request's blocks out and in, and to map them for its next step."""
    start = now(engine)
    engine.scheduler.begun.preempt(sequence.request, "swap")
    out_s = now(engine) - start
    assert sequence.request.swapped is not None, "it was not swapped"
    hand_over(engine, sequence.num_computed)
    start = now(engine)
    engine.memory.ensure(demands(engine.scheduler.schedule()))
    in_s = now(engine) - start
    engine.scheduler.abort_step()  # it runs again, but this step is not computed
    return out_s + in_s


def recompute(engine: Engine, sequence: Sequence) -> float:
    """Seconds to free a running request's blocks, and to compute its tokens again and the next one."""
    num_tokens = sequence.num_computed
    start = now(engine)
    engine.scheduler.begun.preempt(sequence.request, "recompute")
    out_s = now(engine) - start
    hand_over(engine, num_tokens)
    return out_s + until_next_token(engine, sequence)


def until_next_token(engine: Engine, sequence: Sequence) -> float:
    count, start = sequence.num_output_tokens, now(engine)
    while sequence.num_output_tokens == count:
        engine.step()
    return now(engine) - start


def hand_over(engine: Engine, num_tokens: int) -> None:
    """Let another sequence allocate all freed blocks, write into them, and end."""
    memory = engine.memory
    other = memory.create_sequence()
    memory.append(other, num_tokens)
    memory.ensure([StepDemand(other, 0, num_tokens)])
    memory.map_home(other)
    [group] = memory.groups
    for layer in group.layers:
        for side in memory.tensors.home_view(layer):
            side[other.groups[0].block_ids] = 100.0  # a read of this value would change the tokens
    memory.launched()
    memory.free(other)


def now(engine: Engine) -> float:
    """The time once the device is idle."""
    if engine.model.module.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# ---- effect on throughput ----


def measure_pressure(
    args: argparse.Namespace, model: str, checkpoint: Path
) -> tuple[dict[str, list[float]], dict[str, dict[PreemptionMode, float]]]:
    """For each engine, output tokens per second, and preemptions of a run."""
    engines, prompts, new_tokens, repeats = pressed_engines(args, model, checkpoint)
    for llm in engines.values():
        harness.note_engine(llm)

    def run(llm: LLM) -> float:
        start = time.perf_counter()
        llm.generate(prompts, greedy(new_tokens))
        return len(prompts) * new_tokens / (time.perf_counter() - start)

    rates = harness.alternate({name: partial(run, llm) for name, llm in engines.items()}, repeats)
    preempted = {}
    for name, llm in engines.items():
        preempted[name] = {way: n / (repeats + 1) for way, n in llm.engine.scheduler.begun.num_preempted.items()}
        llm.engine.check_integrity()
        llm.close()
    return rates, preempted


def pressed_outputs_equal(args: argparse.Namespace, model: str, checkpoint: Path) -> bool:
    """Whether all engines give the same tokens in float32."""
    engines, prompts, new_tokens, _ = pressed_engines(args, model, checkpoint, dtype="float32")
    outputs = []
    for name, llm in engines.items():
        outputs.append([completion.token_ids for completion in llm.generate(prompts, greedy(new_tokens))])
        assert any(llm.engine.scheduler.begun.num_preempted.values()) == (name in POLICIES)
        llm.engine.check_integrity()
        llm.close()
    return all(tokens == outputs[0] for tokens in outputs)


def pressed_engines(
    args: argparse.Namespace, model: str, checkpoint: Path, **settings: Any
) -> tuple[dict[str, LLM], list[list[int]], int, int]:
    """An engine with memory for all tokens, and one of each policy with memory for a part; prompts, the number of
    their output tokens, and repeats."""
    count, prompt_tokens, new_tokens, repeats = QUICK_PRESSURE if args.quick else PRESSURE
    if args.tiny:
        count, prompt_tokens, new_tokens, repeats = TINY_PRESSURE
    block_tokens = BLOCK_TOKENS[args.device]
    token_bytes = (NUM_LAYERS[args.device] * 512 if model == QWEN else 128) * (2 if settings else 1)
    block_bytes = max(block_tokens * token_bytes, GRANULE_BYTES[args.device])
    full_bytes = count * -(-(prompt_tokens + new_tokens) // block_tokens) * block_bytes
    most = {"max_model_len": prompt_tokens + new_tokens, "max_num_seqs": count, "block_tokens": block_tokens} | settings
    anchor_bytes = block_bytes  # one page holds no blocks
    engines = {"unpressured": start_engine(args, checkpoint, kv_memory_bytes=full_bytes + anchor_bytes, **most)}
    for way in POLICIES:
        budget = int(FITTING * full_bytes) + anchor_bytes
        engines[way] = start_engine(args, checkpoint, kv_memory_bytes=budget, preemption=way, **most)
    return engines, [make_prompt(prompt_tokens - i) for i in range(count)], new_tokens, repeats


# ---- output ----


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Time of both ways by length, for each model, with few block sizes; dots are what the cost model picked."""
    cells = [SimpleNamespace(**cell) for cell in result["raw"]["cells"]]
    models = list(dict.fromkeys(c.model for c in cells))
    sizes = sorted({c.block_tokens for c in cells})
    sizes = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    title = "Getting a preempted sequence back: swap or recompute"
    with picture(result, path, title, columns=len(models), height=4.2, sharey=True) as (figure, plots):
        for plot, model in zip(plots, models, strict=True):
            for colours, way in ((OURS, "swap"), (("#8c4a0f", "#c98a2b", "#e6c48b"), "recompute")):
                for colour, size in zip(colours, sizes, strict=False):
                    row = [c for c in cells if (c.model, c.block_tokens) == (model, size)]
                    times = [1e3 * (c.swap_s if way == "swap" else c.recompute_s) for c in row]
                    lengths = [c.num_tokens for c in row]
                    label = f"{way}, blocks of {size} token{'s' * (size > 1)}"
                    plot.plot(lengths, times, color=colour, label=label)
                    chosen = [(n, ms) for n, ms, c in zip(lengths, times, row, strict=True) if c.picked == way]
                    if chosen:
                        plot.scatter(*zip(*chosen, strict=True), color=colour, s=28, zorder=3)
            ticks = sorted({c.num_tokens for c in cells if c.model == model})
            plot.set(xscale="log", yscale="log", xlabel="tokens of the sequence", title=DRAWN.get(model, model))
            plot.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=40)
            plot.minorticks_off()
            plain_numbers(plot)
        plots[0].set_ylabel("ms until it can go on\n(dot: chosen by the cost model)")
        legend_below(figure, plots[0], 2)


if __name__ == "__main__":
    main()
