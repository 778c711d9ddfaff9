"""Pooling of a model: how a prompt's hidden states become its embedding or score, from the checkpoint or a setting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from folio.app.config.engine import EngineConfig
from folio.app.engine.model.tokenizer import load_tokenizer
from folio.app.engine.request.pooled import Array, PooledKind, PoolingMethod, PoolingParams
from folio.app.errors import ConfigError, ModelError, RequestError
from folio.app.models.builtin import resolve_model

_MODULES = "modules.json"
_SEQUENCE_CLASSIFIER = "ForSequenceClassification"
_HEAD = "score.weight"
# Names of an output layer, and of the embeddings that stand for it where they are tied.
_OUTPUT, _TIED = ("lm_head.weight",), ("model.embed_tokens.weight", "embed_tokens.weight")
# Settings of models that scale or bend the logits of the output layer.
_SCALES = ("logit_scale", "logits_scaling", "final_logit_softcapping", "lm_head_multiplier", "dim_model_base")
# Pooling modes of sentence-transformers, in the settings of its older and newer versions.
_METHODS: dict[str, PoolingMethod] = {
    "lasttoken": "last",
    "mean": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
}


@dataclass(frozen=True, slots=True, eq=False)
class Pooling:
    """How a model turns a prompt into one vector.

    Attributes:
        method: the hidden state of the last token, or the mean over all tokens, after the last norm.
        normalize: embeddings have length 1.
        sizes: sizes that embeddings can be cut to: those in the list, or any (`True`), or none.
        head: `[hidden_size]` float64 of a classifier with one label; `None` for an embedding model.
        template: `score_template` of the settings.
    """

    method: PoolingMethod
    normalize: bool = True
    sizes: Sequence[int] | bool = False
    head: Array | None = None
    template: str | None = None

    @property
    def kind(self) -> PooledKind:
        return "embedding" if self.head is None else "score"

    def check_params(self, params: PoolingParams, hidden_size: int) -> None:
        """Raise `RequestError` unless the model makes such vectors."""
        if params.kind != self.kind:
            raise RequestError(
                "this model is a classifier and makes no embeddings; use /v1/score or /v1/rerank"
                if self.kind == "score"
                else "this model has no classifier; compare its embeddings",
                "model",
            )
        dimensions = params.dimensions
        if dimensions is None or dimensions == hidden_size:
            return
        if self.sizes is False:
            raise RequestError(
                f"dimensions is {dimensions}, but embeddings of this model have {hidden_size} and were not trained to "
                "be cut; leave it out, or set matryoshka: true in the server's settings",
                "dimensions",
            )
        if not 1 <= dimensions <= hidden_size or (self.sizes is not True and dimensions not in self.sizes):
            allowed = f"between 1 and {hidden_size}" if self.sizes is True else f"one of {[*self.sizes, hidden_size]}"
            raise RequestError(f"dimensions is {dimensions}; it must be {allowed}", "dimensions")

    def finish(self, pooled: Array, params: PoolingParams) -> Array:
        """The vector for the client: `[dimensions]`, or `[1]` of a classifier, between 0 and 1."""
        if self.head is not None:
            with np.errstate(over="ignore"):  # exp(1000) is infinite, and the score 0
                return 1 / (1 + np.exp(-np.array([self.head @ pooled])))
        vector = pooled[: params.dimensions]
        if not self.normalize and params.dimensions is None:
            return vector
        length = float(np.linalg.norm(vector))
        return vector / length if length else vector


def find_pooling(config: EngineConfig, hf_config: PreTrainedConfig) -> Pooling | None:
    """The pooling that the settings or the checkpoint ask for; `None`: the model only generates.

    Raises:
        ConfigError: `score_tokens` are not single tokens.
        ModelError: the checkpoint asks for something that Folio cannot compute.
    """
    if config.pooling == "none":
        return None
    if config.score_tokens is not None:
        return Pooling("last", head=_token_head(config, hf_config), template=config.score_template)
    if is_classifier(hf_config):
        return Pooling("last", head=_classifier(config, hf_config), template=config.score_template)
    found = _sentence_transformer(config.model)
    if config.pooling == "auto" and found is None:
        return None
    method, normalize = found if found is not None else (None, True)
    if config.pooling != "auto":
        method = config.pooling
    assert method is not None
    _check_causal(config.model, hf_config)
    text_config: Any = hf_config.get_text_config()
    sizes = getattr(text_config, "matryoshka_dimensions", None) or getattr(text_config, "is_matryoshka", False)
    return Pooling(method, normalize, True if config.matryoshka else sizes)


def is_classifier(hf_config: PreTrainedConfig) -> bool:
    """Whether the checkpoint has a classifier in place of the output layer."""
    return any(name.endswith(_SEQUENCE_CLASSIFIER) for name in hf_config.architectures or ())


def _sentence_transformer(model: str) -> tuple[PoolingMethod, bool] | None:
    """Pooling method, and whether embeddings are normalised, of a checkpoint of sentence-transformers; `None` for
    others."""
    modules = cast(list[dict[str, str]] | None, _read_json(model, _MODULES))
    if modules is None:
        return None
    kinds = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
    if unknown := kinds.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise ModelError(
            f"{_MODULES} of {model!r} has modules that Folio cannot compute: {', '.join(sorted(unknown))}; with "
            "pooling: none the model generates, and makes no embeddings"
        )
    if "Pooling" not in kinds:
        raise ModelError(f"{_MODULES} of {model!r} has no Pooling; set pooling: last, mean or none")
    settings = cast(dict[str, Any], _read_json(model, f"{kinds['Pooling']}/config.json") or {})
    named = settings.get("pooling_mode")
    modes = [named] if isinstance(named, str) else [name for name in settings if settings[name] is True]
    modes = [mode for mode in modes if mode != "include_prompt"]
    if len(modes) != 1 or modes[0] not in _METHODS:
        raise ModelError(
            f"{kinds['Pooling']}/config.json of {model!r} pools by {', '.join(modes) or 'nothing'}; Folio pools by "
            "lasttoken or mean: set pooling: last, mean or none"
        )
    return _METHODS[modes[0]], "Normalize" in kinds


def _check_causal(model: str, hf_config: PreTrainedConfig) -> None:
    """Raise `ModelError` for a decoder that was trained to see later tokens: its keys and values cannot be cached."""
    text_config: Any = hf_config.get_text_config()
    if getattr(text_config, "use_bidirectional_attention", False) or getattr(text_config, "is_causal", True) is False:
        raise ModelError(f"{model!r} attends in both directions; Folio computes causal attention only")


def _classifier(config: EngineConfig, hf_config: PreTrainedConfig) -> Array:
    """The weights of a sequence classifier's only label."""
    hidden_size = hf_config.get_text_config().hidden_size
    if config.load_format == "dummy":
        return _dummy_head(hidden_size)
    head = _read_rows(config.model, (_HEAD,))
    if head.shape != (1, hidden_size):
        raise ModelError(
            f"{_HEAD} of {config.model!r} has the shape {list(head.shape)}; Folio serves classifiers with one label, "
            f"[1, {hidden_size}]; with pooling: none the checkpoint is loaded as a generating model"
        )
    return head[0]


def _token_head(config: EngineConfig, hf_config: PreTrainedConfig) -> Array:
    """The difference of two tokens' output weights: its sigmoid is the second one's probability among the two."""
    assert config.score_tokens is not None
    tokenizer = load_tokenizer(config.model)
    token_ids = [_single_token(tokenizer, text) for text in config.score_tokens]
    if config.load_format == "dummy":
        return _dummy_head(hf_config.get_text_config().hidden_size)
    text_config = hf_config.get_text_config()
    if scaled := [name for name in _SCALES if getattr(text_config, name, None) not in (None, 1)]:
        raise ModelError(f"score_tokens cannot be used with {config.model!r}, whose {scaled[0]} changes its logits")
    names = _OUTPUT + (_TIED if hf_config.tie_word_embeddings else ())
    no, yes = _read_rows(config.model, names, token_ids)
    return yes - no


def _single_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) != 1:
        raise ConfigError(f"score_tokens has {text!r}, which is {len(token_ids)} tokens of this model; it must be one")
    return int(token_ids[0])


def _dummy_head(hidden_size: int) -> Array:
    return np.random.default_rng(0).standard_normal(hidden_size) / hidden_size**0.5


def _read_rows(model: str, names: Sequence[str], rows: Sequence[int] | None = None) -> Array:
    """Rows of the first of these weights that the checkpoint has, float64; all rows by default."""
    index = cast(dict[str, Any] | None, _read_json(model, "model.safetensors.index.json"))
    for name in names:
        path = _file(model, "model.safetensors" if index is None else index["weight_map"].get(name, ""))
        if path is None:
            continue
        with safe_open(path, "pt", backend="pread") as weights:
            if name in weights.keys():  # noqa: SIM118 - it is no dict
                part = weights.get_slice(name)
                found = part[:] if rows is None else torch.stack([part[row] for row in rows])
                return cast(Array, found.double().numpy())
    raise ModelError(f"{model!r} has none of the weights {', '.join(names)} in its safetensors files")


def _read_json(model: str, name: str) -> object:
    path = _file(model, name)
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error


def _file(model: str, name: str) -> Path | None:
    """A file of a folder or of a Hub id; `None` if there is none."""
    folder = Path(resolve_model(model))
    if not name:
        return None
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    found = try_to_load_from_cache(model, name)
    if found is not None:  # a path, or a mark that the Hub has no such file
        return Path(found) if isinstance(found, str) else None
    try:
        return Path(hf_hub_download(model, name))
    except EntryNotFoundError:  # or neither the cache nor the network has it
        return None
