"""Checks of a configuration before anything starts: all faults at once, a line each.

A line has the file, the key as in the YAML, its value, and the allowed values or the nearest known key:

    serve_config.yaml: applications[0].args.engine.max_num_seq is not a setting; the nearest is max_num_seqs

Values are validated by the pydantic models that the server uses: Serve's for its own settings, `AppArgs` for Folio's.
Serve's models ignore unknown keys, so that they are looked for here. Of a checkpoint only the files' headers are read.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from ray.serve.schema import ServeDeploySchema

from folio.app.config.args import AppArgs
from folio.app.config.checkpoint import checkpoint_faults, name_fault, rank_faults, weight_bytes
from folio.app.config.engine import EngineConfig
from folio.app.config.machine import Machine, check_resources
from folio.app.edge.keys import read_keys
from folio.app.errors import ConfigError
from folio.app.fleet.autoscaling import ScalingTargets
from folio.app.models.builtin import local_folder

logger = logging.getLogger(__name__)

FOLIO = "folio.app.main:build"
# Paths of version 0.1, taken until 0.2: a project's own folder `app` could hide these.
_RENAMED = {
    old: f"folio.{old}"
    for old in (
        "app.main:build",
        "app.serving.autoscaling:KVAwareScaling",
        "app.tracing:otlp",
        "app.tracing:files",
        "app.proto.folio_pb2_grpc.add_FolioServicer_to_server",
    )
}
DEPLOYMENTS = ("Ingress", "EngineReplica")

_MAX_SHOWN_CHARS = 80  # of a value
_MAX_LISTED = 12  # known keys, when none resembles the unknown one


def load_config(path: Path, *, is_local: bool = True) -> ServeDeploySchema:
    """Read and check a configuration file of `serve deploy`. Raises `ConfigError` as `read_config` and `check_config`
    do, with the file's name before each line."""
    value = read_config(path)
    try:
        return check_config(value, is_local=is_local)
    except ConfigError as error:
        raise _in_file(path, error) from None


def read_config(path: Path) -> dict[str, Any]:
    """A configuration file's content, with today's names. Raises `ConfigError` if it cannot be read."""
    try:
        value = _parsed(path)
    except ConfigError as error:
        raise _in_file(path, error) from None
    old: set[str] = set()
    value = _with_new_names(value, old)
    for name in sorted(old):
        logger.warning("%s: %s is now %s; change it, Folio 0.2 will not accept it", path, name, _RENAMED[name])
    return value


def _with_new_names(value: Any, old: set[str]) -> Any:
    """The value with each path of `_RENAMED` replaced. Adds the replaced paths to `old`."""
    if isinstance(value, dict):
        return {key: _with_new_names(part, old) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_new_names(part, old) for part in value]
    if isinstance(value, str) and value in _RENAMED:
        old.add(value)
        return _RENAMED[value]
    return value


def check_config(value: dict[str, Any], *, is_local: bool = True) -> ServeDeploySchema:
    """Check a configuration file's content.

    Args:
        is_local: the server runs on this machine: named modules and models must exist here.

    Raises:
        ConfigError: a line for each fault.
    """
    faults = _Faults()
    faults.check_value(ServeDeploySchema, value, "")
    for i, application in enumerate(_dicts(value.get("applications"))):
        faults.check_application(application, f"applications[{i}]", is_local=is_local)
    if is_local and isinstance(http := value.get("http_options"), dict):
        faults.add(*_file_faults(http))
    if isinstance(tracing := value.get("tracing_config"), dict):
        faults.add(*_tracing_faults(tracing, is_local=is_local))
    faults.close()
    return ServeDeploySchema.model_validate(value)


def _in_file(path: Path, error: ConfigError) -> ConfigError:
    return ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines()))


def check_args(args: AppArgs) -> None:
    """Check an application's arguments. Raises `ConfigError` with a line for each fault."""
    faults = _Faults()
    if args.engine is not None:
        faults.check_models(args.engine, "args.engine")
    for i, model in enumerate(args.models or ()):
        faults.check_models(model.engine, f"args.models[{i}].engine")
    faults.check_shelf(args, "args")
    faults.close()


class _UniqueKeys(yaml.SafeLoader):
    """Loader that refuses duplicate keys, of which PyYAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value} occurs twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot be read: {reason}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ConfigError(f"{where}not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"is {_shown(value)}; it must be a mapping with the key applications")
    return value


class _Faults:
    """Collects a line for each fault."""

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}  # ordered and unique: nested models report some faults twice

    def add(self, *lines: str) -> None:
        self.lines.update(dict.fromkeys(" ".join(line.split()) for line in lines))

    def close(self) -> None:
        """Raise `ConfigError` if there are faults."""
        if self.lines:
            raise ConfigError("\n".join(self.lines))

    def check_value(self, kind: Any, value: object, path: str) -> Any:
        """Validate a value, and each part of it by the part's model, so that all faults are found and not only the
        first model's. Returns the value without what is invalid or unknown; `None` if nothing valid remains."""
        if not isinstance(value, dict):
            self._reasons(kind, value, path, frozenset())
            return None
        settings, kept = _settings(kind), {}
        for key, part in value.items():
            where = _join(path, key)
            if key not in settings:
                self.add(f"{where} is not a setting; {_nearest(str(key), settings)}")
                continue
            model = settings[key]
            if get_origin(model) is list and isinstance(part, list):
                of = _model_in(*get_args(model))
                entries = [self._part(of, entry, f"{where}[{i}]") for i, entry in enumerate(part)]
                part = entries if None in part or None not in entries else None
            elif get_origin(model) is not list:
                part = self._part(model, part, where)
            if part is not None or value[key] is None:
                kept[key] = part
        return self._valid(kind, kept, path, skipped=frozenset(value.keys() - kept.keys()))

    def _part(self, model: Any, part: object, path: str) -> Any:
        return self.check_value(model, part, path) if model is not None and isinstance(part, dict) else part

    def _valid(self, kind: Any, value: dict[str, Any], path: str, skipped: frozenset[str]) -> dict[str, Any] | None:
        """The valid part of a value whose nested values are valid. It is validated again without the settings at fault:
        pydantic looks for contradictions, and a model for its own bounds, only when all types are right.

        Args:
            skipped: keys left out of the value, whose faults are known.
        """
        while (wrong := self._reasons(kind, value, path, skipped)) is not None:
            if not wrong & value.keys():
                return None
            value, skipped = {key: part for key, part in value.items() if key not in wrong}, skipped | wrong
        return value

    def _reasons(self, kind: Any, value: object, path: str, skipped: frozenset[str]) -> set[str] | None:
        """Add a value's faults, unless they come from skipped keys. Returns the keys at fault; `None` if none is."""
        try:
            TypeAdapter(kind).validate_python(value, extra="ignore")  # unknown keys are known faults
        except ConfigError as error:  # its lines begin with the key
            wrong: set[str] = set()
            for line in str(error).splitlines():
                first, *others = re.findall(r"\w+", line)
                if not skipped & {first, *others}:
                    self.add(_join(path, line))
                wrong |= {first} if isinstance(value, dict) and first in value else {*others}
            return wrong
        except ValidationError as error:
            self.add(*_lines(error, value, path, skipped))
            return {str(entry["loc"][0]) for entry in error.errors(include_url=False) if entry["loc"]}
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            self.add(f"{path}: {error}")  # from importing what a setting names
            return set()
        return None

    def check_application(self, application: Mapping[str, Any], path: str, *, is_local: bool) -> None:
        """Check Folio's deployments and models, which Serve's models do not know."""
        import_path = str(application.get("import_path", "")).replace(".build", ":build")
        module = import_path.partition(":")[0]
        if module == FOLIO.partition(":")[0] and import_path != FOLIO:
            self.add(f"{path}.import_path is {application['import_path']!r}; Folio's is {FOLIO}")
        elif import_path == FOLIO:
            self._check_folio(application, path, is_local=is_local)
        elif is_local and module and not application.get("runtime_env") and not _is_module(module):
            self.add(f"{path}.import_path is {application['import_path']!r}; no module {module} exists")

    def _check_folio(self, application: Mapping[str, Any], path: str, *, is_local: bool) -> None:
        seen: list[object] = []
        for i, deployment in enumerate(_dicts(application.get("deployments"))):
            where = f"{path}.deployments[{i}]"
            if (name := deployment.get("name")) is not None and name not in DEPLOYMENTS:
                self.add(f"{where}.name is {_shown(name)}; {_nearest(str(name), DEPLOYMENTS)}")
            elif name in seen:
                first = f"deployments[{seen.index(name)}]"
                self.add(f"{where}.name is {_shown(name)}, which {first} is, too; write its settings into one of them")
            seen.append(name)
            policy = (deployment.get("autoscaling_config") or {}).get("policy")
            if isinstance(policy, dict):
                self._check_policy(policy, f"{where}.autoscaling_config.policy")
        args = application.get("args")
        args = {} if args is None else args
        valid = self.check_value(AppArgs, args, f"{path}.args")
        if not is_local or not isinstance(args, dict):
            return
        self._check_key_file(args.get("http"), f"{path}.args.http")
        engines = {"engine": args.get("engine")}
        engines |= {f"models[{i}].engine": model.get("engine") for i, model in enumerate(_dicts(args.get("models")))}
        for key, engine in engines.items():
            if isinstance(engine, dict):
                self._check_here(engine, f"{path}.args.{key}")
        if valid is not None:
            self.check_shelf(AppArgs.model_validate(valid), f"{path}.args")

    def _check_here(self, engine: Mapping[str, Any], path: str) -> None:
        """Check an engine's settings against this machine and its files."""
        if (valid := self.check_value(EngineConfig, engine, path)) is None:
            return
        config = TypeAdapter(EngineConfig).validate_python(valid)
        self.add(*(_join(path, line) for line in check_resources(config, Machine.detect())))
        self.check_models(config, path)

    def _check_key_file(self, http: object, path: str) -> None:
        source = http.get("api_keys") if isinstance(http, dict) else None
        if not isinstance(source, dict) or not isinstance(file := source.get("file"), str):
            return
        try:
            read_keys(Path(file))
        except ConfigError as error:
            self.add(f"{path}.api_keys.file is {file!r}: {error}")

    def _check_policy(self, policy: Mapping[str, Any], path: str) -> None:
        function, kwargs = policy.get("policy_function"), policy.get("policy_kwargs")
        if function != "folio.app.serving.autoscaling:KVAwareScaling" or not isinstance(kwargs, dict):
            return
        self.check_value(ScalingTargets, kwargs, f"{path}.policy_kwargs")

    def check_shelf(self, args: AppArgs, path: str) -> None:
        """Check `models_dir`, and that the weights of local checkpoints fit into `device_memory_bytes` together."""
        if args.models_dir is not None and not args.models_dir.expanduser().is_dir():
            self.add(f"{path}.models_dir is {str(args.models_dir)!r}, and there is no such folder; create it")
        if (most := args.device_memory_bytes) is None:
            return
        sizes = [_stored_bytes(model.engine) for model in args.shelf.models]
        kept = [size for model, size in zip(args.shelf.models, sizes, strict=True) if model.keep == "always"]
        for i, (model, size) in enumerate(zip(args.shelf.models, sizes, strict=True)):
            if size >= most:
                self.add(
                    f"{path}.models[{i}].engine.model is {model.engine.model!r}, whose weights take {size} bytes; "
                    f"device_memory_bytes is {most}, and must have room for them and the KV cache of a request"
                )
            elif model.keep != "always" and sum(kept) < most <= sum(kept) + size:
                self.add(
                    f"{path}.models[{i}].engine.model is {model.engine.model!r}, whose weights take {size} bytes; "
                    f"models with keep 'always' take {sum(kept)} of the {most} of device_memory_bytes, so that it "
                    "could never wake: raise device_memory_bytes, or let others sleep"
                )
        if sum(kept) >= most:
            self.add(
                f"{path}.device_memory_bytes is {most}; the weights of models with keep 'always' take {sum(kept)} "
                "bytes: raise it, or let some of them sleep"
            )

    def check_models(self, engine: EngineConfig, path: str) -> None:
        """Check folders of checkpoints and adapters. Hub ids are checked when they are loaded."""
        for key, model in (("model", engine.model), ("draft_model", engine.draft_model)):
            if model is None:
                continue
            folder = local_folder(model)
            if os.path.isdir(folder):  # False for a name that is too long, where Path raises
                found = checkpoint_faults(folder, weights=engine.load_format == "auto")
                self.add(*(f"{_join(path, key)} is {model!r}: {fault}" for fault in found))
                ranks = engine.tensor_parallel_size if key == "model" else 1
                self.add(*(f"{path}.tensor_parallel_size is {ranks}; {fault}" for fault in rank_faults(folder, ranks)))
            elif (reason := name_fault(model)) is not None:
                self.add(f"{_join(path, key)} is {model!r}; {reason}")
        if engine.adapter_dir is not None and not Path(engine.adapter_dir).expanduser().is_dir():
            self.add(f"{path}.adapter_dir is {engine.adapter_dir!r}, and there is no such folder; create it")
        for name, source in engine.adapters.items():
            where = f"{path}.adapters.{name}"
            if os.path.isdir(source):
                if not (Path(source) / "adapter_config.json").is_file():
                    self.add(f"{where} is {source!r}, a folder without adapter_config.json; a LoRA adapter has one")
            elif (reason := name_fault(source)) is not None:
                self.add(f"{where} is {source!r}; {reason}")


def _file_faults(http: Mapping[str, Any]) -> Iterator[str]:
    """TLS files that do not exist."""
    for key in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        if isinstance(file := http.get(key), str) and not Path(file).is_file():
            yield f"http_options.{key} is {file!r}; no such file exists"


def _tracing_faults(tracing: Mapping[str, Any], *, is_local: bool) -> Iterator[str]:
    """Faults of `tracing_config` that Serve would not find before a replica starts."""
    path, key = tracing.get("exporter_import_path"), "tracing_config.exporter_import_path"
    if tracing.get("enabled") and not path:
        yield (
            f"{key} is missing; Serve's own exporter also writes exceptions, whose messages may quote a request: use "
            "folio.app.tracing:otlp or folio.app.tracing:files"
        )
    if is_local and path == "folio.app.tracing:otlp" and not _is_module("opentelemetry.exporter.otlp.proto.http"):
        yield f"{key} is {_shown(path)}, which needs a package: pip install 'folio-serve[traces]'"


def _stored_bytes(engine: EngineConfig) -> int:
    """Bytes of a model's weights, from its local files; 0 if these do not tell."""
    folder = local_folder(engine.model)
    is_known = engine.dtype == "auto" and engine.quantization == "none" and os.path.isdir(folder)
    return weight_bytes(folder) if is_known else 0


def _settings(kind: Any) -> dict[str, Any]:
    """Each key of a model → the model of its value, or the list of models; `None` for other values."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return {field.name: _model_in(hints[field.name]) for field in fields(kind)}
    return {name: _model_in(field.annotation) for name, field in kind.model_fields.items()}


def _model_in(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        return next(filter(None, map(_model_in, get_args(annotation))), None)
    if get_origin(annotation) is list:
        return annotation if _model_in(*get_args(annotation)) else None
    is_model = isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation))
    return annotation if is_model else None


def _lines(error: ValidationError, value: object, path: str, skipped: frozenset[str]) -> Iterator[str]:
    """A line for each key, although pydantic has an entry for each type of a union."""
    expected: dict[str, tuple[object, list[str]]] = {}
    for entry in error.errors(include_url=False):
        location = entry["loc"]
        if entry["type"] == "missing":
            if location[0] not in skipped:
                yield f"{_join(path, '.'.join(map(str, location)))} is missing"
            continue
        where, found = _at(value, path, location)
        message = entry["msg"].removeprefix("Value error, ")
        if message.startswith("Input should be"):
            allowed = message.removeprefix("Input should be ").partition(", unable")[0]
            allowed = re.sub(r"^(a valid|a) dictionary( or (an )?instance of .*)?$", "a mapping", allowed)
            expected.setdefault(where, (found, []))[1].append(allowed)
        else:
            yield f"{where}: {message}" if where else message
    for where, (found, allowed_ones) in expected.items():
        yield f"{where or 'it'} is {_shown(found)}; it must be {' or '.join(dict.fromkeys(allowed_ones))}"


def _at(value: object, path: str, location: Sequence[int | str]) -> tuple[str, object]:
    """Path and value at a location that pydantic names, or at the deepest part of it that exists."""
    for step in location:
        if isinstance(value, dict) and step in value:
            path, value = _join(path, step), value[step]
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            path, value = f"{path}[{step}]", value[step]
        else:
            break
    return path, value


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _shown(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)  # null and true, as in YAML
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"


def _nearest(key: str, known: Iterable[str]) -> str:
    names = list(known)
    if near := difflib.get_close_matches(key.lower(), names, n=1, cutoff=0.6):
        return f"the nearest is {near[0]}"
    more = ", …" if len(names) > _MAX_LISTED else ""
    return f"there are {', '.join(names[:_MAX_LISTED])}{more}"


def _dicts(value: object) -> Iterator[dict[str, Any]]:
    for entry in value if isinstance(value, list) else ():
        yield entry if isinstance(entry, dict) else {}


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
