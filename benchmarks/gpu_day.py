"""All tests and benchmarks for a CUDA machine, in stages of at most 8 minutes: `python -m benchmarks.gpu_day STAGE…`.

- *facts*: what the driver and the device do (`benchmarks.gpu_probes`), chosen tests, attention, the parts of a step
- *whole*: all tests marked `gpu`, Llama-3-8B's shape with `transformers` beside it
- *graphs*: decode graphs: tokens with and without them, capture, replays after remapping, step times
- *memory*: block sizes and views at saturation, elastic against static, a trace, preemption, delays of idle release
- *shelf*: weights that sleep and wake, from pinned memory and from a file; two models that take turns

A stage is a list of jobs. Each job is a process with a time limit, at which it is killed with its children, so that a
failure costs only itself. Jobs that measure time run alone, the others side by side. Facts
go to `STAGE.jsonl` as soon as they are known, all output to `STAGE.log`, both in the folder that `FOLIO_RESULTS` names
or in benchmarks/results/cuda. At the end there is a table, failures first. Exit status 1 if anything failed.

--fake runs the same without a device: the driver's calls by the tests' stand-in for libcuda, kernels in Triton's
interpreter, everything else small and on the CPU. It shows that this program works, and measures nothing.

Needs torch, triton, cuda-bindings, transformers and pytest; neither git nor a network.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.facts import FILE_VARIABLE, JOB_VARIABLE, append

ROOT = Path(__file__).parents[1]
BUDGET_S = 480.0
# Where only the end of the output is visible, the whole table must fit.
MOST_LINES, MOST_CHARACTERS, LINE_CHARACTERS = 80, 11_000, 150
FAILURE_LINES, TAIL_LINES = 48, 5
MOST_FILES = 8
GRACE_S = 3.0  # from the signal for Python's stacks to SIGKILL


@dataclass(frozen=True, slots=True)
class Job:
    """One process.

    Attributes:
        argv: arguments of the interpreter.
        limit_s: time after which it is killed.
        alone: it measures time, so no other job runs beside it.
    """

    name: str
    argv: tuple[str, ...]
    limit_s: float
    alone: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a job. `reason` says why it failed or was not run, and is empty if it succeeded; `tail` has its last
    lines."""

    job: Job
    seconds: float
    reason: str
    tail: tuple[str, ...]


# ---- the stages ----


def facts(fake: bool) -> list[Job]:
    """Cheap and decisive jobs first: if time runs out, only details are missing."""
    tests = "tests/kernels/triton/test_triton.py"
    return [
        _probe("machine", fake, 60),
        *(
            _probe(name, fake, 60, alone=False)
            for name in ("granularity", "triton", "dlpack", "run_unmap", "context", "alias", "graph")
        ),
        _pytest(
            "backend",
            "tests/vmem/backends/test_backend_contract.py",
            "",
            fake,
            tiny="page and (fake or stand_in)",
            limit_s=60,
        ),
        _pytest("decode", tests, "test_splits", fake, tiny="test_splits and dtype0-3", limit_s=120),
        _pytest("prefill", tests, "test_ragged_batch", fake, tiny="test_ragged_batch and dtype0-16", limit_s=150),
        _pytest("cache write", tests, "test_write", fake, tiny="test_write and dims0-dtype0", limit_s=120),
        _pytest("block copies", tests, "test_copy_blocks", fake, tiny="test_copy_blocks and 100", limit_s=60),
        _pytest(
            "tokens as on the CPU",
            "tests/app/engine/execution/test_cuda.py",
            "test_a_real_device and llama",
            fake,
            tiny="test_cuda_without",
            limit_s=150,
        ),
        _probe("costs", fake, 75),
        _probe("stall", fake, 60),
        _probe("splits", fake, 60),
        _benchmark("attention", fake, 180, "--footprints"),
        _throughput("parts", fake, 120, "qwen2.5-0.5b", "--parts"),
        _probe("ceiling_one", fake, 60),  # last: a process with so many mappings may take long to end
        _probe("ceiling_many", fake, 60),
    ]


def whole(fake: bool) -> list[Job]:
    """The tests in one process per processor, because most of their time is compilation."""
    if fake:
        tests = [_pytest("tests 1/1", "tests/vmem/test_layout.py", "", True, tiny="", limit_s=60)]
    else:
        count = num_processors()
        folders = ("tests/kernels", "tests/vmem", "tests/app/engine")
        tests = [
            Job(f"tests {i + 1}/{count}", (*PYTEST, "-m", "gpu", *folders, "--shard", f"{i}/{count}"), 220, alone=False)
            for i in range(count)
        ]
    return [
        *tests,
        _throughput("Llama-3-8B", fake, 240, "llama-3-8b"),
        _throughput("Llama-3-8B parts", fake, 90, "llama-3-8b", "--parts"),
    ]


def graphs(fake: bool) -> list[Job]:
    """What a replay may rely on, then the engine's tokens, then times."""
    tests, small = "tests/app/engine/execution/test_decode_graphs.py", "test_buckets or test_rows"
    return [
        _probe("graph", fake, 60, alone=False),
        _pytest("captures", tests, "leaves_the_device_usable", fake, tiny=small, limit_s=60),
        _pytest("tokens with graphs", tests, "same_tokens_with_graphs", fake, tiny=small, limit_s=200),
        _graphs("qwen2.5-0.5b", fake, 120),
        _graphs("llama-3-8b", fake, 180),
    ]


def memory(fake: bool) -> list[Job]:
    return [
        _benchmark("elastic", fake, 120),
        _benchmark("elastic", fake, 150, "--measure", "blocks"),
        _benchmark("mapping", fake, 110),
        _benchmark("preemption", fake, 140),
        _benchmark("elastic", fake, 130, "--measure", "delays"),
    ]


def shelf(fake: bool) -> list[Job]:
    """Under two minutes in all: the rates, then what a driver may refuse, then the engine."""
    size = ("--fake",) if fake else ()
    return [
        Job("wakes", ("-m", "benchmarks.gpu_shelf", "--measure", "wakes", *size), 90),
        _pytest(
            "weight ranges", "tests/vmem/test_uploads.py", "real_device", fake, tiny="same_tensor and Fake", limit_s=40
        ),
        Job("turns", ("-m", "benchmarks.gpu_shelf", "--measure", "turns", *size), 110),
    ]


STAGES: Mapping[str, Callable[[bool], list[Job]]] = {
    "facts": facts,
    "whole": whole,
    "graphs": graphs,
    "memory": memory,
    "shelf": shelf,
}
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


def _probe(name: str, fake: bool, limit_s: float, *, alone: bool = True) -> Job:
    return Job(name, ("-m", "benchmarks.gpu_probes", name, *(["--fake"] if fake else [])), limit_s, alone)


def _pytest(name: str, path: str, chosen: str, fake: bool, *, tiny: str, limit_s: float) -> Job:
    """Tests marked `gpu` that match `chosen`; without a device, those that match `tiny`."""
    select = ("-m", "not gpu", "-k", tiny) if fake else ("-m", "gpu", "-k", chosen)
    return Job(name, (*PYTEST, path, *select), limit_s, alone=False)


def _benchmark(name: str, fake: bool, limit_s: float, *more: str) -> Job:
    size = ("--device", "cpu", "--tiny") if fake else ("--device", "cuda", "--quick")
    job_name = " ".join((name, *(word for word in more if word != "--measure")))
    return Job(job_name.replace("--", ""), ("-m", f"benchmarks.{name}", *size, *more), limit_s)


def _graphs(shape: str, fake: bool, limit_s: float) -> Job:
    size = ("--fake",) if fake else ("--shape", shape)
    return Job(f"graphs {shape}", ("-m", "benchmarks.gpu_graphs", *size), limit_s)


def _throughput(name: str, fake: bool, limit_s: float, shape: str, *more: str) -> Job:
    size = ("--device", "cpu", "--shape", "tiny", "--quick") if fake else ("--device", "cuda", "--shape", shape)
    return Job(name, ("-m", "benchmarks.throughput", *size, *more), limit_s)


# ---- running ----


class Stage:
    """Runs the jobs of a stage once, within its budget, and keeps their output.

    Args:
        folder: of `NAME.jsonl` and `NAME.log`.
        environment: of the jobs.
        budget_s: for all jobs together.
    """

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str], budget_s: float = BUDGET_S) -> None:
        self.facts, self._log = folder / f"{name}.jsonl", (folder / f"{name}.log").open("a", buffering=1)
        self._environment = dict(environment) | {FILE_VARIABLE: str(self.facts)}
        self._lock = threading.Lock()  # of the log
        self._running: set[subprocess.Popen[str]] = set()
        self._end = time.monotonic() + budget_s

    def run(self, jobs: Iterable[Job]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for alone, some in itertools.groupby(jobs, key=lambda job: job.alone):
            with ThreadPoolExecutor(1 if alone else num_processors()) as pool:
                try:
                    outcomes += pool.map(self._run_one, some)
                except BaseException:  # interrupted: start nothing more, leave nothing running
                    self._end = 0.0
                    for process in list(self._running):
                        _kill(process)
                    raise
        self._log.close()
        return outcomes

    def _run_one(self, job: Job) -> Outcome:
        left = self._end - time.monotonic()
        if left < job.limit_s / 2:  # limits are generous: most jobs take less than half of theirs
            outcome = Outcome(job, 0.0, "skipped: no time left", ())
        else:
            outcome = self._run_process(job, min(job.limit_s, left))
        figures = _figures(outcome.tail)
        line = {
            "job": job.name,
            "ok": not outcome.reason,
            "seconds": round(outcome.seconds, 1),
            "reason": outcome.reason,
        }
        append(self.facts, line | ({"figures": figures} if figures else {}))
        return outcome

    def _run_process(self, job: Job, limit_s: float) -> Outcome:
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *job.argv],
            cwd=ROOT,
            env=self._environment | {JOB_VARIABLE: job.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        reader = threading.Thread(target=self._read, args=(job, process, tail), daemon=True)
        self._running.add(process)
        reader.start()
        try:
            status = process.wait(limit_s)
            reason = "" if status == 0 else f"exit status {status}"
            seen: Sequence[str] = ()
        except subprocess.TimeoutExpired:
            reason, seen = f"killed at its limit of {limit_s:.0f} s", tuple(tail)
        _kill(process)  # always, because it may have left children
        reader.join(GRACE_S)  # a grandchild in another session may keep the pipe open
        self._running.discard(process)
        # Of a hung job, the lines before its stacks, which are in the log.
        return Outcome(job, time.monotonic() - start, reason, tuple(seen or tail))

    def _read(self, job: Job, process: subprocess.Popen[str], tail: deque[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._lock:
                if not self._log.closed:
                    self._log.write(f"[{job.name}] {line.rstrip()}\n")
            if line.strip():
                tail.append(line.rstrip())


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a job's process group, which has all its children."""
    if process.poll() is None:
        _signal(process, signal.SIGABRT)  # Python's fault handler prints where each thread is
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    _signal(process, signal.SIGKILL)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} does not end", flush=True)  # in a call of the driver, say


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def num_processors() -> int:
    return len(os.sched_getaffinity(0))


# ---- the table ----


def table(outcomes: Sequence[Outcome], facts: Sequence[Mapping[str, object]], *, fake: bool = False) -> str:
    """At most 80 lines: failures with their last lines, then successes, then the main figures."""
    failed = [outcome for outcome in outcomes if outcome.reason]
    lines = [f"{len(outcomes) - len(failed)} of {len(outcomes)} jobs succeeded"]
    if fake:
        lines[0] += "; without a device, so that no number below is a measurement"
    # One line for each failure, and as many of their last lines as fit.
    tail_lines = min(TAIL_LINES, max(0, FAILURE_LINES // max(1, len(failed)) - 1))
    for outcome in failed[:FAILURE_LINES]:
        lines.append(f"FAILED  {outcome.job.name}, {outcome.seconds:.1f} s: {outcome.reason}")
        lines += [f"    | {line}" for line in outcome.tail[len(outcome.tail) - tail_lines :]]
    if succeeded := [f"{o.job.name} {o.seconds:.1f} s" for o in outcomes if not o.reason]:
        lines += _wrap("ok: " + ", ".join(succeeded), 10)
    speaking = {fact["job"] for fact in facts if fact.get("shown")}
    for fact in facts:
        if shown := fact.get("shown"):
            lines += _wrap(f"{fact['job']}, {fact['fact']}: {shown}", 3)
        elif (figures := fact.get("figures")) and fact["job"] not in speaking:
            lines += _wrap(f"{fact['job']}: {figures}", 8)
    return _cut(lines)


def _wrap(text: str, most: int) -> list[str]:
    return textwrap.wrap(text, LINE_CHARACTERS, subsequent_indent="    ", max_lines=most, placeholder=" …")


def _cut(lines: Sequence[str]) -> str:
    """As many lines as may be shown, with long ones shortened."""
    kept: list[str] = []
    room = MOST_CHARACTERS
    for line in lines:
        line = line if len(line) <= LINE_CHARACTERS else line[: LINE_CHARACTERS - 1] + "…"
        room -= len(line) + 1
        if room < 100 or len(kept) == MOST_LINES - 1:
            kept.append(f"… {len(lines) - len(kept)} more lines are in the results")
            break
        kept.append(line)
    return "\n".join(kept)


def _figures(tail: Sequence[str]) -> str:
    """The figures in the last line of a benchmark's output, which is JSON."""
    try:
        figures = json.loads(tail[-1])["figures"]
    except (IndexError, ValueError, TypeError, KeyError):
        return ""
    return ", ".join(f"{key} {value:.4g}" for key, value in figures.items())


def read_facts(path: Path) -> list[dict[str, object]]:
    """All complete lines; a killed job may have left a partial one."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


# ---- the program ----


def make_environment(folder: Path, fake: bool) -> dict[str, str]:
    environment = dict(os.environ) | {
        "FOLIO_RESULTS": str(folder),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if fake:
        stand_in = importlib.import_module("tests.vmem.backends.stand_in_driver")  # building it needs a C compiler
        environment |= {
            "LD_LIBRARY_PATH": f"{stand_in.build()}:{environment.get('LD_LIBRARY_PATH', '')}",
            "CUDA_VISIBLE_DEVICES": "",
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
        }
    return environment


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=tuple(STAGES), metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--fake", action="store_true", help="run small versions of everything without a device")
    parser.add_argument("--only", nargs="+", metavar="JOB", help="run only these jobs")
    parser.add_argument("--list", action="store_true", help="list the jobs and their time limits")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for each stage")
    args = parser.parse_args(argv)
    stages = {name: STAGES[name](args.fake) for name in args.stages}
    if args.fake:  # without measurements jobs may run side by side, and on a machine that is busy with other work
        stages = {
            name: [replace(job, alone=False, limit_s=2 * job.limit_s) for job in jobs] for name, jobs in stages.items()
        }
    if unknown := set(args.only or ()) - {job.name for jobs in stages.values() for job in jobs}:
        parser.error(f"no such job: {', '.join(sorted(unknown))}")
    if args.only:
        stages = {name: [job for job in jobs if job.name in args.only] for name, jobs in stages.items()}
    if args.list:
        for name, jobs in stages.items():
            for job in jobs:
                print(f"{name:8}{job.name:28}{job.limit_s:5.0f} s{'  alone' if job.alone else ''}")
        return 0
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a job that is ended by a signal leaves no file
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which runs every `finally`
    with tempfile.TemporaryDirectory() as temporary:
        default = Path(temporary) / "results" if args.fake else ROOT / "benchmarks" / "results" / "cuda"
        folder = Path(os.environ.get("FOLIO_RESULTS", default)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        environment = make_environment(folder, args.fake)
        outcomes: list[Outcome] = []
        found: list[dict[str, object]] = []
        for name, jobs in stages.items():
            stage = Stage(name, folder, environment, args.budget_s)
            known = len(read_facts(stage.facts))
            outcomes += stage.run(jobs)
            found += read_facts(stage.facts)[known:]
            for path in sorted(folder.glob("*.png"))[: max(0, len(list(folder.iterdir())) - MOST_FILES)]:
                path.unlink()  # plots first, in case few files come back
    print(table(outcomes, found, fake=args.fake))
    return int(any(outcome.reason for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
