"""Steps with prompts, and what admission waits for, on a GPU (a job of `benchmarks.gpu_day`):

- admission of prompts of 1,024 and 8,192 tokens, in chunks of 1,024, over memory without pages: milliseconds of mapping
  that a prompt's steps wait for, with pages of slices and with a page a block, prepared beside the steps and not
- milliseconds of steps of 16 and 64 decodes beside 0 to 2,048 prompt tokens: launched kernel by kernel, and replayed in
  pieces (`mixed_graphs`). Llama-3-8B's shape in bfloat16 with 8 of its 32 layers and random weights: what a layer costs
  the host does not depend on their number
- largest relative difference of a row of logits between both

--fake runs tiny sizes on the CPU with the stand-in for graphs, and measures nothing.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig

from benchmarks import facts, harness, sweep
from benchmarks.gpu_parts import Parts
from folio.app.engine import LLM, SamplingParams
from folio.app.engine.execution import mixed_graphs
from folio.app.engine.model import checkpoint_module
from folio.vmem import (
    KVMemory,
    LayerGroup,
    LayerSpec,
    LayoutKind,
    MappingOptions,
    StepDemand,
    plan_layout,
    select_backend,
)

NUM_LAYERS = 8
CHUNK_TOKENS = 1024
STEP_S = 0.02  # of a chunk of Llama-3-8B; the mapper has as long
LAYOUTS: tuple[LayoutKind, ...] = ("sliced", "whole")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of admitted prompts, prompt tokens of mixed steps, decodes beside them, and steps of each kind."""

    admitted: tuple[int, ...] = (1024, 8192)
    prompts: tuple[int, ...] = (0, 128, 512, 2048)
    decodes: tuple[int, ...] = (16, 64)
    repeats: int = 8


FAKE_BUCKETS = (4, 16, 48)
FAKE = Sizes((64, 256), (0, 12, 40), (2,), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true")
    args = parser.parse_args()
    args.device, args.quick = "cpu" if args.fake else "cuda", False
    sizes = FAKE if args.fake else Sizes()
    figures: dict[str, float] = {}
    parts = Parts(math.inf)  # one that fails leaves the figures of the others
    parts.run("admission", lambda: figures.update(admission(args, sizes)))
    parts.run("mixed steps", lambda: figures.update(mixed_steps(parts, args, sizes)))
    harness.finish("gpu_steps", args, figures, {})
    parts.finish()


# ---- admission ----


def admission(args: argparse.Namespace, sizes: Sizes) -> dict[str, float]:
    """Milliseconds of exposed mapping of a prompt, by layout, whether it is prepared, and length."""
    figures: dict[str, float] = {}
    chunk = 32 if args.fake else CHUNK_TOKENS
    for kind, prepares in itertools.product(LAYOUTS, (True, False)):
        memory = make_memory(args, kind, max(sizes.admitted), chunk, prepares=prepares)
        for length in sizes.admitted:
            exposed = [admit(memory, length, chunk, 0.0 if args.fake else STEP_S) for _ in range(3)]
            name = f"{kind}_{length}{'' if prepares else '_unprepared'}"
            figures[f"exposed_ms_{name}"] = ms = statistics.median(exposed)
            layout = memory.groups[0].layout
            facts.record(
                f"admission {name.replace('_', ' ')}",
                f"{ms:.3f} ms of mapping waited for",
                exposed_ms=exposed,
                pages=layout.num_blocks(length) * layout.num_slices,
                page_bytes=layout.page_bytes,
            )
        memory.close()
    return figures


def make_memory(
    args: argparse.Namespace, kind: LayoutKind, max_tokens: int, step_tokens: int, *, prepares: bool
) -> KVMemory:
    backend = select_backend(torch.device(args.device), capacity_bytes=1 << 40)
    layers = (LayerSpec(2, 16, 16),) * 8 if args.fake else (LayerSpec(8, 128, 128),) * 32
    layout = plan_layout(layers, sweep.DTYPE, granularity_bytes=backend.granularity_bytes, kind=kind)
    return KVMemory(
        backend,
        [LayerGroup(tuple(range(len(layers))), layout)],
        budget_bytes=2 * layout.num_blocks(max_tokens) * layout.block_bytes,
        num_regions=2,
        max_tokens=max_tokens,
        step_tokens=step_tokens,
        prefix_cache=False,
        options=MappingOptions(overlap=prepares, eager_allocation=False),
    )


def admit(memory: KVMemory, length: int, chunk: int, step_s: float) -> float:
    """Let a prompt come to memory without pages, announced as the step before it would; returns milliseconds that its
    steps wait for."""
    memory.release_all()
    memory.plan([], min(chunk, length), "region")
    time.sleep(step_s)
    before = memory.report().exposed_us
    sequence = memory.create_sequence("region", expected_tokens=length)
    for start in range(0, length, chunk):
        demand = StepDemand(sequence, start, min(start + chunk, length))
        memory.append(sequence, demand.end)
        memory.ensure([demand])
        memory.plan([StepDemand(sequence, demand.end, min(demand.end + chunk, length))])
        memory.launched()
        time.sleep(step_s)
    exposed_us = memory.report().exposed_us - before
    memory.free(sequence)
    return exposed_us / 1e3


# ---- mixed steps ----


def mixed_steps(parts: Parts, args: argparse.Namespace, sizes: Sizes) -> dict[str, float]:
    shape = dict(sweep.SHAPES["tiny" if args.fake else sweep.DEFAULT_SHAPE])
    if not args.fake:
        shape["num_hidden_layers"] = NUM_LAYERS
    config = AutoConfig.for_model(
        shape.pop("model_type"), **shape, initializer_range=sweep.WEIGHT_STD, dtype=sweep.DTYPE
    )
    context = 32 if args.fake else 1024
    measured = sweep.Sizes(sizes.decodes, context, (max(sizes.prompts),), (), steps=2 * sizes.repeats * 8)
    with ExitStack() as undo:
        if args.fake:  # the stand-in records torch's calls alone
            undo.enter_context(patch.object(checkpoint_module, "optimise", lambda *_, **__: None))
            undo.enter_context(patch.object(mixed_graphs, "TOKEN_BUCKETS", FAKE_BUCKETS))
            undo.enter_context(patch.object(sweep, "MAX_NUM_SEQS", FAKE_BUCKETS[0]))
        llm = undo.enter_context(
            sweep.make_llm(config, args.device, measured, decode_graphs="on", mixed_graphs="on", async_scheduling="off")
        )
        start = time.perf_counter()
        llm.engine.executor.capture_graphs(llm.engine.config.kv_view)
        graphs = llm.engine.executor.graphs
        buckets = [] if graphs is None else sorted(bucket for kind, bucket in graphs.captured if kind == "mixed")
        if graphs is None or not buckets:
            raise RuntimeError("this engine has no mixed graphs")
        facts.record(
            "capture",
            f"{len(buckets)} mixed graphs beside the decode graphs in {time.perf_counter() - start:.1f} s, "
            f"{graphs.held_bytes / 2**20:.0f} MiB together",
            buckets=buckets,
            num_bytes=graphs.held_bytes,
        )
        steps = MixedSteps(llm, sweep.Sweep(llm, config, measured, *sweep.ceilings(llm.engine.model.module.device)))
        parts.run("logits", lambda: steps.logits(sizes.decodes[0], sizes.prompts[1]))
        for num_decodes, num_tokens in itertools.product(sizes.decodes, sizes.prompts):
            steps.measure(num_decodes, num_tokens, sizes.repeats, f"{config.num_hidden_layers} layers")
        llm.engine.check_integrity()
    return steps.figures


class MixedSteps:
    """Measures one engine and collects the figures."""

    def __init__(self, llm: LLM, measure: sweep.Sweep) -> None:
        self._llm, self._measure = llm, measure
        self._runner = llm.engine.executor._runner
        self._ids = itertools.count()
        self.figures: dict[str, float] = {}

    def measure(self, num_decodes: int, num_tokens: int, repeats: int, shape: str) -> None:
        """Milliseconds of a step of so many decodes beside a prompt, both ways in turn."""
        times: dict[bool, list[float]] = {True: [], False: []}
        with self._measure.decoding(num_decodes, temperature=0.0):
            for _ in range(1 + repeats):  # the first compiles
                for in_pieces in times:
                    with ExitStack() as undo:
                        undo.enter_context(patch.object(self._runner, "graphs", None))  # of steps without a prompt
                        if not in_pieces:
                            undo.enter_context(patch.object(self._runner, "mixed_graphs", None))
                        self._submit(num_tokens)
                        start = time.perf_counter()
                        deltas = self._llm.engine.step()
                        times[in_pieces].append(time.perf_counter() - start)
                    if len(deltas) != num_decodes + bool(num_tokens):
                        raise RuntimeError(f"a step of {num_decodes} decodes and a prompt gave {len(deltas)} deltas")
        pieces, launched = (statistics.median(times[in_pieces][1:]) * 1e3 for in_pieces in (True, False))
        name = f"{num_decodes}_decodes_{num_tokens}_tokens"
        self.figures |= {f"pieces_ms_{name}": pieces, f"launched_ms_{name}": launched}
        too_long = num_decodes + num_tokens > mixed_graphs.TOKEN_BUCKETS[-1]
        facts.record(
            f"step of {num_decodes} decodes and {num_tokens} prompt tokens",
            f"{pieces:.2f} ms {'launched (too long for a graph)' if too_long else 'in pieces'}, {launched:.2f} "
            f"launched: {launched / pieces:.2f} times ({shape})",
            pieces_ms=pieces,
            launched_ms=launched,
        )

    def logits(self, num_decodes: int, num_tokens: int) -> None:
        """Compute the same step both ways: it writes the same keys and values again."""
        found: list[torch.Tensor] = []
        run = self._runner.run

        def both(batch: Any) -> torch.Tensor:
            with patch.object(self._runner, "mixed_graphs", None), patch.object(self._runner, "graphs", None):
                found.append(run(batch).float().clone())
            found.append(run(batch).float().clone())
            return found[-1]

        with self._measure.decoding(num_decodes, temperature=0.0):
            self._submit(num_tokens)
            with patch.object(self._runner, "run", both):
                self._llm.engine.step()
        launched, pieces = found[:2]
        off = ((pieces - launched).norm(dim=-1) / launched.norm(dim=-1)).max().item()
        self.figures["off"] = off
        facts.record("logits in pieces", f"differ by {off:.2g} at most", off=off)
        if not off <= 0.05:
            raise RuntimeError(f"logits of a step in pieces differ by {off:.2g} from those of the same step launched")

    def _submit(self, num_tokens: int) -> None:
        """A prompt that ends with its first token."""
        if num_tokens:
            [prompt] = self._measure.prompts(1, num_tokens)
            params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
            self._llm.engine.submit(f"beside {next(self._ids)}", prompt, params)


if __name__ == "__main__":
    main()
