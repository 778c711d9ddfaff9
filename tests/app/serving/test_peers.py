"""Hot prefixes from peer replicas: no behaviour of peers prevents a start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from folio.app.fleet.messages import HotPrefixes
from folio.app.serving import peers
from folio.app.serving.peers import peer_prefixes
from folio.vmem import CachedPrefix
from tests.app.compat.ray_types import DeploymentID

PREFIXES = [CachedPrefix((1, 2), ("tenant:a",), 3)]
ANSWER = HotPrefixes("same", PREFIXES)
UNAVAILABLE = DeploymentUnavailableError(DeploymentID("EngineReplica", "app"))


class Serve:
    """`ray.serve` for a starting replica.

    Args:
        states: replicas of the deployment by state; `None`: the application is unknown.
        answers: the results of each broadcast, or its error.
    """

    def __init__(self, states: dict[str, int] | None, *answers: list[Any] | Exception) -> None:
        self._states = states
        self.answers = list(answers)
        self.asked: list[tuple[str, str, str]] = []
        self.open_handles = 0

    def status(self) -> Any:
        if self._states is None:
            return SimpleNamespace(applications={})
        deployment = SimpleNamespace(replica_states=self._states)
        return SimpleNamespace(applications={"app": SimpleNamespace(deployments={"EngineReplica": deployment})})

    def handle(self, deployment: str, app_name: str) -> Any:
        """A `DeploymentHandle`, to be shut down."""

        def broadcast(method: str, fingerprint: str) -> Any:
            assert fingerprint == "same"
            self.asked.append((deployment, app_name, method))
            return SimpleNamespace(results=self._results)

        def shutdown() -> None:
            self.open_handles -= 1

        self.open_handles += 1
        return SimpleNamespace(broadcast=broadcast, shutdown=shutdown)

    def _results(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions  # one failure must not hide the other answers
        assert 0 <= timeout_s <= 1.0
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def ask(monkeypatch: pytest.MonkeyPatch, serve: Serve, timeout_s: float = 1.0) -> list[Any]:
    monkeypatch.setattr(peers, "serve", serve)
    monkeypatch.setattr(peers, "DeploymentHandle", serve.handle)
    found = peer_prefixes("EngineReplica", "app", timeout_s, "same")
    assert not serve.open_handles  # its router would read all replicas' reports for ever
    return found


@pytest.mark.parametrize("states", [None, {}, {"STARTING": 2}, {"STOPPING": 1}])
def test_the_first_replica_has_no_peers(states: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Serve(states)
    assert ask(monkeypatch, serve) == []
    assert not serve.asked


def test_running_peers_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Serve({"RUNNING": 2, "STARTING": 1}, [ANSWER, HotPrefixes("same", [])])
    assert ask(monkeypatch, serve) == [PREFIXES, []]
    assert serve.asked == [("EngineReplica", "app", "hot_prefixes")]


def test_a_new_handle_does_not_know_replicas_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Serve({"RUNNING": 1}, UNAVAILABLE, UNAVAILABLE, [ANSWER])
    assert ask(monkeypatch, serve) == [PREFIXES]
    assert len(serve.asked) == 3


def test_a_failing_peer_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serve = Serve({"RUNNING": 3}, [AttributeError("hot_prefixes"), ANSWER, TimeoutError()])
    assert ask(monkeypatch, serve) == [PREFIXES]
    assert caplog.text.count("no hot prefixes from a peer replica") == 2


def test_prefixes_of_other_models_and_versions_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: token ids of another tokenizer were computed, and pinned, as if they were this one's."""
    caplog.set_level("INFO")
    other = HotPrefixes("other", PREFIXES)
    assert ask(monkeypatch, Serve({"RUNNING": 4}, [other, ANSWER, PREFIXES, None])) == [PREFIXES]
    assert [r.getMessage() for r in caplog.records if "another model" in r.getMessage()] == [
        "3 peer replicas have another model or version; their prefixes are not restored"
    ]


@pytest.mark.parametrize("error", [TimeoutError("slow"), RayActorError(), KeyError("gone")])
def test_a_replica_starts_without_answers(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert ask(monkeypatch, Serve({"RUNNING": 1}, error)) == []
    assert f"cannot be asked for hot prefixes: {type(error).__name__}" in caplog.text


def test_peers_that_have_gone_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert ask(monkeypatch, Serve({"RUNNING": 1}, UNAVAILABLE, UNAVAILABLE), 0.0) == []
    assert "cannot be asked" in caplog.text
