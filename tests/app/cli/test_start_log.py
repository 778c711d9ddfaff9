"""The lines of a start: a phase each, what went wrong, and nothing of Ray's."""

from __future__ import annotations

import pytest

from folio.app.cli.start.start_log import StartLog

AT = "2026-11-28 03:50:03,091"
ADVICE = f"WARNING {AT} controller 13357 -- HTTPOptions.host='127.0.0.1' … Set host to '0.0.0.0' or omit it"
REQUEST = f"{AT} INFO folio.app.edge.request_log: POST /v1/completions 200"
STARTING, READY = "while it starts", "when it is ready"


@pytest.mark.parametrize(
    ("line", "shown_in"),
    [
        (f"INFO {AT} proxy 192.0.2.2 -- HAProxy started successfully.", ()),
        (ADVICE, ()),  # regression: the advice to listen on all addresses
        (f"WARNING {AT} controller 1 -- 1 replicas that have taken more than 30s to be scheduled.", (STARTING, READY)),
        (f"ERROR {AT} controller 1 -- Exception in the control loop", (STARTING, READY)),
        (f"ERROR {AT} controller 1 -- Exception in Replica(id='a', app='folio'), it will be stopped.", (READY,)),
        (f"{AT} INFO folio.app.engine.memory.kv_plan: KV cache: up to 64.0 MiB", (READY,)),
        (REQUEST, (READY,)),
        (f"{AT} WARNING folio.app.engine.startup: less memory", (STARTING, READY)),
        ("\rLoading weights:   0%|          | 0/54 [00:00<?, ?it/s]\rLoading weights: 100%|██████████| 54/54", ()),
        ("Fatal Python error: Segmentation fault", (STARTING, READY)),
    ],
)
def test_lines_of_workers(line: str, shown_in: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    log = StartLog()
    for when in (STARTING, READY):
        assert log.visible("EngineReplica", [line]) == ([line] if when in shown_in else []), when
        log.end()
    assert StartLog(verbose=True).visible("EngineReplica", [line]) == [line]


def test_a_line_for_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    log = StartLog()
    log.lap("Ray runs")
    assert log.visible("EngineReplica", [f"{AT} INFO folio.app.engine.startup: model m is loaded (3.1 s)"]) == []
    log.end()
    written = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in written] == ["==> Ray runs", "==> model m is loaded", "==> ready"]
    assert all(line.endswith((" s)", " s in all)")) for line in written)


@pytest.mark.parametrize("is_explained", [False, True])
def test_a_replicas_traceback_is_for_failures_that_nobody_explains(
    is_explained: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: 130 lines above "no tokenizer for 'x'"."""
    trace = [
        f"ERROR {AT} controller 1 -- Exception in Replica(id='a')",
        "Traceback (most recent call last):",
        "KeyError",
    ]
    log = StartLog()
    assert log.visible("ServeController", trace) == []
    log.fail(is_explained=is_explained)
    shown = capsys.readouterr().err.splitlines()
    assert shown == ([] if is_explained else [f"(ServeController) {line}" for line in trace])
    assert log.visible("ServeController", trace) == ([] if is_explained else trace)  # those that come late


def test_a_failed_start_shows_what_was_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    """All but Serve's notes: a traceback below a warning of Serve's, and notes of Folio's."""
    log, note = StartLog(), f"{AT} INFO folio.app.engine.memory.kv_plan: KV cache: up to 64.0 MiB"
    trace = [f"WARNING {AT} controller 1 -- Failed to start", "Traceback (most recent call last):", "  File x"]
    assert log.visible("ServeController", [f"INFO {AT} controller 1 -- Deploying", *trace, note]) == []
    log.fail()
    assert capsys.readouterr().err.splitlines() == [f"(ServeController) {line}" for line in (*trace, note)]
    assert log.visible("ServeController", trace) == []  # the end's own warnings
