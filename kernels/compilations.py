"""Kernels that this process has compiled, or loaded from a compiler's cache.

Each does so at its first use, which takes from milliseconds to seconds. After an engine's start there should be none.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

# Kernels of this process, whose compilers' caches are the process's, too. Appended to by any thread.
_names: list[str] = []


def note_compilation(name: str) -> None:
    """Count a kernel, or a library of kernels, that has been compiled or loaded."""
    _names.append(name)
    logger.debug("kernel %s has been compiled or loaded", name)


def num_compilations() -> int:
    """Triton kernels, one for each variant, and C++ libraries so far. Kernels of torch are not counted."""
    return len(_names)
