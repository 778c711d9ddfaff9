"""The life of a server without a cluster: failed applications, draining, the end."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from folio.app.checks import load_config
from folio.app.cli.start import lifetime
from folio.app.cli.start.greeting import greeting
from folio.app.cli.start.start_log import StartLog
from folio.app.errors import UnavailableError

ROOT = Path(__file__).parents[3]


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


class Serve:
    """Serve's statuses of the applications in turn, the last for ever, and its ingresses."""

    rounds: list[dict[str, ApplicationStatus]]
    message, ingress = "", Any

    def status(self) -> Any:
        now, *later = self.rounds
        self.rounds = later or [now]
        applications = {
            name: SimpleNamespace(status=status, message="no memory", deployments=deployments(name, self.message))
            for name, status in now.items()
        }
        return SimpleNamespace(applications=applications)

    def get_deployment_handle(self, deployment: str, application: str) -> Any:
        return self.ingress


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Serve, and no pauses in draining."""
    for pause in ("_POLL_S", "_FLUSH_GRACE_S"):
        monkeypatch.setattr(lifetime, pause, 0.0)
    monkeypatch.setattr(lifetime, "serve", serve := Serve())
    return serve


class Ingress:
    """A handle of ingresses. `answers`: their requests in flight at each call, or the error of the call."""

    def __init__(self, answers: Iterator[list[int] | Exception]) -> None:
        self._answers = answers

    def options(self, **options: bool) -> Ingress:
        assert options == {"_by_reference": False}
        return self

    def broadcast(self, method: str) -> Any:
        assert method == "drain"
        answer = next(self._answers)

        def results(timeout_s: float) -> list[int]:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return SimpleNamespace(results=results)


def test_the_greeting(monkeypatch: pytest.MonkeyPatch, config: Callable[..., str]) -> None:
    """Regression: `serve status` ended in a traceback of Ray's token authentication, and nothing said why."""
    loaded = load_config(Path(config({}, host="0.0.0.0", port=8123)))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.chdir("/")
    folio = Path(sys.executable).parent / "folio"
    monkeypatch.setattr(Path, "exists", lambda path: path == folio or path.name == "serve")
    address = "127.0.0.1:6379"
    assert "serve status" not in greeting(loaded, address)  # it asks Ray's dashboard
    shown = greeting(loaded, address, ray_dashboard=True)
    url = "http://127.0.0.1:8123"
    for part in (
        f"curl {url}/v1/chat/completions",
        '"model": "builtin"',
        f"\n{folio} chat --url {url}\n",  # regression: only in an activated environment, or in the same folder
        f"Other Ray apps join with: RAY_ADDRESS={address} RAY_AUTH_MODE=token python app.py",
        f"Dashboard: {url}/dashboard\n",
        f"a toy of 3 million parameters. To serve a real one, a small assistant of 98 MB:\n{folio} pull smollm2 && ",
        "RAY_AUTH_MODE=token",
    ):
        assert part in shown
    loaded.applications[0].args["engine"]["model"] = "owner/model"
    loaded.applications[0].args["http"] = {"api_keys": {"env": "KEYS"}}
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    shown = greeting(loaded, address, ray_dashboard=True)
    assert "Authorization: Bearer" in shown
    for part in ("RAY_AUTH_MODE", "a toy"):
        assert part not in shown


@pytest.mark.parametrize("has_ended", [True, False])
def test_the_end_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
    config: Callable[..., str],
    serve: Serve,
    has_ended: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Regression: the command took 33 s more than the grace period. The process's end is scheduled before anything is
    stopped, and a drain that has used up the grace period is not waited for again."""
    done: list[Any] = []
    instance = SimpleNamespace(deploy=lambda config: None, shut_down=done.append)
    monkeypatch.setattr(lifetime, "ServeInstance", lambda config: instance)
    monkeypatch.setattr(lifetime, "end_within", lambda seconds, status: done.append((seconds, status)))
    signals: Any = SimpleNamespace(came=True, wait=lambda timeout_s: True)
    serve.rounds, serve.ingress = [{"a": ApplicationStatus.RUNNING}], Ingress(iter([[0 if has_ended else 1]]))
    assert lifetime.serve_until_signal(load_config(Path(config({}))), signals, 0.0, log=StartLog()) == 0
    (seconds, status), timeout_s = done
    assert seconds <= 7  # after an answer that was waited for
    assert status == 0
    assert (timeout_s > 0) == has_ended
    assert "ready" not in capsys.readouterr().err  # regression: a start that is cut off said so


@pytest.mark.processes
def test_a_process_that_hangs_at_its_end_is_ended() -> None:
    """Also where a call of Ray hangs before the end is scheduled: after a raylet's death, a signal did not end it."""
    for ending, status in {
        "lifetime.end_within(0.0, 7)": 7,
        "lifetime.Signals(0.0); os.kill(os.getpid(), signal.SIGTERM)": 0,
    }.items():
        run = f"from folio.app.cli.start import lifetime; {ending}; threading.Event().wait(240)"
        code = f"import os, signal, threading; {run}"
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == status


def test_waiting_until_all_applications_run(serve: Serve) -> None:
    runs, deploys = ApplicationStatus.RUNNING, ApplicationStatus.DEPLOYING
    serve.rounds = [{}, {"a": runs}, {"a": runs, "b": deploys}, {"a": runs, "b": runs}]
    waits = Signals(after=10)
    assert lifetime.wait_until_running(["a", "b"], waits, StartLog()) == 0  # type: ignore[arg-type]
    assert waits.left == 6
    serve.rounds = [{"a": runs, "b": deploys}]
    assert lifetime.wait_until_running(["a", "b"], Signals(after=3), StartLog()) == 0  # type: ignore[arg-type]


def test_an_application_that_cannot_be_deployed(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    serve.rounds = [{"a": ApplicationStatus.RUNNING, "b": ApplicationStatus.DEPLOY_FAILED}]
    assert lifetime.wait_until_running(["a", "b"], Signals(after=10), StartLog()) == 1  # type: ignore[arg-type]
    assert "b cannot be deployed: no memory" in caplog.text


def test_permanent_errors_are_not_retried(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: 68 s and six tracebacks, while Serve retried to load a broken model."""
    serve.message = "A replica failed to start.\nTraceback:\n  File\napp.errors.ModelError: no weights in 'x'\n"
    serve.rounds = [{"a": ApplicationStatus.DEPLOYING}]
    assert lifetime.wait_until_running(["a"], Signals(after=2), StartLog()) == 1  # type: ignore[arg-type]
    assert caplog.messages == ["a cannot be deployed: no weights in 'x'"]


def test_draining_lasts_until_no_request_is_in_flight(serve: Serve) -> None:
    """An ingress that does not answer may have requests. Other applications are not drained."""
    runs = ApplicationStatus.RUNNING
    serve.rounds = [{"a": runs, "desk": runs, "new": ApplicationStatus.DEPLOYING}]
    answers: Iterator[Any] = iter([[2, 1], RayServeException("restarting"), [0, 1], [0, 0]])
    serve.ingress = Ingress(answers)
    assert lifetime.drain_ingresses(60.0, {})
    assert next(answers, None) is None


def test_ingresses_are_drained_without_the_controller(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its raylet's death it answers nobody, and is asked once."""
    monkeypatch.setattr(lifetime, "_ANSWER_S", 0.01)
    asked: list[threading.Thread] = []
    ended = threading.Event()

    def hangs() -> None:
        asked.append(threading.current_thread())
        ended.wait(240)
        raise RayError("the test has ended")

    serve.status = hangs  # type: ignore[method-assign]
    answers: Iterator[Any] = iter([[2], [0]])
    assert lifetime.drain_ingresses(60.0, {"a": Ingress(answers)})
    assert next(answers, None) is None
    ended.set()
    [thread] = asked
    thread.join()


def test_a_dead_raylet_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    lifetime.watch(Signals(after=5), iter([False, True]).__next__)  # type: ignore[arg-type]
    assert [message[:29] for message in caplog.messages] == ["Ray's raylet on this machine "]


def test_draining_ends_with_the_grace_period(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    serve.rounds, serve.ingress = [{"a": ApplicationStatus.RUNNING}], Ingress(iter([[3, 4]]))
    with caplog.at_level(logging.WARNING):
        assert not lifetime.drain_ingresses(0.0, {})
    assert "7 requests are cut off" in caplog.text


@pytest.fixture
def longer_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_LIMIT", "")  # which restores it
    monkeypatch.delenv("RAY_LIMIT")
    monkeypatch.setattr(lifetime, "LONGER_LIMITS", {"RAY_LIMIT": "9"})


@pytest.mark.parametrize(
    ("is_local", "where"), [(True, "cannot be started"), (False, "does not answer at RAY_ADDRESS=127.0.0.1:")]
)
@pytest.mark.usefixtures("longer_limits")
def test_ray_that_does_not_start_is_a_line(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, is_local: bool, where: str
) -> None:
    """On a busy machine Ray gives up after 30 s with a bare `Exception`, whose traceback was all the user saw."""

    def init(**_: Any) -> None:
        raise Exception("The current node timed out\n  during startup.")

    cluster.init = init
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if not is_local:
            monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(UnavailableError, match=where) as caught:
            lifetime.join_ray(is_local=is_local)
    assert "(The current node timed out during startup.)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_address_where_nobody_listens_is_a_line(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray tried for more than three minutes, with lines of its own."""
    monkeypatch.setattr(lifetime, "_LISTENS_S", 0.6)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(UnavailableError, match=rf"RAY_ADDRESS=127.0.0.1:{port} .*refused.*start the cluster, or unset"):
        lifetime.join_ray(is_local=False)
    assert [message[:16] for message in caplog.messages] == ["no server listen"]


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/home/user/.ray", "set HOME to a folder that can be written, or RAY_AUTH_TOKEN"),
        ("/home/user/.ray/auth_token", "set HOME"),
        ("/home/user", "set HOME"),  # it does not exist
        ("/home", "set HOME"),
        ("/tmp/ray", "other processes may keep it busy"),
    ],
)
def test_a_home_that_cannot_be_written_is_named(
    path: str, remedy: str, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that other processes may keep the machine busy."""

    def init(**_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setenv("HOME", "/home/user")
    cluster.init = init
    with pytest.raises(UnavailableError, match=rf"'{path}'.*{remedy}"):
        lifetime.join_ray(is_local=True)


@pytest.mark.processes
@pytest.mark.usefixtures("longer_limits")
def test_a_start_that_times_out_is_repeated_once(cluster: Any) -> None:
    """Six of eight starts on a starved machine failed. What the first attempt has started ends; other failures, and
    those of clusters that run already, are not repeated."""
    started: list[subprocess.Popen[bytes]] = []
    ours = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def init(**options: Any) -> None:
        assert options["include_dashboard"] is False
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        if len(started) == 1:
            assert "RAY_LIMIT" not in os.environ
            raise Exception("The current node timed out during startup.")
        assert os.environ["RAY_LIMIT"] == "9"

    cluster.init = init
    lifetime.join_ray(is_local=True)
    assert started[0].wait() == -signal.SIGKILL
    assert [process.poll() for process in (ours, started[1])] == [None, None]
    for process in (ours, started[1]):
        process.kill()
        process.communicate()
    tries: list[None] = []

    def fails(**_: Any) -> None:
        tries.append(None)
        raise Exception("Permission denied")

    cluster.init = fails
    with pytest.raises(UnavailableError):
        lifetime.join_ray(is_local=True)
    assert len(tries) == 1
