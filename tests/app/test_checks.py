"""Configurations with faults: a line for each fault, all at once, and nothing is started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import folio.app.config.engine
import folio.app.fleet.policies
from folio import vmem
from folio.app.checks import check_args, load_config
from folio.app.cli.main import main
from folio.app.config.args import AppArgs
from folio.app.config.engine import EngineConfig
from folio.app.errors import ConfigError

ROOT = Path(__file__).parents[2]
KEY = "applications[0]"
ENGINE = f"{KEY}.args.engine"
REPLICA = f"{KEY}.deployments[1]"
GOOD: dict[str, Any] = {
    "http_options": {"port": 8000},
    "applications": [
        {
            "name": "folio",
            "route_prefix": "/",
            "import_path": "folio.app.main:build",
            "args": {"engine": {"model": "builtin", "kv_memory_bytes": 1 << 26}},
            "deployments": [{"name": "Ingress"}, {"name": "EngineReplica", "num_replicas": 1}],
        }
    ],
}


def faults(tmp_path: Path, content: object, *, is_local: bool = True) -> list[str]:
    """The lines, without the file's name, which each must begin with."""
    path = tmp_path / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    try:
        load_config(path, is_local=is_local)
    except ConfigError as error:
        lines = str(error).splitlines()
        assert all(line.startswith(f"{path}: ") for line in lines)
        return [line.removeprefix(f"{path}: ") for line in lines]
    return []


def changed(change: Callable[[Any], object]) -> dict[str, Any]:
    content = deepcopy(GOOD)
    change(content)
    return content


def engine(**settings: Any) -> dict[str, Any]:
    return changed(lambda c: c["applications"][0]["args"]["engine"].update(settings))


def http(**settings: Any) -> dict[str, Any]:
    return application(args={"engine": {"model": "builtin"}, "http": settings})


def replica(**settings: Any) -> dict[str, Any]:
    return changed(lambda c: c["applications"][0]["deployments"].__setitem__(1, {"name": "EngineReplica"} | settings))


def application(**settings: Any) -> dict[str, Any]:
    return changed(lambda c: c["applications"][0].update(settings))


@pytest.mark.parametrize("file", ["serve_config.yaml", "examples/hotel_desk/hotel_desk.yaml"])
def test_folios_own_files_are_valid(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    config = load_config(ROOT / file)
    assert config.http_options.host == "127.0.0.1"
    assert config.applications


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (engine(max_num_seq=8), f"{ENGINE}.max_num_seq is not a setting; the nearest is max_num_seqs"),
        (engine(max_num_seqs=0), f"{ENGINE}.max_num_seqs is 0; it must be at least 1"),
        (engine(max_num_seqs="many"), f'{ENGINE}.max_num_seqs is "many"; it must be a valid integer'),
        (engine(dtype="int4"), f"{ENGINE}.dtype is 'int4'; choose one of auto, float32, bfloat16, float16"),
        (
            engine(kv_memory_floor_bytes=1 << 40),
            f"{ENGINE}.kv_memory_floor_bytes is 1099511627776; it must not be above the ceiling, kv_memory_bytes, "
            "which is 67108864",
        ),
        (
            engine(tensor_parallel_size=3),
            f"{ENGINE}.tensor_parallel_size is 3; it must divide the 4 attention heads of ",
        ),
        (engine(model="/no/such"), f"{ENGINE}.model is '/no/such'; no such folder exists"),
        (engine(model="a/b/c"), f"{ENGINE}.model is 'a/b/c'; no such folder exists, and a Hub id has the form"),
        (engine(adapters={"a": "./no"}), f"{ENGINE}.adapters.a is './no'; no such folder exists"),
        (application(args={}), f"{ENGINE} is missing"),
        (application(args=[1]), f"{KEY}.args is [1]; it must be a mapping"),
        (  # a list of models was checked where one model belongs, and the fault of the list was not told
            application(args={"engine": {"model": "builtin"}, "routing": [{"policy": "nearest"}]}),
            f'{KEY}.args.routing is [{{"policy": "nearest"}}]; it must be a mapping',
        ),
        (
            application(args={"engine": {"model": "builtin"}, "routing": {"policy": "nearest"}}),
            f"{KEY}.args.routing.policy is \"nearest\"; it must be 'prefix_aware', 'least_loaded', 'round_robin' or ",
        ),
        (
            application(args={"engine": {"model": "builtin"}, "http": {"api_key": {"env": "KEYS"}}}),
            f"{KEY}.args.http.api_key is not a setting; the nearest is api_keys",
        ),
        (
            application(import_path="app.mian:build"),
            f"{KEY}.import_path is 'app.mian:build'; no module app.mian exists",
        ),
        (
            application(import_path="folio.app.main:bild"),
            f"{KEY}.import_path is 'folio.app.main:bild'; Folio's is folio.app.main:build",
        ),
        (
            application(deployments=[{"name": "EngineReplca"}]),
            f'{KEY}.deployments[0].name is "EngineReplca"; the nearest is EngineReplica',
        ),
        (  # "ok", and Serve took the settings of the last one only
            application(deployments=[{"name": "EngineReplica"}] * 2),
            f'{KEY}.deployments[1].name is "EngineReplica", which deployments[0] is, too; write its settings into one',
        ),
        (  # "ok", and the ingress failed
            http(api_keys={"file": "/nope/keys.yaml"}),
            f"{KEY}.args.http.api_keys.file is '/nope/keys.yaml': the API keys in /nope/keys.yaml cannot be read: No",
        ),
        (http(max_body_bytes="4 gigs"), f'{KEY}.args.http.max_body_bytes is "4 gigs"; it must be a size such as 4GiB'),
        (
            replica(ray_actor_options={"num_cpu": 1}),
            f"{REPLICA}.ray_actor_options.num_cpu is not a setting; the nearest is num_cpus",
        ),
        (
            replica(autoscaling_config={"min_replica": 1}),
            f"{REPLICA}.autoscaling_config.min_replica is not a setting; the nearest is min_replicas",
        ),
        (
            replica(autoscaling_config={"min_replicas": 3, "max_replicas": 2}),
            f"{REPLICA}.autoscaling_config: max_replicas (2) must be greater than or equal to min_replicas (3)!",
        ),
        (
            replica(num_replicas=2, autoscaling_config={"max_replicas": 2}),
            f"{REPLICA}: Manually setting num_replicas is not allowed when autoscaling_config is provided.",
        ),
        (
            replica(
                autoscaling_config={
                    "policy": {
                        "policy_function": "folio.app.serving.autoscaling:KVAwareScaling",
                        "policy_kwargs": {"ttft": 1.0},
                    }
                }
            ),
            f"{REPLICA}.autoscaling_config.policy.policy_kwargs.ttft is not a setting; the nearest is ttft_s",
        ),
        (changed(lambda c: c.update(http_option={})), "http_option is not a setting; the nearest is http_options"),
        (changed(lambda c: c["http_options"].update(prt=1)), "http_options.prt is not a setting; the nearest is port"),
        (
            changed(lambda c: c["http_options"].update(ssl_certfile="/no/such.pem", ssl_keyfile=__file__)),
            "http_options.ssl_certfile is '/no/such.pem'; no such file exists",
        ),
        (changed(lambda c: c["http_options"].update(port="x")), 'http_options.port is "x"; it must be a valid integer'),
        (
            changed(lambda c: c["applications"].append(c["applications"][0])),
            'applications: Found multiple configs for application "folio". Please remove all duplicates.',
        ),
        (changed(lambda c: c.update(applications=5)), "applications is 5; it must be a valid list"),
        ("", "is null; it must be a mapping with the key applications"),
        ("- a", 'is ["a"]; it must be a mapping with the key applications'),
        ("applications: [\n  {oops", "line 2, column 8: not YAML: "),
        ("a: 1\na: 2", "line 2, column 1: not YAML: the key a occurs twice"),
    ],
)
def test_a_fault_is_a_line_with_its_key(tmp_path: Path, content: object, line: str) -> None:
    """Regression: a typo took 54 s and 118 lines, and unknown keys were ignored."""
    [found] = faults(tmp_path, content)
    assert found.startswith(line)


def tracing(**settings: Any) -> dict[str, Any]:
    return changed(lambda c: c.update(tracing_config={"enabled": True} | settings))


def test_an_exporter_without_text_is_asked_for(tmp_path: Path) -> None:
    """Serve's own one writes exceptions' messages, which may quote a request."""
    [line] = faults(tmp_path, tracing())
    assert line.startswith("tracing_config.exporter_import_path is missing; ")
    assert faults(tmp_path, tracing(enabled=False)) == []
    assert faults(tmp_path, tracing(exporter_import_path="folio.app.tracing:files")) == []


def test_the_package_of_an_exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    otlp = tracing(exporter_import_path="folio.app.tracing:otlp")
    assert faults(tmp_path, otlp) == []
    monkeypatch.setattr("folio.app.checks._is_module", lambda _: False)
    assert "pip install 'folio-serve[traces]'" in faults(tmp_path, otlp)[0]
    assert faults(tmp_path, otlp, is_local=False) == []


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


def test_all_faults_at_once(tmp_path: Path) -> None:
    """Faults of keys, values, models and other applications do not hide each other."""
    second = {
        "name": "b",
        "route_prefix": "/b",
        "import_path": "folio.app.main:build",
        "args": {"engine": {"model": "/y"}},
    }
    content = engine(max_num_seq=8, model="/x", pin_quota=3, dtype="int4", max_num_seqs=0, warm_up="maybe")
    content["applications"][0]["args"]["engine"] |= {"num_threads": 10_000, "speculation": "draft"}
    content["applications"][0]["args"]["routing"] = {"report_period_s": 10, "policy": "nearest"}
    content["applications"].append(second)
    content["aplications"] = []
    found = faults(tmp_path, content)
    assert [line.split(" is ")[0] for line in found] == [
        "aplications",
        f"{ENGINE}.max_num_seq",
        f"{ENGINE}.warm_up",
        f"{ENGINE}.dtype",
        f"{ENGINE}.max_num_seqs",
        f"{ENGINE}.pin_quota",
        f"{ENGINE}.speculation",
        f"{KEY}.args.routing.policy",
        f"{KEY}.args.routing.stale_after_s",
        f"{ENGINE}.num_threads",
        f"{ENGINE}.model",
        "applications[1].args.engine.model",
    ]


def test_sizes_are_written_with_units(tmp_path: Path) -> None:
    """As on the command line: of engines, applications, models and HTTP."""
    content = engine(kv_memory_bytes="64MiB", kv_memory_floor_bytes="1MiB", swap_bytes="1GB")
    content["applications"][0]["args"]["http"] = {"max_body_bytes": "8MiB", "batches": {"max_bytes": "1TiB"}}
    assert faults(tmp_path, content) == []
    args = load_config(tmp_path / "config.yaml").applications[0].args
    parsed = AppArgs.model_validate(args)
    assert parsed.engine is not None
    assert (parsed.engine.kv_memory_bytes, parsed.engine.swap_bytes) == (64 << 20, 10**9)
    assert (parsed.http.max_body_bytes, parsed.http.batches.max_bytes) == (8 << 20, 1 << 40)
    content = shelf({}, {}, device_memory_bytes="2GiB", host_memory_bytes="0", weights_dir_bytes="10GB")
    assert faults(tmp_path, content) == []


_OTHER_FORMATS = {  # files → what the fault names
    "gptq": ({"config.json": '{"quantization_config": {"quant_method": "gptq", "bits": 3}}'}, "by GPTQ in 3 bits (q"),
    "aqlm": ({"config.json": '{"quantization_config": {"quant_method": "aqlm"}}'}, "quantized by AQLM (quantizatio"),
    "old": ({"config.json": '{"quantization_config": {"load_in_4bit": 1}}'}, "quantized by an unknown method (quan"),
}


@pytest.mark.parametrize("kind", _OTHER_FORMATS)
def test_formats_that_are_not_read_are_named(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: a file of GGUF "must be a folder", a folder with one "has no config.json"."""
    files, named = _OTHER_FORMATS[kind]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    [fault] = faults(tmp_path, engine(model=str(tmp_path)))
    assert named in fault
    assert main(["plan", str(tmp_path), "--memory", "1GiB"]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("name", ["m.gguf", "m.bin", "folder/m.gguf"])
def test_a_damaged_gguf_file(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"GGUF\x03")
    model = str(path.parent if "/" in name else path)
    [fault] = faults(tmp_path, engine(model=model))
    assert fault.endswith(f"{path}: its version ends at byte 8, beyond the file's 5 bytes: it is truncated or damaged")
    assert main(["plan", model, "--memory", "1GiB"]) == 2
    assert "it is truncated or damaged" in capsys.readouterr().err


def test_a_gguf_file_of_the_hub_is_left_to_the_hub(tmp_path: Path) -> None:
    for name in ("Qwen/Qwen3-0.6B-GGUF:Q8_0", "hf.co/a/b", "a/b:Q4_K_M"):
        assert faults(tmp_path, engine(model=name)) == []
    for name in ("./m.gguf", "m.gguf", "models/m.gguf"):  # not sought on the Hub, after Ray has started
        assert "no such file exists" in faults(tmp_path, engine(model=name))[0]


def shelf(*engines: dict[str, Any], device_memory_bytes: int | str = 1 << 30, **settings: Any) -> dict[str, Any]:
    models = [{"name": f"m{i}", "engine": {"model": "builtin"} | engine} for i, engine in enumerate(engines)]
    return application(args={"models": models, "device_memory_bytes": device_memory_bytes} | settings)


def test_faults_of_models_begin_with_the_number_of_the_model(tmp_path: Path) -> None:
    content = shelf({}, {"model": "/x"}, {"max_num_seq": 8}, {"dtype": "int4"}, models_dir=str(tmp_path / "gone"))
    content["applications"][0]["args"]["models"][0] |= {"keep": -1, "slo": {"ttft": 1}}
    found = faults(tmp_path, content)
    models = f"{KEY}.args.models"
    assert [line.split(" is ")[0] for line in found] == [
        f"{models}[0].slo.ttft",
        f"{models}[0].keep",
        f"{models}[2].engine.max_num_seq",
        f"{models}[3].engine.dtype",
        f"{models}[1].engine.model",
        f"{KEY}.args.models_dir",
    ]
    [line] = faults(tmp_path, shelf({}, models_dir=str(tmp_path / "gone")))
    assert line.startswith(f"{KEY}.args.models_dir is ")
    assert faults(tmp_path, shelf({}, {}, models_dir=str(tmp_path))) == []


def test_models_must_fit_into_the_memory_of_the_device(tmp_path: Path) -> None:
    from folio.app.config.checkpoint import weight_bytes
    from folio.app.models.builtin import resolve_model

    size = weight_bytes(Path(resolve_model("builtin")))
    assert size > 1 << 20
    assert faults(tmp_path, shelf({}, {}, device_memory_bytes=size + 1)) == []
    [first, second] = faults(tmp_path, shelf({}, {}, device_memory_bytes=size))
    assert first.startswith(f"{KEY}.args.models[0].engine.model is 'builtin', whose weights take {size} bytes")
    assert second.startswith(f"{KEY}.args.models[1].engine.model")
    content = shelf({}, {}, {}, device_memory_bytes=2 * size)
    content["applications"][0]["args"]["models"][0]["keep"] = "always"
    assert [line.split(" is ")[0] for line in faults(tmp_path, content)] == [
        f"{KEY}.args.models[{i}].engine.model" for i in (1, 2)
    ]
    content["applications"][0]["args"]["models"][1]["keep"] = "always"
    [line] = faults(tmp_path, content)
    assert line.startswith(f"{KEY}.args.device_memory_bytes is {2 * size}; the weights of models with keep 'always'")


def test_files_of_another_machine_are_not_checked(tmp_path: Path) -> None:
    assert faults(tmp_path, engine(model="/elsewhere"), is_local=False) == []
    assert faults(tmp_path, application(import_path="elsewhere.app:build"), is_local=False) == []
    assert len(faults(tmp_path, engine(max_num_seq=8), is_local=False)) == 1


def test_settings_beyond_the_machine(tmp_path: Path) -> None:
    """Regression: the machine ran out of memory, or the engine used more threads than cores."""
    [line] = faults(tmp_path, engine(num_threads=10_000))
    assert line.startswith(f"{ENGINE}.num_threads is 10000; it must be at most ")


def test_a_hub_id_is_left_to_the_hub(tmp_path: Path) -> None:
    assert faults(tmp_path, engine(model="Qwen/Qwen2.5-0.5B-Instruct")) == []


def test_a_deployed_application_is_checked_alike(tmp_path: Path) -> None:
    """`serve run` and `serve deploy` do not call `load_config`; the builder checks."""
    with pytest.raises(ConfigError, match=r"args\.engine\.model is '/no/such'; no such folder exists"):
        check_args(AppArgs(engine=EngineConfig(model="/no/such")))
    check_args(AppArgs(engine=EngineConfig(model="builtin")))


def test_names_of_the_version_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Folio's modules were `app`, `vmem` and `kernels`, which a project's own folders hid."""
    policy = {"policy_function": "app.serving.autoscaling:KVAwareScaling", "policy_kwargs": {"target": 1}}
    replicas = {"name": "EngineReplica", "autoscaling_config": {"policy": policy}}
    old = application(import_path="app.main:build", deployments=[replicas])
    [fault] = faults(tmp_path, old)  # of what Folio has checked
    assert "policy_kwargs.target is not a setting" in fault
    said = [record.message.partition(": ")[2] for record in caplog.records]
    assert said == [
        "app.main:build is now folio.app.main:build; change it, Folio 0.2 will not accept it",
        "app.serving.autoscaling:KVAwareScaling is now folio.app.serving.autoscaling:KVAwareScaling; "
        "change it, Folio 0.2 will not accept it",
    ]


def test_copied_choices_are_the_same() -> None:
    """`folio.app.config.engine` does not import their users, so that a check stays fast."""
    assert get_args(folio.app.config.engine.LayoutKind) == get_args(vmem.LayoutKind)
    assert get_args(folio.app.config.engine.ViewPolicy) == get_args(vmem.ViewPolicy)
    assert get_args(folio.app.config.engine.PolicyName) == get_args(folio.app.fleet.policies.PolicyName)


@pytest.mark.processes
def test_a_check_imports_nothing_heavy() -> None:
    """Regression: a typo was found only after torch and transformers were imported."""
    code = (
        "import folio.app.checks, sys; print(sorted({'torch', 'transformers', 'vmem', 'kernels'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"
