"""Processor time of test files: measured in each run, recorded in `times.json`, and limited to four times the record.

Processor time, because a machine that does other things at the same time makes a run longer, and its tests less
dear than that: cores that others use, too, have still made single files three times as dear as the rest of a run.
Of processes that a test starts it is theirs, too.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
RECORD = TESTS / "times.json"
SLOW_S = 4.0
_CLOCK_HZ = os.sysconf("SC_CLK_TCK")
_SCAN_S = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """When a file is too slow.

    Attributes:
        factor: a file may take so many times its recorded time,
        tolerance_s: or so much more: what the first test of a process imports for all others takes some seconds, and
            which test that is differs from run to run.
        new_file_s: of a file without a record.
        files_for_speed: the machine's speed is known where so many files
        seconds_for_speed: took so long when they were recorded.
    """

    factor: float = 4.0
    tolerance_s: float = 20.0
    new_file_s: float = 30.0
    files_for_speed: int = 20
    seconds_for_speed: float = 2.0


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of comparing a run's times with the recorded ones.

    Attributes:
        speed: seconds that this machine takes for a recorded second; `None`: too few files to tell, nothing is judged.
        exceeded: a line for each file over its limit.
    """

    speed: float | None
    exceeded: tuple[str, ...] = ()


def judge(recorded: Mapping[str, float], seen: Mapping[str, float], limits: Limits = LIMITS) -> Verdict:
    """Compare seconds of files with the recorded ones, scaled by this machine's speed.

    The speed is the median over all files of seen to recorded seconds. A calibrated loop would compare two processors
    at that loop; files differ between processors by their instruction sets and caches, and the median takes the mix as
    it is. It hides what makes most files slower at once: that shows in the printed speed.
    """
    ratios = [seen[file] / s for file, s in recorded.items() if s >= limits.seconds_for_speed and file in seen]
    if len(ratios) < limits.files_for_speed:
        return Verdict(None)
    speed, exceeded = statistics.median(ratios), []
    for file, seen_s in sorted(seen.items()):
        if file in recorded:
            expected_s = recorded[file] * speed
            most_s = max(limits.factor * expected_s, expected_s + limits.tolerance_s)
            known = f"recorded {recorded[file]:.1f} s"
        else:
            most_s, known = limits.new_file_s * speed, "not recorded"
        if seen_s > most_s:
            exceeded.append(f"{file}: {known}, took {seen_s:.1f} s, may take {most_s:.1f} s of processor time here")
    return Verdict(speed, tuple(exceeded))


def merged(recorded: Mapping[str, float], seen: Mapping[str, float], exist: frozenset[str]) -> dict[str, float]:
    """A new record: files that ran as a whole have the seen times, files that are gone have none."""
    return {
        file: round(s, 1) for file, s in sorted({**recorded, **seen}.items(), key=lambda pair: pair[0]) if file in exist
    }


def read_record(path: Path = RECORD) -> dict[str, float]:
    """Seconds by file, as paths in `tests`."""
    record: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return record


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-times", action="store_true", help=f"write the files' processor times into {RECORD.name}")


class FileTimes:
    """Plugin that measures, sums up over the workers of xdist, and judges or records at the end.

    Args:
        record: files are paths from its folder.
        judges: False where other tests run than daily.
    """

    def __init__(
        self, config: pytest.Config, record: Path = RECORD, judges: bool = True, limits: Limits = LIMITS
    ) -> None:
        self._config, self._record, self._judges, self._limits = config, record, judges, limits
        self._seen: Counter[str] = Counter()
        self._partial: set[str] = set()  # files of which tests were left out, or did not pass
        self._verdict = Verdict(None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        with _processor_time(with_others=item.get_closest_marker("processes") is not None) as spent:
            result = yield
        self._seen[self._file(item)] += spent()
        return result

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._partial |= {self._file(item) for item in items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._partial.add(self._relative(self._config.rootpath / report.nodeid.partition("::")[0]))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """In the controller, at a worker's end."""
        told = getattr(node, "workeroutput", {}).get("times", {"seen": {}, "partial": []})
        self._seen.update(told["seen"])
        self._partial.update(told["partial"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["times"] = {"seen": dict(self._seen), "partial": sorted(self._partial)}
            return
        whole = {file: s for file, s in self._seen.items() if file not in self._partial}
        if self._config.getoption("--record-times"):
            exist = frozenset(map(self._relative, self._record.parent.rglob("test_*.py")))
            self._record.write_text(json.dumps(merged(read_record(self._record), whole, exist), indent=0) + "\n")
        elif self._judges:
            self._verdict = judge(read_record(self._record), whole, self._limits)
            if self._verdict.exceeded and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        speed = self._verdict.speed
        if not self._seen or (speed is None and not self._config.getoption("--record-times")):
            return
        terminalreporter.section("processor time of files")
        total = f"{sum(self._seen.values()) / 60:.1f} minutes of processor time"
        terminalreporter.line(total if speed is None else f"{total}; this machine takes {speed:.2f} s for 1 s recorded")
        for line in self._verdict.exceeded:
            terminalreporter.line(f"TOO SLOW {line}", red=True)
        if self._verdict.exceeded:
            terminalreporter.line("Make them faster, or record their times: pytest --record-times FILE ...")

    def _file(self, item: pytest.Item) -> str:
        return self._relative(item.path)

    def _relative(self, path: Path) -> str:
        return os.path.relpath(path, self._record.parent)


@contextmanager
def _processor_time(with_others: bool) -> Iterator[Any]:
    """Yields a function that says how many seconds of processor time have been spent within.

    Args:
        with_others: look for processes that are not waited for, as Ray's are: nobody adds up their time.
    """
    began_s = _waited_for_s()
    if not with_others:
        yield lambda: _waited_for_s() - began_s
        return
    tree = _Descendants()
    before_s = tree.scan()
    enough = threading.Event()

    def watch() -> None:  # of a process that has ended its last known time counts
        while not enough.wait(_SCAN_S):
            tree.scan()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: max(_waited_for_s() - began_s, tree.scan() - before_s)
    finally:
        enough.set()
        thread.join()


def _waited_for_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class _Descendants:
    """This process and those that it and its descendants have started."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, str], float] = {}  # by process id and start, since ids come again
        self._lock = threading.Lock()

    def scan(self) -> float:
        """Seconds of processor time of all of them, ended ones included."""
        found: dict[int, tuple[int, str, float]] = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                values = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            found[int(name)] = int(values[1]), values[19], (int(values[11]) + int(values[12])) / _CLOCK_HZ
        with self._lock:
            for pid, (_, began, seconds) in found.items():
                if (pid, began) in self._seconds or self._is_ours(pid, found):
                    self._seconds[pid, began] = seconds
            return sum(self._seconds.values())

    def _is_ours(self, pid: int, found: Mapping[int, tuple[int, str, float]]) -> bool:
        # The processes are read one after the other: where ids come again meanwhile, parents may form a circle.
        for _ in found:
            if pid == os.getpid() or pid not in found:
                break
            pid = found[pid][0]
        return pid == os.getpid()
