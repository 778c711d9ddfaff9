"""The wheel in an environment of its own, beside a project that has a folder `app/` as many have."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.served import free_port
from tests.docs.blocks import ROOT
from tests.e2e.pages import Runner
from tests.processes import until

START_S = 240.0
# Without a path to the checkout.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "PYTHONPATH")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without compiled kernels, which those of the checkout replace: their compilation takes minutes."""
    source = tmp_path_factory.mktemp("source")
    for name in ("folio", "app", "vmem", "kernels"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(source / "dist"), str(source)]
    no_compiler = os.environ | {"PATH": str(Path(sys.executable).parent)}
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, env=no_compiler)
    [made] = (source / "dist").iterdir()
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with the libraries of this one but not with its Folio."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("app", "vmem", "kernels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True")
    return tmp_path


@pytest.fixture
def server(python: Path, project: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """`folio serve` in the project's folder: its host and port, and the variables for other Ray apps."""
    port = free_port()
    command = [python.with_name("folio"), "serve", "--port", str(port), "--replicas", "1", "--kv-memory", "256MiB"]
    output = project / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=project, env=ENVIRONMENT, stdout=file, stderr=file, start_new_session=True
        )

    def is_ready() -> bool:
        assert process.poll() is None, output.read_text()
        try:
            return "RAY_ADDRESS=" in output.read_text() and httpx.get(f"http://127.0.0.1:{port}/ready").is_success
        except httpx.TransportError:
            return False

    try:
        until(is_ready, START_S)
        yield f"127.0.0.1:{port}", dict(re.findall(r"(RAY_[A-Z_]+)=(\S+)", output.read_text()))
        process.terminate()
        assert process.wait(START_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_it_has_one_name(wheel: Path) -> None:
    """Regression: it installed `app`, `vmem` and `kernels`, which a project's own folders hid."""
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in files} == {"folio"}
    for name in ("app/models/builtin/model/model.safetensors", "app/cli/default.yaml", "kernels/cpu/csrc/chain.cpp"):
        assert f"folio/{name}" in files


def test_the_readme(server: tuple[str, dict[str, str]], python: Path, project: Path) -> None:
    address, ray_variables = server
    runner = Runner(address, ray_variables, project, python=python, path=project)
    try:
        own = "import app, vmem, kernels, folio; print(app.MINE and vmem.MINE and kernels.MINE, folio.__file__)"
        imported = subprocess.check_output([python, "-c", own], cwd=project, env=ENVIRONMENT, text=True)
        assert imported == f"True {next(python.parents[1].glob('lib/*/site-packages'))}/folio/__init__.py\n"
        runner.run_page("README.md")
    finally:
        runner.close()
