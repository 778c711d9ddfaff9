"""LoRA adapters in files, as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`.

What a file asks for and this does not do is an error that names it: an adapter that is applied in part would answer
wrongly without a word.
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

from app.errors import ConfigError, ModelError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_TENSOR = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<side>[AB])\.weight")
# Settings that are read here, or that change training only, or how weights were named or started.
_KNOWN = {"r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern", "bias", "peft_type"}
_KNOWN |= {"init_lora_weights", "base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout"}
_KNOWN |= {"auto_mapping", "fan_in_fan_out", "layers_to_transform", "layers_pattern", "exclude_modules", "peft_version"}
_KNOWN |= {"megatron_core", "megatron_config", "qalora_group_size", "runtime_config", "ensure_weight_tying"}
_KNOWN |= {"eva_config"}
# Others than these (pissa, olora, corda, …) change the base model's weights, too.
_STARTS = (True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one linear layer: `x @ down.T @ up.T`.

    Attributes:
        down: `[rank, in_features]`.
        up: `[out_features, rank]`, scaled.
    """

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings that say which layers an adapter changes, and how much.

    Attributes:
        targets: names, or endings of dotted paths; one regular expression for whole paths; "all-linear".
        complete: whether every layer that `targets` fits has to be there.
        rank_pattern, alpha_pattern: for paths that end so, instead of `rank` and `alpha`.
    """

    rank: int
    alpha: float
    rank_stabilised: bool
    targets: str | tuple[str, ...]
    complete: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, path: str) -> int:
        return self.rank_pattern.get(_first_fitting(self.rank_pattern, path), self.rank)

    def scale_of(self, path: str) -> float:
        rank = self.rank_of(path)
        alpha = self.alpha_pattern.get(_first_fitting(self.alpha_pattern, path), self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    def wants(self, path: str, head: str | None) -> bool:
        """Whether the layer at `path` is one of its targets; `head` is where the output layer is."""
        if self.targets == "all-linear":
            return path != head
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, path) is not None
        return any(path == target or path.endswith(f".{target}") for target in self.targets)


def check_sources(sources: Mapping[str, str]) -> None:
    """Raise `ConfigError` for an adapter that can be no folder of PEFT's and no Hub id; nothing is loaded yet."""
    for name, source in sources.items():
        if not name:
            raise ConfigError(f"the adapter at {source!r} has an empty name; give it one")
        folder = Path(source).expanduser()
        if folder.is_dir():
            missing = [file for file in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / file).is_file()]
            if missing:
                raise ConfigError(f"adapter {name!r}: {source!r} has no {' and no '.join(missing)}")
        elif not _HUB_ID.fullmatch(source):
            raise ConfigError(f"adapter {name!r}: {source!r} is neither a folder nor a Hub id such as owner/name")


def find_folder(name: str, source: str) -> Path:
    """The adapter's folder, downloaded if it is a Hub id. Raises `ModelError` if it is not to be had."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(source, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE]))
        except (OSError, ValueError) as error:  # no such repository, or no network
            raise ModelError(f"adapter {name!r}: no folder and no download of {source!r}: {error}") from error
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / file).is_file():
            raise ModelError(f"adapter {name!r}: {source!r} has no {file}")
    return folder


def read_config(name: str, folder: Path) -> AdapterConfig:
    """Raises `ModelError` for a file that cannot be read, and for settings that are not supported."""
    try:
        settings: Any = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"adapter {name!r}: cannot read {CONFIG_FILE}: {error}") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        kind = settings.get("peft_type") if isinstance(settings, dict) else settings
        raise ModelError(f"adapter {name!r} is of type {kind!r}; only LORA is supported")
    unsupported = {key: value for key, value in settings.items() if value and key not in _KNOWN}
    if settings.get("bias", "none") != "none":
        unsupported["bias"] = settings["bias"]
    if settings.get("init_lora_weights", True) not in _STARTS:
        unsupported["init_lora_weights"] = settings["init_lora_weights"]
    if unsupported:
        named = ", ".join(f"{key}={value!r}" for key, value in sorted(unsupported.items()))
        raise ModelError(f"adapter {name!r} needs what is not supported: {named}; merge it into its model instead")
    targets = settings.get("target_modules")
    if not isinstance(targets, str | list) or not targets:
        raise ModelError(f"adapter {name!r}: target_modules is {targets!r}; it must name layers")
    try:
        if isinstance(targets, str) and targets != "all-linear":
            re.compile(targets)
        config = AdapterConfig(
            rank=int(settings["r"]),
            alpha=float(settings["lora_alpha"]),
            rank_stabilised=bool(settings.get("use_rslora")),
            targets=targets if isinstance(targets, str) else tuple(map(str, targets)),
            complete=not any(settings.get(key) for key in ("layers_to_transform", "exclude_modules")),
            rank_pattern={str(key): int(rank) for key, rank in (settings.get("rank_pattern") or {}).items()},
            alpha_pattern={str(key): float(alpha) for key, alpha in (settings.get("alpha_pattern") or {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise ModelError(f"adapter {name!r}: {CONFIG_FILE} is damaged: {error!r}") from error
    ranks = [config.rank, *config.rank_pattern.values()]
    if min(ranks) < 1:
        raise ModelError(f"adapter {name!r}: a rank is {min(ranks)}; it must be at least 1")
    return config


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
    """Path → what is added to the layer there, on the device.

    Args:
        shapes: path → (out_features, in_features) of every layer that may be changed.
        head: the path of the output layer.

    Raises:
        ModelError: a tensor is for no such layer, or of the wrong shape, or missing.
    """
    sides: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt", device="cpu") as file:
            for key in file.keys():  # noqa: SIM118 - no dictionary
                found = _TENSOR.fullmatch(key)
                if found is None or found["path"] not in shapes:
                    raise ModelError(
                        f"adapter {name!r} has {key!r}, which is for no linear layer of this model that adapters can "
                        "change: embeddings, norms, biases, experts and recurrent mixers are not supported"
                    )
                sides.setdefault(found["path"], {})[found["side"]] = file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"adapter {name!r}: cannot read {WEIGHTS_FILE}: {error}") from error
    expected = {path for path in shapes if config.complete and config.wants(path, head)} | sides.keys()
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
        down, up = sides[path]["A"], sides[path]["B"].float() * config.scale_of(path)
        weights[path] = LowRank(down.to(device, dtype), up.to(device, dtype))
    return weights


def _first_fitting(patterns: Iterable[str], path: str) -> str:
    """As PEFT chooses among them; the path itself if none fits."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", path)), path)
