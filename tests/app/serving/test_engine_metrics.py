"""Metrics of engine replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from folio.app.config.engine import EngineConfig
from folio.app.engine.engine import Engine
from folio.app.engine.report import GpuMemory, StartTimes
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.speculation import SpeculationCounts
from folio.app.fleet.status import ModelReport, ReplicaStatus, unloaded_report
from folio.app.serving.engine_metrics import ReplicaMeter
from folio.app.serving.metric_rows import Gauge, Total
from folio.app.shelf.status import DeviceStatus, ModelStatus
from folio.kernels import note_compilation
from folio.vmem.prefix.store.block_store import StoreCounts
from tests.app.serving.conftest import Recorded

DEVICE = DeviceStatus(capacity_bytes=100, used_bytes=30, idle_bytes=5, charged_bytes=40, workspace_bytes=10)
AWAKE = ModelStatus(name="a", state="awake", weight_bytes=40, kv_bytes=30, num_wakes=1, last_wake_s=2.0)
ASLEEP = replace(AWAKE, name="b", state="asleep", kv_bytes=0)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(EngineConfig(model="builtin", kv_memory_bytes=16 << 20))
    yield engine
    engine.close()


class Noted:
    """What is recorded of one engine, the model "m"; its figures may be replaced."""

    def __init__(self, recorded: Recorded, engine: Engine) -> None:
        self._recorded, self._engine, self.meter = recorded, engine, ReplicaMeter()
        self.gauges: dict[tuple[str, str], float] = {}

    def note(self, speculation: Any = None, start: StartTimes | None = None, **activity: Any) -> None:
        self._recorded.clear()
        taken = replace(self._engine.load.take_activity(), **activity)
        engine: Any = SimpleNamespace(
            take_activity=lambda: taken, speculation=speculation, start_times=start or StartTimes()
        )
        report = ModelReport(replace(AWAKE, name="m"), self._engine.load.report(), self._engine.report())
        self.meter.note(ReplicaStatus("r", 0.0, (report,)), {"m": engine})
        self.gauges |= {(name, tags["kind"]): value for name, value, tags in self._recorded if "kind" in tags}

    def values(self, name: str) -> list[float]:
        return [value for n, value, _ in self._recorded if n == name]

    def tagged(self, name: str, tag: str) -> dict[str, float]:
        return {tags[tag]: value for n, value, tags in self._recorded if n == name}


@pytest.fixture
def noted(recorded: Recorded, engine: Engine) -> Noted:
    return Noted(recorded, engine)


def note_statuses(meter: ReplicaMeter, *statuses: ModelStatus, device: DeviceStatus = DEVICE) -> None:
    reports = tuple(ModelReport(status, unloaded_report(status, 0.0)) for status in statuses)
    meter.note(ReplicaStatus("r", 0.0, reports, device), {})


def by_tags(recorded: Recorded, name: str) -> dict[tuple[str, ...], float]:
    return {tuple(tags.values()): value for found, value, tags in recorded if found == name}


def test_prefixes_on_disk_are_counted(noted: Noted) -> None:
    noted.note()
    assert not noted.values("folio_store_records")
    assert ("folio_store_bytes", "disk") not in noted.gauges
    noted.note(store=StoreCounts(written=4, read=3, dropped=2, refused=1, disk_bytes=99))
    assert noted.tagged("folio_store_records", "outcome") == {"written": 4, "read": 3, "dropped": 2, "refused": 1}
    assert noted.gauges["folio_store_bytes", "disk"] == 99


def test_draft_tokens_are_counted_once(noted: Noted) -> None:
    """The engine has totals, a counter takes increases, and never one of 0."""
    names = [f"folio_{name}" for name in ("verified_drafts", "draft_tokens", "accepted_tokens")]
    counts = SpeculationCounts("ngram")
    for drafts, accepted, checks, gained in (
        (0, 0, 0, ([], [], [])),
        (8, 0, 2, ([2], [8], [])),
        (8, 0, 2, ([], [], [])),
        (11, 2, 2, ([], [3], [2])),
    ):
        counts.draft_tokens, counts.accepted_tokens, counts.checks = drafts, accepted, checks
        noted.note(counts)
        assert tuple(noted.values(name) for name in names) == gained
    noted.note(None)
    assert not any(noted.values(name) for name in names)
    counts.draft_tokens += 1
    noted.note(counts)
    assert noted.tagged("folio_draft_tokens", "proposer") == {"ngram": 1}


def test_kernels_that_compile_after_the_start_are_counted(noted: Noted, engine: Engine) -> None:
    def late() -> list[float]:
        noted.note()
        return noted.values("folio_late_compilations")

    note_compilation("a kernel of the warm-up")
    engine.reset_counts()
    assert late() == []
    note_compilation("a kernel that a request waits for")
    assert late() == [1]
    assert late() == []


def test_compilations_of_later_loads_are_no_late_ones(recorded: Recorded, engine: Engine) -> None:
    """Each model's engine counts those of the process since its own load; the least number is told, and none while a
    model is loaded."""
    meter, activity = ReplicaMeter(), engine.load.take_activity()

    def note(*num_late: int, is_loading: bool = False) -> None:
        names = [str(number) for number in range(len(num_late))]
        engines: dict[str, Any] = {
            name: SimpleNamespace(
                take_activity=lambda late=late: replace(activity, num_late_compilations=late),
                speculation=None,
                start_times=StartTimes(),
            )
            for name, late in zip(names, num_late, strict=True)
        }
        state = "loading" if is_loading else "awake"
        statuses = [ModelStatus(name=name, state="awake") for name in names] + [ModelStatus(name="x", state=state)]
        reports = [ModelReport(status, engine.load.report(), engine.report()) for status in statuses]
        meter.note(ReplicaStatus("r", 0.0, tuple(reports)), engines)

    note(1, 4)
    note(5, 9, is_loading=True)
    for least in (0, 2, 2):  # the second engine begins at 0
        note(least, least + 1)
    assert [value for name, value, _ in recorded if name == "folio_late_compilations"] == [1, 2]


def test_a_gpus_memory_is_recorded_by_part(recorded: Recorded) -> None:
    status = ReplicaStatus("r", 0.0, (), None, GpuMemory({"weights": 7, "free": 0}, 5))
    ReplicaMeter().note(status, {})
    ReplicaMeter().note(replace(status, gpu=None), {})
    parts = [("folio_gpu_bytes", 7, {"part": "weights"}), ("folio_gpu_bytes", 0, {"part": "free"})]
    assert recorded == [*parts, ("folio_pinned_bytes", 5, {})]


def test_an_engines_activity_is_recorded_once(noted: Noted, engine: Engine) -> None:
    """Gauges have present values, counters increases, histograms each step's time once."""
    values = noted.values
    noted.note()
    assert values("folio_step_seconds") == values("folio_queue_seconds") == values("folio_preemptions") == []
    for name in ("a", "b"):
        engine.submit(name, list(range(5, 45)), SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    engine.step()
    noted.note()
    assert values("folio_running_sequences") == [2]
    assert len(values("folio_step_seconds")) == 2
    assert values("folio_step_tokens") == [48, 2]  # the second prompt finds 32 tokens of the first
    prefill_s, same = values("folio_prefill_seconds")  # both have their first token from the first step
    assert prefill_s == same == pytest.approx(values("folio_step_seconds")[0])
    first, second = values("folio_queue_seconds")
    assert first > second > 0  # both wait for the same step
    assert values("folio_prefix_queried_tokens") == [80]
    report, load = engine.report(), engine.load.report()
    assert noted.gauges["folio_kv_bytes", "budget"] == report.budget_bytes
    assert noted.gauges["folio_kv_bytes", "active"] == report.active_bytes > 0
    tokens = {kind: value for (name, kind), value in noted.gauges.items() if name == "folio_kv_tokens"}
    assert tokens == {"block": 16, "free": load.free_tokens, "total": load.total_tokens}
    while engine.has_work:
        engine.step()
    noted.note()
    assert values("folio_running_sequences") == [0]
    assert len(values("folio_step_seconds")) == 1
    assert values("folio_queue_seconds") == values("folio_prefix_queried_tokens") == []
    assert values("folio_prefill_seconds") == []


def test_prefill_lasts_from_the_first_chunk_to_the_first_token() -> None:
    """A request that is cancelled before its first token has no time."""
    engine = Engine(EngineConfig(model="builtin", kv_memory_bytes=16 << 20, max_num_batched_tokens=32))
    try:
        engine.submit("a", list(range(5, 85)), SamplingParams(max_tokens=2, ignore_eos=True))
        step_s: list[float] = []
        prefill_s: list[float] = []
        while not prefill_s:
            engine.step()
            activity = engine.load.take_activity()
            step_s += activity.step_s
            prefill_s += activity.prefill_s
        assert len(step_s) == 3  # 80 tokens
        assert prefill_s[0] >= sum(step_s)
        engine.cancel("a")
        engine.submit("b", list(range(85, 165)), SamplingParams(max_tokens=2, ignore_eos=True))
        engine.step()
        engine.cancel("b")
        engine.submit("c", list(range(165, 170)), SamplingParams(max_tokens=2, ignore_eos=True))
        engine.step()
        activity = engine.load.take_activity()
        assert len(activity.queue_s) == 2
        assert len(activity.prefill_s) == 1
    finally:
        engine.close()


def test_preemptions_are_counted_by_mode(noted: Noted) -> None:
    for num_preempted, gained in (
        ({"swap": 2, "recompute": 0}, {"swap": 2}),
        ({"swap": 2, "recompute": 1}, {"recompute": 1}),
    ):
        noted.note(num_preempted=num_preempted)
        assert noted.tagged("folio_preemptions", "way") == gained


def test_the_phases_of_a_start(noted: Noted) -> None:
    noted.note(start=StartTimes(model_s=1.0, warm_up_s=2.0, process_s=7.0))
    phases = noted.tagged("folio_ready_seconds", "phase")
    assert (phases["model"], phases["warm_up"], phases["process"], phases["all"]) == (1.0, 2.0, 7.0, 3.0)
    assert phases["prefixes"] == 0.0


def test_a_model_has_one_state_and_the_bytes_that_it_has_now(recorded: Recorded) -> None:
    note_statuses(ReplicaMeter(), AWAKE, ASLEEP, device=replace(DEVICE, needed_bytes=120))
    states = by_tags(recorded, "folio_model_state")
    assert len(states) == 12
    assert [key for key, value in states.items() if value] == [("a", "awake"), ("b", "asleep")]
    kinds = {("a", "weights"): 40, ("a", "kv"): 30, ("b", "weights"): 0, ("b", "kv"): 0}
    assert by_tags(recorded, "folio_model_bytes") == kinds
    device = {("capacity",): 100, ("used",): 30, ("idle",): 5, ("charged",): 40, ("workspace",): 10}
    assert by_tags(recorded, "folio_device_bytes") == device
    assert by_tags(recorded, "folio_device_needed_bytes") == {(): 120}


def test_the_former_state_is_0(recorded: Recorded) -> None:
    """Both were 1 until Ray dropped the former one."""
    meter = ReplicaMeter()
    note_statuses(meter, AWAKE)
    recorded.clear()
    note_statuses(meter, replace(AWAKE, state="asleep", num_evictions=1, evicted_for="b"))
    assert by_tags(recorded, "folio_model_state") == {("a", "awake"): 0, ("a", "asleep"): 1}
    assert by_tags(recorded, "folio_model_evictions") == {("a",): 1}


def test_each_wake_is_counted_once(recorded: Recorded) -> None:
    meter = ReplicaMeter()
    for num_wakes, last_wake_s in ((0, 0.0), (1, 2.0), (1, 2.0), (2, 0.1), (4, 0.2), (1, 3.0)):
        note_statuses(meter, replace(AWAKE, num_wakes=num_wakes, last_wake_s=last_wake_s))
    wakes = [value for name, value, _ in recorded if name == "folio_model_wake_seconds"]
    assert wakes == [2.0, 0.1, 0.2, 0.2, 3.0]  # the model was added again


def test_the_totals_of_a_new_engine_begin_at_0(recorded: Recorded) -> None:
    """A model that is loaded again has a new engine, whose first events were not counted."""
    record = Total("c", "C.", float).recorder()
    for total in (5, 5, 2, 3):
        record(total, {"model": "a"})
    record(1, {"model": "b"})
    assert [(value, tags["model"]) for _, value, tags in recorded] == [(5, "a"), (2, "a"), (1, "a"), (1, "b")]


def test_a_gauge_is_set_when_it_changes_and_again_before_ray_drops_it(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("folio.app.serving.metric_rows.time.monotonic", lambda: now)
    record = Gauge("g", "G.", float).recorder()
    for now, value in ((100.0, 1), (100.5, 1), (101.0, 2), (101.5, 2), (106.0, 2), (110.0, 2)):  # noqa: B007
        record(value, {"model": "a"})
        record(7, {"model": "b"})
    assert [value for _, value, tags in recorded if tags["model"] == "a"] == [1, 2, 2]
    assert [value for _, value, tags in recorded if tags["model"] == "b"] == [7, 7]
