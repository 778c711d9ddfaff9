"""Mutation testing: change the code at random places, one at a time, and count the changes that the tests notice.

`make mutants` draws 300 mutants with a fixed seed and runs each against the tests of its own package, until the first
one fails. `mutants.toml` has the packages, their tests, and the survivors that are accepted, each with its reason.

    python -m tests.mutation --count 40 vmem               # a smaller sample of one package
    python -m tests.mutation --count 20 vmem/mapper.py     # or of one file

Of two well-kept tools neither fits:

- cosmic-ray 8.7 has no operator that drops a call or changes what is returned; it changes type hints too, has one test
  command for all modules, and changes files in place. With a sampler, a filter, operators and workers around it, what
  is left of it is what `ast` does in a few lines.
- mutmut 3.8 changes functions only (no decorated ones), runs one suite for all, and spends its mutants on strings and
  on arguments that become None. It has no negated condition and no dropped call either.

How it is fast: this process imports torch and the other libraries once and is forked for each mutant. Tests are run in
the order: the quick ones, those of the file's own name first; then the slow ones.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.mutation.mutants import Mutant, mutants_of

LIBRARIES = ("numpy", "torch", "transformers", "fastapi", "hypothesis", "ray")
ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = Path(__file__).with_name("mutants.toml")
QUICK_S = 0.5
MOST_MEMORY_BYTES = 12 << 30  # a mutant may never stop allocating


@dataclass
class Suite:
    """The tests of a package, and how long each takes where nothing is changed."""

    tests: list[str]
    durations: dict[str, float] = field(default_factory=dict)
    most_processor_s: int = 600  # a mutant may loop
    most_s: int = 1200  # or wait for what never comes


class Order:
    """A plugin that runs the quick tests first, and of those the ones of the changed file's name."""

    def __init__(self, suite: Suite, stem: str) -> None:
        self._suite, self._stem = suite, stem
        self.durations: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        usual = self._suite.durations
        items.sort(key=lambda item: (usual.get(item.nodeid, 0.0) > QUICK_S, self._stem not in item.path.stem))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.durations[report.nodeid] += report.duration  # type: ignore[assignment]


def start(suite: Suite, mutant: Mutant | None, copy: Path) -> int:
    """Fork a process that runs `suite` in `copy` with the mutant in it; a signal ends it when that takes too long."""
    if mutant:
        (copy / mutant.file).replace(copy / "original.py")
        (copy / mutant.file).write_text(mutant.source)
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        signal.alarm(suite.most_s)
        resource.setrlimit(resource.RLIMIT_CPU, (suite.most_processor_s, suite.most_processor_s))
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]
        sys.dont_write_bytecode = mutant is not None
        output = os.open(copy / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        order = Order(suite, Path(mutant.file).stem if mutant else "")
        options = ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutants")
        code = int(pytest.main([*options, *suite.tests], plugins=[order]))
        (copy / "durations.json").write_text(json.dumps(order.durations))
        sys.stdout.flush()
    finally:
        os._exit(code)


@dataclass(frozen=True)
class Outcome:
    """`code`: of the process; negative when a signal has ended it."""

    mutant: Mutant | None
    copy: Path
    code: int
    processor_s: float


def run(work: Iterable[tuple[Suite, Mutant | None]], copies: Sequence[Path]) -> Iterator[Outcome]:
    """Run the work with one process in each copy of the tree; yields what has ended."""
    running: dict[int, tuple[Mutant | None, Path]] = {}
    free, waiting = list(copies), iter(work)
    following = next(waiting, None)
    while following or running:
        if following and free:
            copy = free.pop()
            running[start(*following, copy)] = following[1], copy
            following = next(waiting, None)
            continue
        pid, status, usage = os.wait4(-1, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what the tests have left
        mutant, copy = running.pop(pid)
        yield Outcome(mutant, copy, os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)
        if mutant:
            (copy / "original.py").replace(copy / mutant.file)  # as old as its bytecode, which is valid again
        free.append(copy)


def measure(suite: Suite, copies: Sequence[Path]) -> None:
    """Time the tests where nothing is changed, and see them pass in the order that mutants get. Bytecode is kept."""
    for folders in (copies[:1], copies):
        began, processor_s = time.monotonic(), 0.0
        for outcome in run([(suite, None)] * len(folders), folders):
            if outcome.code:
                sys.exit(f"{(outcome.copy / 'output.txt').read_text()}\n{suite.tests} fail without a mutant")
            suite.durations = json.loads((outcome.copy / "durations.json").read_text())
            processor_s = max(processor_s, outcome.processor_s)
    suite.most_processor_s = int(2 * processor_s + 20)
    suite.most_s = int(4 * (time.monotonic() - began) + 60)


def copy_tree(to: Path) -> Path:
    listed = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="of what is in mutants.toml, only these folders or files")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--at-least", type=float, default=0.9, help="the share that must be killed")
    arguments = parser.parse_args()

    config = tomllib.loads(CONFIG.read_text())
    accepted = {(entry["file"], entry["line"], entry["operator"]) for entry in config.get("accepted", [])}
    for file, line, _ in sorted(accepted):
        if not (ROOT / file).exists() or line not in map(str.strip, (ROOT / file).read_text().splitlines()):
            print(f"mutants.toml: no longer in the code: {file}  {line}")
    suites: dict[str, Suite] = {}
    for path, tests in config["tests"].items():
        for file in [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("*.py")):
            name = file.relative_to(ROOT).as_posix()
            if not arguments.paths or any(Path(name).is_relative_to(path) for path in arguments.paths):
                suites[name] = next((suite for suite in suites.values() if suite.tests == tests), Suite(tests))
    drawn = sorted(
        (pair for name in suites for pair in mutants_of(ROOT, name, config["skipped_functions"], arguments.seed)),
        key=lambda pair: pair[0],
    )
    mutants = [mutant for _, mutant in drawn[: arguments.count]]
    known = [mutant for mutant in mutants if (mutant.file, mutant.original, mutant.operator) in accepted]
    print(f"{len(mutants)} of {len(drawn)} mutants; {len(known)} are accepted survivors and not run")

    for library in LIBRARIES:
        importlib.import_module(library)
    survivors: list[Mutant] = []
    with tempfile.TemporaryDirectory() as scratch:
        copies = [copy_tree(Path(scratch) / str(i)) for i in range(arguments.jobs)]
        for suite in {id(suites[mutant.file]): suites[mutant.file] for mutant in mutants}.values():
            measure(suite, copies)
            print(f"{len(suite.durations)} tests of {' '.join(suite.tests)} pass", flush=True)
        for outcome in run(((suites[m.file], m) for m in mutants if m not in known), copies):
            assert outcome.mutant
            survivors += [] if outcome.code else [outcome.mutant]
            result = "survived" if not outcome.code else "too long" if outcome.code < 0 else "killed"
            print(f"{result:8}  {outcome.mutant}", flush=True)

    print(
        "\n".join(["", *(f"accepted  {mutant}" for mutant in known), *(f"SURVIVED  {mutant}" for mutant in survivors)])
    )
    killed = 1 - (len(known) + len(survivors)) / max(len(mutants), 1)
    print(f"{killed:.1%} of {len(mutants)} mutants are killed; at least {arguments.at_least:.0%} must be")
    sys.exit(killed < arguments.at_least)


if __name__ == "__main__":
    main()
