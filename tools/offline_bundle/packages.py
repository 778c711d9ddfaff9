"""The packages that Folio needs: their requirements, resolved for another Python, and their files.

The list is derived: from `pyproject.toml`, requirement by requirement as the packages' own metadata state them, with
the markers of the target and the versions of `constraints.txt`.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email import message_from_string
from functools import partial
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.offline_bundle.rules import site_path

# Newest glibc that a wheel may ask for. pip takes the wheel for the oldest one.
_NEWEST_GLIBC = 39
_OLDEST_GLIBC = {"x86_64": 5, "aarch64": 17}
_LEGACY = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}


class BundleError(Exception):
    """The archive cannot be made; the message says what to change."""


@dataclass(frozen=True)
class Target:
    """The machine: CPython of a version such as "3.12", on Linux with glibc, of a processor."""

    python: str
    machine: str

    @property
    def tag(self) -> str:
        return f"cp{self.python.replace('.', '')}-linux_{self.machine}"

    def markers(self) -> dict[str, str]:
        """Values of the markers in requirements. Python's patch version is unknown: .0 needs the most packages."""
        return {name: str(value) for name, value in default_environment().items()} | {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }

    def platforms(self) -> list[str]:
        """Tags of the wheels that may be taken, best first."""
        found = []
        for minor in range(_OLDEST_GLIBC[self.machine], _NEWEST_GLIBC + 1):
            found += [f"{_LEGACY[minor]}_{self.machine}"] if minor in _LEGACY else []
            found.append(f"manylinux_2_{minor}_{self.machine}")
        return found


class File(NamedTuple):
    """A file of a package. `path`: below the folder of packages."""

    path: str
    num_bytes: int
    is_executable: bool
    read: Callable[[], bytes]


@dataclass(frozen=True)
class Package:
    """A package of one version. `sha256`: of its wheel, if it comes from one; `glibc`: the oldest minor version of
    glibc 2 that its compiled files run with."""

    name: str
    version: str
    requires: tuple[str, ...]
    files: Callable[[], Iterator[File]] = field(repr=False)
    sha256: str = ""
    glibc: int = 0


class Source(Protocol):
    """Where packages come from."""

    def get(self, requirements: Sequence[Requirement]) -> list[Package]:
        """A package for each requirement. Raises `BundleError` if there is none."""


def resolve(
    project: Package, extras: set[str], source: Source, markers: Mapping[str, str], left_out: Container[str]
) -> list[Package]:
    """All packages that a project and its extras need, and itself, less `left_out` and what only those need.

    Raises:
        BundleError: there is no package for a requirement, or its version is not what another one allows.
    """
    packages = {canonicalize_name(project.name): project}
    done: set[tuple[str, str]] = set()
    pending = [Requirement(f"{project.name}[{','.join(extras)}]")]
    while pending:
        missing = {
            canonicalize_name(need.name): need for need in pending if canonicalize_name(need.name) not in packages
        }
        if missing:
            packages |= dict(zip(missing, source.get(list(missing.values())), strict=True))
        needs: list[Requirement] = []
        for need in pending:
            package = packages[canonicalize_name(need.name)]
            if not need.specifier.contains(package.version, prereleases=True):
                raise BundleError(f"{package.name} is {package.version}, and {need} is needed; change constraints.txt")
            for extra in need.extras | {""}:
                if (package.name, extra) not in done:
                    done.add((package.name, extra))
                    needs += _applying(package, extra, markers)
        pending = [need for need in needs if canonicalize_name(need.name) not in left_out]
    return sorted(packages.values(), key=lambda package: package.name.lower())


def _applying(package: Package, extra: str, markers: Mapping[str, str]) -> list[Requirement]:
    needs = map(Requirement, package.requires)
    return [need for need in needs if need.marker is None or need.marker.evaluate({**markers, "extra": extra})]


class Wheels:
    """Wheels for a target, which pip downloads into `folder`."""

    def __init__(self, folder: Path, target: Target, constraints: Path) -> None:
        self._folder, self._target, self._constraints = folder, target, constraints

    def get(self, requirements: Sequence[Requirement]) -> list[Package]:
        wanted = [f"{need.name}{need.specifier}" for need in requirements]
        arguments = ["--no-deps", "--only-binary=:all:", "--dest", str(self._folder)]
        arguments += ["--python-version", self._target.python, "--implementation", "cp", "--quiet", "--quiet"]
        arguments += [part for platform in self._target.platforms() for part in ("--platform", platform)]
        arguments += ["--constraint", str(self._constraints), *wanted]
        if subprocess.run([sys.executable, "-m", "pip", "download", *arguments]).returncode:
            raise BundleError(
                f"pip found no wheels of {', '.join(wanted)} for {self._target.tag}; its message is above"
            )
        wheels = {canonicalize_name(path.name.partition("-")[0]): path for path in self._folder.glob("*.whl")}
        return [_of_wheel(wheels[canonicalize_name(need.name)]) for need in requirements]


def _of_wheel(path: Path) -> Package:
    name, version = path.name.split("-")[:2]
    info = f"{name}-{version}.dist-info"

    def files() -> Iterator[File]:
        with zipfile.ZipFile(path) as wheel:
            for member in wheel.infolist():
                place = None if member.is_dir() else site_path(member.filename, info)
                if place is not None:
                    is_executable = bool(member.external_attr >> 16 & 0o100)
                    yield File(place, member.file_size, is_executable, partial(wheel.read, member))

    with zipfile.ZipFile(path) as wheel:
        metadata, tags = (wheel.read(f"{info}/{part}").decode() for part in ("METADATA", "WHEEL"))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return _package(metadata, tags, files, digest)


class Installed:
    """The packages of this environment, for its own Python."""

    def get(self, requirements: Sequence[Requirement]) -> list[Package]:
        return [self._package(need) for need in requirements]

    def _package(self, need: Requirement) -> Package:
        try:
            found = distribution(need.name)
        except PackageNotFoundError:
            raise BundleError(f"{need} is not installed; install it, or leave --from-environment out") from None
        metadata, tags = found.read_text("METADATA"), found.read_text("WHEEL")
        if metadata is None or tags is None or found.files is None:
            raise BundleError(f"{need.name} was not installed from a wheel; install it again with pip")
        return _package(metadata, tags, lambda: _installed_files(found))


def _installed_files(found: Distribution) -> Iterator[File]:
    files = [(str(file), Path(str(file.locate()))) for file in found.files or ()]
    info = next(path.partition("/")[0] for path, _ in files if path.endswith(".dist-info/METADATA"))
    for path, place in files:
        if (target := site_path(path, info)) is not None:
            yield _on_disk(target, place)


def _on_disk(path: str, place: Path) -> File:
    return File(path, place.stat().st_size, os.access(place, os.X_OK), place.read_bytes)


def _package(metadata: str, tags: str, files: Callable[[], Iterator[File]], sha256: str = "") -> Package:
    head = message_from_string(metadata)
    minors = [int(minor) for tag in re.findall(r"^Tag: (.*)$", tags, re.MULTILINE) for minor in _minors(tag)]
    return Package(
        head["Name"], head["Version"], tuple(head.get_all("Requires-Dist") or ()), files, sha256, min(minors, default=0)
    )


def _minors(tag: str) -> list[int]:
    """Minor versions of glibc in a wheel's tag."""
    legacy = [minor for minor, name in _LEGACY.items() if f"{name}_" in tag]
    return legacy + [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", tag)]


def project_settings(root: Path) -> dict[str, Any]:
    """The `pyproject.toml` of a checkout."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def project_package(root: Path) -> Package:
    """Folio itself, of a checkout: the files that `pyproject.toml` puts into its wheel."""
    settings = project_settings(root)
    project, setuptools = settings["project"], settings["tool"]["setuptools"]
    extras = project["optional-dependencies"]
    requires = [*project["dependencies"]]
    requires += [f"{need}; extra == '{extra}'" for extra in extras for need in extras[extra]]
    name, version = project["name"], project["version"]
    fields = [("Metadata-Version", "2.1"), ("Name", name), ("Version", version)]
    fields += [("Requires-Python", project["requires-python"]), *(("Requires-Dist", need) for need in requires)]
    metadata = "".join(f"{key}: {value}\n" for key, value in fields).encode()
    info = f"{name.replace('-', '_')}-{version}.dist-info"

    def files() -> Iterator[File]:
        yield File(f"{info}/METADATA", len(metadata), False, lambda: metadata)
        for pattern in project["license-files"]:
            for path in root.glob(pattern):
                yield _on_disk(f"{info}/licenses/{path.name}", path)
        paths = {
            Path(folder, file)
            for pattern in setuptools["packages"]["find"]["include"]
            for top in root.glob(pattern)
            for folder, _, names in os.walk(top, followlinks=True)
            for file in names
            if file.endswith(".py")
        }
        for package, patterns in setuptools["package-data"].items():
            paths |= {path for pattern in patterns for path in (root / package.replace(".", "/")).glob(pattern)}
        for path in sorted(paths):
            yield _on_disk(str(path.relative_to(root)), path)

    return Package(name, version, tuple(requires), files)
