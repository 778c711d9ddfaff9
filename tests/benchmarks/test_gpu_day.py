"""`benchmarks.gpu_day` without a device: every stage, jobs that fail and hang, and what its reader sees of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_day import ROOT, STAGES, Job, Outcome, Stage, main, read_facts, table
from tests.conftest import keep_shard
from tests.nightly import of_today
from tests.processes import until
from tests.vmem.backends.stand_in_driver import skip_without_stand_in

# Starts a child that only SIGKILL ends, records its process id, and then hangs.
HANGS = """
import subprocess, sys, time
from benchmarks.facts import record
ignore = "from signal import *; import time; signal(SIGABRT, SIG_IGN); print('ready', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", ignore], stdout=subprocess.PIPE)
child.stdout.readline()
record("child", pid=child.pid)
time.sleep(600)
"""


def job(name: str, program: str, limit_s: float = 60.0, *, alone: bool = False) -> Job:
    return Job(name, ("-c", program), limit_s, alone)


def make_stage(folder: Path, budget_s: float = 120.0) -> Stage:
    return Stage("facts", folder, os.environ | {"PYTHONPATH": str(ROOT)}, budget_s)


@pytest.mark.processes
@pytest.mark.parametrize("name", of_today(list(STAGES), 1))
def test_every_job_of_a_stage_succeeds_without_a_device(name: str, tmp_path: Path) -> None:
    """Each job's own code was never run before there was a GPU, and then it was what failed. A stage a day: starting
    its processes takes minutes."""
    skip_without_stand_in()
    argv = [sys.executable, "-m", "benchmarks.gpu_day", name, "--fake"]
    environment = os.environ | {"FOLIO_RESULTS": str(tmp_path)}
    run = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(run.stdout.splitlines()) <= 80
    assert len(run.stdout + run.stderr) < 12_000
    facts = read_facts(tmp_path / f"{name}.jsonl")
    assert {fact["job"] for fact in facts if fact.get("ok")} == {job.name for job in STAGES[name](True)}
    assert any(fact.get("fact") for fact in facts)
    assert (tmp_path / f"{name}.log").stat().st_size
    assert len(list(tmp_path.iterdir())) <= 8


@pytest.mark.processes
def test_a_failure_costs_only_itself(tmp_path: Path) -> None:
    """One test that hung took all that came after it along, and its child ran on."""
    stage = make_stage(tmp_path)
    outcomes = stage.run(
        [
            job("fails", "import sys\nfor i in range(7): print('line', i)\nsys.exit(3)"),
            job("hangs", HANGS, limit_s=10.0, alone=True),
            job("works", "from benchmarks.facts import record\nrecord('answer', 'it is 42', value=42)"),
        ]
    )
    assert [outcome.reason for outcome in outcomes] == ["exit status 3", "killed at its limit of 10 s", ""]
    facts = read_facts(stage.facts)
    [child] = [
        fact["pid"] for fact in facts if fact.get("fact") == "child"
    ]  # it was recorded although its job was killed
    until(lambda: not is_running(int(str(child))), 10)
    assert [(fact["job"], fact["ok"]) for fact in facts if "ok" in fact] == [
        ("fails", False),
        ("hangs", False),
        ("works", True),
    ]
    lines = table(outcomes, facts).splitlines()
    assert lines[:7] == ["1 of 3 jobs succeeded", *lines[1:2], *(f"    | line {i}" for i in range(2, 7))]
    assert lines[1].startswith("FAILED  fails")
    assert "[fails] line 0" in (tmp_path / "facts.log").read_text()
    assert any("it is 42" in line for line in lines)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.processes
def test_a_job_that_no_longer_fits_is_skipped(tmp_path: Path) -> None:
    """The stage must end before the machine is taken away; then all that is not on the disk is lost."""
    stage = make_stage(tmp_path, budget_s=5.0)
    first, second = stage.run([job("long", "", limit_s=60.0), job("short", "", limit_s=5.0)])
    assert (first.reason, second.reason) == ("skipped: no time left", "")
    assert [fact["ok"] for fact in read_facts(stage.facts)] == [False, True]


@pytest.mark.parametrize("num_failed", [1, 9, 40, 100])
def test_the_table_fits_whatever_happens(num_failed: int) -> None:
    """Only the end of the output is seen: with more of it the failures, which come first, were cut off."""
    long = "x" * 400
    outcomes = [Outcome(job(f"job {i}", ""), 1.0, "exit status 1", (long,) * 5) for i in range(num_failed)]
    outcomes += [Outcome(job(f"good {i}", ""), 1.0, "", ()) for i in range(200)]
    facts = [{"job": "good", "fact": "f", "shown": long} for _ in range(300)]
    text = table(outcomes, facts)
    assert len(text) < 12_000
    assert len(text.splitlines()) <= 80
    named = sum(line.startswith("FAILED") for line in text.splitlines())
    assert named == num_failed or named >= 40
    assert text.count("    | ") == (5 if num_failed == 1 else 36 if num_failed == 9 else 0)


def test_unknown_jobs_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["facts", "--only", "machine", "nonsense"])
    assert "no such job: nonsense" in capsys.readouterr().err
    assert main(["facts", "memory", "--only", "machine", "mapping", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_tests_of_the_same_kernels_share_a_shard() -> None:
    """Five seeds of one shape in five processes compiled its kernels five times."""

    def item(test: str, **params: Any) -> Any:
        callspec = SimpleNamespace(params=params)
        return SimpleNamespace(name=test, location=("test_x.py", 0, test), callspec=callspec, params=params)

    items = [item("random", seed=seed) for seed in range(40)]
    items += [item("engine", name=name, view=view) for view in ("region", "block_table") for name in ("llama", "gpt2")]
    shards = []
    for i in range(3):
        mine = items.copy()
        hook = SimpleNamespace(pytest_deselected=lambda items: None)
        keep_shard(SimpleNamespace(getoption=lambda _, i=i: f"{i}/3", hook=hook), mine)  # type: ignore[arg-type]
        shards.append(mine)
    assert sorted(map(id, items)) == sorted(id(item) for shard in shards for item in shard)
    for shard in shards:
        seeds = [item.params["seed"] for item in shard if item.name == "random"]
        assert {seed // 5 * 5 + i for seed in seeds for i in range(5)} == set(seeds)
        names = [item.params["name"] for item in shard if item.name == "engine"]
        assert all(names.count(name) == 2 for name in names)
