"""LoRA weights: adapters in PEFT's files, `adapter_config.json` and `adapter_model.safetensors`.

An unsupported setting is an error that names it: an adapter applied in part would silently give wrong answers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from folio.app.engine.lora.source import CONFIG_FILE, FILES, WEIGHTS_FILE
from folio.app.errors import ConfigError, ModelError

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_TENSOR = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<side>[AB])\.weight")
# Settings that are read here, or that concern only training, initialisation or names.
_KNOWN = {"r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern", "bias", "peft_type"}
_KNOWN |= {"init_lora_weights", "base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout"}
_KNOWN |= {"auto_mapping", "fan_in_fan_out", "layers_to_transform", "layers_pattern", "exclude_modules", "peft_version"}
_KNOWN |= {"megatron_core", "megatron_config", "qalora_group_size", "runtime_config", "ensure_weight_tying"}
_KNOWN |= {"eva_config"}
# Other initialisations (pissa, olora, corda, …) also change the base model's weights.
_INITIALISATIONS = (True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True, slots=True)
class LowRank:
    """The update of one linear layer: `x @ down.T @ up.T`.

    Attributes:
        down: `[rank, in_features]`.
        up: `[out_features, rank]`, scaled.
    """

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """An adapter's settings.

    Attributes:
        targets: names, or endings of dotted paths; one regular expression for whole paths; "all-linear".
        complete: whether the file must have every layer that `targets` matches.
        rank_pattern, alpha_pattern: path endings → values that replace `rank` and `alpha`.
    """

    rank: int
    alpha: float
    rank_stabilised: bool
    targets: str | tuple[str, ...]
    complete: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, path: str) -> int:
        return self.rank_pattern.get(_first_match(self.rank_pattern, path), self.rank)

    def scale_of(self, path: str) -> float:
        rank = self.rank_of(path)
        alpha = self.alpha_pattern.get(_first_match(self.alpha_pattern, path), self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    def targets_layer(self, path: str, head: str | None) -> bool:
        """Whether the layer at `path` is a target; `head` is the path of the output layer."""
        if self.targets == "all-linear":
            return path != head
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, path) is not None
        return any(path == target or path.endswith(f".{target}") for target in self.targets)


def check_sources(sources: Mapping[str, str], adapter_dir: str | None = None) -> None:
    """Raise `ConfigError` for an adapter that is neither a folder of PEFT's nor a Hub id, or an `adapter_dir` that is
    no folder; nothing is loaded yet."""
    if adapter_dir is not None and not Path(adapter_dir).expanduser().is_dir():
        raise ConfigError(f"adapter_dir is {adapter_dir!r}, and there is no such folder; create it, or leave it out")
    for name, source in sources.items():
        if not name:
            raise ConfigError(f"the adapter at {source!r} has an empty name; give it one")
        folder = Path(source).expanduser()
        if folder.is_dir():
            if missing := _missing_files(folder):
                raise ConfigError(f"adapter {name!r}: {source!r} has no {' and no '.join(missing)}")
        elif not _HUB_ID.fullmatch(source):
            raise ConfigError(f"adapter {name!r}: {source!r} is neither a folder nor a Hub id such as owner/name")


def find_folder(name: str, source: str) -> Path:
    """The adapter's folder, downloaded if `source` is a Hub id. Raises `ModelError` if it is unavailable or
    incomplete."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(source, allow_patterns=list(FILES)))
        except (OSError, ValueError) as error:  # no such repository, or no network
            raise ModelError(f"adapter {name!r}: {source!r} is no folder, and cannot be downloaded: {error}") from error
    if missing := _missing_files(folder):
        raise ModelError(f"adapter {name!r}: {source!r} has no {' and no '.join(missing)}")
    return folder


def _missing_files(folder: Path) -> list[str]:
    return [file for file in FILES if not (folder / file).is_file()]


def read_config(name: str, folder: Path) -> AdapterConfig:
    """Raises `ModelError` for an unreadable file or unsupported settings."""
    try:
        settings: Any = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"adapter {name!r}: cannot read {CONFIG_FILE}: {error}") from error
    kind = settings.get("peft_type") if isinstance(settings, dict) else type(settings)
    if kind != "LORA":
        raise ModelError(f"adapter {name!r} is of type {kind!r}; only LORA is supported")
    if unsupported := _unsupported(settings):
        raise ModelError(f"adapter {name!r} needs unsupported settings: {unsupported}; merge it into its model instead")
    targets = settings.get("target_modules")
    if not isinstance(targets, str | list) or not targets:
        raise ModelError(f"adapter {name!r}: target_modules is {targets!r}; it must name layers")
    try:
        config = _parse(settings, targets)
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise ModelError(f"adapter {name!r}: {CONFIG_FILE} is damaged: {error!r}") from error
    if (least := min([config.rank, *config.rank_pattern.values()])) < 1:
        raise ModelError(f"adapter {name!r}: a rank is {least}; it must be at least 1")
    return config


def _unsupported(settings: Mapping[str, Any]) -> str:
    found = {key: value for key, value in settings.items() if value and key not in _KNOWN}
    for key, default, supported in (("bias", "none", ("none",)), ("init_lora_weights", True, _INITIALISATIONS)):
        if settings.get(key, default) not in supported:
            found[key] = settings[key]
    return ", ".join(f"{key}={value!r}" for key, value in sorted(found.items()))


def _parse(settings: Mapping[str, Any], targets: str | list[Any]) -> AdapterConfig:
    if isinstance(targets, str) and targets != "all-linear":
        re.compile(targets)
    return AdapterConfig(
        rank=int(settings["r"]),
        alpha=float(settings["lora_alpha"]),
        rank_stabilised=bool(settings.get("use_rslora")),
        targets=targets if isinstance(targets, str) else tuple(map(str, targets)),
        complete=not any(settings.get(key) for key in ("layers_to_transform", "exclude_modules")),
        rank_pattern={str(key): int(rank) for key, rank in (settings.get("rank_pattern") or {}).items()},
        alpha_pattern={str(key): float(alpha) for key, alpha in (settings.get("alpha_pattern") or {}).items()},
    )


def stored_numbers(name: str, folder: Path) -> int:
    """Number of elements of the adapter's tensors, from the header of its file. Raises `ModelError`."""
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt", backend="pread") as file:
            return sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"adapter {name!r}: cannot read {WEIGHTS_FILE}: {error}") from error


def read_weights(
    name: str,
    folder: Path,
    config: AdapterConfig,
    shapes: Mapping[str, tuple[int, int]],
    *,
    head: str | None,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, LowRank]:
    """Path → the layer's update, on the device.

    Args:
        shapes: path → (out_features, in_features) of every layer that adapters can change.
        head: the path of the output layer.

    Raises:
        ModelError: a tensor is missing, of the wrong shape or type, or for another layer.
    """
    sides: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt", backend="pread") as file:
            for key in file.keys():  # noqa: SIM118 - no dictionary
                found = _TENSOR.fullmatch(key)
                if found is None or found["path"] not in shapes:
                    raise ModelError(
                        f"adapter {name!r} has {key!r}, which is for no layer of this model that adapters can change: "
                        "embeddings, norms, biases, experts and recurrent mixers are not supported"
                    )
                sides.setdefault(found["path"], {})[found["side"]] = file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"adapter {name!r}: cannot read {WEIGHTS_FILE}: {error}") from error
    expected = {path for path in shapes if config.complete and config.targets_layer(path, head)} | sides.keys()
    if not expected:
        raise ModelError(f"adapter {name!r}: its target_modules {config.targets!r} name no layer of this model")
    weights = {}
    for path in sorted(expected):
        rank, (rows, columns) = config.rank_of(path), shapes[path]
        given = {side: tuple(tensor.shape) for side, tensor in sides.get(path, {}).items()}
        if given != {"A": (rank, columns), "B": (rows, rank)}:
            raise ModelError(
                f"adapter {name!r} does not fit this model: {path} needs A {(rank, columns)} and B {(rows, rank)}, the "
                f"file has {given or 'neither'}; was it made for another one?"
            )
        if others := {str(t.dtype) for t in sides[path].values() if not t.is_floating_point()}:
            raise ModelError(f"adapter {name!r}: {path} is {', '.join(sorted(others))}; weights are floating-point")
        read = sides.pop(path)  # so that only one layer is in memory twice
        down, up = read["A"], read["B"].float() * config.scale_of(path)
        weights[path] = LowRank(down.to(device, dtype), up.to(device, dtype))
    return weights


def _first_match(patterns: Iterable[str], path: str) -> str:
    """The first matching pattern, as PEFT chooses; the path itself if there is none."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", path)), path)
