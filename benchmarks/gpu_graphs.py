"""Decode graphs of one shape on a GPU: what capturing costs, and what a step gains (a job of `benchmarks.gpu_day`).

Random weights in bfloat16, as in `benchmarks.sweep`:

- seconds and bytes of capturing every bucket in the view of the settings, the largest first
- milliseconds of a greedy decode step by batch, with graphs and, in turn, without them in the same engine; the kernels
  of one of them
- the same after all pages have been given back and mapped anew
- largest relative difference of a row of logits between both; rows differ only where a product chooses another kernel
  for the padded number of rows

--fake runs a tiny shape on the CPU with the stand-in for graphs, and measures nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig

from benchmarks import facts, harness, sweep
from folio.app.engine import LLM
from folio.app.engine.model import checkpoint_module

BATCHES, FAKE_BATCHES = (1, 4, 16, 32, 64, 256), (1, 3)
STEPS, FAKE_STEPS = 24, 4


class Graphs:
    """Measures one engine and collects the figures."""

    def __init__(self, llm: LLM, measure: sweep.Sweep, num_steps: int) -> None:
        self._llm, self._measure, self._num_steps = llm, measure, num_steps
        self._runner = llm.engine.executor._runner
        self.figures: dict[str, float] = {}

    def capture(self) -> None:
        engine, graphs = self._llm.engine, self._llm.engine.executor.graphs
        if graphs is None:
            raise RuntimeError("this engine has no graphs")
        start = time.perf_counter()
        engine.executor.capture_graphs(engine.config.kv_view)
        seconds = time.perf_counter() - start
        buckets = [bucket for _, bucket in graphs.captured]
        self._note(
            "capture",
            f"{len(buckets)} graphs of {min(buckets)} to {max(buckets)} sequences in {seconds:.1f} s, "
            f"{graphs.num_bytes / 2**20:.0f} MiB",
            graphs=len(buckets),
            capture_s=seconds,
            graphs_mib=graphs.num_bytes / 2**20,
        )

    def steps(self, batch: int, when: str) -> None:
        """Milliseconds of a step of so many sequences, with and without graphs, a run of each in turn, twice."""
        times: dict[bool, list[float]] = {True: [], False: []}
        with self._measure.decoding(batch, temperature=0.0):
            for on in (True, False, True, False):
                with nullcontext() if on else patch.object(self._runner, "graphs", None):
                    for _ in range(self._num_steps // 2):
                        start = time.perf_counter()
                        self._llm.engine.step()
                        times[on].append(time.perf_counter() - start)
            if self._runner.graphs is not None and batch == BATCHES[-2]:
                self._measure.kernels(batch)
        replayed, launched = (statistics.median(times[on]) * 1e3 for on in (True, False))
        self._note(
            f"step of {batch}{when}",
            f"{replayed:.2f} ms with graphs, {launched:.2f} without: {launched / replayed:.2f} times",
            **{
                f"step_ms_{batch}{when}".replace(" ", "_"): replayed,
                f"launched_ms_{batch}{when}".replace(" ", "_"): launched,
            },
        )

    def logits(self, batch: int) -> None:
        """Compute the same step both ways: decodes of it write the same keys and values again."""
        found: list[torch.Tensor] = []
        run = self._runner.run

        def both(step: Any) -> torch.Tensor:
            with patch.object(self._runner, "graphs", None):
                found.append(run(step).float().clone())
            found.append(run(step).float().clone())
            return found[-1]

        with self._measure.decoding(batch, temperature=0.0), patch.object(self._runner, "run", both):
            self._llm.engine.step()
        launched, replayed = found[:2]
        off = ((replayed - launched).norm(dim=-1) / launched.norm(dim=-1)).max().item()
        same = (replayed.argmax(-1) == launched.argmax(-1)).float().mean().item()
        self._note(
            f"logits of {batch}",
            f"differ by {off:.2g} at most; {same:.0%} greedy tokens are equal",
            **{f"off_{batch}": off},
        )
        if not off <= 0.05:
            raise RuntimeError(f"logits of a graph differ by {off:.2g} from those of the same step without")

    def _note(self, fact: str, shown: str, **figures: float) -> None:
        self.figures |= figures
        facts.record(fact, shown, **{name: float(f"{value:.4g}") for name, value in figures.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default=sweep.DEFAULT_SHAPE, choices=tuple(sweep.SHAPES))
    parser.add_argument("--fake", action="store_true")
    args = parser.parse_args()
    args.device, args.quick = "cpu" if args.fake else "cuda", False
    shape = "tiny" if args.fake else args.shape
    settings = dict(sweep.SHAPES[shape])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, initializer_range=sweep.WEIGHT_STD)
    sizes = sweep.QUICK if args.fake else sweep.Sizes()
    with ExitStack() as undo:
        if args.fake:  # the stand-in records torch's calls alone
            undo.enter_context(patch.object(checkpoint_module, "optimise", lambda *_, **__: None))
        llm = undo.enter_context(
            sweep.make_llm(
                config,
                args.device,
                sizes,
                decode_graphs="on",
                kv_idle_release_s=0.5,
                async_scheduling="off",
                num_threads=1 if args.fake else None,
            )
        )
        graphs = Graphs(
            llm,
            sweep.Sweep(llm, config, sizes, *sweep.ceilings(llm.engine.model.module.device)),
            FAKE_STEPS if args.fake else STEPS,
        )
        graphs.capture()
        batches = FAKE_BATCHES if args.fake else BATCHES
        for batch in batches:
            graphs.steps(batch, "")
        graphs.logits(batches[1])
        time.sleep(0.1 if args.fake else 1.5)  # idle pages go back
        graphs.steps(batches[1], " after a pause")
    harness.finish(f"graphs-{shape}", args, graphs.figures, {})


if __name__ == "__main__":
    main()
