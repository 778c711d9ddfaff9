"""Journals: whatever happens to an engine, its scheduler's decisions can be made again, and others are found out."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from app.config import EngineConfig
from app.engine import engine as engine_module
from app.engine.engine import Engine
from app.engine.params import SamplingParams
from app.engine.replay import Replayed, main, replay
from app.engine.request import Request
from app.errors import ConfigError, RequestError
from tests.app.engine.test_schedules import (
    EVENTS,
    MAX_MODEL_LEN,
    MODELS,
    SUBMIT,
    Budget,
    Cancel,
    Event,
    Fork,
    Run,
    Steps,
    Submit,
)
from tests.conftest import MakeCheckpoint

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)

# More than there is room for, and everything that can happen to them.
BURST: list[Event] = [
    Submit(document=i % 2, common=33 + i, own=(i,), max_tokens=30, seed=None, priority=i // 3, salt=str(i))
    for i in range(6)
]
EVERYTHING: list[Event] = [
    *(Steps(6, fails=False), Fork(1, 8, None), Steps(8, fails=False), Budget(0.0), Steps(4, fails=False)),
    *(Steps(1, fails=True), Cancel(3), Budget(1.0), Steps(8, fails=False)),
]


def make_engine(make_checkpoint: MakeCheckpoint, path: Path, model: str = "llama", **changes: Any) -> Engine:
    """With room for the longest sequence and a little more."""
    folder = str(make_checkpoint(model, **MODELS[model]))
    same: dict[str, Any] = {"model": folder, "skip_tokenizer_init": True, "max_model_len": MAX_MODEL_LEN}
    same |= {"block_tokens": 16, "num_threads": 1}
    probe = Engine(EngineConfig(**same))
    page_bytes = probe.memory.groups[0].layout.page_bytes
    same["kv_memory_bytes"] = (probe.memory.pages_for(MAX_MODEL_LEN) + 6) * page_bytes
    same |= {"swap_bytes": 40 * page_bytes, "max_num_seqs": 6, "max_num_batched_tokens": 40, "journal": str(path)}
    probe.close()
    return Engine(EngineConfig(**(same | changes)))


class Unchecked:
    """In place of a reference: the tokens are another test's business."""

    def check(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("model", "policy", "fair", "view"),
    [("llama", "auto", True, "auto"), ("llama", "swap", False, "region"), ("bamba", "recompute", False, "block_table")],
)
def test_all_decisions_are_made_again(
    model: str,
    policy: str,
    fair: bool,
    view: str,
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Schedules of every kind, over a budget that is far too small, one after the other."""
    monkeypatch.setattr(engine_module, "_GIVE_UP_S", 0.1)
    path = tmp_path / "journal"
    engine = make_engine(
        make_checkpoint,
        path,
        model,
        preemption=policy,
        fair_tenants=fair,
        kv_view=view,
    )
    if policy == "swap":
        monkeypatch.setattr(engine, "_propose", lambda: guesses(engine))
    names = itertools.count()

    @settings(
        max_examples=3,
        deadline=None,
        phases=[Phase.explicit] if model == "bamba" else [Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @example(burst=BURST, events=EVERYTHING, several={"n": 2})
    @given(
        burst=st.lists(SUBMIT, min_size=4, max_size=6),
        events=st.lists(EVENTS, min_size=3, max_size=20),
        several=st.sampled_from([{"n": 2}, {"n": 2, "use_beam_search": True, "best_of": 3}, {"best_of": 3}]),
    )
    def play(burst: list[Event], events: list[Event], several: dict[str, Any]) -> None:
        try:
            run = Run(engine, Unchecked())  # type: ignore[arg-type]
            params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, **several)
            with contextlib.suppress(RequestError):  # of a model with states they do not fit together
                engine.submit(f"several {next(names)}", [1, 2, 3] * 5, params, tenant="x")
            run.play(burst + events)
        finally:
            for request_id in list(engine._generations):
                engine.cancel(request_id)
            for pin in engine.report().pins:
                engine.unpin(pin.name)

    play()
    engine.close()
    lines = path.read_text().splitlines(keepends=True)
    replayed = replay(lines)
    assert replayed.difference is None
    happened = Counter(decision[0] for line in map(json.loads, lines) for decision in line.get("made", ()))
    events = Counter(line.get("event") for line in map(json.loads, lines))
    assert replayed.num_decisions == sum(happened.values()) > 100
    assert all(happened[what] for what in ("begin", "resume", "preempt", "compute")), happened
    assert all(events[what] for what in ("arrive", "end", "budget", "done", "abort")), events
    if model == "llama":  # the other's forks do not fit
        assert events["sync"]
    assert any("drafts" in text for text in lines) == (policy == "swap")


def guesses(engine: Engine) -> dict[Request, list[int]]:
    """The last token again, for everybody who may have drafts: whether guessing pays is a matter of times."""
    return {
        request: request.token_ids[-1:] * min(2, request.max_tokens - request.num_output_tokens - 1)
        for request in engine._scheduler.decoding()
        if not request.group.lockstep and not request.num_forks and request.pin_name is None
    }


@pytest.fixture
def journal(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> list[str]:
    """The lines of a short one: four requests, of which two run at once."""
    path = tmp_path / "journal"
    engine = make_engine(make_checkpoint, path, max_num_seqs=2)
    for i in range(4):
        engine.submit(str(i), [i] * 20, GREEDY, tenant="t")
    while engine.has_work:
        engine.step()
    engine.close()
    return path.read_text().splitlines(keepends=True)


def test_another_scheduler_is_found_out(journal: list[str]) -> None:
    """The first decision that it makes otherwise is named, with its line."""
    assert replay(journal) == Replayed(num_steps=12, num_decisions=28, difference=None)
    header = json.loads(journal[0])
    header["scheduler"]["max_num_batched_tokens"] = 30
    other = replay([json.dumps(header) + "\n", *journal[1:]])
    assert other.difference == "line 6: decision 3 is ['compute', 1, 0, 10, 0]; then it was ['compute', 1, 0, 20, 0]"
    header = json.loads(journal[0])
    header["scheduler"]["max_num_seqs"] = 3
    asks_more = replay([json.dumps(header) + "\n", *journal[1:]])
    assert asks_more.difference is not None
    assert "asked for" in asks_more.difference
    assert asks_more.num_steps > 0


def test_every_changed_decision_is_found_out(journal: list[str]) -> None:
    for number, text in enumerate(journal, 1):
        line = json.loads(text)
        for i in range(len(line.get("made", ()))):
            changed = json.loads(text)
            changed["made"][i][1] = 99
            lines = [*journal[: number - 1], json.dumps(changed) + "\n", *journal[number:]]
            assert (replay(lines).difference or "").startswith(f"line {number}: decision {i} ")


def test_a_journal_that_was_cut_off_is_replayed_as_far_as_it_goes(journal: list[str]) -> None:
    whole = replay(journal)
    part = replay([*journal[:-4], journal[-4][:10]])
    assert part.difference is None
    assert 0 < part.num_steps <= whole.num_steps


@pytest.mark.parametrize("lines", [[], ["{}\n"], ['{"journal": 99}\n'], ["no JSON\n"]])
def test_what_is_no_journal_is_refused(lines: list[str]) -> None:
    with pytest.raises(ConfigError, match="journal"):
        replay(lines)


def test_the_command_says_what_came_of_it(
    journal: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, lines in (("same", journal), ("other", [journal[0].replace('"max_num_seqs":2', '"max_num_seqs":1', 1)])):
        (tmp_path / name).write_text("".join(lines + journal[len(lines) :]))
        monkeypatch.setattr("sys.argv", ["replay", str(tmp_path / name)])
        assert main() == (name == "other")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "28 decisions in 12 steps are the same"
    assert "then line" in out[1]


def test_a_journal_that_cannot_be_written_is_said_at_the_start(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        make_engine(make_checkpoint, tmp_path / "no such folder" / "journal")


def test_without_a_journal_nothing_is_between_the_scheduler_and_its_memory(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    engine = make_engine(make_checkpoint, tmp_path / "none", journal=None)
    assert engine._scheduler._memory is engine.memory
    assert engine._scheduler._log is None
    engine.close()
