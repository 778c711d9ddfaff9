"""Private interfaces of transformers. Seen to work: 5.17.0 and 5.23.0."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def uses_attention_interface(model: PreTrainedModel | type[PreTrainedModel]) -> bool:
    """Whether the model's attention layers look up their function in `AttentionInterface`.

    Private: `_can_set_attn_implementation`. `set_attn_implementation` only logs a warning for such models, and some of
    them (MPT) fail in a forward without masks before their attention could be observed.
    """
    return model._can_set_attn_implementation()


@contextmanager
def imported_without_torch() -> Iterator[None]:
    """Import transformers as where torch is not installed, for a process that needs nothing but tokenizers.

    Tokenizers do not need torch, but transformers imports it with them, and half of itself: 3.5 s of processor time and
    350 MB. transformers decides once in a process whether there is torch, so this does nothing where either is imported
    already.
    """
    if "transformers" in sys.modules or "torch" in sys.modules:
        yield
        return
    advice = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that models need torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own way to say that there is no such module
    try:
        importlib.import_module("transformers")
        yield
    finally:
        del sys.modules["torch"]
        if advice is None:
            del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]
        else:
            os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = advice
