"""What a replica hears from others before it runs, and that nothing they do keeps it from starting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from app.fleet.messages import HotPrefixes
from app.serving import peers
from app.serving.peers import PeerReplicas
from vmem import CachedPrefix

TOLD = [CachedPrefix((1, 2), ("tenant:a",), 3)]
TELLS = HotPrefixes("same", TOLD)
UNAVAILABLE = DeploymentUnavailableError(DeploymentID("EngineReplica", "app"))


class Serve:
    """`ray.serve` as a starting replica sees it.

    Args:
        states: replicas of the deployment in each state; None: the application is not known yet.
        answers: what each broadcast brings, or fails with.
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
        """`DeploymentHandle`, which whoever makes it has to shut down."""

        def broadcast(method: str) -> Any:
            self.asked.append((deployment, app_name, method))
            return SimpleNamespace(results=self._results)

        def shutdown() -> None:
            self.open_handles -= 1

        self.open_handles += 1
        return SimpleNamespace(broadcast=broadcast, shutdown=shutdown)

    def _results(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions  # one that fails must not hide the others
        assert 0 <= timeout_s <= peers.ANSWER_TIMEOUT_S
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def ask(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> list[Any]:
    monkeypatch.setattr(peers, "serve", serve)
    monkeypatch.setattr(peers, "DeploymentHandle", serve.handle)
    monkeypatch.setattr(peers, "_ASK_AGAIN_S", 0.0)
    told = PeerReplicas("EngineReplica", "app").prefixes("same")
    assert not serve.open_handles  # its router would read all replicas' reports for ever
    return told


@pytest.mark.parametrize("states", [None, {}, {"STARTING": 2}, {"STOPPING": 1}])
def test_a_first_replica_asks_nobody(states: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Serve(states)
    assert ask(monkeypatch, serve) == []
    assert not serve.asked


def test_those_that_run_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Serve({"RUNNING": 2, "STARTING": 1}, [TELLS, HotPrefixes("same", [])])
    assert ask(monkeypatch, serve) == [TOLD, []]
    assert serve.asked == [("EngineReplica", "app", "hot_prefixes")]


def test_a_new_handle_hears_of_replicas_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Serve({"RUNNING": 1}, UNAVAILABLE, UNAVAILABLE, [TELLS])
    assert ask(monkeypatch, serve) == [TOLD]
    assert len(serve.asked) == 3


def test_one_that_fails_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serve = Serve({"RUNNING": 3}, [AttributeError("hot_prefixes"), TELLS, TimeoutError()])
    assert ask(monkeypatch, serve) == [TOLD]
    assert caplog.text.count("does not tell its prefixes") == 2


def test_other_models_and_versions_have_other_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: token ids of another tokenizer were computed, and pinned, as if they were this one's."""
    caplog.set_level("INFO")
    other = HotPrefixes("other", TOLD)
    assert ask(monkeypatch, Serve({"RUNNING": 4}, [other, TELLS, TOLD, other])) == [TOLD]
    assert [r.getMessage() for r in caplog.records if "another model" in r.getMessage()] == [
        "3 replicas have another model or version; their prefixes are not restored"
    ]


@pytest.mark.parametrize("error", [TimeoutError("slow"), RayActorError(), KeyError("gone")])
def test_without_answers_a_replica_starts_all_the_same(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert ask(monkeypatch, Serve({"RUNNING": 1}, error)) == []
    assert f"cannot be asked for their prefixes: {type(error).__name__}" in caplog.text


def test_replicas_that_have_all_gone_are_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "ANSWER_TIMEOUT_S", 0.0)
    assert ask(monkeypatch, Serve({"RUNNING": 1}, UNAVAILABLE, UNAVAILABLE)) == []
    assert "cannot be asked" in caplog.text
