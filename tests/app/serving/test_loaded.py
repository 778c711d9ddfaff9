"""Loading and unloading on several replicas by several ingresses, with a registry in this process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from folio.app.engine.lora.source import AdapterSource
from folio.app.errors import EngineError, FolioError, NoReplicaError, RequestError, UnavailableError, UnknownModelError
from folio.app.fleet.loaded import LoadedTable
from folio.app.serving import loaded as loaded_module
from folio.app.serving.loaded import LoadedTables, TableCopy
from tests.app.serving.registry import Cluster, patched_cluster


class Replica:
    """Has a table and files: path → version. `fails`: method → what it raises, once for each."""

    def __init__(self, files: dict[str, str]) -> None:
        self.table = LoadedTable()
        self.files = files
        self.fails: dict[str, list[FolioError]] = {}
        self.num_checks = 0
        self.before: Callable[[str], None] = lambda _: None

    async def check_adapter(self, name: str, path: str, model: str) -> AdapterSource:
        self.num_checks += 1
        if path not in self.files:
            raise UnknownModelError(f"no adapter: {path!r}", "lora_path")
        return AdapterSource(name, f"/adapters/{path}", self.files[path])

    async def set_loaded(self, table: LoadedTable) -> None:
        if table.revision > self.table.revision:
            self.table = table


class Replicas:
    """`ReplicaClient.call_each` of these replicas."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = list(replicas)

    async def call_each(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        answers = await asyncio.gather(*(self._call(replica, method, *args) for replica in self.replicas))
        return list(answers)

    async def _call(self, replica: Replica, method: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        replica.before(method)
        if failures := replica.fails.get(method):
            return failures.pop()
        try:
            return await getattr(replica, method)(*args)
        except FolioError as error:
            return error


FILES = {"v1": "1", "v2": "2", "poet": "3"}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return patched_cluster(monkeypatch, "app")


@pytest.fixture
def replicas() -> Replicas:
    return Replicas(Replica(dict(FILES)), Replica(dict(FILES)))


def ingress(replicas: Any) -> tuple[LoadedTables, TableCopy]:
    copy = TableCopy("app")
    return LoadedTables(copy, replicas, ("model", "configured")), copy


def served(replicas: Replicas) -> list[dict[str, str]]:
    """Name → version at each replica."""
    return [{s.name: s.version or "" for s in replica.table.sources} for replica in replicas.replicas]


@pytest.mark.parametrize("seed", range(20))
async def test_changes_are_on_all_replicas_or_on_none(cluster: Cluster, replicas: Replicas, seed: int) -> None:
    """By two ingresses, of which some are new, while each method of a replica or the registry fails now and then. All
    learn of a change; a registry that has died gets the table from the ingresses; the next change need not wait."""
    rng, expected = random.Random(seed), dict[str, str]()
    ingresses = [ingress(replicas) for _ in range(2)]
    for _ in range(40):
        name, path, in_place = rng.choice(["legal", "poet"]), rng.choice(["v1", "v2"]), rng.random() < 0.5
        unloads, known, version = rng.random() < 0.3, expected.get(name), FILES[path]
        refusal: type[FolioError] | None = None
        if unloads and known is None:
            refusal = UnknownModelError
        elif not unloads and known not in (None, version) and not in_place:
            refusal = RequestError
        methods = ["newer", "begin", "end"] + ["check_adapter"] * (not unloads)
        methods += ["commit", "set_loaded"] * (refusal is None and (unloads or known != version))
        fault, error = rng.choice(["none", "dead", *methods]), refusal
        if fault in ("check_adapter", "set_loaded"):
            error = rng.choice([RequestError, UnavailableError, EngineError])
            rng.choice(replicas.replicas).fails[fault] = [error("it fails")]
        elif fault in methods:
            cluster.actor.dies[fault] = rng.random() < 0.5
            error = refusal if fault == "end" else UnavailableError
        loaded, _ = rng.choice(ingresses)
        change = loaded.unload(name) if unloads else loaded.load(name, path, in_place=in_place, model="model")
        if error is not None:
            with pytest.raises(error):
                await change
        else:
            await change
            expected = {other: of for other, of in expected.items() if other != name}
            expected |= {} if unloads else {name: version}
        cluster.actor.is_dead = fault == "dead"
        for one, _ in ingresses * 3:  # one finds it dead, one restores it, and the other learns of that
            await one.refresh()
        assert served(replicas) == [expected] * 2
        assert [copy.table.ids for _, copy in ingresses] == [{n: f"{n}@{v}" for n, v in expected.items()}] * 2
        if rng.random() < 0.1:
            ingresses[0] = ingress(replicas)
            await ingresses[0][0].refresh()


async def test_loading_again(cluster: Cluster, replicas: Replicas) -> None:
    """The same files: no effect. Others: only in place."""
    loaded, copy = ingress(replicas)
    await loaded.load("legal", "v1", in_place=False, model="model")
    for in_place in (False, True):
        await loaded.load("legal", "v1", in_place=in_place, model="model")
        assert copy.table.revision == 1
    with pytest.raises(RequestError, match=r"from '/adapters/v1'.*load_inplace") as refused:
        await loaded.load("legal", "v2", in_place=False, model="model")
    assert refused.value.param == "lora_name"
    await loaded.load("legal", "v2", in_place=True, model="model")
    assert served(replicas) == [{"legal": "2"}] * 2
    for replica in replicas.replicas:
        replica.files["v2"] = "22"
    with pytest.raises(RequestError, match="its files have changed since"):
        await loaded.load("legal", "v2", in_place=False, model="model")
    await loaded.load("legal", "v2", in_place=True, model="model")
    assert served(replicas) == [{"legal": "22"}] * 2
    await loaded.load("other", "v2", in_place=False, model="model")  # the same files under two names


async def test_names_of_the_settings_are_refused(cluster: Cluster, replicas: Replicas) -> None:
    loaded, _ = ingress(replicas)
    for name in ("model", "configured"):
        with pytest.raises(RequestError, match="of the settings"):
            await loaded.load(name, "v1", in_place=True, model="model")
        with pytest.raises(RequestError, match="belongs to the settings"):
            await loaded.unload(name)
    with pytest.raises(UnknownModelError) as unknown:
        await loaded.unload("legal")
    assert unknown.value.param == "lora_name"
    assert replicas.replicas[0].num_checks == 0


async def test_a_replica_that_missed_a_change_takes_it_over(cluster: Cluster, replicas: Replicas) -> None:
    """It did not answer when the change was made, nor when it was undone; or it started later."""
    loaded, _ = ingress(replicas)
    late = replicas.replicas[1]
    late.fails["set_loaded"] = [UnavailableError("silent")] * 2
    with pytest.raises(UnavailableError):
        await loaded.load("legal", "v1", in_place=False, model="model")
    assert late.table.revision == 0
    await loaded.load("poet", "poet", in_place=False, model="model")
    for replica in (late, Replica(FILES)):
        await replica.set_loaded(await TableCopy("app").sync())
        assert {source.name for source in replica.table.sources} == {"poet"}


async def test_the_error_that_says_most_is_raised(cluster: Cluster, replicas: Replicas) -> None:
    loaded, _ = ingress(replicas)
    replicas.replicas[0].fails["check_adapter"] = [UnavailableError("gone")]
    replicas.replicas[1].fails["check_adapter"] = [RequestError("does not fit", "lora_path")]
    with pytest.raises(RequestError, match="does not fit"):
        await loaded.load("legal", "v1", in_place=False, model="model")
    replicas.replicas[1].files["v1"] = "other"
    with pytest.raises(RequestError, match="not the same for all replicas"):
        await loaded.load("legal", "v1", in_place=False, model="model")
    with pytest.raises(UnknownModelError):
        await loaded.load("legal", "typo", in_place=False, model="model")
    replicas.replicas = []
    with pytest.raises(NoReplicaError):
        await loaded.load("legal", "v1", in_place=False, model="model")


async def test_changes_at_the_same_time_come_one_after_the_other(cluster: Cluster, replicas: Replicas) -> None:
    """By two ingresses: no change is lost, and every replica has the same adapters at the end."""
    ingresses = [ingress(replicas)[0] for _ in range(2)]
    running = 0

    def enter(method: str) -> None:
        nonlocal running
        if method == "check_adapter":
            running += 1
            assert running <= len(replicas.replicas)
        else:
            running = 0

    for replica in replicas.replicas:
        replica.before = enter
    loads = [ingresses[i % 2].load(f"a{i}", "v1", in_place=False, model="model") for i in range(8)]
    await asyncio.gather(*loads)
    assert served(replicas) == [{f"a{i}": "1" for i in range(8)}] * 2
    changes = [ingresses[i % 2].unload(f"a{i}") for i in range(4)]
    changes += [
        ingresses[i % 2].load("same", path, in_place=False, model="model") for i, path in enumerate(("v1", "v2", "v1"))
    ]
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    errors = [error for error in outcomes if error is not None]
    assert len(errors) == 1  # v2 came before or after v1
    assert "load_inplace" in str(errors[0])
    left, same = served(replicas)[0], served(replicas)[0]["same"]
    assert left == served(replicas)[1] == {f"a{i}": "1" for i in range(4, 8)} | {"same": same}


async def test_a_registry_that_starts_slowly_is_not_let_go(
    cluster: Cluster, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends an actor once its owner has no handle of it: a new one would take as long, and so on for ever."""
    monkeypatch.setattr(loaded_module, "ANSWER_TIMEOUT_S", 0.01)
    cluster.actor.late = []
    loaded, copy = ingress(replicas)
    for _ in range(3):
        with pytest.raises(UnavailableError, match="registry"):
            await copy.sync()
    cluster.actor.late = None
    await loaded.load("legal", "v1", in_place=False, model="model")
    assert cluster.actors.num_finds == 1


async def test_a_cancelled_change_lets_others_begin(cluster: Cluster, replicas: Replicas) -> None:
    """Its client has gone."""
    loaded, _ = ingress(replicas)

    async def hang(name: str, path: str, model: str) -> AdapterSource:
        await asyncio.Event().wait()
        raise AssertionError

    replicas.replicas[0].check_adapter = hang  # type: ignore[method-assign]
    change = asyncio.create_task(loaded.load("legal", "v1", in_place=False, model="model"))
    for _ in range(100):
        await asyncio.sleep(0)
    change.cancel()
    with pytest.raises(asyncio.CancelledError):
        await change
    del replicas.replicas[0].check_adapter
    await ingress(replicas)[0].load("legal", "v2", in_place=False, model="model")
    assert served(replicas) == [{"legal": "2"}] * 2


async def test_a_change_waits_only_so_long(
    cluster: Cluster, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_module, "CHANGE_WAIT_S", 0.05)
    loaded, _ = ingress(replicas)
    cluster.registry.begin("another")
    with pytest.raises(UnavailableError, match="another change") as refused:
        await loaded.load("legal", "v1", in_place=False, model="model")
    assert refused.value.retry_after_s is not None
    assert served(replicas) == [{}] * 2
    cluster.registry.end("another")
    await loaded.load("legal", "v1", in_place=False, model="model")


async def test_silence_is_logged_once(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    copy = TableCopy("app")
    for silent, logged in ((True, 1), (True, 1), (False, 1), (True, 2)):
        cluster.actor.dies = {"newer": False} if silent else {}
        await copy.refresh()
        assert caplog.text.count("models and adapters are not shared (RayActorError)") == logged
    assert caplog.text.count("models and adapters are shared again") == 1


async def test_a_replica_starts_without_an_answer(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.registry.restore(LoadedTable(2, (AdapterSource("legal", "/a", "1"),)))
    assert TableCopy("app").fetch().revision == 2
    cluster.actor.dies = {"newer": False}
    assert TableCopy("app").fetch() == LoadedTable()
    assert "come later" in caplog.text
