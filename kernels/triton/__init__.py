"""Triton kernels for GPUs."""

from __future__ import annotations

import triton

from folio.kernels.compilations import note_compilation


def _note_load(module: object, function: object, name: str, metadata_group: object, hash: str) -> None:
    note_compilation(name)


# Triton loads a binary at the first launch of a variant: once in a process, whether it was compiled now or earlier.
triton.knobs.runtime.kernel_load_end_hook.add(_note_load)
