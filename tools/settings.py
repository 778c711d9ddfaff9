"""The reference of all settings: `docs/reference/settings.md`, from the models that check a configuration file.

Defaults and ranges are the models'; meanings are the `Attributes:` of their docstrings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from folio.app import main
from folio.app.config.args import AppArgs, RoutingArgs, StreamingArgs
from folio.app.config.engine import _BOUNDS, _CHOICES, EngineConfig, KVStore
from folio.app.config.http import BatchSettings, HttpSettings, KeyEntry, KeySource, RateLimits, ResponseSettings
from folio.app.config.machine import MOST_SEQS, MOST_STEP_TOKENS
from folio.app.config.shelf import SLO, ModelConfig
from folio.app.fleet.autoscaling import ScalingTargets, _fault
from tools.schema import allowed, cell, code

_REQUIRED = object()
_HEAD = "| Setting | Default | Allowed | Meaning |\n|---|---|---|---|"
_POLICY = "folio.app.serving.autoscaling:KVAwareScaling"


@dataclass(frozen=True)
class Group:
    """A section of the page.

    Attributes:
        anchor: of the section; a setting's is `anchor.name`.
        title: the keys above the settings, as in the file.
        intro: what the settings are for.
    """

    anchor: str
    title: str
    model: Any
    intro: str


GROUPS = (
    Group("engine", "args.engine", EngineConfig, "The engine of each replica: model, memory, scheduling, decoding."),
    Group("kv_store", "args.engine.kv_store", KVStore, "[Cached prefixes on disk](../operate/kv-store.md)."),
    Group("args", "args", AppArgs, "The application."),
    Group(
        "models",
        "args.models[]",
        ModelConfig,
        "The models of a [shelf](../guides/shelf.md), in place of `engine`: a list of these.",
    ),
    Group("slo", "args.models[].slo", SLO, "Latency targets of a model, in seconds above 0."),
    Group("routing", "args.routing", RoutingArgs, "[The choice of the replica](../guides/replicas.md)."),
    Group("streaming", "args.streaming", StreamingArgs, "[The pace of streams](../operate/streams.md)."),
    Group("http", "args.http", HttpSettings, "[Protection of HTTP and gRPC](../operate/security.md)."),
    Group("batches", "args.http.batches", BatchSettings, "[Files and batches](../guides/batches.md)."),
    Group("responses", "args.http.responses", ResponseSettings, "[Stored responses](http-api.md#responses)."),
    Group(
        "limits",
        "args.http.key_limits, address_limits, and limits of a key",
        RateLimits,
        "[Limits of one caller](../guides/tenants.md#rate-limits) over all ingress replicas; null: no limit.",
    ),
    Group(
        "api_keys",
        "args.http.api_keys",
        KeySource,
        "Where [API keys](../guides/tenants.md#api-keys) are. Set one of both.",
    ),
    Group("keys", "keys of a file of API keys", KeyEntry, "A file of API keys has one key, `keys`: a list of these."),
    Group(
        "policy_kwargs",
        "deployments[].autoscaling_config.policy.policy_kwargs",
        ScalingTargets,
        f"The [autoscaling policy](../guides/replicas.md#autoscaling), with `policy_function: {_POLICY}`.",
    ),
)
_PARTS = {
    EngineConfig: "engine",
    KVStore: "kv_store",
    RoutingArgs: "routing",
    StreamingArgs: "streaming",
    HttpSettings: "http",
} | {
    BatchSettings: "batches",
    ResponseSettings: "responses",
    RateLimits: "limits",
    SLO: "slo",
    KeySource: "api_keys",
}
# Settings whose default does not tell the section of their keys: (section, name, which is also that section's anchor).
_LISTED = {("args", "engine"), ("args", "models"), ("models", "engine")}
# Bounds that depend on the machine, or that every machine has (`check_resources`).
_MACHINE = {
    "max_num_seqs": f"at most {MOST_SEQS}",
    "max_num_batched_tokens": f"at most {MOST_STEP_TOKENS}",
    "kv_memory_bytes": "at most the machine's memory",
    "kv_memory_floor_bytes": "at most the memory available",
    "swap_bytes": "at most the machine's memory",
    "num_threads": "at most the cores",
}
# Settings of Serve that matter: (path in the file, Folio's default, meaning). A test looks them up in Serve's models.
SERVE: tuple[tuple[str, object, str], ...] = (
    ("http_options.host", "127.0.0.1", "the address that HAProxy listens on; `0.0.0.0`: all"),
    ("http_options.port", 8000, "the port"),
    ("http_options.keep_alive_timeout_s", 90, "idle connections are closed after this time"),
    ("grpc_options.port", None, "the port for [gRPC](grpc.md)"),
    (
        "grpc_options.grpc_servicer_functions",
        [],
        "`[folio.app.proto.folio_pb2_grpc.add_FolioServicer_to_server]` opens gRPC",
    ),
    ("proxy_location", "EveryNode", "where HAProxy runs: [several nodes](../operate/nodes.md)"),
    ("applications.name", "default", "the application's name; `Folio(name)` finds it"),
    ("applications.route_prefix", "/", "the path before all routes"),
    ("applications.import_path", None, f"`{main.build.__module__}:build`"),
    ("applications.runtime_env", {}, "packages and variables of its processes"),
    ("applications.deployments.name", None, "`Ingress` or `EngineReplica`"),
    ("applications.deployments.num_replicas", 1, "a fixed number of replicas; instead of `autoscaling_config`"),
    (
        "applications.deployments.autoscaling_config",
        None,
        "[by load](../guides/replicas.md#autoscaling)",
    ),
    (
        "applications.deployments.ray_actor_options",
        {"num_cpus": main.REPLICA_CPUS},
        "resources of each replica; replaces all defaults. On CUDA `num_gpus` is 1 by default",
    ),
    (
        "applications.deployments.graceful_shutdown_timeout_s",
        main.DRAIN_TIMEOUT_S,
        "time for a stopped replica to finish its streams",
    ),
    (
        "applications.deployments.max_surge_percent",
        main.MAX_SURGE_PERCENT,
        "share of replicas that [an update](../operate/upgrades.md) starts before it stops others",
    ),
    (
        "applications.deployments.health_check_period_s",
        main.HEALTH_CHECK_PERIOD_S,
        "period of the health checks of an engine replica",
    ),
    (
        "applications.deployments.health_check_timeout_s",
        main.HEALTH_CHECK_TIMEOUT_S,
        "a check of an engine replica without an answer in this time has failed",
    ),
    (
        "applications.deployments.placement_group_bundles",
        None,
        "resources of each [rank](../guides/tensor-parallel.md); by default one bundle for each",
    ),
    ("applications.deployments.placement_group_strategy", "STRICT_PACK", "`PACK`: ranks may be on several nodes"),
    ("applications.deployments.max_replicas_per_node", None, "most replicas on one node"),
    (
        "applications.deployments.max_ongoing_requests",
        None,
        "leave it out: Folio sets it above its own queue, which refuses requests properly",
    ),
    ("applications.deployments.logging_config", {"enable_access_log": False}, "Serve's log of each call"),
)


def settings_page() -> str:
    """The page."""
    lines = [
        "# Settings",
        "",
        "<!-- Made from the code by `python -m tools.reference`. -->",
        "",
        "All settings of the configuration file, with default and allowed values. Unknown keys are errors.",
        "`folio check FILE` lists all faults of a file. Sizes are bytes, or texts such as `4GiB` and `500MB`; names",
        "that end in `_s` are seconds.",
    ]
    for group in GROUPS:
        lines += ["", f'## <a id="{group.anchor}"></a>{group.title}', "", group.intro, "", _HEAD]
        lines += [_row(group, *setting) for setting in settings_of(group.model)]
    lines += [
        "",
        "## Ray Serve's settings",
        "",
        "The rest of the file is an ordinary configuration of Ray Serve. These settings matter most; defaults are",
        "Folio's, of the deployment `EngineReplica`.",
        "",
        "| Setting | Default | Meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{path}` | {code(default)} | {cell(meaning)} |" for path, default, meaning in SERVE]
    return "\n".join(lines) + "\n"


def settings_of(model: Any) -> Iterator[tuple[str, object, str, str]]:
    """(name, default, allowed values, meaning) of each setting."""
    meanings = attributes(model)
    properties = TypeAdapter(model).json_schema()["properties"]
    for name, default in _defaults(model):
        yield name, default, _range(model, name, properties[name]), meanings.get(name, "")


def attributes(model: Any) -> dict[str, str]:
    """The section `Attributes:` of a class's docstring."""
    _, _, section = (inspect.getdoc(model) or "").partition("Attributes:\n")
    section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
    found = {}
    for entry in re.split(r"^    (?=\S)", section, flags=re.MULTILINE)[1:]:
        names, _, meaning = entry.partition(":")
        for name in names.split(", "):
            found[name] = re.sub(r"`?\bNone\b`?", "null", " ".join(meaning.split()))
    return found


def _defaults(model: Any) -> Iterator[tuple[str, object]]:
    if is_dataclass(model):
        for field in fields(model):
            given = field.default_factory() if field.default_factory is not MISSING else field.default
            yield field.name, _REQUIRED if given is MISSING else given
        return
    declared: Mapping[str, FieldInfo] = model.model_fields
    for name, info in declared.items():
        yield name, _REQUIRED if info.default is PydanticUndefined else info.default


def _range(model: Any, name: str, schema: Mapping[str, Any]) -> str:
    words = [allowed(schema)]
    if model is EngineConfig:
        words = [", ".join(map(code, _CHOICES[name]))] if name in _CHOICES else words
        words += [bound for names, _, bound in _BOUNDS if name in names]
        words += [_MACHINE[name]] if name in _MACHINE else []
    elif model is ScalingTargets and (fault := _fault(name, -1.0)):
        words.append(fault.rpartition("it must ")[2].partition(",")[0])
    return ", ".join(words).replace("not be negative", "at least 0").replace(", be ", ", ")


def _row(group: Group, name: str, default: object, values: str, meaning: str) -> str:
    anchor = f'<a id="{group.anchor}.{name}"></a>'
    part = _PARTS.get(type(default)) or (name if (group.anchor, name) in _LISTED else None)
    if name == "api_keys":
        part = "api_keys"
    if part is not None:
        kind = "a list" if part == "models" else "a mapping"
        shown = "null" if default is None else "see there" if default is not _REQUIRED else "required"
        return f"| {anchor}`{name}` | {shown} | [{kind}](#{part}) | {cell(meaning)} |"
    shown = "required" if default is _REQUIRED else code(_plain(default))
    return f"| {anchor}`{name}` | {shown} | {cell(values)} | {cell(meaning)} |"


def _plain(value: object) -> object:
    if isinstance(value, frozenset | tuple):
        return sorted(map(str, value))
    assert not isinstance(value, BaseModel)
    return value
