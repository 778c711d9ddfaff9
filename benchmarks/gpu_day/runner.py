"""Runs the jobs of a stage, each as a process whose descendants all end with it."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from benchmarks.facts import FILE_VARIABLE, JOB_VARIABLE, append
from benchmarks.gpu_day import keeper, ray_logs
from benchmarks.gpu_day.job import Job, Outcome
from benchmarks.gpu_day.table import TAIL_LINES, figures_of

ROOT = Path(__file__).parents[2]
# From a job's limit until its last process is gone, and its Ray logs are packed.
ENDING_S = keeper.GRACE_S + keeper.END_S + 2


class Stage:
    """Runs the jobs of a stage once, within its budget, and keeps their output.

    Args:
        folder: of `NAME.jsonl`, `NAME.log` and `NAME-ray.tar.gz`.
        environment: of the jobs.
        budget_s: for all jobs together, their ends included.

    Attributes:
        outcomes: so far, those of jobs that an interruption has ended included.
    """

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str], budget_s: float) -> None:
        self.facts, self._log = folder / f"{name}.jsonl", (folder / f"{name}.log").open("a", buffering=1)
        self._ray_logs = folder / f"{name}-ray.tar.gz"
        self._environment = dict(environment) | {FILE_VARIABLE: str(self.facts)}
        self._lock = threading.Lock()  # of the log
        self._running: set[subprocess.Popen[str]] = set()
        self._end = time.monotonic() + budget_s  # 0 after an interruption
        self.outcomes: list[Outcome] = []

    def run(self, jobs: Iterable[Job]) -> list[Outcome]:
        sessions = Path(tempfile.mkdtemp(prefix="gd", dir="/tmp"))  # short, for the paths of Ray's sockets
        try:
            for alone, some in itertools.groupby(jobs, key=lambda job: job.alone):
                futures: list[Future[Outcome]] = []
                try:
                    with ThreadPoolExecutor(1 if alone else num_processors()) as pool:
                        futures += [pool.submit(self._run_one, job, sessions) for job in some]
                        try:
                            wait(futures)
                        except BaseException:  # interrupted: start nothing more, leave nothing running
                            self._end = 0.0
                            running = list(self._running)
                            for process in running:
                                self._tell(process)  # all, before one is waited for
                            for process in running:
                                self._end_job(process)
                            raise
                finally:
                    self.outcomes += [future.result() for future in futures if future.done()]
        finally:
            ray_logs.pack(sessions, self._ray_logs)
            shutil.rmtree(sessions, ignore_errors=True)
            self._log.close()
        return self.outcomes

    def _run_one(self, job: Job, sessions: Path) -> Outcome:
        left = self._end - time.monotonic() - ENDING_S
        if left < job.limit_s / 2:  # limits are generous: most jobs take less than half of theirs
            outcome = Outcome(job, 0.0, f"skipped: {'no time left' if self._end else 'interrupted'}", ())
        else:
            ray_folder = Path(tempfile.mkdtemp(dir=sessions))
            outcome = self._run_process(job, min(job.limit_s, left), ray_folder)
            if outcome.reason:
                for name, lines in ray_logs.last_lines(ray_folder):
                    append(self.facts, {"job": job.name, "fact": "last lines", "file": name, "lines": lines})
        figures = figures_of(outcome.tail)
        line = {
            "job": job.name,
            "ok": not outcome.reason,
            "seconds": round(outcome.seconds, 1),
            "reason": outcome.reason,
        }
        append(self.facts, line | ({"figures": figures} if figures else {}))
        return outcome

    def _run_process(self, job: Job, limit_s: float, ray_folder: Path) -> Outcome:
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-SE", keeper.__file__, sys.executable, *job.argv],
            cwd=ROOT,
            env=self._environment | {JOB_VARIABLE: job.name, "RAY_TMPDIR": str(ray_folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a signal for this process's group leaves the keeper to its work
        )
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        reader = threading.Thread(target=self._read, args=(job, process, tail), daemon=True)
        self._running.add(process)
        reader.start()
        try:
            status = process.wait(limit_s if self._end else 0.0)
            reason = "" if status == 0 else f"exit status {status}"
            seen: Sequence[str] = ()
        except subprocess.TimeoutExpired:
            reason, seen = f"killed at its limit of {limit_s:.0f} s", tuple(tail)
        if reason and not self._end:
            reason = "interrupted"
        self._end_job(process)
        reader.join(keeper.GRACE_S)  # a process that does not end keeps the pipe open
        self._running.discard(process)
        # Of a hung job, the lines before its stacks, which are in the log.
        return Outcome(job, time.monotonic() - start, reason, tuple(seen or tail))

    def _end_job(self, process: subprocess.Popen[str]) -> None:
        """Let the keeper end the job's processes. Its pipe ends with this process, too, however that ends."""
        self._tell(process)
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()

    def _tell(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.close()

    def _read(self, job: Job, process: subprocess.Popen[str], tail: deque[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._lock:
                if not self._log.closed:
                    self._log.write(f"[{job.name}] {line.rstrip()}\n")
            if line.strip() and self._end:  # not the stacks of an interrupted job
                tail.append(line.rstrip())


def num_processors() -> int:
    return len(os.sched_getaffinity(0))
