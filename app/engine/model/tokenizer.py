"""Tokenizer loader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from folio.app.errors import ModelError
from folio.app.models.builtin import resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer. Raises `ModelError` if there is none that can decode incrementally."""
    from transformers import AutoTokenizer  # not with this module, for `imported_without_torch`

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(resolve_model(model))
    except Exception as error:  # damaged files raise any, KeyError and ZeroDivisionError among them
        raise ModelError(f"no tokenizer for {model!r}: {type(error).__name__}: {one_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"{model!r} has only a slow tokenizer; Folio needs a fast one (of the tokenizers library)")
    return tokenizer


def one_line(error: Exception) -> str:
    """The error's text in one line; transformers often writes paragraphs."""
    return " ".join(str(error).split())
