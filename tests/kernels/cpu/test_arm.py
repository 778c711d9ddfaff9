"""The C++ kernels on Arm: compiled for it, and compared with plain loops in an emulator (`scalar.cpp`)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from folio.kernels.cpu import build

_COMPILER, _EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
_CSRC = Path(build.__file__).parent / "csrc"
_OPTIONS = ("-std=c++17", "-fopenmp", "-march=armv8.2-a+dotprod", f"-I{_CSRC}")

pytestmark = pytest.mark.processes
_with_compiler = pytest.mark.skipif(shutil.which(_COMPILER) is None, reason=f"no {_COMPILER}")


def test_the_program_is_as_old_as_the_kernels() -> None:
    """It compiles for this processor: few machines have the other compiler."""
    source = Path(__file__).parent / "scalar.cpp"
    subprocess.run(["g++", "-std=c++17", "-fopenmp", f"-I{_CSRC}", "-fsyntax-only", str(source)], check=True)


@_with_compiler
@pytest.mark.third_day(1)
def test_all_sources_compile() -> None:
    sources = [str(source) for source in sorted(_CSRC.glob("*.cpp"))]
    subprocess.run([_COMPILER, *_OPTIONS, "-fsyntax-only", "-Wall", "-Werror", *sources], check=True)


@_with_compiler
@pytest.mark.third_day(1)
@pytest.mark.skipif(shutil.which(_EMULATOR) is None, reason=f"no {_EMULATOR}")
def test_products_and_a_layer(tmp_path: Path) -> None:
    """Without optimisation, which takes four times as long to compile."""
    source, program = Path(__file__).parent / "scalar.cpp", tmp_path / "scalar"
    subprocess.run([_COMPILER, *_OPTIONS, "-static", str(source), "-o", str(program)], check=True)
    result = subprocess.run([_EMULATOR, str(program)], capture_output=True, text=True)
    assert result.returncode == 0, [line for line in result.stdout.splitlines() if not line.startswith("ok")]
    assert "layer" in result.stdout
