"""Build of the C++ kernels: compile for this machine's processor on first use, and load.

The libraries need no torch headers. Those with parallel loops share torch's OpenMP runtime, because torch is imported
before they are loaded; so `torch.set_num_threads` governs them.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kernels.compilations import note_compilation
from kernels.errors import KernelError

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "csrc"
# No -ffast-math: linked into a library it sets flush-to-zero for the whole process.
_FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC"]


@cache
def load_library(name: str, march: str = "native", *, openmp: bool = True) -> ctypes.CDLL:
    """The library of `csrc/<name>.cpp`, compiled unless it is cached for this source, compiler and processor.

    Args:
        march: the compiler's name of the processor.
        openmp: whether the library has parallel loops, and imports torch for its runtime.

    Raises:
        KernelError: there is no compiler, it failed, or the cache folder cannot be used.
    """
    if openmp:
        importlib.import_module("torch")
    flags = [flag for flag in _FLAGS if openmp or flag != "-fopenmp"]
    source = _FOLDER / f"{name}.cpp"
    try:
        library = ctypes.CDLL(str(_build(source, flags, march)))
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(
            f"{source.name} cannot be compiled in {_cache()}: {error}; set XDG_CACHE_HOME to another folder"
        ) from error
    note_compilation(source.name)
    return library


def build_name(name: str, march: str = "native") -> str:
    """A name of `load_library(name, march)` which is another one for another source, compiler or processor."""
    return Path(load_library(name, march)._name).stem


def load_function(name: str, function: str, *arguments: Any, result: Any = None, march: str = "native") -> Any:
    """A function of `load_library(name, march)`, with these types of arguments and result."""
    loaded = load_library(name, march)[function]
    loaded.argtypes, loaded.restype = arguments, result
    return loaded


def _build(source: Path, flags: Sequence[str], march: str) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise KernelError("no C++ compiler (g++) found; install one, for example `apt-get install g++`")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256()
    headers = "".join(path.read_text() for path in sorted(_FOLDER.glob("*.h")))
    for part in (source.read_text(), headers, version, " ".join(flags), march, _cpu_flags()):
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
            [compiler, *flags, f"-march={march}", str(source), "-o", str(built)], capture_output=True, text=True
        )
        if result.returncode:
            raise KernelError(f"{compiler} failed on {source.name}:\n{result.stderr[-2000:]}")
        built.replace(library)  # atomic: another process may be building the same library
    return library


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "folio"


def has_matrix_tiles() -> bool:
    """True if the processor multiplies bfloat16 matrices in tiles (AMX), several times faster than in vectors."""
    return "amx_bf16" in _cpu_flags().split()


def _cpu_flags() -> str:
    """The processor's features, on which `-march=native` depends."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
