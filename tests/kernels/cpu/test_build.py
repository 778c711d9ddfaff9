"""Libraries of kernels: a wheel's for each instruction set, or compiled for this processor."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

with suppress(ImportError):
    # Before any test: it replaces Python's own distutils, which fails once another module has imported a part of it.
    import setuptools  # noqa: F401

from folio.kernels import KernelError
from folio.kernels.cpu import build
from tests.kernels.conftest import UseCompiler

FEATURES = {chosen.name: " ".join(sorted(chosen.features)) for chosen in build.INSTRUCTION_SETS}


@pytest.mark.parametrize(
    ("flags", "library"),
    [
        (FEATURES["avx512bf16"] + " amx_tile", "copy.avx512bf16-1.so"),
        (FEATURES["avx512vnni"], "copy.avx512vnni-1.so"),
        (FEATURES["avx512"], "copy.avx512-1.so"),
        (FEATURES["avx2"] + " avx512f", "copy.avx2-1.so"),
        ("sse2 avx", None),
        ("asimd", None),
    ],
)
def test_a_wheel_has_a_library_for_the_processor(
    flags: str, library: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, use_compiler: UseCompiler
) -> None:
    """Regression: 86 of the first start's 90 s were the compiler. A processor without any of the sets compiles."""
    packaged, cache = tmp_path / "lib", tmp_path / "cache"
    packaged.mkdir()
    for name in FEATURES:
        (packaged / f"copy.{name}-1.so").touch()
    monkeypatch.setattr(build, "PACKAGED", packaged)
    monkeypatch.setattr(build, "_cpu_flags", lambda: f"flags : {flags}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    if library is None:
        use_compiler(None)
        with pytest.raises(KernelError, match="no C\\+\\+ compiler"):
            build.load_library("copy")
        return
    with pytest.raises(KernelError, match=f"{packaged / library}: file too short"):
        build.load_library("copy")
    assert "copy" not in build.missing_libraries()
    assert "rotary" in build.missing_libraries()
    assert not cache.exists()


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_libraries_are_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For this processor into the cache, and for each instruction set into a wheel's folder."""
    sources = [Path(build.__file__).with_name("csrc") / name for name in ("copy.cpp", "chain.cpp")]
    monkeypatch.setattr(build, "_sources", lambda: sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.missing_libraries() == ["copy", "chain"]
    build.compile_all()
    assert build.missing_libraries() == []
    compiled = {path: path.stat() for path in tmp_path.rglob("*.so")}
    build.compile_all()
    assert len(compiled) == 2
    assert {path: path.stat() for path in tmp_path.rglob("*.so")} == compiled
    del sources[1]
    build.compile_packaged(tmp_path / "lib")
    made = sorted(path.name.partition("-")[0] for path in (tmp_path / "lib").iterdir())
    assert made == sorted(f"copy.{name}" for name in FEATURES)


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("call", [build.missing_libraries, build.compile_all])
def test_a_cache_that_cannot_be_used(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: `folio serve` ended where its user may not look into the home folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"/tmp/{'x' * 300}")
    with pytest.raises(KernelError, match="set XDG_CACHE_HOME to another folder"):
        call()


@pytest.mark.processes
@pytest.mark.skipif(platform.machine() != "x86_64", reason="wheels of others have no libraries")
def test_a_wheel_by_an_old_compiler_has_no_libraries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, use_compiler: UseCompiler
) -> None:
    """Regression: the installation failed, as g++ 10 knows no x86-64-v3."""
    wheel = pytest.importorskip("folio.kernels.cpu.wheel")
    use_compiler('case "$*" in *x86-64-v4*) exit 1;; esac; : > "$last"')
    monkeypatch.syspath_prepend(tmp_path)  # what the command inserts is removed, too
    command = wheel.BuildKernels(pytest.importorskip("setuptools").Distribution())
    command.ensure_finalized()
    command.build_lib = str(tmp_path)
    command.run()
    assert not (tmp_path / "folio" / "kernels" / "cpu" / "lib").exists()
