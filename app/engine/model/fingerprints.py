"""Fingerprints of engines, which compare them before they exchange anything."""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple

from folio.app.config.added_model import files_sample
from folio.app.config.engine import EngineConfig
from folio.app.engine.model.loader import LoadedModel
from folio.app.models.builtin import resolve_model
from folio.app.models.weights.key import weight_files


class Fingerprints(NamedTuple):
    """What other engines compare with theirs.

    Attributes:
        prefixes: of all that gives token ids and prefix keys their meaning. Engines exchange prefixes only when it is
            equal; weights may differ, because prefixes are computed anew.
        outputs: also of the weights and their precision. Outputs that one engine has begun continue only at engines
            with the same.
    """

    prefixes: str
    outputs: str


def fingerprints(config: EngineConfig, model: LoadedModel) -> Fingerprints:
    """The fingerprints of an engine. Reads samples of the weight files."""
    tokenizer = model.tokenizer
    common = [
        config.model,
        model.module.config.model_type,
        model.vocab_size,
        config.isolate_tenants,
        None if tokenizer is None else [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template],
    ]
    try:
        weights = files_sample(weight_files(resolve_model(config.model))) if config.load_format == "auto" else ""
    except OSError:  # they have been removed since
        weights = ""
    precision = [str(model.dtype), config.quantization, config.kv_dtype, config.batch_invariant]
    more = [*common, *precision, config.load_format, weights]
    return Fingerprints(
        *(hashlib.blake2b(json.dumps(of).encode(), digest_size=16).hexdigest() for of in (common, more))
    )
