"""The rivals of the shelf's benchmark, its requests, and its shares."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.fleet.shelf import Alone, window
from benchmarks.fleet.shelf_folio import shelf_args
from benchmarks.fleet.shelf_models import BenchModel, ModelAsk, TracedRequest, asks_of, read_trace
from benchmarks.fleet.shelf_outcome import Outcome
from benchmarks.rivals.lean_server import lean_servers
from benchmarks.rivals.shelf_rivals import NOT_SERVED, OneAtATime, StaticSplit, best_split, connections
from benchmarks.serving.latency import Targets
from benchmarks.serving.loops import closed_loop
from folio.app.cli.bench.load import Ask, Clock, Record, Send
from folio.app.config.args import AppArgs
from folio.app.models.builtin import BUILTIN_FOLDER
from tests.processes import until_async


def model(name: str, weight_bytes: int = 100) -> BenchModel:
    return BenchModel(
        name=name,
        traced=f"traced-{name}",
        shape="s",
        folder=Path("none"),
        vocab_size=50,
        weight_bytes=weight_bytes,
        token_bytes=0,
    )


def ask(name: str, at_s: float = 0.0) -> ModelAsk:
    return ModelAsk([1, 2], 3, at_s, name)


# ---- static split ----


def test_the_best_split_covers_most_requests_in_the_memory() -> None:
    models = [model("a", 60), model("b", 50), model("c", 50)]
    asks = [ask("a")] * 5 + [ask("b")] * 3 + [ask("c")] * 3
    assert [m.name for m in best_split(models, asks, 100)] == ["b", "c"]  # 6 requests; "a" alone has 5
    assert [m.name for m in best_split(models, asks, 99)] == ["a"]
    assert best_split(models, asks, 49) == ()


async def test_requests_to_models_outside_of_the_split_are_not_served() -> None:
    async def send(_: Ask, record: Record, clock: Clock) -> None:
        record.status = 200

    records = [Record(0.0, 3), Record(0.0, 3)]

    split = StaticSplit({"a": send})
    for name, record in zip("ab", records, strict=True):
        await split(ask(name), record, Clock())
    assert [record.status for record in records] == [200, NOT_SERVED]
    assert not records[1].completed
    assert records[1].ended_s is not None


# ---- one process at a time ----


@dataclass(eq=False)
class Fake:
    """Servers that note what happens; a request ends when the test lets it."""

    events: list[str] = field(default_factory=list)
    num_alive: int = 0
    ends: dict[str, asyncio.Event] = field(default_factory=dict)
    fails: bool = False

    def start(self, name: str) -> FakeServer:
        if self.fails:
            raise RuntimeError(f"{name} does not start")
        self.num_alive += 1
        assert self.num_alive == 1, "two processes at once"
        self.events.append(f"start {name}")
        return FakeServer(self, name)

    def connect(self, name: str, url: str) -> Send:
        assert url == f"url of {name}"

        async def send(sent: Ask, record: Record, clock: Clock) -> None:
            self.events.append(f"send {name}")
            await self.ends.setdefault(name, asyncio.Event()).wait()
            record.status = 200

        return send


class FakeServer:
    def __init__(self, fake: Fake, name: str) -> None:
        self._fake, self._name, self.url = fake, name, f"url of {name}"

    async def memory_bytes(self) -> tuple[int, int]:
        return 0, 0

    def kill(self) -> None:
        self._fake.num_alive -= 1
        self._fake.events.append(f"kill {self._name}")


async def test_a_server_is_replaced_when_its_requests_have_ended() -> None:
    """The one that has waited longest is next, with all that wait for its model, and later requests to the model that
    runs wait behind it."""
    fake = Fake()

    swap = OneAtATime(fake.start, fake.connect)

    def send(name: str) -> asyncio.Task[None]:
        return asyncio.create_task(swap(ask(name), Record(0.0, 3), Clock()))

    tasks = [send("a")]
    await until_async(lambda: "send a" in fake.events)
    for name in "bcab":
        tasks.append(send(name))
        await asyncio.sleep(0)
    assert fake.events == ["start a", "send a"]  # the others wait for the request that runs
    for name in "bca":
        fake.ends[name] = fake.ends.get(name, asyncio.Event())
        fake.ends[name].set()
    await asyncio.gather(*tasks)
    await swap.close()
    assert len(swap.starts) == 4
    assert swap.server is None
    assert fake.events == [
        *("start a", "send a", "kill a"),
        *("start b", "send b", "send b", "kill b"),
        *("start c", "send c", "kill c"),
        *("start a", "send a", "kill a"),
    ]


async def test_requests_to_the_model_that_runs_do_not_wait() -> None:
    fake = Fake()

    swap = OneAtATime(fake.start, fake.connect)
    tasks = [asyncio.create_task(swap(ask("a"), Record(0.0, 3), Clock()))]
    await until_async(lambda: "send a" in fake.events)
    tasks.append(asyncio.create_task(swap(ask("a"), Record(0.0, 3), Clock())))
    await asyncio.sleep(0)
    assert fake.events == ["start a", "send a", "send a"]
    fake.ends["a"].set()
    await asyncio.gather(*tasks)


async def test_a_server_that_does_not_start_fails_the_requests_that_wait() -> None:
    fake = Fake(fails=True)

    swap = OneAtATime(fake.start, fake.connect)
    with pytest.raises(RuntimeError, match="a does not start"):
        await swap(ask("a"), Record(0.0, 3), Clock())


# ---- servers ----


@pytest.mark.processes
def test_a_lean_server_streams_refuses_and_is_killed() -> None:
    async def ask_for(url: str, *asks: Ask) -> list[Record]:
        async with connections() as connect:
            return await closed_loop(connect("m", url), asks, 1)

    with lean_servers() as servers:
        with pytest.raises(RuntimeError, match="the server of m does not start"):
            servers.start("m", {"model": "/no/such/folder"})
        server = servers.start("m", {"model": "builtin", "device": "cpu", "warm_up": False, "max_model_len": 64})
        try:
            whole, too_long = asyncio.run(ask_for(server.url, Ask([5, 6, 7], 4), Ask([5] * 64, 1)))
            weight_bytes, kv_bytes = asyncio.run(server.memory_bytes())
        finally:
            server.kill()
        assert asyncio.run(server.memory_bytes()) == (0, 0)
    files = sum(path.stat().st_size for path in BUILTIN_FOLDER.glob("*.safetensors"))
    assert 0.99 * files <= weight_bytes <= files  # which have headers
    assert kv_bytes > 0
    assert whole.completed
    assert len(whole.events) >= 2
    assert too_long.status == 500
    assert "64" in (too_long.error or "")


def test_the_shelfs_arguments_are_an_applications() -> None:
    args = AppArgs.model_validate(shelf_args([model("a"), model("b")], dict.fromkeys("ab", Targets(2.0, 0.2)), 1000))
    assert args.models is not None
    assert [m.name for m in args.models] == ["a", "b"]
    assert args.models[1].slo.tpot_s == 0.2
    assert args.device_memory_bytes == 1000


# ---- requests ----


def test_the_twelve_models_that_are_asked_for_most(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"{i}.0,model-{i % 13:02},{8 * i},{80 * i}" for i in range(13 * 4 - 1)]  # the last model has one less
    path.write_text("\n".join(["time_s,model,input_tokens,output_tokens", *rows]))
    requests, source = read_trace(path)
    assert len({request.model for request in requests}) == 12
    assert "model-12" not in {request.model for request in requests}
    assert requests[5] == TracedRequest(5.0, "model-05", 5, 50)
    assert requests[0].prompt_tokens == requests[0].output_tokens == 1  # at least
    assert requests[-1].output_tokens == 128  # at most
    assert source.startswith("trace.csv")


def test_without_a_trace_requests_are_synthetic() -> None:
    requests, source = read_trace(None)
    assert len({request.model for request in requests}) == 12
    assert requests == sorted(requests, key=lambda request: request.at_s)
    assert source.startswith("synthetic")


def test_as_many_requests_as_take_their_share_of_the_time_alone() -> None:
    """0.1 s to the first token and 0.1 s for each of 4 others are 0.5 s: 60 % of 5 s have room for 6 requests."""
    requests = [TracedRequest(float(i), "traced-a", 10, 5) for i in range(100)]
    alone = {"a": Alone(first_s=0.05, prompt_token_s=0.005, token_s=0.0999, start_s=1.0, weight_bytes=1)}
    chosen = window(requests, [model("a")], alone, 5.0)
    assert len(chosen) == 6
    asks = asks_of(chosen, [model("a")], 5.0)
    assert [a.at_s for a in asks] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(a.model == "a" and len(a.prompt) == 10 and max(a.prompt) < 50 for a in asks)


# ---- outcome ----


def answered(ttft_s: float, tpot_s: float) -> Record:
    return Record(
        0.0, 3, status=200, ended_s=2.0, events=[(ttft_s, 1), (ttft_s + 2 * tpot_s, 2)], num_tokens=3, done=True
    )


def test_shares_of_requests_and_of_models() -> None:
    """Of all requests, those that were not answered included; and the mean of the models' shares."""
    asks = [ask("a"), ask("a"), ask("a"), ask("b")]
    records = [answered(0.9, 0.05), answered(1.5, 0.05), answered(0.9, 0.3), Record(0.0, 3, status=NOT_SERVED)]
    outcome = Outcome(asks, records, [])
    targets = {"a": Targets(1.0, 0.1), "b": Targets(1.0, 0.1)}
    assert outcome.good_share(targets) == 0.25
    assert outcome.good_share(targets, 2.0) == 0.5
    assert outcome.good_share(targets, 4.0) == 0.75
    assert outcome.good_share_of_models(targets) == pytest.approx(1 / 6)
    assert outcome.tokens_per_s == 4.5
    assert outcome.ttft_s(["a"], 50) == 0.9
