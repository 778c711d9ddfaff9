"""Mutation testing: change the code at random places, one at a time, and count the changes that the tests notice.

`make mutants` draws 300 mutants with a fixed seed and runs each against the tests of its own package, until the first
one fails. `mutants.toml` has the packages, their tests, and the survivors that are accepted, each with its reason.

    python -m tests.mutation --count 40 vmem               # a smaller sample of one package
    python -m tests.mutation --count 20 vmem/mapping/mapper.py     # or of one file

Of two well-kept tools neither fits:

- cosmic-ray 8.7 has no operator that drops a call or changes what is returned; it changes type hints too, has one test
  command for all modules, and changes files in place. With a sampler, a filter, operators and workers around it, what
  is left of it is what `ast` does in a few lines.
- mutmut 3.8 changes functions only (no decorated ones), runs one suite for all, and spends its mutants on strings and
  on arguments that become None. It has no negated condition and no dropped call either.

How it is fast: this process imports torch and the other libraries once and is forked for each mutant. The tests run
once without a mutant, to time them and to note which functions each calls. A mutant gets only the tests that call its
function, the quick ones first, and of these those of the file's own name. A mutant that loops or waits is ended after a
few times its test's usual time.
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
import threading
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

import pytest

from benchmarks import harness
from tests.mutation.mutants import Mutant, mutants_of

LIBRARIES = ("numpy", "torch", "transformers", "fastapi", "hypothesis", "ray")
ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = Path(__file__).with_name("mutants.toml")
QUICK_S = 0.5
MEASURED = "measured.json"
MOST_MEMORY_BYTES = 12 << 30  # a mutant may never stop allocating


@dataclass
class Suite:
    """The tests of a package, how long each takes where nothing is changed, and the functions that it calls.

    `calls`: test → functions; file of tests → functions that fixtures call, which several tests may share; "" →
    functions that are called when modules are imported.
    """

    tests: list[str]
    durations: dict[str, float] = field(default_factory=dict)
    calls: dict[str, list[str]] = field(default_factory=dict)

    def may_notice(self, test: str, mutant: Mutant) -> bool:
        function = f"{mutant.file} {mutant.function}"
        return (
            not mutant.function
            or test not in self.calls  # not known
            or any(function in self.calls.get(caller, ()) for caller in (test, test.split("::")[0], ""))
        )


class Measure:
    """A plugin that times the tests and notes the functions under `folder` that each of them calls."""

    def __init__(self, folder: Path) -> None:
        self.durations: Counter[str] = Counter()
        self._folder = f"{folder}/"
        self._caller = ""
        self._calls: defaultdict[str, dict[int, CodeType]] = defaultdict(dict)
        self._untraced: set[str] = set()
        threading.settrace(self._note_call)
        sys.settrace(self._note_call)

    def _note_call(self, frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code.co_filename.startswith(self._folder):
            self._calls[self._caller][id(frame.f_code)] = frame.f_code

    @property
    def calls(self) -> dict[str, list[str]]:
        def name(code: CodeType) -> str:
            file = code.co_filename.removeprefix(self._folder).removeprefix("folio/")
            return f"{file} {code.co_qualname.split('.<locals>')[0]}"

        return {
            caller: sorted({name(code) for code in codes.values()})
            for caller, codes in self._calls.items()
            if caller not in self._untraced
        }

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._caller = item.nodeid.split("::")[0]
        sys.settrace(self._note_call)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._caller = item.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._caller = item.nodeid.split("::")[0]
        if sys.gettrace() != self._note_call:  # Python has dropped it, as after a RecursionError
            self._untraced.add(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.durations[report.nodeid] += report.duration  # type: ignore[assignment]


class Choice:
    """A plugin that runs the tests that may notice a mutant in a good order, and ends the process if one takes long."""

    def __init__(self, suite: Suite, mutant: Mutant) -> None:
        self._suite, self._mutant = suite, mutant

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        stem = Path(self._mutant.file).stem

        def cost(item: pytest.Item) -> tuple[bool, bool, float]:
            usual_s = self._suite.durations.get(item.nodeid, 0.0)
            return usual_s > QUICK_S, usual_s <= QUICK_S and stem not in item.path.stem, usual_s

        items[:] = sorted((item for item in items if self._suite.may_notice(item.nodeid, self._mutant)), key=cost)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        limit(self._suite.durations.get(item.nodeid, 0.0))


def limit(usual_s: float) -> None:
    """Let signals end this process: a mutant may loop, or wait for what never comes."""
    signal.setitimer(signal.ITIMER_PROF, 20 + 4 * usual_s)  # processor time
    signal.alarm(int(60 + 10 * usual_s))


def start(suite: Suite, mutant: Mutant | None, copy: Path) -> int:
    """Fork a process that runs `suite` in `copy`, with the mutant in it or measured."""
    if mutant:
        (copy / mutant.file).replace(copy / "original.py")
        (copy / mutant.file).write_text(mutant.source)
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "folio")]:
            del sys.modules[name]
        sys.dont_write_bytecode = mutant is not None
        output = os.open(copy / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutants", *suite.tests]
        if mutant:
            limit(60)
            code = int(pytest.main(options, plugins=[Choice(suite, mutant)]))
        else:
            measure = Measure(copy)
            code = int(pytest.main(options, plugins=[measure]))
            sys.settrace(None)
            (copy / MEASURED).write_text(json.dumps([measure.durations, measure.calls]))
        sys.stdout.flush()
    finally:
        os._exit(code)


@dataclass(frozen=True)
class Outcome:
    """`code`: of the process; negative when a signal has ended it."""

    mutant: Mutant | None
    copy: Path
    code: int

    @property
    def result(self) -> str:
        if self.code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return "survived"
        return "too long" if self.code < 0 else "killed"


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
        pid, status = os.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what the tests have left
        mutant, copy = running.pop(pid)
        yield Outcome(mutant, copy, os.waitstatus_to_exitcode(status))
        if mutant:
            (copy / "original.py").replace(copy / mutant.file)  # as old as its bytecode, which is valid again
        free.append(copy)


def measure(suite: Suite, copy: Path) -> None:
    """Fill in the suite, and see it pass where nothing is changed. Bytecode is kept."""
    for outcome in run([(suite, None)], [copy]):
        if outcome.code:
            sys.exit(f"{(copy / 'output.txt').read_text()}\n{suite.tests} fail without a mutant")
    suite.durations, suite.calls = json.loads((copy / MEASURED).read_text())


def copy_tree(to: Path) -> Path:
    listed = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():  # `folio` has links to the packages
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="of what is in mutants.toml, only these folders or files")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=49)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--at-least", type=float, default=0.95, help="the share that must be killed")
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
        copies = [copy_tree(Path(scratch) / "0")]
        for suite in {id(suites[mutant.file]): suites[mutant.file] for mutant in mutants}.values():
            measure(suite, copies[0])
            print(f"{len(suite.durations)} tests of {' '.join(suite.tests)} pass", flush=True)
        copies += [
            Path(shutil.copytree(copies[0], Path(scratch) / str(i), symlinks=True)) for i in range(1, arguments.jobs)
        ]
        for outcome in run(((suites[m.file], m) for m in mutants if m not in known), copies):
            assert outcome.mutant
            survivors += [outcome.mutant] if outcome.result == "survived" else []
            print(f"{outcome.result:8}  {outcome.mutant}", flush=True)

    print(
        "\n".join(["", *(f"accepted  {mutant}" for mutant in known), *(f"SURVIVED  {mutant}" for mutant in survivors)])
    )
    killed = 1 - (len(known) + len(survivors)) / max(len(mutants), 1)
    # Fewer than by default, or of chosen files, is a quick run.
    is_part = bool(arguments.paths) or arguments.count != parser.get_default("count")
    harness.finish(
        "tests",
        argparse.Namespace(device="cpu", quick=is_part),
        {"mutants_killed_share": killed, "mutants": len(mutants)},
        {"accepted": [str(mutant) for mutant in known], "survived": [str(mutant) for mutant in survivors]},
    )
    print(f"{killed:.1%} of {len(mutants)} mutants are killed; at least {arguments.at_least:.0%} must be")
    sys.exit(killed < arguments.at_least)


if __name__ == "__main__":
    main()
