"""Build of the C++ kernels.

A wheel has the libraries of each of `INSTRUCTION_SETS` (`folio.kernels.cpu.wheel`). Where there are none, as in a
checkout or on other processors, they are compiled for this machine's processor, into the user's cache: by
`compile_all`, or when one is first loaded.

The libraries need no torch headers. Those with parallel loops have threads of their own (`csrc/pool.h`), as many as
torch uses: they share its OpenMP runtime, because torch is imported before they are loaded, and ask it for the number.
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
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from folio.kernels.compilations import note_compilation
from folio.kernels.errors import KernelError

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "csrc"
PACKAGED = Path(__file__).parent / "lib"  # of a wheel
# No -ffast-math: linked into a library it sets flush-to-zero for the whole process.
_FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC"]
_WITHOUT_OPENMP = ("chain",)  # for routers, which do not import torch
_NATIVE = "native"


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """Processors that a wheel has libraries for.

    Attributes:
        march: the compiler's options.
        features: those of /proc/cpuinfo that a processor needs.
    """

    name: str
    march: tuple[str, ...]
    features: frozenset[str]


_AVX2 = frozenset(("avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = ("-march=x86-64-v4", "-mavx512vnni")
# The fastest first.
INSTRUCTION_SETS = (
    InstructionSet("avx512bf16", (*_VNNI, "-mavx512bf16"), _AVX512 | {"avx512_vnni", "avx512_bf16"}),
    InstructionSet("avx512vnni", _VNNI, _AVX512 | {"avx512_vnni"}),
    InstructionSet("avx512", ("-march=x86-64-v4",), _AVX512),
    InstructionSet("avx2", ("-march=x86-64-v3",), _AVX2),
)


@cache
def load_library(name: str, march: str = _NATIVE) -> ctypes.CDLL:
    """The library of `csrc/<name>.cpp`: the wheel's, or compiled unless it is cached for this source, compiler and
    processor. Imports torch unless the library has no parallel loops.

    Args:
        march: the compiler's name of the processor.

    Raises:
        KernelError: there is no compiler, it failed, or the cache folder cannot be used.
    """
    if name not in _WITHOUT_OPENMP:
        importlib.import_module("torch")
    source = _FOLDER / f"{name}.cpp"
    with _in_cache(source.name):
        library = ctypes.CDLL(str(_library(source, march).make()))
    note_compilation(source.name)
    return library


def build_name(name: str, march: str = _NATIVE) -> str:
    """A name for what `load_library(name, march)` loads, different for each source, compiler and processor."""
    return Path(load_library(name, march)._name).stem


def load_function(name: str, function: str, *arguments: Any, result: Any = None, march: str = _NATIVE) -> Any:
    """A function of `load_library(name, march)`, with these types of arguments and result."""
    loaded = load_library(name, march)[function]
    loaded.argtypes, loaded.restype = arguments, result
    return loaded


def missing_libraries() -> list[str]:
    """Names of the libraries that are to be compiled on this machine, by `compile_all` or at their first use. Raises as
    `compile_all`."""
    with _in_cache("a kernel"):
        return [source.stem for source in _sources() if not _library(source, _NATIVE).path.exists()]


def compile_all() -> None:
    """Compile the libraries that this machine lacks, side by side.

    Raises:
        KernelError: there is no compiler, it failed, or the cache folder cannot be used.
    """
    with _in_cache("a kernel"):
        _compile_each([_library(source, _NATIVE) for source in _sources()])


def compile_packaged(folder: Path) -> None:
    """Compile the libraries of each of `INSTRUCTION_SETS` into a wheel's folder, on x86-64.

    Raises:
        KernelError: there is no compiler, or it failed; older ones do not know all of the sets.
        OSError: the folder cannot be used.
    """
    _compile_each(
        [
            _compiled(source, chosen.march, folder, f"{source.stem}.{chosen.name}")
            for source in _sources()
            for chosen in INSTRUCTION_SETS
        ]
    )


@dataclass(frozen=True, slots=True)
class _Library:
    """A library's file, and the command that compiles it, but for the output's path; empty for a wheel's library."""

    path: Path
    command: tuple[str, ...] = ()

    def make(self) -> Path:
        """Compile it unless it is there."""
        if self.path.exists():
            return self.path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self.path.parent) as build:
            built = Path(build) / self.path.name
            result = subprocess.run([*self.command, "-o", str(built)], capture_output=True, text=True)
            if result.returncode:
                raise KernelError(f"{self.command[0]} failed on {self.command[-1]}:\n{result.stderr[-2000:]}")
            built.replace(self.path)  # atomic: another process may be building the same library
        logger.info("compiled %s for this processor in %.0f s", self.path, time.monotonic() - begun)
        return self.path


def _sources() -> list[Path]:
    return sorted(_FOLDER.glob("*.cpp"))


def _library(source: Path, march: str) -> _Library:
    """A source's library for this machine: the wheel's, or one of the cache."""
    if march == _NATIVE:
        features = set(_cpu_flags().split())
        for chosen in INSTRUCTION_SETS:
            if chosen.features <= features and (found := sorted(PACKAGED.glob(f"{source.stem}.{chosen.name}-*.so"))):
                return _Library(found[0])
    return _compiled(source, (f"-march={march}",), _cache(), source.stem, processor=_cpu_flags())


def _compiled(source: Path, march: Sequence[str], folder: Path, name: str, *, processor: str = "") -> _Library:
    """The library `<name>-<key>.so` in a folder. The key is different for each source, compiler, set of options and
    processor."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise KernelError("no C++ compiler (g++) found; install one, for example `apt-get install g++`")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    flags = [*_FLAGS, *(() if source.stem in _WITHOUT_OPENMP else ("-fopenmp",)), *march]
    key = hashlib.sha256()
    headers = "".join(path.read_text() for path in sorted(_FOLDER.glob("*.h")))
    for part in (source.read_text(), headers, version, " ".join(flags), processor):
        key.update(part.encode())
    return _Library(folder / f"{name}-{key.hexdigest()[:16]}.so", (compiler, *flags, str(source)))


def _compile_each(libraries: Sequence[_Library]) -> None:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(_Library.make, libraries))


@contextmanager
def _in_cache(what: str) -> Iterator[None]:
    """Raise `KernelError` for a cache folder, or a compiler, that cannot be used."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(
            f"{what} cannot be compiled in {_cache()}: {error}; set XDG_CACHE_HOME to another folder"
        ) from error


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "folio"


def _cpu_flags() -> str:
    """The processor's features, on which `-march=native` depends."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
