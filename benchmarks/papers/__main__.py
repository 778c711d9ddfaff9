"""The evaluations of the two papers that Folio follows, repeated on its own scheduler, allocator and engine.

PagedAttention (Kwon et al., SOSP 2023), §6 and §7: normalised latency by request rate, of Folio and of the paper's
baselines, which reserve contiguous memory (`reserved.py`); requests batched; samples, beams, common prefixes,
conversations; block sizes; what the KV memory holds.

    simulated   OPT-13B on an A100 of 40 GB, the paper's smallest model, in simulated time (`simulated.py`)
    real        SmolLM2-135M on this machine with as many tokens of KV cache (`real.py`). Rates are shares of what Folio
                reaches at most, so that every machine is loaded alike; systems in turn at each rate.

vAttention (Prabhu et al., ASPLOS 2025), §7: iterations that wait for memory, allocation rates, waste (`mapped.py`).

Benchmarks that measure more of both papers' figures are run first if their results are older than their code:
`fragmentation`, `sharing`, `preemption`, `attention`, `mapping`. `docs/benchmarks/papers.md` is written from all
results (`page.py`), by `python -m benchmarks.report --write`, too. --quick takes a few small runs of each kind, and
writes no page.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from benchmarks import harness, real_models, report
from benchmarks.all import run_all as run_benchmarks
from benchmarks.all import why_due
from benchmarks.figures import BY_NAME
from benchmarks.papers import drawn, mapped, real, sweep
from benchmarks.papers.outcome import Outcome, Run, described
from benchmarks.papers.simulated import simulate
from benchmarks.simulator.jobs import run_all

SIBLINGS = ("fragmentation", "sharing", "preemption", "attention", "mapping")


def simulated(*, quick: bool) -> dict[Run, Outcome]:
    """All simulated runs, in one process for each processor."""
    runs, outcomes = sweep.simulated_runs(quick=quick), {}
    tasks = [functools.partial(simulate, run) for run in runs]
    for run, seen in zip(runs, run_all(tasks), strict=True):
        outcomes[run] = seen
        print(f"simulated {described(run, seen)}", flush=True)
    return outcomes


def run_siblings() -> None:
    """Run the other benchmarks whose results are older than their code."""
    folder = harness.RESULTS / "cpu"
    due = [BY_NAME[name] for name in SIBLINGS if why_due(BY_NAME[name], folder / f"{name}.json")]
    if failed := run_benchmarks(due, folder, quick=False):
        sys.exit(str(failed))


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--own", action="store_true", help="leave the other benchmarks' results as they are")
    args = parser.parse_args()
    if not args.quick and not args.own:
        run_siblings()
    if (model := real_models.fetched("smollm2")) is None:
        sys.exit("the default model is needed: folio pull smollm2")
    figures, iterations = mapped.measure(quick=args.quick)
    outcomes = {"simulated": simulated(quick=args.quick)}
    outcomes["real"], others = real.measure(model, quick=args.quick)
    figures |= others
    for where, seen in outcomes.items():
        figures |= sweep.figures(seen, where)
    raw: dict[str, Any] = {where: sweep.raw(seen) for where, seen in outcomes.items()}
    harness.finish("papers", args, figures, raw | {"iterations_ms": iterations}, drawn.draw)
    if not args.quick:
        report.write_documents()


if __name__ == "__main__":
    main()
