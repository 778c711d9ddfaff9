"""The command without a cluster: faults of files, failed applications, draining, the end."""

from __future__ import annotations

import contextlib
import logging
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import yaml
from ray import serve as ray_serve
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from app import serve
from app.checks import load_config

ROOT = Path(__file__).parents[2]


class Signals:
    """Signals that come after so many waits."""

    def __init__(self, after: int) -> None:
        self.left = after

    def wait(self, timeout_s: float) -> bool:
        self.left -= 1
        return self.left < 0


def deployments(application: str, message: str) -> dict[str, Any]:
    """Deployments of an application: Folio's, but not of "desk"; the ingress of "new" is still starting."""
    if application == "desk":
        return {"Desk": SimpleNamespace(replica_states={"RUNNING": 1}, message="")}
    states = {"STARTING": 1} if application == "new" else {"RUNNING": 1}
    return {name: SimpleNamespace(replica_states=states, message=message) for name in ("Ingress", "EngineReplica")}


def statuses(monkeypatch: pytest.MonkeyPatch, *rounds: dict[str, ApplicationStatus], message: str = "") -> None:
    """Serve's statuses of the applications in turn, the last for ever."""
    left = list(rounds)

    def status() -> Any:
        now = left.pop(0) if len(left) > 1 else left[0]
        applications = {
            name: SimpleNamespace(status=status, message="no memory", deployments=deployments(name, message))
            for name, status in now.items()
        }
        return SimpleNamespace(applications=applications)

    monkeypatch.setattr(ray_serve, "status", status)


class Ingress:
    """A handle of ingresses. `answers`: their requests in flight at each call, or the error of the call."""

    def __init__(self, answers: Iterator[list[int] | Exception]) -> None:
        self._answers = answers

    def broadcast(self, method: str) -> Any:
        assert method == "drain"
        answer = next(self._answers)

        def results(timeout_s: float) -> list[int]:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return SimpleNamespace(results=results)


def refuse(*_: Any, **__: Any) -> None:
    pytest.fail("Ray is started")


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """Write a file for a Folio application, with these engine settings and HTTP options of Serve."""

    def write(engine: dict[str, Any], **http: Any) -> str:
        args = {"engine": {"model": "builtin"} | engine}
        application = {"name": "folio", "import_path": "app.main:build", "args": args}
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
        return str(path)

    return write


def test_an_invalid_file(
    config: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression: a typo took 54 s and 118 lines."""
    monkeypatch.setattr(ray, "init", refuse)
    path = config({"max_num_seq": 1, "pin_quota": 2})
    for arguments in ([path], [path, "--check"]):
        assert serve.main(arguments) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert [line.split(" is ")[0] for line in err.splitlines()] == [
            f"{path}: applications[0].args.engine.max_num_seq",
            f"{path}: applications[0].args.engine.pin_quota",
        ]


def test_a_check_starts_nothing(
    config: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(serve, "reserve_address", refuse)
    path = config({})
    assert serve.main(["--check", path]) == 0
    assert capfd.readouterr().out == f"{path}: ok\n"


def test_a_port_in_use(
    config: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression: both servers said "serving", and half of the requests reached the wrong one.

    Run as `python -m app.serve` runs it: `main` was called before the functions below it were defined.
    """
    monkeypatch.setattr(ray, "init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(sys, "argv", ["app.serve", config({}, host="127.0.0.1", port=listener.getsockname()[1])])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(serve.__file__, run_name="__main__")
    assert ended.value.code == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("http_options: 127.0.0.1:")
    assert " is in use; stop that server, or choose another port" in line


@pytest.mark.parametrize(
    ("http", "arguments", "address"),
    [
        ({}, [], ("127.0.0.1", 8000)),
        ({"port": 8123}, [], ("127.0.0.1", 8123)),
        ({"port": 8123, "host": "0.0.0.0"}, ["--port", "8124"], ("0.0.0.0", 8124)),
    ],
)
def test_the_host_is_this_machine_unless_it_is_set(
    config: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    http: dict[str, Any],
    arguments: list[str],
    address: tuple[str, int],
) -> None:
    """Regression: with a port only, every address of the machine was served."""
    served: list[ServeDeploySchema] = []

    def run(config: ServeDeploySchema, *_: Any) -> int:
        served.append(config)
        return 0

    monkeypatch.setattr(serve, "reserve_address", lambda *address: claimed.append(address))
    monkeypatch.setattr(serve, "serve_until_signal", run)
    monkeypatch.setattr(serve, "Signals", lambda: None)
    monkeypatch.setattr(serve, "prepared_environment", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(ray, "init", lambda namespace: SimpleNamespace(dashboard_url=""))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    claimed: list[Any] = []
    assert serve.main([config({}, **http), *arguments]) == 0
    options = served[0].http_options
    assert ((options.host, options.port), claimed) == (address, [address])


def test_the_greeting(monkeypatch: pytest.MonkeyPatch, config: Callable[..., str]) -> None:
    """Regression: `serve status` ended in a traceback of Ray's token authentication, and nothing said why."""
    loaded = load_config(Path(config({}, host="0.0.0.0", port=8123)))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    shown = serve.greeting(loaded, "127.0.0.1:8265")
    assert "curl http://127.0.0.1:8123/v1/chat/completions" in shown
    assert '"model": "builtin"' in shown
    assert "RAY_AUTH_MODE=token" in shown
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "RAY_AUTH_MODE" not in serve.greeting(loaded, "127.0.0.1:8265")


@pytest.mark.parametrize("has_ended", [True, False])
def test_the_end_is_bounded(monkeypatch: pytest.MonkeyPatch, config: Callable[..., str], has_ended: bool) -> None:
    """Regression: the command took 33 s more than the grace period. The process's end is scheduled before anything is
    stopped, and a drain that has used up the grace period is not waited for again."""
    done: list[Any] = []
    instance = SimpleNamespace(deploy=lambda config: None, shut_down=done.append)
    monkeypatch.setattr(serve, "ServeInstance", lambda config: instance)
    monkeypatch.setattr(serve, "wait_until_running", lambda names, signals: 0)
    monkeypatch.setattr(serve, "wait_until_routed", lambda url, signals: None)
    monkeypatch.setattr(serve, "drain_ingresses", lambda grace_s: has_ended)
    monkeypatch.setattr(serve, "end_within", lambda seconds, status: done.append((seconds, status)))
    signals: Any = SimpleNamespace(came=True, wait=lambda timeout_s: True)
    assert serve.serve_until_signal(load_config(Path(config({}))), signals, 60.0) == 0
    (seconds, status), timeout_s = done
    assert seconds + serve._ANSWER_S <= 10
    assert status == 0
    assert (timeout_s > 0) == has_ended


@pytest.mark.processes
def test_a_process_that_hangs_at_its_end_is_ended() -> None:
    code = "import threading; from app import serve; serve.end_within(0.0, 7); threading.Event().wait(240)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 7


def test_waiting_until_all_applications_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, deploys = ApplicationStatus.RUNNING, ApplicationStatus.DEPLOYING
    statuses(monkeypatch, {}, {"a": runs}, {"a": runs, "b": deploys}, {"a": runs, "b": runs})
    waits = Signals(after=10)
    assert serve.wait_until_running(["a", "b"], waits) == 0  # type: ignore[arg-type]
    assert waits.left == 6
    statuses(monkeypatch, {"a": runs, "b": deploys})
    assert serve.wait_until_running(["a", "b"], Signals(after=3)) == 0  # type: ignore[arg-type]


def test_an_application_that_cannot_be_deployed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    statuses(monkeypatch, {"a": ApplicationStatus.RUNNING, "b": ApplicationStatus.DEPLOY_FAILED})
    assert serve.wait_until_running(["a", "b"], Signals(after=10)) == 1  # type: ignore[arg-type]
    assert "b cannot be deployed: no memory" in caplog.text


def test_permanent_errors_are_not_retried(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: 68 s and six tracebacks, while Serve retried to load a broken model."""
    message = "A replica failed to start.\nTraceback:\n  File\napp.errors.ModelError: no weights in 'x'\n"
    statuses(monkeypatch, {"a": ApplicationStatus.DEPLOYING}, message=message)
    assert serve.wait_until_running(["a"], Signals(after=2)) == 1  # type: ignore[arg-type]
    assert caplog.messages == ["a cannot be deployed: no weights in 'x'"]


def test_draining_lasts_until_no_request_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingress that does not answer may have requests. Other applications are not drained."""
    monkeypatch.setattr(serve, "_POLL_S", 0.0)
    monkeypatch.setattr(serve, "_FLUSH_GRACE_S", 0.0)
    runs = ApplicationStatus.RUNNING
    statuses(monkeypatch, {"a": runs, "desk": runs, "new": ApplicationStatus.DEPLOYING})
    answers: Iterator[Any] = iter([[2, 1], RayServeException("restarting"), [0, 1], [0, 0]])
    monkeypatch.setattr(ray_serve, "get_deployment_handle", lambda deployment, name: Ingress(answers))
    assert serve.drain_ingresses(60.0)
    assert next(answers, None) is None


def test_draining_ends_with_the_grace_period(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    statuses(monkeypatch, {"a": ApplicationStatus.RUNNING})
    monkeypatch.setattr(ray_serve, "get_deployment_handle", lambda deployment, name: Ingress(iter([[3, 4]])))
    with caplog.at_level(logging.WARNING):
        assert not serve.drain_ingresses(0.0)
    assert "7 requests are cut off" in caplog.text
