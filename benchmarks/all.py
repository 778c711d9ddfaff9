"""All benchmarks one after the other, and the report of their results.

`python -m benchmarks.all` runs the quick versions (`make bench`), `--full` the whole ones (`make bench-full`), which
replace the committed results. Full runs are for a quiet machine. They measure what has no result or a stale one, of
code that has changed since (`benchmarks.measured`), so that an interrupted run can be continued; `--again` measures the
others, too. A benchmark that fails is told at the end, and the others are run.

Rivals that are servers (vLLM, OpenVINO GenAI, llama.cpp) take part in `throughput` if they are installed: see
`benchmarks.rival_servers`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import harness, measured, report
from benchmarks.figures import BENCHMARKS, BY_NAME, Benchmark
from benchmarks.rivals import rival_servers

QUICK_TIMEOUT_S, TIMEOUT_FACTOR, LEAST_TIMEOUT_S, END_S = 900.0, 5, 1800.0, 60.0


def command_of(benchmark: Benchmark, *, quick: bool) -> list[str]:
    """The command line of a benchmark on this machine."""
    command = [sys.executable, "-m", *benchmark.command]
    if benchmark.command[0] == "benchmarks.serving" and not harness.has_fast_bfloat16():
        # Otherwise steps take seconds, whose noise hides the cost of HTTP.
        command += ["--dtype", "float32", "--layers", "4"]
    if benchmark.name == "throughput" and not quick:
        command += ["--rivals"]
    return command + (["--quick"] if quick else [])


def why_due(benchmark: Benchmark, path: Path) -> str:
    """Why a benchmark must be measured: no result, or a stale one. Empty if its result is of the present code."""
    if not path.exists():
        return "no result"
    changed = measured.changed(benchmark, json.loads(path.read_text()))
    return f"stale: {', '.join(changed)}" if changed else ""


def minutes_of(benchmark: Benchmark, path: Path) -> float:
    """Expected duration: that of the last result, or the estimate."""
    duration_s = json.loads(path.read_text())["duration_s"] if path.exists() else None
    return benchmark.minutes if duration_s is None else duration_s / 60


def run(benchmark: Benchmark, *, quick: bool, timeout_s: float) -> str | None:
    """Run one benchmark; returns how it failed, or `None`."""
    command = command_of(benchmark, quick=quick)
    print(f"\n==> {benchmark.name}: {shlex.join(command[1:])}", flush=True)
    # Benchmarks end their servers themselves; the session's group is ended with a benchmark that hangs.
    with subprocess.Popen(command, cwd=harness.ROOT, env=os.environ, start_new_session=True) as process:
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            time.sleep(END_S)
            os.killpg(process.pid, signal.SIGKILL)
            return f"not done after {timeout_s / 60:.0f} minutes"
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGINT)
            raise
    return f"exit status {status}" if status else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the whole benchmarks, for a quiet machine: hours")
    parser.add_argument("--again", action="store_true", help="also those whose result is of the present code")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[b.name for b in BENCHMARKS if b.command], help="these only"
    )
    parser.add_argument("--list", action="store_true", help="print what would run, with expected minutes, and end")
    args = parser.parse_args()
    quick = not args.full
    folder = (harness.QUICK_RESULTS if quick else harness.RESULTS) / "cpu"
    chosen = chosen_by(args.only, quick=quick)
    why = {b.name: "" if quick else why_due(b, folder / f"{b.name}.json") for b in chosen}
    due = [b for b in chosen if quick or args.again or why[b.name]]
    show(chosen, due, why, folder, quick=quick)
    if args.list:
        return
    if not quick and harness.commit().endswith("+changes"):
        sys.exit("the working tree has changes: commit them first, because full results name the commit they measure")
    failed = run_all(due, folder, quick=quick)
    print(f"\nreport: {(folder / 'report.md').relative_to(harness.ROOT)}")
    if not quick:
        print("now: python -m benchmarks.report --write, look at the pictures, and commit")
    if failed:
        sys.exit("\n".join(f"FAILED {name}: {failure}" for name, failure in failed.items()))


def chosen_by(names: Sequence[str] | None, *, quick: bool) -> list[Benchmark]:
    """The benchmarks of these names, or all, that have such a run."""
    return [b for b in BENCHMARKS if b.command and (b.quick or not quick) and b.name in (names or BY_NAME)]


def show(
    chosen: Sequence[Benchmark], due: Sequence[Benchmark], why: Mapping[str, str], folder: Path, *, quick: bool
) -> None:
    """Print what would run, why, and how long it takes."""
    for benchmark in chosen:
        minutes = 1.0 if quick else minutes_of(benchmark, folder / f"{benchmark.name}.json")
        reason = why[benchmark.name] if benchmark in due else "has a result of this code"
        print(f"{benchmark.name:16} {minutes:5.0f} min  {reason}")
    if not quick:
        total = sum(minutes_of(b, folder / f"{b.name}.json") for b in due)
        print(f"{'in all':16} {total:5.0f} min\nrivals: {rival_servers.described()}")


def run_all(due: Sequence[Benchmark], folder: Path, *, quick: bool) -> dict[str, str]:
    """Run benchmarks and write the report after each. Returns those that failed, and how."""
    failed: dict[str, str] = {}
    for benchmark in due:
        begun = time.monotonic()
        timeout_s = QUICK_TIMEOUT_S if quick else max(LEAST_TIMEOUT_S, 60 * TIMEOUT_FACTOR * benchmark.minutes)
        if failure := run(benchmark, quick=quick, timeout_s=timeout_s):
            failed[benchmark.name] = failure
        print(f"==> {benchmark.name} {failure or 'done'} after {(time.monotonic() - begun) / 60:.1f} min", flush=True)
        report.write(folder, failed)
    report.write(folder, failed)
    return failed


if __name__ == "__main__":
    main()
