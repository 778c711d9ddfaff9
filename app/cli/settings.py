"""A server's configuration from the options of `folio serve`, over a file or the packaged default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from folio.app.cli.address import HOST
from folio.app.config.sizes import show_size
from folio.app.errors import ConfigError

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema

DEFAULT = Path(__file__).with_name("default.yaml")
# Each option's key: in the file, or in the file's one Folio application.
OF_FILE = {"--host": ("http_options", "host"), "--port": ("http_options", "port")}
OF_APPLICATION = {
    "MODEL": ("args", "engine", "model"),
    "--name": ("args", "model_name"),
    "--kv-memory": ("args", "engine", "kv_memory_bytes"),
    "--shared-kv-memory": ("args", "shared_kv_memory_bytes"),
    "--max-model-len": ("args", "engine", "max_model_len"),
    "--max-num-seqs": ("args", "engine", "max_num_seqs"),
    "--tensor-parallel-size": ("args", "engine", "tensor_parallel_size"),
    "--device": ("args", "engine", "device"),
    "--dtype": ("args", "engine", "dtype"),
    "--kv-dtype": ("args", "engine", "kv_dtype"),
    "--gpu-memory-utilization": ("args", "engine", "gpu_memory_utilization"),
    "--quantization": ("args", "engine", "quantization"),
    "--speculation": ("args", "engine", "speculation"),
    "--adapter": ("args", "engine", "adapters"),
    "--adapter-dir": ("args", "engine", "adapter_dir"),
    "--api-keys": ("args", "http", "api_keys"),
}
REPLICAS = "--replicas"
_REPLICA = "EngineReplica"
_SIZES = ("--kv-memory", "--shared-kv-memory")


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration, and the source of each value.

    Attributes:
        value: content of a configuration file.
        file: the file below the options; `None`: the packaged default.
        options: key in the file → the option that has set it.
    """

    value: dict[str, Any]
    file: Path | None
    options: Mapping[str, str]

    def check(self, *, is_local: bool) -> ServeDeploySchema:
        """The checked configuration.

        Raises:
            ConfigError: a line for each fault, beginning with the option or with the file and the key.
        """
        from folio.app.checks import check_config

        try:
            return check_config(self.value, is_local=is_local)
        except ConfigError as error:
            raise ConfigError("\n".join(map(self._named, str(error).splitlines()))) from None

    def _named(self, line: str) -> str:
        """A fault with the options' names and units, and with the file's name if it is a key of the file."""
        for key, option in self.options.items():
            # A fault begins with a key, and names others of its application without what all have in common.
            names = "|".join(map(re.escape, filter(None, (key, key.partition(".args.")[2]))))
            line = re.sub(rf"(?<![\w.])(?:{names})(?!\w)", option, line).replace(f"{option}.", f"{option} ")
        if any(size in line for size in _SIZES):
            line = re.sub(r"\b\d{4,}\b", lambda m: show_size(int(m[0])), line)
        is_of_option = line.startswith(tuple(self.options.values()))
        return line if is_of_option or self.file is None else f"{self.file}: {line}"


def compose(file: Path | None, given: Mapping[str, Any]) -> Settings:
    """A configuration file, or the default, with the values of options in it.

    Args:
        given: option → value, of those that were given.

    Raises:
        ConfigError: the file cannot be read, or has no place for an option.
    """
    from folio.app.checks import read_config

    value = read_config(file or DEFAULT)
    options = {}
    for option in given.keys() & OF_FILE.keys():
        _put(value, OF_FILE[option], given[option], option, file)
        options[".".join(OF_FILE[option])] = option
    if isinstance(http := value.setdefault("http_options", {}), dict):
        http.setdefault("host", HOST)  # Serve's default is every address of the machine
    of_application = {option: entry for option, entry in given.items() if option not in OF_FILE}
    if of_application:
        i, application = _only_application(value, file, next(iter(of_application)))
        for option, entry in of_application.items():
            if option == REPLICAS:
                where = _put_replicas(application, entry, file)
            else:
                _put(application, OF_APPLICATION[option], entry, option, file)
                where = ".".join(OF_APPLICATION[option])
            options[f"applications[{i}].{where}"] = option
    return Settings(value, file, options)


def _only_application(value: Mapping[str, Any], file: Path | None, option: str) -> tuple[int, dict[str, Any]]:
    """The file's one application of Folio's, and its number."""
    from folio.app.checks import FOLIO

    listed = value.get("applications")
    folios = [
        (i, application)
        for i, application in enumerate(listed if isinstance(listed, list) else ())
        if isinstance(application, dict) and application.get("import_path") == FOLIO
    ]
    if len(folios) != 1:
        names = ", ".join(str(application.get("name", i)) for i, application in folios)
        has = f"has {len(folios)} applications of Folio's ({names})" if folios else "has no application of Folio's"
        raise ConfigError(f"{option} is for one application, and {file} {has}; write the setting into the file")
    return folios[0]


def _put(value: dict[str, Any], path: tuple[str, ...], entry: object, option: str, file: Path | None) -> None:
    *parents, last = path
    for key in parents:
        if value.get(key) is None:
            value[key] = {}
        if not isinstance(value[key], dict):
            raise ConfigError(f"{option}: in {file} {key} is no mapping; correct the file")
        value = value[key]
    value[last] = entry


def _put_replicas(application: dict[str, Any], replicas: tuple[int, int | None], file: Path | None) -> str:
    """Set a fixed number, or the bounds of autoscaling. Returns the key that has been set."""
    from folio.app.checks import read_config

    deployments = application.setdefault("deployments", [])
    if not isinstance(deployments, list) or not all(isinstance(deployment, dict) for deployment in deployments):
        raise ConfigError(f"{REPLICAS}: in {file} deployments is no list of mappings; correct the file")
    if _REPLICA not in (deployment.get("name") for deployment in deployments):
        deployments.append({"name": _REPLICA})
    i = _index(deployments)
    replica = deployments[i]
    lowest, highest = replicas
    scaling, _ = replica.pop("autoscaling_config", None), replica.pop("num_replicas", None)
    if highest is None:
        replica["num_replicas"] = lowest
        return f"deployments[{i}].num_replicas"
    if not isinstance(scaling, dict):
        usual = read_config(DEFAULT)["applications"][0]["deployments"]
        scaling = usual[_index(usual)]["autoscaling_config"]
    replica["autoscaling_config"] = scaling | {"min_replicas": lowest, "max_replicas": highest}
    return f"deployments[{i}].autoscaling_config"


def _index(deployments: list[dict[str, Any]]) -> int:
    return next(i for i, deployment in enumerate(deployments) if deployment.get("name") == _REPLICA)
