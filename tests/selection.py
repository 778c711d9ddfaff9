"""Which tests run, in which order, and which of them share a process.

Daily: tests marked `nightly` are left out; of those marked `thirds` a third of the parameters runs, another third each
day, of those marked `daily(count)` so many, and those marked `third_day(rest)` run every third day, or where files are
named. On a GPU, with a profile of hypothesis (`nightly`, `mutants`), and where tests are named one by one, all run.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.times import SLOW_S, TESTS, read_record

# A Ray cluster each.
WITH_RAY = ("e2e", "hostile")
CLUSTER = "cluster"  # the name of what shares one
# Files that start clusters of their own; all others in these folders share one (`cluster_url`).
OWN_CLUSTER = frozenset(
    f"e2e/{name}.py" for name in ("test_lifetime", "test_nodes", "test_offline_bundle", "test_serve")
)
_CLUSTERS = OWN_CLUSTER | {CLUSTER}
# Files that share an application, too, and so come one after the other, the attacks last.
ONE_APPLICATION = ("e2e/test_server.py", "e2e/test_grpc.py", "e2e/test_docs.py", "hostile/test_hostile.py")
# Of `seed`, so many values in a row compile the same kernels (PROBLEMS_PER_SHAPE of test_triton).
SEEDS_TOGETHER = 5


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="0/1", help="i/n: the i-th of n processes that share the tests between them")
    parser.addoption(
        "--day",
        type=int,
        default=date.today().toordinal(),
        help="a number: its rest by 3 chooses the tests of `thirds`",
    )


def is_daily(config: pytest.Config) -> bool:
    """Whether the expensive tests are left out."""
    return config.getoption("--hypothesis-profile", None) is None and not any("::" in arg for arg in config.args)


class Selection:
    """Plugin that marks, selects and sorts the tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_report_header(self) -> str:
        day = self._config.getoption("--day")
        return f"expensive tests: a third of them, --day={day}" if is_daily(self._config) else "expensive tests: all"

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """The shared cluster's tests first, then the slowest files, by their recorded times, so that no process is left
        with one at the end; last, files with clusters of their own, which go to the shared cluster's process."""
        recorded = read_record()

        def place(item: pytest.Item) -> tuple[int, int, float]:
            file = str(item.path.relative_to(TESTS))
            shares = ONE_APPLICATION.index(file) if file in ONE_APPLICATION else len(ONE_APPLICATION)
            rank = 2 if file in OWN_CLUSTER else scope_of(f"{TESTS.name}/{file}") == file
            return rank, shares, -recorded.get(file, 0.0)

        for item in items:
            if item.path.relative_to(TESTS).parts[0] in WITH_RAY:
                item.add_marker("processes")
            if -place(item)[-1] > SLOW_S:
                item.add_marker("slow")
        if is_daily(config):
            _keep_daily(config, items)
        items.sort(key=place)
        keep_shard(config, items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        from xdist.scheduler import LoadFileScheduling

        class OneClusterPerRun(LoadFileScheduling):
            """The tests of a file share a process. One process has all those with clusters, and nothing else: no other
            test meets Ray's threads and handlers there, or waits as these do."""

            @property
            def nodes(self) -> list[Any]:
                """In order: the first gets the tests of the clusters, and has all cores (tests/__init__.py)."""
                return sorted(super().nodes, key=lambda node: str(node.gateway.id))

            def _split_scope(self, nodeid: str) -> str:
                return scope_of(nodeid)

            def _reschedule(self, node: Any) -> None:
                has_cluster = [n for n in self.nodes if not _CLUSTERS.isdisjoint(self.assigned_work[n])]
                if has_cluster and len(self.nodes) > 1:
                    mine = (scope for scope in self.workqueue if (scope in _CLUSTERS) == (node in has_cluster))
                    if (scope := next(mine, None)) is not None:
                        self.workqueue.move_to_end(scope, last=False)
                    elif not node.shutting_down:
                        node.shutdown()  # after the tests that it has
                super()._reschedule(node)

        return OneClusterPerRun(config, log)


def scope_of(nodeid: str) -> str:
    """The name of the tests that run in the same process as this one."""
    file = nodeid.partition("::")[0].removeprefix(f"{TESTS.name}/")
    folder = file.partition("/")[0]
    return CLUSTER if folder in WITH_RAY and file not in OWN_CLUSTER else file


def _keep_daily(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs nightly, and of `thirds`, `daily` and `third_day` what runs on other days."""
    functions: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        functions.setdefault((item.path, _function(item)), []).append(item)
    day, names_files = config.getoption("--day"), any(arg.endswith(".py") for arg in config.args)

    def is_chosen(item: pytest.Item, place: int, count: int) -> bool:
        whole = item.get_closest_marker("third_day")
        if item.get_closest_marker("nightly") or (whole and not names_files and day % 3 != whole.args[0]):
            return False
        if marker := item.get_closest_marker("daily"):
            return bool((place - day * marker.args[0]) % count < marker.args[0])
        # What has no three sets of parameters runs whole.
        return not item.get_closest_marker("thirds") or count < 3 or place % 3 == day % 3

    runs = {
        item.nodeid
        for of_function in functions.values()
        for place, item in enumerate(of_function)
        if item.get_closest_marker("gpu") or is_chosen(item, place, len(of_function))
    }
    # Those left out are not told to `pytest_deselected`: for the files' times these are whole.
    items[:] = [item for item in items if item.nodeid in runs]


def keep_shard(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave this process's share of the tests; those that compile the same kernels stay together."""
    index, count = map(int, config.getoption("--shard").split("/"))
    places: dict[object, int] = {}
    shards: list[list[pytest.Item]] = [[] for _ in range(count)]
    for item in items:
        shards[places.setdefault(kernels_of(item), len(places)) % count].append(item)
    items[:] = shards.pop(index)
    if left_out := [item for shard in shards for item in shard]:
        config.hook.pytest_deselected(items=left_out)


def kernels_of(item: pytest.Item) -> tuple[str, str, str]:
    """A test and its parameters, but for those that leave its kernels the same: seeds within a shape, and views, of
    which the last needs what the others compiled."""
    parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    parameters.pop("view", None)
    if isinstance(seed := parameters.get("seed"), int):
        parameters["seed"] = seed // SEEDS_TOGETHER
    return item.location[0], _function(item), repr(parameters)


def _function(item: pytest.Item) -> str:
    return item.originalname if isinstance(item, pytest.Function) else item.name
