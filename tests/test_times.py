"""Limits of test files' processor time, and the choice of the tests that run daily."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.selection import Selection, scope_of
from tests.times import Verdict, judge, merged

pytest_plugins = ["pytester"]

# 20 files of 4 s each, which tell the speed.
OTHERS = {f"test_{i}.py": 4.0 for i in range(20)}


@pytest.mark.parametrize(
    ("recorded_s", "speed", "seen_s", "exceeds"),
    [
        (30.0, 1.0, 120.0, False),
        (30.0, 1.0, 120.1, True),
        (30.0, 2.0, 239.0, False),  # a machine that is half as fast
        (30.0, 2.0, 241.0, True),
        (30.0, 0.5, 60.1, True),
        (1.0, 1.0, 21.0, False),  # imports
        (1.0, 1.0, 21.1, True),
        (None, 1.0, 30.0, False),
        (None, 1.0, 30.1, True),
        (None, 2.0, 59.0, False),
    ],
)
def test_files_over_their_limit(recorded_s: float | None, speed: float, seen_s: float, exceeds: bool) -> None:
    seen = {file: s * speed for file, s in OTHERS.items()} | {"x.py": seen_s}
    verdict = judge(OTHERS | ({} if recorded_s is None else {"x.py": recorded_s}), seen)
    assert verdict.speed == speed
    assert [line.partition(":")[0] for line in verdict.exceeded] == (["x.py"] if exceeds else [])


def test_a_few_files_tell_no_speed() -> None:
    """Regression of no run: of a single file the median is its own time, which no file exceeds."""
    assert judge(OTHERS, {"test_0.py": 400.0}) == Verdict(None)


def test_files_that_take_a_second_do_not_tell_the_speed() -> None:
    short = {f"short_{i}.py": 0.1 for i in range(100)}
    seen = {file: 30.0 * s for file, s in short.items()}
    assert judge(OTHERS | short, OTHERS | seen).speed == 1.0


def test_a_record_keeps_files_that_did_not_run_and_forgets_those_that_are_gone() -> None:
    recorded, seen = {"a.py": 1.0, "b.py": 2.0, "gone.py": 3.0}, {"b.py": 2.449}
    assert merged(recorded, seen, frozenset(("a.py", "b.py"))) == {"a.py": 1.0, "b.py": 2.4}


PLAIN = ("-p", "no:cacheprovider")
CONFTEST = """
from pathlib import Path
from tests import times

pytest_addoption = times.pytest_addoption

def pytest_configure(config):
    limits = times.Limits(tolerance_s=0.5, files_for_speed=2, seconds_for_speed=0.05)
    config.pluginmanager.register(times.FileTimes(config, Path(__file__).parent / "times.json", limits=limits))
"""
BURNS = """
import time

def test_it():
    end = time.process_time() + {seconds}
    while time.process_time() < end:
        pass
"""


@pytest.fixture(autouse=True)
def _few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing those of this environment takes seconds."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture
def burning(pytester: pytest.Pytester) -> pytest.Pytester:
    """Three files of which the last one takes longer than its record says."""
    pytester.makeconftest(CONFTEST)
    for name, seconds in (("a", 0.1), ("b", 0.1), ("c", 1.0)):
        pytester.makepyfile(**{f"test_{name}": BURNS.format(seconds=seconds)})
    (pytester.path / "times.json").write_text(json.dumps({f"test_{name}.py": 0.1 for name in "abc"}))
    return pytester


def _check(run: pytest.RunResult) -> None:
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    run.assert_outcomes(passed=3)
    run.stdout.fnmatch_lines(["TOO SLOW test_c.py: recorded 0.1 s, took 1.* s*"])
    run.stdout.no_fnmatch_line("TOO SLOW test_[ab].py*")


def test_a_run_with_a_slow_file_fails_until_its_time_is_recorded(burning: pytest.Pytester) -> None:
    """All tests pass, and the run does not."""
    _check(burning.runpytest_inprocess(*PLAIN))
    assert burning.runpytest_inprocess(*PLAIN, "--record-times", "test_c.py").ret == pytest.ExitCode.OK
    recorded = json.loads((burning.path / "times.json").read_text())
    assert (recorded["test_a.py"], recorded["test_c.py"] >= 1.0) == (0.1, True)
    assert burning.runpytest_inprocess(*PLAIN).ret == pytest.ExitCode.OK


@pytest.mark.processes
def test_the_controller_sums_up_what_its_workers_saw(burning: pytest.Pytester) -> None:
    _check(burning.runpytest_subprocess("-p", "xdist", "-n", "2", "--dist", "loadfile"))


def test_files_that_fail_or_run_in_part_are_not_recorded(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_a=BURNS.format(seconds=0.3) + "\ndef test_fails():\n    assert False\n")
    pytester.makepyfile(test_b=BURNS.format(seconds=0.3) + "\ndef test_other():\n    pass\n")
    pytester.runpytest_inprocess(*PLAIN, "--record-times", "-k", "it or fails")
    assert json.loads((pytester.path / "times.json").read_text()) == {}


def _item(file: Path, *marks: str, **params: Any) -> Any:
    return SimpleNamespace(
        path=file,
        name="test",
        nodeid=f"{file}::test[{params}{marks}]",
        location=(str(file), 0, "test"),
        callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda name: SimpleNamespace(args=(params.get("count"),)) if name in marks else None,
        add_marker=lambda _: None,
    )


def _left(items: list[Any], day: int, profile: str | None = None, *arguments: str) -> list[Any]:
    options = {"--day": day, "--hypothesis-profile": profile, "--shard": "0/1"}
    config: Any = SimpleNamespace(getoption=lambda name, _=None: options[name], args=arguments)
    left = items.copy()
    Selection(config).pytest_collection_modifyitems(config, left)
    return left


def test_each_test_of_the_thirds_runs_on_one_of_three_days() -> None:
    here = Path(__file__)
    items = [_item(here, "thirds", seed=seed) for seed in range(60)]
    items += [_item(here)]
    days = [_left(items, day) for day in range(3)]
    assert sorted(id(item) for day in days for item in day if item is not items[-1]) == sorted(map(id, items[:-1]))
    assert all(items[-1] in day and len(day) == 21 for day in days)


@pytest.mark.parametrize(
    ("profile", "arguments", "runs"),
    [
        (None, ("tests",), False),
        (None, ("tests/x.py::test",), True),
        ("nightly", ("tests",), True),
        ("mutants", (), True),
    ],
)
def test_nightly_tests(profile: str | None, arguments: tuple[str, ...], runs: bool) -> None:
    items = [_item(Path(__file__), "nightly"), _item(Path(__file__))]
    assert _left(items, 0, profile, *arguments) == items[not runs :]


def test_on_a_gpu_all_run() -> None:
    items = [_item(Path(__file__), "thirds", "gpu", seed=seed) for seed in range(30)]
    assert _left(items, 1) == items


def test_some_run_daily_in_turns() -> None:
    items = [_item(Path(__file__), "daily", count=2, place=place) for place in range(7)]
    days = [[item.callspec.params["place"] for item in _left(items, day)] for day in range(4)]
    assert days == [[0, 1], [2, 3], [4, 5], [0, 6]]


@pytest.mark.parametrize(
    ("arguments", "days"), [(("tests",), [1, 4]), (("tests/e2e",), [1, 4]), (("tests/x.py",), [0, 1, 2, 3, 4])]
)
def test_some_files_run_every_third_day_or_when_they_are_named(arguments: tuple[str, ...], days: list[int]) -> None:
    item = _item(Path(__file__), "third_day", count=1)
    assert [day for day in range(5) if _left([item], day, None, *arguments)] == days


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/e2e/test_server.py::test_chat", "cluster"),
        ("tests/hostile/test_hostile.py::test_it[a::b]", "cluster"),
        ("tests/e2e/test_nodes.py::test_it", "e2e/test_nodes.py"),
        ("tests/vmem/test_lock.py::test_it", "vmem/test_lock.py"),
    ],
)
def test_the_shared_cluster_has_one_process(nodeid: str, scope: str) -> None:
    assert scope_of(nodeid) == scope


class _Node:
    """A worker of xdist, which runs what it is given at once."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id=f"gw{id(self)}")
        self.shutting_down = False
        self.given: list[int] = []

    def send_runtest_some(self, indexes: list[int]) -> None:
        self.given += indexes

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_the_process_with_the_cluster_has_all_clusters_and_nothing_else(num_nodes: int) -> None:
    """Unless there is no other one."""
    option = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(option=option, getvalue=lambda _: ["popen"] * num_nodes)
    scheduler = Selection(config).pytest_xdist_make_scheduler(config, None)
    with_ray = ["tests/e2e/test_server.py::a", "tests/hostile/test_hostile.py::a"]
    own = [f"tests/e2e/{file}.py::{i}" for file in ("test_nodes", "test_serve") for i in range(3)]
    tests = [*with_ray, *(f"tests/test_{file}.py::{i}" for file in range(9) for i in range(4)), *own]
    nodes = [_Node() for _ in range(num_nodes)]
    for node in nodes:
        scheduler.add_node(node)
    for node in nodes:
        scheduler.add_node_collection(node, tests)
    scheduler.schedule()
    done = 0
    while done < sum(len(node.given) for node in nodes):
        done = sum(len(node.given) for node in nodes)
        for node in nodes:
            for index in node.given:
                scheduler.mark_test_complete(node, index)
    assert sorted(index for node in nodes for index in node.given) == list(range(len(tests)))
    [with_cluster] = [node for node in nodes if 0 in node.given]
    assert len(with_cluster.given) == (len(tests) if num_nodes == 1 else len(with_ray) + len(own))
    assert all(node.shutting_down for node in nodes)
