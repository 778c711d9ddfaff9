"""The program: chooses stages and jobs, runs them, prints the table."""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import signal
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import benchmarks.gpu_day
from benchmarks import facts
from benchmarks.gpu_day.job import Job, Outcome
from benchmarks.gpu_day.runner import ROOT, Stage
from benchmarks.gpu_day.stages import BUDGET_S, BUDGETS_S, FAKE_BUDGET_S, FAKE_LIMITS, STAGES
from benchmarks.gpu_day.table import table

MOST_FILES = 8


def make_environment(folder: Path, fake: bool) -> dict[str, str]:
    environment = dict(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "FOLIO_RESULTS": str(folder),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    # What one job has compiled, those after it read, also those of a later call of this program.
    environment.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "folio-gpu-day"))
    if fake:
        stand_in = importlib.import_module("tests.vmem.backends.stand_in_driver")  # building it needs a C compiler
        environment |= {
            "LD_LIBRARY_PATH": f"{stand_in.build()}:{environment.get('LD_LIBRARY_PATH', '')}",
            "CUDA_VISIBLE_DEVICES": "",
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
        }
    return environment


def seen(folder: Path) -> dict[Path, int]:
    """When each file was written."""
    return {path: path.stat().st_mtime_ns for path in sorted(folder.iterdir()) if path.is_file()}


def pack(folder: Path, name: str, before: Mapping[Path, int]) -> None:
    """Put the files written since `before` into an archive, but for facts and archives, in case few files come back
    from the machine. Plots, which can be drawn again, are deleted."""
    paths = [path for path, when in seen(folder).items() if before.get(path) != when]
    packed = [path for path in paths if path.suffix not in (".jsonl", ".gz", ".png")]
    with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as archive:
        for path in packed:
            archive.add(path, path.name)
    for path in paths:
        if path in packed or path.suffix == ".png":
            path.unlink()


def make_parser(stages: Iterable[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=benchmarks.gpu_day.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="+", choices=tuple(stages), metavar="STAGE", help=", ".join(stages))
    parser.add_argument("--fake", action="store_true", help="run small versions of everything without a device")
    parser.add_argument("--only", nargs="+", metavar="JOB", help="run only these jobs")
    parser.add_argument("--list", action="store_true", help="list the jobs and their time limits")
    parser.add_argument("--pack", action="store_true", help=f"leave at most {MOST_FILES} files: pack logs and results")
    parser.add_argument("--budget-s", type=float, help="seconds for each stage")
    return parser


def check_folder(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Make the folder of results; exit with an error if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        parser.error(f"results cannot be written to {folder}: {error.strerror}; set FOLIO_RESULTS to another folder")


def chosen(stage: str, jobs: Sequence[Job], args: argparse.Namespace) -> list[Job]:
    """The jobs of `--only`. Without measurements jobs may run side by side, and on a machine that is busy with other
    work; only the bare engine needs the figures of the server."""
    some = [job for job in jobs if not args.only or job.name in args.only]
    if not args.fake:
        return some
    return [replace(job, alone=stage == "server", limit_s=FAKE_LIMITS * job.limit_s) for job in some]


def main(argv: Sequence[str] | None = None, jobs_of: Mapping[str, Callable[[bool], list[Job]]] = STAGES) -> int:
    parser = make_parser(jobs_of)
    args = parser.parse_args(argv)
    stages = {name: jobs_of[name](args.fake) for name in args.stages}
    if unknown := set(args.only or ()) - {job.name for jobs in stages.values() for job in jobs}:
        parser.error(f"no such job: {', '.join(sorted(unknown))}")
    stages = {name: chosen(name, jobs, args) for name, jobs in stages.items()}
    if args.list:
        for name, jobs in stages.items():
            for job in jobs:
                print(f"{name:8}{job.name:28}{job.limit_s:5.0f} s{'  alone' if job.alone else ''}")
        return 0
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a job that is ended by a signal leaves no file
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which runs every `finally`
    with tempfile.TemporaryDirectory() as temporary:
        default = Path(temporary) / "results" if args.fake else ROOT / "benchmarks" / "results" / "cuda"
        folder = Path(os.environ.get("FOLIO_RESULTS") or default).absolute()
        check_folder(parser, folder)
        before = seen(folder)
        environment = make_environment(folder, args.fake)
        outcomes: list[Outcome] = []
        found: list[dict[str, object]] = []
        try:
            for name, jobs in stages.items():
                stage = Stage(
                    name,
                    folder,
                    environment,
                    args.budget_s or (FAKE_BUDGET_S if args.fake else BUDGETS_S.get(name, BUDGET_S)),
                )
                known = len(facts.read(stage.facts))
                try:
                    stage.run(jobs)
                finally:
                    outcomes += stage.outcomes
                    found += facts.read(stage.facts)[known:]
        finally:  # after an interruption, too
            print(table(outcomes, found, fake=args.fake), flush=True)
            if args.pack:
                pack(folder, "-".join(stages), before)
    return int(any(outcome.reason for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
