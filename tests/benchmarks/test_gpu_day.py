"""`benchmarks.gpu_day` without a device: every stage, jobs that fail and hang, and what its reader sees of it."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import facts
from benchmarks.gpu.clients import Clients, Level, summarise
from benchmarks.gpu.gpu_server import FAKE_LEVELS
from benchmarks.gpu.parts import Parts
from benchmarks.gpu_day import __main__ as program
from benchmarks.gpu_day.__main__ import MOST_FILES, main
from benchmarks.gpu_day.job import Job, Outcome
from benchmarks.gpu_day.ray_logs import LAST_LINES
from benchmarks.gpu_day.runner import ENDING_S, ROOT, Stage
from benchmarks.gpu_day.stages import BUDGETS_S, STAGES
from benchmarks.gpu_day.table import figures_of, table
from tests.processes import until
from tests.selection import keep_shard
from tests.vmem.backends.stand_in_driver import skip_without_stand_in

# Starts a process that only SIGKILL ends, in a way that a signal for the job's process group does not reach it, and
# records its process id. Then the job hangs, and ignores what asks it to end.
HANGS = """
import os, signal, subprocess, sys, time
from benchmarks.facts import record
ignore = "from signal import *; import time; signal(SIGABRT, SIG_IGN); signal(SIGTERM, SIG_IGN)"
ignore += "; print('ready', flush=True); time.sleep(600)"
way = sys.argv[1]
if way == "daemon" and os.fork():
    os.wait()
else:
    child = subprocess.Popen([sys.executable, "-c", ignore], stdout=subprocess.PIPE, start_new_session=way != "child")
    child.stdout.readline()
    record("child", pid=child.pid)
    if way == "stopped":
        child.send_signal(signal.SIGSTOP)
    if way == "daemon":
        os._exit(0)  # so that its parent is gone
if way == "deaf":
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if way != "ends":
    time.sleep(600)
"""
WAYS = ("child", "session", "daemon", "stopped", "deaf", "ends")


# What a stage must have recorded, whatever else.
FACTS = {
    "server": {
        *("ray", "start", "phases of the engine's start", "memory by part", "exposed mapping", "prefix hit", "schema"),
        *("late compilations", "replica killed", "stop", "ready", "nvidia-smi"),
        *(f"{of}, {level.name}" for level in FAKE_LEVELS for of in ("HTTP", "bare", "HTTP / bare")),
    },
    "fleet": {
        *("budgets", "idle release", "freed by the second replica", "load, while one of two stops", "nvidia-smi"),
        *("turns", "turns beside a large model", "wake of a", "tokens as on the CPU", "LoRA, as on the CPU"),
        *("draft model, as without", "embeddings", "fp8 KV cache, as on the CPU", "preempted by swap"),
        *("swap, as undisturbed", "preempted by recompute", "recompute, as undisturbed"),
    },
}


def job(name: str, program: str, *arguments: str, limit_s: float = 60.0, alone: bool = False) -> Job:
    return Job(name, ("-c", program, *arguments), limit_s, alone)


def make_stage(folder: Path, budget_s: float = 120.0) -> Stage:
    return Stage("facts", folder, os.environ | {"PYTHONPATH": str(ROOT)}, budget_s + ENDING_S)


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("name", STAGES)
def test_every_job_of_a_stage_succeeds_without_a_device(name: str, tmp_path: Path) -> None:
    """Each job's own code was never run before there was a GPU, and then it was what failed."""
    skip_without_stand_in()
    argv = [sys.executable, "-m", "benchmarks.gpu_day", name, "--fake", "--pack"]
    environment = os.environ | {"FOLIO_RESULTS": str(tmp_path)}
    run = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(run.stdout.splitlines()) <= 80
    assert len(run.stdout + run.stderr) < 12_000
    found = facts.read(tmp_path / f"{name}.jsonl")
    assert {fact["job"] for fact in found if fact.get("ok")} == {job.name for job in STAGES[name](True)}
    assert {fact["fact"] for fact in found if "fact" in fact} >= FACTS.get(name, set())
    assert len(list(tmp_path.iterdir())) <= MOST_FILES


@pytest.mark.processes
def test_a_failure_costs_only_itself(tmp_path: Path) -> None:
    """One test that hung took all that came after it along, and its child ran on. Ray's daemons, in sessions of their
    own, outlived their job, and kept the device's memory from the next one."""
    stage = make_stage(tmp_path)
    outcomes = stage.run(
        [
            job("fails", "import sys\nfor i in range(7): print('line', i)\nsys.exit(3)"),
            *(job(way, HANGS, way, limit_s=15.0) for way in WAYS),
            job("works", "from benchmarks.facts import record\nrecord('answer', 'it is 42', value=42)"),
        ]
    )
    killed = "killed at its limit of 15 s"
    assert {outcome.job.name: outcome.reason for outcome in outcomes} == {
        "fails": "exit status 3",
        **dict.fromkeys(WAYS, killed),
        "ends": "",
        "works": "",
    }
    found = facts.read(stage.facts)
    children = {fact["job"]: fact["pid"] for fact in found if fact.get("fact") == "child"}
    assert set(children) == set(WAYS)  # recorded although their jobs were killed
    assert [way for way, pid in children.items() if is_running(pid)] == []
    assert {fact["job"]: fact["ok"] for fact in found if "ok" in fact} == {
        outcome.job.name: not outcome.reason for outcome in outcomes
    }
    lines = table(outcomes, found).splitlines()
    assert lines[0] == f"2 of {len(outcomes)} jobs succeeded"
    assert lines[1].startswith("FAILED  fails")
    assert lines[2:7] == [f"    | line {i}" for i in range(2, 7)]
    assert "[fails] line 0" in (tmp_path / "facts.log").read_text()
    assert any("it is 42" in line for line in lines)


@pytest.mark.processes
def test_nothing_outlives_a_killed_stage(tmp_path: Path) -> None:
    """A stage that its caller's time limit ends by SIGKILL can end nothing itself."""
    program = (
        "import os; from pathlib import Path; from benchmarks.gpu_day.job import Job\n"
        "from benchmarks.gpu_day.runner import Stage\n"
        f"job = Job('session', ('-c', {HANGS!r}, 'session'), 90)\n"
        f"Stage('facts', Path({str(tmp_path)!r}), os.environ, 120.0).run([job])"
    )
    stage = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)})
    path = tmp_path / "facts.jsonl"
    until(lambda: any(fact.get("fact") == "child" for fact in facts.read(path)), 30)
    [child] = [fact["pid"] for fact in facts.read(path) if fact.get("fact") == "child"]
    stage.kill()
    stage.wait()
    until(lambda: not is_running(child), 15)


@pytest.mark.processes
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_an_interruption_leaves_what_is_known(number: signal.Signals, status: int, tmp_path: Path) -> None:
    """Regression: no table was printed, and --pack took files along that were there before."""
    program = (
        "import signal, sys\nfrom benchmarks.gpu_day import __main__ as program\n"
        "from benchmarks.gpu_day.job import Job\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"hangs = Job('hangs', ('-c', {HANGS!r}, 'session'), 90, alone=False)\n"
        "first, never = (Job(name, ('-c', 'print(1)'), 60) for name in ('first', 'never'))\n"
        "jobs = {'facts': lambda fake: [first, hangs], 'whole': lambda fake: [never]}\n"
        "sys.exit(program.main(['facts', 'whole', '--pack'], jobs))"
    )
    for name in ("notes.txt", "old.png"):
        (tmp_path / name).write_text("mine")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FOLIO_RESULTS": str(tmp_path)}
    run = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    path = tmp_path / "facts.jsonl"
    until(lambda: any(fact.get("fact") == "child" for fact in facts.read(path)), 30)
    run.send_signal(number)
    shown, _ = run.communicate(timeout=60)
    assert run.returncode == status
    first, failed, last, *others = shown.splitlines()
    assert first == "1 of 2 jobs succeeded"
    assert re.fullmatch(r"FAILED  hangs, .* s: interrupted", failed)
    found = facts.read(path)
    assert [(fact["job"], fact["ok"]) for fact in found if "ok" in fact] == [("first", True), ("hangs", False)]
    [child] = [fact["pid"] for fact in found if fact.get("fact") == "child"]
    assert last == f'    | child: {{"pid": {child}}}'
    assert not [line for line in others if line.startswith("    | ")]
    until(lambda: not is_running(child), 15)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("notes.txt", "old.png", "facts.jsonl", "facts-whole.tar.gz")
    }
    with tarfile.open(tmp_path / "facts-whole.tar.gz") as packed:
        assert packed.getnames() == ["facts.log"]


@pytest.mark.parametrize("results", ["a file", ""])
def test_the_folder_of_results(
    results: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a folder that cannot be written was a traceback, and an empty name the working directory, whose files
    --pack took away."""
    (file := tmp_path / "a file").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOLIO_RESULTS", str(file) if results else "")
    monkeypatch.setattr(program, "make_environment", lambda folder, fake: {})
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    if results:
        with pytest.raises(SystemExit, match="2"):
            main(["facts", "--fake", "--pack"], {"facts": lambda fake: []})
        assert f"results cannot be written to {file}: File exists; set FOLIO_RESULTS" in capsys.readouterr().err
    else:
        assert main(["facts", "--fake", "--pack"], {"facts": lambda fake: []}) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a file"]


@pytest.mark.parametrize(
    "line", ["", "{}", "[1]", '{"figures": 1}', '{"figures": {"a": null}}', '{"figures": {"a": "x"}}']
)
def test_a_last_line_that_has_no_figures(line: str) -> None:
    """Regression: one that looked alike ended the whole stage."""
    assert figures_of(["before", line]) == ""
    assert figures_of(['{"figures": {"a": 1.23456}}']) == "a 1.235"


@pytest.mark.processes
def test_the_logs_of_ray_come_back_whatever_happens(tmp_path: Path) -> None:
    """A server that did not come up left its reason on a machine that was gone."""
    program = (
        "import os, time; from pathlib import Path\n"
        "logs = Path(os.environ['RAY_TMPDIR'], 'ray', 'session_2026', 'logs'); (logs / 'serve').mkdir(parents=True)\n"
        "(logs / 'serve' / 'replica_folio_EngineReplica_x.log').write_text('\\n'.join(map(str, range(100))))\n"
        "(logs / 'raylet.err').write_text('no memory'); (logs / 'empty.log').touch(); time.sleep(600)"
    )
    stage = make_stage(tmp_path)
    [outcome] = stage.run([job("hangs", program, limit_s=5.0)])
    assert outcome.reason
    last = {fact["file"]: fact["lines"] for fact in facts.read(stage.facts) if fact.get("fact") == "last lines"}
    assert last["raylet.err"] == ["no memory"]
    assert last["serve/replica_folio_EngineReplica_x.log"] == [str(i) for i in range(100 - LAST_LINES, 100)]
    with tarfile.open(tmp_path / "facts-ray.tar.gz") as packed:
        assert sorted(Path(name).name for name in packed.getnames()) == [
            "raylet.err",
            "replica_folio_EngineReplica_x.log",
        ]


@pytest.mark.processes
def test_a_server_that_never_answers_costs_a_levels_time_only(tmp_path: Path) -> None:
    """It took the load generator's two minutes of silence for each request."""
    level = Level(2, 6, 4, 1, limit_s=2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        clients = Clients(f"http://127.0.0.1:{silent.getsockname()[1]}", "m", 2)
        began = time.monotonic()
        records, seconds, _ = clients.run(level, level.asks(10, 20))
        assert time.monotonic() - began < 30
        clients.close()
    assert (len(records), seconds >= 2.0, [r for r in records if r.completed]) == (6, True, [])
    with pytest.raises(RuntimeError, match="no end within 2 s"):
        summarise("level", records, seconds)


def test_a_part_that_fails_costs_only_itself(capsys: pytest.CaptureFixture[str]) -> None:
    parts, ran = Parts(limit_s=60.0), []
    assert not parts.run("broken", lambda: 1 // 0)
    assert parts.run("whole", lambda: ran.append(1))
    assert not parts.run("too long", lambda: ran.append(2), at_least_s=100.0)
    with pytest.raises(SystemExit) as ended:
        parts.finish()
    assert (ran, ended.value.code) == ([1], 1)
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.startswith("broken: ZeroDivisionError")
    assert second.startswith("too long: TimeoutError: not begun")


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("fake", [False, True])
def test_each_job_has_a_module_and_a_name_of_its_own(name: str, fake: bool) -> None:
    jobs = STAGES[name](fake)
    assert len({job.name for job in jobs}) == len(jobs)
    for each in jobs:
        assert importlib.util.find_spec(each.argv[1]) is not None, each
    # A job that takes all of its time leaves the others of the stage some.
    assert max(job.limit_s for job in jobs) < BUDGETS_S.get(name, 480.0) - ENDING_S


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
    assert [fact["ok"] for fact in facts.read(stage.facts)] == [False, True]


@pytest.mark.parametrize("num_failed", [1, 9, 40, 100])
def test_the_table_fits_whatever_happens(num_failed: int) -> None:
    """Only the end of the output is seen: with more of it the failures, which come first, were cut off."""
    long = "x" * 400
    outcomes = [Outcome(job(f"job {i}", ""), 1.0, "exit status 1", (long,) * 5) for i in range(num_failed)]
    outcomes += [Outcome(job(f"good {i}", ""), 1.0, "", ()) for i in range(200)]
    text = table(outcomes, [{"job": "good", "fact": "f", "shown": long} for _ in range(300)])
    assert len(text) < 12_000
    assert len(text.splitlines()) <= 80
    named = sum(line.startswith("FAILED") for line in text.splitlines())
    assert named == num_failed or named >= 40
    assert text.count("    | ") == (5 if num_failed == 1 else 36 if num_failed == 9 else 0)


def test_what_failed_within_a_job_comes_before_figures() -> None:
    """Of a shard of tests, and of a job's parts: the figures before them filled the table."""
    figures = [{"job": "attention", "fact": f"figure {i}", "shown": "x"} for i in range(200)]
    tests = [{"job": "tests 1/1", "fact": f"test_{i}", "outcome": "passed"} for i in range(3)]
    failed = {"job": "tests 1/1", "fact": "test_x", "outcome": "failed", "shown": "failed: no memory"}
    part = {"job": "server", "fact": "schema", "failed": True, "shown": "FAILED: no answer"}
    lines = table([Outcome(job("tests 1/1", ""), 1.0, "", ())], [*figures, *tests, failed, part]).splitlines()
    assert lines[2:5] == [
        "tests: 1 failed, 3 passed",
        "tests 1/1, test_x: failed: no memory",
        "server, schema: FAILED: no answer",
    ]


def test_a_job_with_many_figures_leaves_lines_to_the_others() -> None:
    """Forty cases of one job, two lines each, filled the table of a stage."""
    many = [{"job": "decode kernels", "fact": f"case {i}", "shown": "x " * 100} for i in range(40)]
    few = [{"job": "steps", "fact": f"step {i}", "shown": "y"} for i in range(8)]
    lines = table([], [*many, *few]).splitlines()
    assert len(lines) <= 80
    assert lines[-8:] == [f"steps, step {i}: y" for i in range(8)]
    assert any(line.startswith("decode kernels: … ") for line in lines)


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
