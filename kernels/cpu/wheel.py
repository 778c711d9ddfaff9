"""The wheel's part of the C++ kernels: on x86-64 a library of each for every instruction set, compiled as it is built.

Without a compiler, with one older than g++ 11, which does not know all of these sets, for an editable installation, and
on other processors the wheel has none: kernels are compiled where they run (`folio.kernels.cpu.build`).
"""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


def has_libraries() -> bool:
    """Whether a wheel that is built on this machine has libraries."""
    is_x86 = sys.platform.startswith("linux") and platform.machine() == "x86_64"
    return is_x86 and (shutil.which("g++") or shutil.which("c++")) is not None


class BuildKernels(build_py):
    """Copy the packages, and compile the libraries beside them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode or not has_libraries():
            return
        sys.path.insert(0, str(Path(__file__).parents[3]))  # setuptools loads this file alone
        from folio.kernels import KernelError
        from folio.kernels.cpu.build import compile_packaged

        folder = Path(self.build_lib) / "folio" / "kernels" / "cpu" / "lib"
        try:
            compile_packaged(folder)
        except (KernelError, OSError) as error:
            shutil.rmtree(folder, ignore_errors=True)  # some of them would be used in place of better ones
            self.warn(f"the wheel has no C++ kernels, which are compiled where they run: {error}")


class PlatformWheel(bdist_wheel):
    """Name the platform in a wheel with libraries; these need no particular Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not has_libraries()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, system = super().get_tag()
        return (python, abi, system) if self.root_is_pure else ("py3", "none", system)
