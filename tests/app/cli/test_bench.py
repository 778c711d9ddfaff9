"""`folio bench` against servers that know more and less of the API."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from folio.app.cli.bench.command import Load, Prompts, kind_of_error, summary
from folio.app.cli.bench.load import Record
from folio.app.cli.main import main
from tests.app.cli.fake_server import DONE, Answer, error, event, serving, stream, text, usage

LOAD = Load((1.0,), 10.0, 100, 8, 40, 0, slo_ttft_s=0.5, slo_tpot_s=0.1, api="chat")
QUICK = ["--rates", "20,40", "--duration", "0.5", "--prompt-tokens", "20", "--output-tokens", "4", "--seed", "3"]


def answering(bodies: list[Any]) -> Answer:
    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        bodies.append(body)
        words = sum(len(message["content"].split()) for message in body["messages"])
        return await stream(request, text("a"), text("b"), usage(2 * words, 4, words), DONE)

    return answer


@pytest.mark.processes  # matplotlib lists the fonts once
def test_a_server_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bodies: list[Any] = []
    with serving(answering(bodies)) as url:
        assert main(["bench", "--url", url, *QUICK, "--prefix-tokens", "8", "--out", str(tmp_path), "--json"]) == 0
    shown = capsys.readouterr()
    results = json.loads(shown.out.strip().split("\n")[-1])
    assert results == json.loads((tmp_path / "bench.json").read_text())
    assert [run["rate"] for run in results["runs"]] == [20.0, 40.0]
    for run in results["runs"]:
        assert run["num_answered"] == run["num_requests"] > 0
        assert run["errors"] == {}
        assert 0 < run["ttft_s"]["p50"] <= run["ttft_s"]["p99"]
        assert run["mean_output_tokens"] == 4
        assert run["cached_share"] == 0.5
        # Words had two tokens each: the prompts became shorter after the first.
        assert run["mean_prompt_tokens"] == pytest.approx(20, abs=2)
    assert {body["messages"][0]["content"] for body in bodies[1:]} == {bodies[1]["messages"][0]["content"]}
    assert len({body["messages"][1]["content"] for body in bodies}) == len(bodies)
    assert {(body["model"], body["max_tokens"], body["ignore_eos"]) for body in bodies} == {("one", 4, True)}
    assert "one at http://127.0.0.1" in shown.out
    assert "20 requests/s: " in shown.err


def test_a_narrow_terminal_cuts_no_figure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with serving(answering([])) as url:
        assert main(["bench", "--url", url, *QUICK]) == 0
    _, head, *runs = capsys.readouterr().out.split("\n")
    assert " ".join(head.split()) == "req/s answered TTFT p50 p90 p99 TPOT p50 p90 p99 tok/s good/s good"
    assert [line.split()[0] for line in runs[:2]] == ["20", "40"]


def test_a_server_that_knows_less(capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        assert request.path == "/v1/completions"
        for name in ("ignore_eos", "stream_options"):
            if name in body:
                return error(f"{name}: unknown field", 400)
        return await stream(request, *(event(choices=[{"text": "a"}]) for _ in range(3)), DONE)

    with serving(answer) as url:
        assert main(["bench", "--url", url, *QUICK, "--api", "completions", "--json"]) == 0
    shown = capsys.readouterr().out
    assert "The server sends no usage" in shown
    results = json.loads(shown.strip().split("\n")[-1])
    assert (results["has_usage"], results["has_fixed_length"]) == (False, False)
    assert results["runs"][0]["mean_output_tokens"] == 3


def test_errors_are_counted_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    answered: list[Any] = []

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        answered.append(body)
        if len(answered) <= 1:
            return await stream(request, text("a"), DONE)
        return error("full", 429, "rate_limit_error", **{"Retry-After": "1"})

    with serving(answer) as url:
        assert main(["bench", "--url", url, *QUICK, "--warm-up", "1", "--json"]) == 0
    shown = capsys.readouterr().out
    run = json.loads(shown.strip().split("\n")[-1])["runs"][0]
    assert run["errors"] == {"HTTP 429": run["num_requests"]}
    assert run["ttft_s"]["p50"] is None
    assert f"{run['num_requests']} × HTTP 429" in shown


def test_without_matplotlib_there_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with serving(answering([])) as url:
        assert main(["bench", "--url", url, *QUICK, "--out", str(tmp_path)]) == 0
    assert "no picture: matplotlib is not installed; pip install 'folio-serve[bench]'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.processes
def test_a_picture(tmp_path: Path) -> None:
    """Also of a rate so low that no request comes: a division by zero."""
    pytest.importorskip("matplotlib")
    with serving(answering([])) as url:
        assert main(["bench", "--url", url, *QUICK, "--rates", "20,0.001", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--rates", "1,x"], "--rates is '1,x'; write positive numbers such as 1,2,4"),
        (["--rates", "0"], "--rates is '0'"),
        (["--api", "tools"], "'tools' is not one of 'chat', 'completions'"),
        (["--prefix-tokens", "256"], "--prefix-tokens is 256; it must be below --prompt-tokens, 256"),
        (["--url", "http://127.0.0.1:1"], "nothing answers at http://127.0.0.1:1"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) > 0
    shown = capsys.readouterr()
    assert line in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_a_folder_that_cannot_be_written_is_told_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: it was found after minutes of requests, whose results were lost."""
    (tmp_path / "file").touch()
    assert main(["bench", "--url", "http://127.0.0.1:1", "--out", str(tmp_path / "file")]) == 2
    assert "cannot be written: File exists" in capsys.readouterr().err


def test_a_rate_without_requests() -> None:
    run = summary(0.001, [], LOAD)
    assert (run["num_requests"], run["goodput_per_s"], run["seconds"]) == (0, 0.0, 10.0)


def test_a_server_that_answers_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        return error("no such model", 404)

    with serving(answer) as url:
        assert main(["bench", "--url", url, *QUICK]) == 1
    assert "does not answer a first request: status 404: no such model" in capsys.readouterr().err


def record(ttft_s: float, tpot_s: float, num_tokens: int = 11) -> Record:
    last_s = 1.0 + ttft_s + tpot_s * (num_tokens - 1)
    events = [(1.0 + ttft_s, 1), (last_s, 1)]
    return Record(1.0, 11, status=200, ended_s=last_s, events=events, num_tokens=num_tokens, done=True)


def test_goodput_counts_answers_within_both_bounds() -> None:
    records = [record(0.4, 0.05), record(0.6, 0.05), record(0.4, 0.2), record(0.1, 0.0, 1), Record(1.0, 11, status=503)]
    run = summary(2.0, records, LOAD)
    assert run["goodput_share"] == 0.4
    assert run["seconds"] == 10.0  # those in which requests arrive, though all have ended before
    assert run["goodput_per_s"] == pytest.approx(2 / 10)
    assert run["output_tokens_per_s"] == pytest.approx(34 / 10)
    assert run["tpot_s"]["p99"] == pytest.approx(0.2)  # a single token has no TPOT
    assert run["errors"] == {"HTTP 503": 1}


def test_kinds_of_errors() -> None:
    found = [Record(0.0, 1), Record(0.0, 1, status=200, error="x"), Record(0.0, 1, status=200)]
    found.append(Record(0.0, 1, status=200, done=True))
    kinds = ["connection lost", "error in the stream", "stream without an end", "no text"]
    assert [kind_of_error(each) for each in found] == kinds


def test_prompts_are_the_same_with_the_same_seed() -> None:
    first, second = (Prompts(LOAD).asks(5.0, seed=1) for _ in range(2))
    assert first == second
    assert len({str(ask.prompt) for ask in first}) == len(first)
    assert [ask.at_s for ask in first] == sorted(ask.at_s for ask in first)
