"""Variables of the processes that `folio serve` starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from folio.app.cli.start import env
from folio.app.config.machine import binding_variables
from folio.app.http import haproxy

BINDING: list[tuple[dict[str, str], list[str]]] = [
    ({}, []),
    ({"OMP_PROC_BIND": "true"}, ["OMP_PROC_BIND=true"]),
    ({"OMP_PLACES": "cores", "GOMP_CPU_AFFINITY": "0-1"}, ["OMP_PLACES=cores", "GOMP_CPU_AFFINITY=0-1"]),
    ({"OMP_PLACES": "cores", "OMP_PROC_BIND": "FALSE"}, []),
    ({"OMP_PLACES": ""}, []),
]


@pytest.mark.parametrize(("variables", "found"), BINDING, ids=str)
def test_threads_are_not_bound_to_cores(
    variables: dict[str, str],
    found: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An engine computed with one thread instead of one for each core, and nothing said so."""
    monkeypatch.setenv(haproxy.SWITCH, "0")  # it would be started, for its version
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert binding_variables() == found
    before = dict(os.environ)
    with env.prepared_environment():
        assert binding_variables() == []
        assert os.environ["OMP_WAIT_POLICY"] == "passive"
    assert dict(os.environ) == before
    assert (", ".join(found) + " would bind all threads" in caplog.text) == bool(found)
    env.env()
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("unset ")] == [
        f"unset {variable.partition('=')[0]}" for variable in found
    ]


@pytest.mark.processes
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize("variable", ["OMP_PROC_BIND=true", "OMP_PLACES=cores", "GOMP_CPU_AFFINITY=0-1"])
def test_each_of_the_variables_takes_cores_which_an_engine_takes_back(variable: str) -> None:
    """Half of the speed was lost: libgomp binds the thread that loads torch to one core, and an engine counted that."""
    name, _, value = variable.partition("=")
    code = """
import os, torch
print(len(os.sched_getaffinity(0)))
from folio.app.config.machine import Machine, unbind_thread
print(Machine.detect().num_cores)
unbind_thread()
print(len(os.sched_getaffinity(0)))
"""
    environment = os.environ | {name: value}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    bound, counted, unbound = map(int, ran.stdout.split())
    cores = os.sched_getaffinity(0)
    assert bound < len(cores)
    assert counted == unbound == (2 if value == "0-1" else len(cores))
