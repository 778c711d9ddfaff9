"""Steps on a GPU, launched and replayed, and what admission waits for (jobs of `benchmarks.gpu_day`):

- admission of prompts of 1,024 and 8,192 tokens, in chunks of 1,024, over memory without pages: milliseconds of mapping
  that a prompt's steps wait for, with pages of slices and with a page a block, prepared beside the steps and not
- milliseconds of steps of 16 and 64 decodes beside 0 to 2,048 prompt tokens: launched kernel by kernel, and replayed in
  pieces (`mixed_graphs`). Llama-3-8B's shape in bfloat16 with 8 of its 32 layers and random weights: what a layer costs
  the host does not depend on their number
- largest relative difference of a row of logits between both

--decodes instead: decode graphs of one shape, all layers. Seconds and bytes of capturing every bucket in the view of
the settings, the largest first; milliseconds of a greedy decode step by batch, with graphs and, in turn, without them,
and the kernels of one of them; the same after all pages have been given back and mapped anew; and the logits, whose
rows differ only where a product chooses another kernel for the padded number of rows.

--fake runs tiny sizes on the CPU with the stand-in for graphs, and measures nothing.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedConfig

from benchmarks import facts, harness
from benchmarks.engine import sweep
from benchmarks.gpu.parts import Parts, arguments
from folio.app.engine import LLM, SamplingParams
from folio.app.engine.execution import mixed_graphs
from folio.app.engine.execution.graph import CAPTURES
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
BATCHES, FAKE_BATCHES = (1, 4, 16, 32, 64, 256), (1, 3)
RUN_STEPS, FAKE_RUN_STEPS = 12, 2  # of decodes, with graphs and without in turn
MOST_OFF = 0.05


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
    parser = arguments(__doc__)
    parser.add_argument("--decodes", action="store_true", help="decode graphs of one shape")
    parser.add_argument("--shape", default=sweep.DEFAULT_SHAPE, choices=sweep.SHAPES, help="of --decodes")
    args = parser.parse_args()
    args.device, args.quick = "cpu" if args.fake else "cuda", False
    if args.decodes:
        shape = "tiny" if args.fake else args.shape
        harness.finish(f"graphs-{shape}", args, decode_steps(args, shape), {})
        return
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


# ---- steps ----


def decode_steps(args: argparse.Namespace, shape: str) -> dict[str, float]:
    sizes = sweep.QUICK if args.fake else sweep.Sizes()
    with captured(args, sweep.config_of(shape), sizes, kv_idle_release_s=0.5) as steps:
        steps.note_capture("decode")
        batches, run = (FAKE_BATCHES, FAKE_RUN_STEPS) if args.fake else (BATCHES, RUN_STEPS)
        for batch in batches:
            steps.measure_decodes(batch, run, kernels=batch == BATCHES[-2])
        steps.logits(batches[1])
        time.sleep(0.1 if args.fake else 1.5)  # idle pages go back
        steps.measure_decodes(batches[1], run, " after a pause")
    return steps.figures


def mixed_steps(parts: Parts, args: argparse.Namespace, sizes: Sizes) -> dict[str, float]:
    config = (
        sweep.config_of("tiny") if args.fake else sweep.config_of(sweep.DEFAULT_SHAPE, num_hidden_layers=NUM_LAYERS)
    )
    context = 32 if args.fake else 1024
    measured = sweep.Sizes(sizes.decodes, context, (max(sizes.prompts),), (), steps=2 * sizes.repeats * 8)
    with captured(args, config, measured, mixed_graphs="on") as steps:
        steps.note_capture("mixed")
        parts.run("logits", lambda: steps.logits(sizes.decodes[0], sizes.prompts[1]))
        for num_decodes, num_tokens in itertools.product(sizes.decodes, sizes.prompts):
            steps.measure_mixed(num_decodes, num_tokens, sizes.repeats)
    return steps.figures


@contextmanager
def captured(
    args: argparse.Namespace, config: PreTrainedConfig, sizes: sweep.Sizes, **settings: Any
) -> Iterator[Steps]:
    """An engine whose graphs have been captured."""
    with ExitStack() as undo:
        if args.fake:  # the stand-in records torch's calls alone
            from tests.fakes.recorded_graph import record

            undo.enter_context(patch.dict(CAPTURES, cpu=record))
            undo.enter_context(patch.object(checkpoint_module, "optimise", lambda *_, **__: None))
            undo.enter_context(patch.object(mixed_graphs, "TOKEN_BUCKETS", FAKE_BUCKETS))
            undo.enter_context(patch.object(sweep, "MAX_NUM_SEQS", FAKE_BUCKETS[0]))
            settings["num_threads"] = 1
        llm = undo.enter_context(
            sweep.make_llm(config, args.device, sizes, decode_graphs="on", async_scheduling="off", **settings)
        )
        start = time.perf_counter()
        llm.engine.executor.capture_graphs(llm.engine.config.kv_view)
        capture_s = time.perf_counter() - start
        yield Steps(llm, sweep.Sweep(llm, config, sizes, *sweep.ceilings(llm.engine.model.module.device)), capture_s)
        llm.engine.check_integrity()


class Steps:
    """Measures one engine, with its graphs and without, and collects the figures.

    Args:
        capture_s: seconds in which its graphs were captured.
    """

    def __init__(self, llm: LLM, measure: sweep.Sweep, capture_s: float) -> None:
        self._llm, self._measure, self._capture_s = llm, measure, capture_s
        self._runner = llm.engine.executor._runner
        self._ids = itertools.count()
        self.figures: dict[str, float] = {}

    def note_capture(self, kind: str) -> None:
        """Record the graphs of this kind. Raises `RuntimeError` if there are none."""
        graphs = self._llm.engine.executor.graphs
        buckets = (
            []
            if graphs is None
            else sorted(bucket for of, bucket in graphs.captured if (of == "mixed") == (kind == "mixed"))
        )
        if graphs is None or not buckets:
            raise RuntimeError(f"this engine has no {kind} graphs")
        mib = graphs.held_bytes / 2**20
        facts.note(
            self.figures,
            "capture",
            f"{len(buckets)} {kind} graphs of {buckets[0]} to {buckets[-1]} tokens; {self._capture_s:.1f} s and "
            f"{mib:.0f} MiB for all kinds",
            graphs=len(buckets),
            capture_s=self._capture_s,
            graphs_mib=mib,
        )

    def measure_decodes(self, batch: int, run: int, when: str = "", *, kernels: bool = False) -> None:
        """Milliseconds of a step of so many decodes, with and without graphs, a run of each in turn, twice."""
        with self._measure.decoding(batch, temperature=0.0):
            replayed, launched = self._in_turn({"graphs"}, 2, run, 0)
            if kernels and self._llm.engine.model.module.device.type == "cuda":
                self._measure.kernels(batch)
        name = f"{batch}{when}"
        figures = {f"step_ms_{name}": replayed, f"launched_ms_{name}": launched}
        facts.note(
            self.figures,
            f"step of {name}",
            f"{replayed:.2f} ms with graphs, {launched:.2f} without: {launched / replayed:.2f} times",
            **{key.replace(" ", "_"): value for key, value in figures.items()},
        )

    def measure_mixed(self, num_decodes: int, num_tokens: int, repeats: int) -> None:
        """Milliseconds of a step of so many decodes beside a prompt, in pieces and launched, in turn."""
        with self._measure.decoding(num_decodes, temperature=0.0):
            self._in_turn({"mixed_graphs"}, 1, 1, num_tokens)  # compiles
            pieces, launched = self._in_turn({"mixed_graphs"}, repeats, 1, num_tokens)
        name = f"{num_decodes}_decodes_{num_tokens}_tokens"
        too_long = num_decodes + num_tokens > mixed_graphs.TOKEN_BUCKETS[-1]
        facts.note(
            self.figures,
            f"step of {num_decodes} decodes and {num_tokens} prompt tokens",
            f"{pieces:.2f} ms {'launched (too long for a graph)' if too_long else 'in pieces'}, {launched:.2f} "
            f"launched: {launched / pieces:.2f} times",
            **{f"pieces_ms_{name}": pieces, f"launched_ms_{name}": launched},
        )

    def logits(self, num_decodes: int, num_tokens: int = 0) -> None:
        """Compute the same step both ways: it writes the same keys and values again."""
        found: list[torch.Tensor] = []
        run = self._runner.run

        def both(step: Any) -> torch.Tensor:
            with self._with_graphs(set()):
                found.append(run(step).float().clone())
            found.append(run(step).float().clone())
            return found[-1]

        with self._measure.decoding(num_decodes, temperature=0.0):
            self._submit(num_tokens)
            with patch.object(self._runner, "run", both):
                self._llm.engine.step()
        launched, replayed = found[:2]
        off = ((replayed - launched).norm(dim=-1) / launched.norm(dim=-1)).max().item()
        same = (replayed.argmax(-1) == launched.argmax(-1)).float().mean().item()
        name = f"{num_decodes}_{num_tokens}" if num_tokens else f"{num_decodes}"
        facts.note(
            self.figures,
            f"logits of {name}",
            f"differ by {off:.2g} at most; {same:.0%} greedy tokens are equal",
            **{f"off_{name}": off},
        )
        if not off <= MOST_OFF:
            raise RuntimeError(f"logits of a replayed step differ by {off:.2g} from those of the same step launched")

    def _in_turn(self, graphs: set[str], rounds: int, run: int, num_tokens: int) -> tuple[float, float]:
        """Median milliseconds of a step with these graphs alone, and without any, `run` steps of each in turn."""
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(rounds):
            for replays in times:
                with self._with_graphs(graphs if replays else set()):
                    for _ in range(run):
                        self._submit(num_tokens)
                        start = time.perf_counter()
                        self._llm.engine.step()
                        times[replays].append(time.perf_counter() - start)
        return statistics.median(times[True]) * 1e3, statistics.median(times[False]) * 1e3

    @contextmanager
    def _with_graphs(self, kept: set[str]) -> Iterator[None]:
        with ExitStack() as undo:
            for kind in {"graphs", "mixed_graphs"} - kept:
                undo.enter_context(patch.object(self._runner, kind, None))
            yield

    def _submit(self, num_tokens: int) -> None:
        """A prompt that ends with its first token."""
        if num_tokens:
            [prompt] = self._measure.prompts(1, num_tokens)
            params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
            self._llm.engine.submit(f"beside {next(self._ids)}", prompt, params)


if __name__ == "__main__":
    main()
