"""`folio serve` and `folio check` up to the start of Ray."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from folio.app.cli.main import main
from folio.app.cli.settings import DEFAULT
from folio.app.models.builtin import BUILTIN_FOLDER

ROOT = Path(__file__).parents[3]


def test_an_invalid_file(config: Callable[..., str], cluster: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Regression: a typo took 54 s and 118 lines."""
    path = config({"max_num_seq": 1, "pin_quota": 2})
    for arguments in (["serve", "--config", path], ["check", path]):
        assert main(arguments) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert [line.split(" is ")[0] for line in err.splitlines()] == [
            f"{path}: applications[0].args.engine.max_num_seq",
            f"{path}: applications[0].args.engine.pin_quota",
        ]


def test_a_check_starts_nothing(config: Callable[..., str], cluster: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # nor is the port asked for
        path = config({}, host="127.0.0.1", port=listener.getsockname()[1])
        assert main(["check", path]) == 0
    assert capfd.readouterr().out == f"{path}: ok\n"


def test_a_port_in_use(config: Callable[..., str], cluster: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Regression: both servers said "serving", and half of the requests reached the wrong one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        path = config({}, host="127.0.0.1", port=listener.getsockname()[1])
        assert main(["serve", "--config", path]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("127.0.0.1:")
    assert " is in use; stop that server, or choose another port" in line


@pytest.mark.parametrize(
    ("http", "arguments", "address"),
    [
        ({}, [], ("127.0.0.1", 8000)),
        ({"port": 8123}, [], ("127.0.0.1", 8123)),
        ({"port": 8123, "host": "0.0.0.0"}, ["--port", "8124", "--ray-dashboard"], ("0.0.0.0", 8124)),
    ],
)
def test_the_host_is_this_machine_unless_it_is_set(
    config: Callable[..., str],
    served: Any,
    http: dict[str, Any],
    arguments: list[str],
    address: tuple[str, int],
) -> None:
    """Regression: with a port only, every address of the machine was served."""
    assert main(["serve", "--config", config({}, **http), *arguments]) == 0
    [(configuration, more)], [start] = served.configs, served.starts
    options = configuration.http_options
    assert ((options.host, options.port), served.addresses) == (address, [address])
    assert more["ray_dashboard"] == start["include_dashboard"] == ("--ray-dashboard" in arguments)


@pytest.fixture
def printed(cluster: Any, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The content of the file that `folio serve --print-config` prints; the text after a fault."""

    def run(*arguments: str) -> Any:
        status = main(["serve", *arguments, "--print-config"])
        out, err = capfd.readouterr()
        if status:
            assert (status, out) == (2, "")
            return err
        assert err == ""
        return yaml.safe_load(out)

    return run


def test_without_options_the_default_is_served(printed: Callable[..., Any]) -> None:
    """The default in the package is a copy of the file that a checkout shows to users. Regression: it was a symbolic
    link, which some ways of copying a checkout turn into a file with the link's target."""
    assert DEFAULT.read_text() == (ROOT / "serve_config.yaml").read_text(), f"cp serve_config.yaml {DEFAULT}"
    shown = printed()
    assert shown == yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    assert shown["applications"][0]["args"]["engine"]["model"] == "default"


def test_options_are_put_over_the_default(printed: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: a, key: 0123456789abcdef}]")
    shown = printed(
        *("Qwen/Qwen2.5-0.5B-Instruct", "--port", "8001", "--host", "0.0.0.0", "--name", "qwen", "--kv-memory", "1GiB"),
        *("--max-model-len", "512", "--max-num-seqs", "8", "--device", "cuda", "--dtype", "float32"),
        *("--kv-dtype", "fp8_e5m2", "--gpu-memory-utilization", "0.8"),
        *("--quantization", "int8", "--speculation", "ngram", "--adapter", "a=owner/a", "--adapter", "b=owner/b"),
        *("--api-keys", str(keys), "--replicas", "2"),
    )
    assert shown["http_options"] == {"host": "0.0.0.0", "port": 8001}
    [application] = shown["applications"]
    assert application["args"] == {
        "engine": {
            "model": "Qwen/Qwen2.5-0.5B-Instruct",
            "max_num_seqs": 8,
            "kv_dtype": "fp8_e5m2",
            "gpu_memory_utilization": 0.8,
            "kv_memory_bytes": 1 << 30,
            "max_model_len": 512,
            "device": "cuda",
            "dtype": "float32",
            "quantization": "int8",
            "speculation": "ngram",
            "adapters": {"a": "owner/a", "b": "owner/b"},
        },
        "model_name": "qwen",
        "http": {"api_keys": {"file": str(keys)}},
    }
    assert application["deployments"][1] == {"name": "EngineReplica", "num_replicas": 2}


def test_what_is_printed_is_served_identically(
    printed: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = printed("--shared-kv-memory", "500MB", "--replicas", "2:4")
    path = tmp_path / "printed.yaml"
    path.write_text(yaml.safe_dump(shown))
    assert printed("--config", str(path)) == shown
    assert main(["check", str(path)]) == 0
    assert capfd.readouterr().out == f"{path}: ok\n"


def test_replicas_that_follow_the_load(printed: Callable[..., Any], config: Callable[..., str]) -> None:
    """Over a file without autoscaling, with the packaged policy."""
    usual = printed()["applications"][0]["deployments"][1]["autoscaling_config"]
    for arguments in (["--replicas", "2:4"], ["--config", config({}), "--replicas", "2:4"]):
        [replica] = [d for d in printed(*arguments)["applications"][0]["deployments"] if d["name"] == "EngineReplica"]
        assert replica == {
            "name": "EngineReplica",
            "autoscaling_config": usual | {"min_replicas": 2, "max_replicas": 4},
        }


def test_a_folder_is_found_from_anywhere(
    printed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "model").symlink_to(BUILTIN_FOLDER)
    monkeypatch.chdir(tmp_path)
    assert printed("model")["applications"][0]["args"]["engine"]["model"] == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--kv-memory", "1000TB"], "--kv-memory is 909.5 TiB; it must be at most "),
        (["--max-model-len", "0"], "--max-model-len is 0; it must be at least 1\n"),
        (["./nowhere"], "MODEL is './nowhere'; no such folder exists"),
        (["--adapter", "a=./x"], "--adapter a is './x'; no such folder exists"),
        (
            ["--kv-memory", "1GiB", "--shared-kv-memory", "1GiB"],
            "--shared-kv-memory is 1 GiB and --kv-memory 1 GiB; the first is",
        ),
        (["--kv-memory", "much"], "folio serve: Invalid value for '--kv-memory': 'much' is no size; write a number"),
        (["--replicas", "3:1"], "folio serve: Invalid value for '--replicas': '3:1' must be a number from 1, or MIN"),
        (["--adapter", "legal"], "folio serve: Invalid value for '--adapter': 'legal' must be NAME=MODEL, such as"),
        (["--dtype", "int3"], "folio serve: Invalid value for '--dtype': 'int3' is not one of 'auto', "),
        (["--port", "70000"], "folio serve: Invalid value for '--port': "),
        (["--api-keys", "none.yaml"], "folio serve: Invalid value for '--api-keys': "),
    ],
)
def test_faults_name_the_option(printed: Callable[..., Any], arguments: list[str], line: str) -> None:
    shown = printed(*arguments)
    assert shown.startswith(line)
    assert shown.count("\n") == 1


def test_faults_of_a_file_name_the_file(printed: Callable[..., Any], config: Callable[..., str]) -> None:
    path = config({"max_num_seq": 1, "max_model_len": 0})
    first, second = printed("--config", path, "--max-model-len", "-1").splitlines()
    assert first.startswith(f"{path}: applications[0].args.engine.max_num_seq is not a setting")
    assert second.startswith("--max-model-len is -1; ")


def test_an_option_that_contradicts_the_file(
    printed: Callable[..., Any], config: Callable[..., str], tmp_path: Path
) -> None:
    """Regression: the line had the option's key in the file and bytes, in place of what was typed."""
    path = Path(config({}))
    value = yaml.safe_load(path.read_text())
    value["applications"][0]["args"]["shared_kv_memory_bytes"] = 8 << 30
    path.write_text(yaml.safe_dump(value))
    key = "applications[0].args.shared_kv_memory_bytes"
    line = f"{path}: {key} is 8 GiB and --kv-memory 1 GiB; the first is for all replicas"
    assert printed("--config", str(path), "--kv-memory", "1GiB").startswith(line)


def test_an_option_for_two_applications(printed: Callable[..., Any], config: Callable[..., str]) -> None:
    path = Path(config({}))
    value = yaml.safe_load(path.read_text())
    [first] = value["applications"]
    value["applications"] = [first | {"name": "a"}, first | {"name": "b", "route_prefix": "/b"}]
    path.write_text(yaml.safe_dump(value))
    assert len(printed("--config", str(path), "--port", "8001")["applications"]) == 2
    line = f"{path} has 2 applications of Folio's (a, b); write the setting into the file\n"
    assert printed("builtin", "--config", str(path)) == f"MODEL is for one application, and {line}"
    value["applications"] = [{"name": "c", "import_path": "examples.hotel_desk.hotel_desk:build"}]
    path.write_text(yaml.safe_dump(value))
    assert "has no application of Folio's" in printed("--name", "x", "--config", str(path))
