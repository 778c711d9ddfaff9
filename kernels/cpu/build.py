"""C++ kernels, compiled for this machine's processor when they are first used.

The libraries need no torch headers and share torch's OpenMP runtime (torch is imported before they are loaded), so
`torch.set_num_threads` governs them.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from kernels.provider import KernelError

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "csrc"
# No -ffast-math: linked into a library it sets flush-to-zero for the whole process.
_FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC"]
# What the C++ side calls each dtype.
CPP_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@cache
def load_library(name: str, march: str = "native") -> ctypes.CDLL:
    """The library of `csrc/<name>.cpp`, compiled unless this source, compiler and processor have met before.

    Args:
        march: the processor it is for, as the compiler names it.

    Raises:
        KernelError: there is no compiler, it failed, or the folder for what it makes does not do.
    """
    source = _FOLDER / f"{name}.cpp"
    try:
        return ctypes.CDLL(str(_build(source, march)))
    except (OSError, subprocess.SubprocessError) as error:
        where = f"compiled in {_cache()}; set XDG_CACHE_HOME to another folder"
        raise KernelError(f"{source.name} cannot be {where}: {error}") from error


def _build(source: Path, march: str) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise KernelError("no C++ compiler (g++) found; install one, for example `apt-get install g++`")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256()
    headers = "".join(path.read_text() for path in sorted(_FOLDER.glob("*.h")))
    for part in (source.read_text(), headers, version, " ".join(_FLAGS), march, _cpu_flags()):
        key.update(part.encode())
    folder = _cache()
    library = folder / f"{source.stem}-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    logger.info("compiling %s for this processor into %s", source.name, library)
    with tempfile.TemporaryDirectory(dir=folder) as build:
        built = Path(build) / library.name
        result = subprocess.run(
            [compiler, *_FLAGS, f"-march={march}", str(source), "-o", str(built)], capture_output=True, text=True
        )
        if result.returncode:
            raise KernelError(f"{compiler} failed on {source.name}:\n{result.stderr[-2000:]}")
        built.replace(library)  # atomic: another process may be building the same one
    return library


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "folio"


def has_matrix_tiles() -> bool:
    """Whether the processor multiplies bfloat16 matrices in tiles (AMX), several times faster than in vectors."""
    return "amx_bf16" in _cpu_flags().split()


def _cpu_flags() -> str:
    """What `-march=native` depends on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
