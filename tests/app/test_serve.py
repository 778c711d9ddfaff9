"""The command without a cluster: what it says of files, of applications that fail, and how it drains."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve as ray_serve
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from app import serve


class Signals:
    """Come after so many waits."""

    def __init__(self, after: int) -> None:
        self._left = after

    def wait(self, timeout_s: float) -> bool:
        self._left -= 1
        return self._left < 0


def deployments(application: str) -> dict[str, Any]:
    """Those of a Folio application, except of "desk", and of "new", whose ingress does not run yet."""
    if application == "desk":
        return {"Desk": SimpleNamespace(replica_states={"RUNNING": 1})}
    states = {"STARTING": 1} if application == "new" else {"RUNNING": 1}
    return {name: SimpleNamespace(replica_states=states) for name in ("Ingress", "EngineReplica")}


def statuses(monkeypatch: pytest.MonkeyPatch, *rounds: dict[str, ApplicationStatus]) -> None:
    """What Serve says of the applications, the last for ever."""
    left = list(rounds)

    def status() -> Any:
        now = left.pop(0) if len(left) > 1 else left[0]
        applications = {
            name: SimpleNamespace(status=status, message="no memory", deployments=deployments(name))
            for name, status in now.items()
        }
        return SimpleNamespace(applications=applications)

    monkeypatch.setattr(ray_serve, "status", status)


class Ingress:
    """A handle of ingresses; `answers`: how many requests they have, each time, or what they fail with."""

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


@pytest.mark.parametrize("content", [None, "applications: 5", "{oops"])
def test_a_file_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    assert serve.main([str(path)]) == 1
    assert f"{path} cannot be used" in caplog.text


def test_it_waits_until_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, deploys = ApplicationStatus.RUNNING, ApplicationStatus.DEPLOYING
    statuses(monkeypatch, {}, {"a": runs}, {"a": runs, "b": deploys}, {"a": runs, "b": runs})
    waits = Signals(after=10)
    assert serve.wait_until_running(["a", "b"], waits) == 0  # type: ignore[arg-type]
    assert waits._left == 6
    statuses(monkeypatch, {"a": runs, "b": deploys})
    assert serve.wait_until_running(["a", "b"], Signals(after=3)) == 0  # type: ignore[arg-type]


def test_an_application_that_cannot_be_deployed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    statuses(monkeypatch, {"a": ApplicationStatus.RUNNING, "b": ApplicationStatus.DEPLOY_FAILED})
    assert serve.wait_until_running(["a", "b"], Signals(after=10)) == 1  # type: ignore[arg-type]
    assert "b cannot be deployed: no memory" in caplog.text


def test_it_asks_until_nothing_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingress that does not answer may have requests; other applications are not asked."""
    monkeypatch.setattr(serve, "_POLL_S", 0.0)
    monkeypatch.setattr(serve, "_LAST_BYTES_S", 0.0)
    runs = ApplicationStatus.RUNNING
    statuses(monkeypatch, {"a": runs, "desk": runs, "new": ApplicationStatus.DEPLOYING})
    answers = iter([[2, 1], RayServeException("restarting"), [0, 1], [0, 0]])
    monkeypatch.setattr(ray_serve, "get_deployment_handle", lambda deployment, name: Ingress(answers))
    serve.drain(60.0)
    assert next(answers, None) is None


def test_it_waits_no_longer_than_the_grace_period(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    statuses(monkeypatch, {"a": ApplicationStatus.RUNNING})
    monkeypatch.setattr(ray_serve, "get_deployment_handle", lambda deployment, name: Ingress(iter([[3, 4]])))
    with caplog.at_level(logging.WARNING):
        serve.drain(0.0)
    assert "7 requests are broken off" in caplog.text
