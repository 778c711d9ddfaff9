"""The rules of offline archives: what is resolved, what is left out, and where files go."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.offline_bundle import __main__ as program
from tools.offline_bundle import start
from tools.offline_bundle.__main__ import main, pack
from tools.offline_bundle.packages import BundleError, Package, Target, project_package, resolve
from tools.offline_bundle.rules import GIVEN, UNUSED, site_path, trimmed_by

ROOT = Path(__file__).parents[2]
TARGET = Target("3.12", "x86_64")


class Index:
    """Packages by name: a version, and requirements."""

    def __init__(self, **packages: tuple[str, ...]) -> None:
        self._packages = packages
        self.asked: list[str] = []

    def get(self, requirements: Sequence[Requirement]) -> list[Package]:
        self.asked += [need.name for need in requirements]
        return [self._package(need.name) for need in requirements]

    def _package(self, name: str) -> Package:
        version, *requires = self._packages[name]
        return Package(name, version, tuple(requires), lambda: iter(()))


@pytest.mark.parametrize(
    ("requires", "packages", "expected"),
    [
        (["a>=1"], {"a": ("1.5", "b", "a[x]", "c; extra == 'x'"), "b": ("2", "A"), "c": ("3",)}, "a b c"),
        (["a"], {"a": ("1", "b; extra == 'x'", "c; python_version < '3.12'", "d; sys_platform == 'win32'")}, "a"),
        (["a; extra == 'traces'"], {"a": ("1",)}, "a"),
        (["a; extra == 'cuda'"], {"a": ("1",)}, ""),
        (["torch>=9", "a"], {"a": ("1", "numpy", "Py-Spy", "HuggingFace_Hub", "b"), "b": ("1",)}, "a b"),
        (["a", "a[x]; python_full_version < '3.12.1'"], {"a": ("1", "b; extra == 'x'"), "b": ("2.0rc1",)}, "a b"),
    ],
    ids=["a circle through an extra", "markers", "an extra", "another extra", "given packages", "an extra, later"],
)
def test_resolve(requires: list[str], packages: dict[str, tuple[str, ...]], expected: str) -> None:
    project, index = Package("folio", "0", tuple(requires), lambda: iter(())), Index(**packages)
    found = resolve(project, {"traces"}, index, TARGET.markers(), GIVEN | UNUSED)
    assert " ".join(package.name for package in found if package is not project) == expected
    assert len(index.asked) == len(set(index.asked)) == len(found) - 1  # each once


def test_versions_that_contradict_each_other_are_refused() -> None:
    project = Package("folio", "0", ("a", "b"), lambda: iter(()))
    with pytest.raises(BundleError, match=r"b is 2, and b<2 is needed; change constraints\.txt"):
        resolve(project, set(), Index(a=("1", "b<2"), b=("2",)), TARGET.markers(), ())


def test_wheels_for_old_systems_come_first() -> None:
    tags = TARGET.platforms()
    assert tags[0] == "manylinux1_x86_64"
    assert (
        tags.index("manylinux2014_x86_64") < tags.index("manylinux_2_17_x86_64") < tags.index("manylinux_2_28_x86_64")
    )
    assert Target("3.12", "aarch64").platforms()[0] == "manylinux2014_aarch64"


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("ray/serve/api.py", "ray/serve/api.py"),
        ("ray-2.dist-info/METADATA", "ray-2.dist-info/METADATA"),
        ("x-1.data/purelib/x/y.py", "x/y.py"),
        ("x-1.data/platlib/x.so", "x.so"),
        ("x-1.data/scripts/ray", None),
        ("x-1.data/data/share/man/x.1", None),
        ("../../../bin/ray", None),
        ("x-1.data/data/THIRD_PARTY_LICENSES", "i.dist-info/licenses/THIRD_PARTY_LICENSES"),
        ("../../../LICENSE", "i.dist-info/licenses/LICENSE"),
    ],
)
def test_places_of_files(path: str, place: str | None) -> None:
    assert site_path(path, "i.dist-info") == place


@pytest.mark.parametrize(
    ("path", "is_left_out"),
    [
        ("ray/jars/ray_dist.jar", True),
        ("ray/data/_internal/x.py", True),
        ("ray/serve/llm/__init__.py", True),
        ("ray/serve/_private/api.py", False),
        ("ray/_private/thirdparty/dacite/core.py", False),
        ("ray/dashboard/client/build/index.html", True),
        ("ray/dashboard/agent.py", False),
        ("x/tests/data.py", True),
        ("x/latests/data.py", False),
        ("x/tests/LICENSE.txt", False),
        ("x/__pycache__/y.cpython-311.pyc", True),
        ("x-1.dist-info/METADATA", False),
        ("x-1.dist-info/direct_url.json", True),
        ("x-1.dist-info/licenses/NOTICE", False),
    ],
)
def test_trimming(path: str, is_left_out: bool) -> None:
    assert (trimmed_by(path) is not None) == is_left_out


def test_the_same_files_make_the_same_archive(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        folder = tmp_path / name / "folio-x86_64"
        (folder / "bin").mkdir(parents=True)
        for part in ("bin/folio", "README.txt") if made else ("README.txt", "bin/folio"):
            (folder / part).write_text(part)
        (folder / "bin" / "folio").chmod(0o755)
        pack(folder, archive := tmp_path / name / "folio-x86_64.tar.xz")
        made.append(archive.read_bytes())
    assert made[0] == made[1]
    with tarfile.open(archive) as tar:
        assert [(entry.name, entry.mode, entry.uid, entry.uname) for entry in tar] == [
            ("folio-x86_64/README.txt", 0o644, 0, ""),
            ("folio-x86_64/bin/folio", 0o755, 0, ""),
        ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--python", "3.12.3"], r"--python is '3\.12\.3'; name a version >=3\.11 by two numbers, such as 3\.12"),
        (["--python", "3.9"], r"--python is '3\.9'; name a version >=3\.11"),
        (["--python", "three"], r"--python is 'three'"),
        (["--extra", "nonsense"], r"--extra: invalid choice: 'nonsense' \(choose from .*traces"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: an archive for Python 3.12.3 was made, which no Python could start; an unknown extra was nothing."""
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "out"), *arguments])
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def sigterm() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("sigterm")
@pytest.mark.parametrize("way", ["killed", "full", "no folder"])
def test_an_interrupted_build_leaves_nothing(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: parts of archives, and folders of hundreds of MiB, were left; a folder that cannot be written was a
    traceback."""
    out = tmp_path / "out"

    def build(target: Target, options: object, work: Path) -> tuple[Path, str]:
        (folder := work / "folio-x").mkdir()
        (folder / "one").write_text("1")
        (folder / "two").write_text("2")
        return folder, ""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        if info.name.endswith("two"):
            if way == "killed":
                os.kill(os.getpid(), signal.SIGTERM)
            raise OSError(errno.ENOSPC, "No space left on device")
        return info

    monkeypatch.setattr(program, "_build", build)
    monkeypatch.setattr(program, "_plain", plain)
    if way == "no folder":
        out.write_text("")
    if way == "killed":
        with pytest.raises(SystemExit, match="143"):
            main([str(out), "--strip", "true"])
    else:
        assert main([str(out), "--strip", "true"]) == 2
        expected = "File exists" if way == "no folder" else "No space left on device"
        assert re.fullmatch(f"offline_bundle: .*{expected}.*\n", capsys.readouterr().err)
    assert way == "no folder" or [*out.iterdir()] == []


@pytest.mark.processes
@pytest.mark.parametrize("wrong", ["python", "folder"])
def test_where_the_command_cannot_run(wrong: str, tmp_path: Path) -> None:
    """Regression: Python 3.6, which systems still call python3, ended in a traceback about importlib.metadata instead
    of the message; below a folder with a colon in its name the server's processes found no module."""
    source, folder = Path(start.__file__).read_text(), tmp_path / ("x:y" if wrong == "folder" else "x")
    ast.parse(source, feature_version=(3, 6))
    (folder / "bin").mkdir(parents=True)
    (command := folder / "bin" / "folio").write_text(source)
    python, machine = (
        "3.99" if wrong == "python" else f"{sys.version_info[0]}.{sys.version_info[1]}",
        os.uname().machine,
    )
    (folder / "bundle.json").write_text(json.dumps({"python": python, "machine": machine, "given": []}))
    program = (
        "import runpy, sys; sys.modules['importlib.metadata'] = None; runpy.run_path(sys.argv[1], None, '__main__')"
    )
    done = subprocess.run([sys.executable, "-S", "-c", program, command], capture_output=True, text=True)
    assert done.returncode == 2
    expected = "this archive is for Python 3.99" if wrong == "python" else "which separates paths in PYTHONPATH; move"
    assert re.match(f"folio: .*{expected}.*\n$", done.stderr)


@pytest.mark.processes
def test_folio_itself_is_whole() -> None:
    """`package-data` names all that git has in the folders of the code and is not Python."""
    tracked = subprocess.run(
        ["git", "ls-files", "app", "kernels", "vmem"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    files = {file.path: file for file in project_package(ROOT).files()}
    assert {f"folio/{path}" for path in tracked if not path.endswith(".md")} <= files.keys()
    assert b"Requires-Dist: torch>=2" in files["folio_serve-0.1.0.dist-info/METADATA"].read()
    assert "folio_serve-0.1.0.dist-info/licenses/LICENSE" in files
