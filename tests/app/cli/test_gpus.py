"""GPUs that Ray does not find, and replicas that the GPUs hold."""

from __future__ import annotations

import ctypes
import logging
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from folio.app.cli.settings import DEFAULT, compose
from folio.app.cli.start import gpus, lifetime
from folio.app.errors import ConfigError

SHARED = {"ray_actor_options": {"num_gpus": 0.4}, "num_replicas": 5}


@pytest.mark.parametrize(
    ("nodes", "engine", "replica", "expected"),
    [
        ([0.0], {}, None, 3),  # CPUs: as in the file
        ([8.0], {"device": "cpu"}, None, 3),
        ([1.0], {}, None, 1),  # regression: the second replica waited for a GPU for ever
        ([8.0], {}, None, 8),
        ([4.0, 0.0, 3.0], {"tensor_parallel_size": 2}, None, 3),
        ([1.0], {}, {"num_replicas": 1}, ""),
        ([1.0], {}, {"num_replicas": 2}, "may have 2 replicas, .* hold 1: .* to 1,"),
        ([1.0], {"device": "cuda"}, {"autoscaling_config": {"max_replicas": 4}}, "may have 4 replicas, .* hold 1: "),
        ([2.0], {}, SHARED | {"num_replicas": 4}, ""),
        ([2.0], {}, SHARED, r"\(2, for each replica 0.4\) hold 4: "),
        ([1.0], {}, {"ray_actor_options": {"num_cpus": 1}, "num_replicas": 9}, ""),
        ([2.0], {}, {"placement_group_bundles": [{"GPU": 1}, {"GPU": 1}], "num_replicas": 2}, " hold 1: "),
        ([0.0], {"device": "cuda"}, None, "needs GPUs on one node: 1; the nodes have: 0; "),
        ([1.0, 1.0], {"tensor_parallel_size": 2}, None, "needs GPUs on one node: 2; the nodes have: 1, 1; "),
    ],
)
def test_replicas_follow_the_gpus(
    nodes: list[float],
    engine: dict[str, Any],
    replica: dict[str, Any] | None,
    expected: int | str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The default's bound, or the warning about a given number. What can never run is refused."""
    settings = compose(DEFAULT, {})
    [application] = settings.value["applications"]
    application["args"]["engine"] |= {"model": "builtin"} | engine
    if replica is not None:
        application["deployments"] = [{"name": "EngineReplica"} | replica]
    config = settings.check(is_local=True)
    caplog.set_level(logging.INFO)

    def fit(*, is_local: bool) -> None:
        gpus.fit_replicas(config, nodes, is_default=replica is None, is_local=is_local)

    if isinstance(expected, str) and "needs" in expected:
        with pytest.raises(ConfigError, match=expected + "lower tensor_parallel_size"):
            fit(is_local=True)
        fit(is_local=False)
        assert "waits for a node that has them; lower tensor_parallel_size" in caplog.text
        assert "ray start --num-gpus" in caplog.text
        return
    fit(is_local=True)
    if isinstance(expected, int):
        scaling: Any = config.applications[0].deployments[-1].autoscaling_config
        assert (scaling["min_replicas"], scaling["max_replicas"]) == (1, expected)
        assert (f"max_replicas is {expected}" in caplog.text) == (expected != 3 or len(nodes) > 1)
    elif expected:
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert re.search(expected, record.getMessage())
    else:
        assert not caplog.records


@pytest.mark.parametrize(
    ("has_driver", "nvml", "answer", "expected", "said"),
    [
        (False, None, "4", None, ""),  # torch is not asked
        (True, (0, 4), "4", None, ""),
        (True, None, "2\n", 2, "torch sees: 2"),
        (True, (999, 0), "1\n", 1, "torch sees: 1"),
        (True, (0, 0), "1\n", 1, "torch sees: 1"),
        (True, (), "1\n", 1, "torch sees: 1"),  # regression: a library without functions ended the start
        (True, None, "0\n", None, ""),
        (True, None, "", None, "torch cannot be asked"),
    ],
)
def test_gpus_that_ray_does_not_find(
    has_driver: bool,
    nvml: tuple[int, ...] | None,
    answer: str,
    expected: int | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: without libnvidia-ml, Ray had no GPU, and the server ran on the CPU of a GPU machine. `nvml`: status
    of its start, and number of GPUs."""

    def load(name: str) -> Any:
        if name == "libcuda.so.1" and has_driver:
            return object()
        if name == "libnvidia-ml.so.1" and nvml is not None:
            if not nvml:
                return SimpleNamespace()
            status, number = nvml

            def count(found: Any) -> int:
                ctypes.cast(found, ctypes.POINTER(ctypes.c_uint))[0] = number
                return 0

            return SimpleNamespace(nvmlInit_v2=lambda: status, nvmlDeviceGetCount_v2=count)
        raise OSError(name)

    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=answer))
    with caplog.at_level(logging.INFO):
        assert gpus.unseen_gpus(load) == expected
    assert said in caplog.text
    assert bool(said) == bool(caplog.records)


@pytest.mark.processes
def test_torch_counts_in_a_process_of_its_own() -> None:
    import torch

    asked = subprocess.run([sys.executable, "-c", gpus._COUNT], capture_output=True, text=True, check=True)
    assert int(asked.stdout) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.mark.parametrize(("is_local", "given"), [(True, 1), (False, None)])
def test_a_cluster_that_is_started_has_the_gpus(
    is_local: bool, given: int | None, monkeypatch: pytest.MonkeyPatch, cluster: Any, served: Any
) -> None:
    """A cluster that runs has its own."""
    if not is_local:
        monkeypatch.setenv("RAY_ADDRESS", "auto")
    served.gpus = 1
    cluster.nodes = lambda: [{"Alive": True, "Resources": {"GPU": 1.0}}, {"Alive": False}]
    settings = compose(None, {}).check(is_local=True)
    assert lifetime.run(settings, 0.0, is_local=is_local, is_default_scale=True) == 0
    assert [options["num_gpus"] for options in served.starts] == [given]
    assert served.configs[0][0].applications[0].deployments[-1].autoscaling_config["max_replicas"] == 1
