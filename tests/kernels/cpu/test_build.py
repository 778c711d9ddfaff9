"""Libraries of kernels: a wheel's for each instruction set, or compiled for this processor."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from folio.kernels import KernelError
from folio.kernels.cpu import build

FEATURES = {chosen.name: " ".join(sorted(chosen.features)) for chosen in build.INSTRUCTION_SETS}


@pytest.mark.parametrize(
    ("flags", "library"),
    [
        (FEATURES["avx512bf16"] + " amx_tile", "copy.avx512bf16-1.so"),
        (FEATURES["avx512"], "copy.avx512-1.so"),
        (FEATURES["avx2"] + " avx512f", "copy.avx2-1.so"),
        ("sse2 avx", None),
        ("asimd", None),
    ],
)
def test_a_wheel_has_a_library_for_the_processor(
    flags: str, library: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uncached_libraries: None
) -> None:
    """Regression: 86 of the first start's 90 s were the compiler. A processor without any of the sets compiles."""
    packaged, cache = tmp_path / "lib", tmp_path / "cache"
    packaged.mkdir()
    for name in FEATURES:
        (packaged / f"copy.{name}-1.so").touch()
    monkeypatch.setattr(build, "PACKAGED", packaged)
    monkeypatch.setattr(build, "_cpu_flags", lambda: f"flags : {flags}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    loaded: list[str] = []
    monkeypatch.setattr(build.ctypes, "CDLL", loaded.append)
    if library is None:
        monkeypatch.setattr(build.shutil, "which", lambda name: None)
        with pytest.raises(KernelError, match="no C\\+\\+ compiler"):
            build.load_library("copy")
        return
    build.load_library("copy")
    assert loaded == [str(packaged / library)]
    assert "copy" not in build.missing_libraries()
    assert "rotary" in build.missing_libraries()
    assert not cache.exists()


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_libraries_are_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For this processor into the cache, and for each instruction set into a wheel's folder."""
    monkeypatch.setattr(build, "_sources", lambda: [build._FOLDER / "copy.cpp", build._FOLDER / "chain.cpp"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.missing_libraries() == ["copy", "chain"]
    build.compile_all()
    assert build.missing_libraries() == []
    monkeypatch.setattr(build.subprocess, "run", _only_versions(subprocess.run))
    build.compile_all()
    monkeypatch.undo()
    monkeypatch.setattr(build, "_sources", lambda: [build._FOLDER / "copy.cpp"])
    build.compile_packaged(tmp_path / "lib")
    made = sorted(path.name.partition("-")[0] for path in (tmp_path / "lib").iterdir())
    assert made == ["copy.avx2", "copy.avx512", "copy.avx512bf16"]


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("call", [build.missing_libraries, build.compile_all])
def test_a_cache_that_cannot_be_used(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: `folio serve` ended where its user may not look into the home folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"/tmp/{'x' * 300}")
    with pytest.raises(KernelError, match="set XDG_CACHE_HOME to another folder"):
        call()


def test_a_wheel_by_an_old_compiler_has_no_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regression: the installation failed, as g++ 10 knows no x86-64-v3."""
    wheel = pytest.importorskip("folio.kernels.cpu.wheel")

    def fail(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "copy.avx2-1.so").touch()
        raise KernelError("g++ failed")

    monkeypatch.setattr(wheel, "has_libraries", lambda: True)
    monkeypatch.setattr(build, "compile_packaged", fail)
    monkeypatch.setattr(sys, "path", [*sys.path])
    command = wheel.BuildKernels(pytest.importorskip("setuptools").Distribution())
    command.ensure_finalized()
    command.build_lib = str(tmp_path)
    command.run()
    assert not (tmp_path / "folio" / "kernels" / "cpu" / "lib").exists()


def _only_versions(run):  # type: ignore[no-untyped-def]
    def checked(command, **options):  # type: ignore[no-untyped-def]
        assert command[1:] == ["--version"], "compiled again"
        return run(command, **options)

    return checked
