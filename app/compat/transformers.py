"""Private interfaces of transformers. Seen to work: 5.17.0 and 5.23.0."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def uses_attention_interface(model: PreTrainedModel | type[PreTrainedModel]) -> bool:
    """Whether the model's attention layers look up their function in `AttentionInterface`.

    Private: `_can_set_attn_implementation`. `set_attn_implementation` only logs a warning for such models, and some of
    them (MPT) fail in a forward without masks before their attention could be observed.
    """
    return model._can_set_attn_implementation()


@contextmanager
def weights_copied(most_bytes: int) -> Iterator[None]:
    """Let `from_pretrained` copy weights out of their files, as far as these have at most so many bytes. In one thread
    at a time.

    transformers maps the files, and on a CPU tensors go on reading them: if such a file is overwritten in place later,
    the model changes, and if it is truncated, the process ends (SIGBUS). Its option `disable_mmap` needs memory for a
    whole file at once. Private: `safe_open` and `is_zipfile` in `modeling_utils`; the second one is only asked whether
    `torch.load` can map a file.
    """
    module: Any = importlib.import_module("transformers.modeling_utils")
    safe_open, is_zipfile = module.safe_open, module.is_zipfile

    def takes(path: str) -> bool:
        nonlocal most_bytes
        most_bytes -= os.stat(path).st_size
        if most_bytes < 0:
            logger.info("%s stays mapped, as memory is short: do not overwrite it while its model is served", path)
        return most_bytes >= 0

    def open_file(path: str, **options: Any) -> Any:
        return safe_open(path, **options | ({"backend": "pread"} if takes(path) else {}))

    module.safe_open, module.is_zipfile = open_file, lambda path: is_zipfile(path) and not takes(path)
    try:
        yield
    finally:
        module.safe_open, module.is_zipfile = safe_open, is_zipfile


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
