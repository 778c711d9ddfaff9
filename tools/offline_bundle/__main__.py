"""One archive of what `folio serve` needs beside Python, torch and transformers, for machines without a network.

    python -m tools.offline_bundle OUT --python 3.12

It needs pip, and strip of binutils. The packages follow from `pyproject.toml` and `constraints.txt` (`packages.py`);
`rules.py` has what is left out, with reasons.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from benchmarks.harness import commit
from tools.offline_bundle import start
from tools.offline_bundle.packages import (
    BundleError,
    Installed,
    Package,
    Source,
    Target,
    Wheels,
    project_package,
    project_settings,
    resolve,
)
from tools.offline_bundle.rules import GIVEN, TRIMMED, UNUSED, Row, trimmed_by

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
# Time of all files: the same packages make the same archive. Ray may put them into ZIP files, whose days begin in 1980.
_MTIME = 315_532_800
_README = """\
Folio {folio}, commit {commit}, for CPython {python} on Linux {machine}, glibc {glibc} or newer: all but Python and

    {needs}

which the machine has to have, with the packages that they bring along. On a GPU it also needs NVIDIA's driver, and gcc
with Python's headers, which Triton calls. On CPUs it needs g++, which compiles the kernels at the first start into
~/.cache/folio; without it torch computes attention, several times slower.

    sha256sum --quiet -c SHA256SUMS                             # in this folder: all files are as they were
    python{python} bin/folio serve                                 # the built-in toy model; works from any folder
    HF_HUB_OFFLINE=1 python{python} bin/folio serve /data/my-model # a folder in Hugging Face's format

Python code imports Folio with this folder's `site` in PYTHONPATH. bundle.json has what follows, and each wheel's
checksum.

{table}"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    target = Target(options.python, options.machine)
    try:
        if options.from_environment and target != _this():
            raise BundleError(f"--from-environment makes an archive for {_this().tag}, not for {target.tag}")
        if shutil.which(options.strip) is None:
            raise BundleError(f"no {options.strip} found; install binutils, or name another one with --strip")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that incomplete files are removed
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=options.out) as work:
            folder, text = _build(target, options, Path(work))
            # It gets its name only once it is complete.
            packed = Path(work) / f"{folder.name}.tar{'' if options.uncompressed else '.xz'}"
            pack(folder, packed)
            archive = packed.replace(options.out / packed.name)
        checksum = archive.with_name(f"{archive.name}.sha256")
        checksum.write_text(f"{_sha256(archive)}  {archive.name}\n", encoding="utf-8")
    except (BundleError, OSError) as error:
        print(f"offline_bundle: {error}", file=sys.stderr)
        return 2
    print(text)
    print(f"{archive}: {archive.stat().st_size / MIB:.1f} MiB, with {checksum.name}. There:")
    print(f"  sha256sum -c {checksum.name} && tar -xf {archive.name} && python3 {folder.name}/bin/folio serve")
    return 0


def _this() -> Target:
    return Target(f"{sys.version_info[0]}.{sys.version_info[1]}", platform.machine())


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    project = project_settings(ROOT)["project"]
    parser = argparse.ArgumentParser(prog="python -m tools.offline_bundle", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="folder for the archive and its checksum")
    parser.add_argument("--python", default=_this().python, help="version of CPython there; by default this one's")
    parser.add_argument("--machine", default=_this().machine, choices=("x86_64", "aarch64"), help="processor there")
    parser.add_argument(
        "--extra",
        action="append",
        default=[],
        choices=tuple(project["optional-dependencies"]),
        help="an extra of Folio; may be repeated",
    )
    parser.add_argument(
        "--from-environment",
        action="store_true",
        help="take the packages installed here; by default pip downloads them",
    )
    parser.add_argument(
        "--uncompressed", action="store_true", help="make a .tar, five times larger; by default .tar.xz"
    )
    parser.add_argument("--strip", default="strip", help="program that removes symbols, for the processor there")
    options = parser.parse_args(arguments)
    needed = project["requires-python"]
    # Two numbers, because the archive's command compares them with those of its Python.
    if not re.fullmatch(r"\d+\.\d+", options.python) or not SpecifierSet(needed).contains(options.python):
        parser.error(f"--python is {options.python!r}; name a version {needed} by two numbers, such as 3.12")
    return options


def _build(target: Target, options: argparse.Namespace, work: Path) -> tuple[Path, str]:
    """The archive's folder below `work`, and the text that describes it."""
    project = project_package(ROOT)
    folder = work / f"folio-{project.version}-{target.tag}"
    (wheels := work / "wheels").mkdir()
    source: Source = Installed() if options.from_environment else Wheels(wheels, target, ROOT / "constraints.txt")
    packages = resolve(project, set(options.extra), source, target.markers(), GIVEN | UNUSED)
    trimmed: Counter[Row] = Counter()
    paths = [unpack(package, folder / "site", trimmed) for package in packages]
    strip([path for found in paths for path in found], options.strip)
    sizes = [sum(path.stat().st_size for path in found) for found in paths]
    bundle = {
        "folio": project.version,
        "commit": commit(),
        "python": target.python,
        "machine": target.machine,
        "glibc": f"2.{max(package.glibc for package in packages)}",
        "given": [str(need) for need in map(Requirement, project.requires) if need.name in GIVEN and not need.marker],
        "packages": [
            {"name": package.name, "version": package.version, "bytes": size, "sha256": package.sha256}
            for package, size in zip(packages, sizes, strict=True)
        ],
        "packages_left_out": GIVEN | UNUSED,
        "files_left_out": [{"files": row.patterns, "reason": row.reason, "bytes": trimmed[row]} for row in TRIMMED],
    }
    text = describe(bundle)
    (folder / "bundle.json").write_text(json.dumps(bundle, indent=1) + "\n", encoding="utf-8")
    (folder / "README.txt").write_text(text, encoding="utf-8")
    command = folder / "bin" / "folio"
    command.parent.mkdir()
    shutil.copyfile(start.__file__, command)
    command.chmod(0o755)
    sums = "".join(f"{_sha256(path)}  {path.relative_to(folder)}\n" for path in _files(folder))
    (folder / "SHA256SUMS").write_text(sums, encoding="utf-8")
    return folder, text


def unpack(package: Package, site: Path, trimmed: Counter[Row]) -> list[Path]:
    """Write a package's files, less those that a row of `rules` leaves out, whose bytes are added to `trimmed`."""
    written = []
    for file in package.files():
        if row := trimmed_by(file.path):
            trimmed[row] += file.num_bytes
            continue
        path, content = site / file.path, file.read()
        if path.exists():  # packages of one namespace have the same __init__.py
            if path.read_bytes() != content:
                raise BundleError(f"{package.name} has another {file.path} than a package before it")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if file.is_executable else 0o644)
        written.append(path)
    return written


def strip(paths: Sequence[Path], program: str) -> None:
    """Remove symbols from the programs and libraries among the files."""
    binaries = [path for path in paths if path.open("rb").read(4) == b"\x7fELF"]
    result = subprocess.run([program, "--strip-unneeded", *map(str, binaries)], capture_output=True, text=True)
    if result.returncode:
        raise BundleError(
            f"{program} failed; name that of the machine's processor with --strip:\n{result.stderr[-2000:]}"
        )


def describe(bundle: Mapping[str, Any]) -> str:
    """How an archive is used, and tables of what is in it and what is not."""
    rows = [["MiB", "Package", "Version"], ["---", "-------", "-------"]]
    rows += [[_mib(entry), entry["name"], entry["version"]] for entry in bundle["packages"]]
    total = sum(entry["bytes"] for entry in bundle["packages"])
    rows += [
        [f"{total / MIB:.1f}", "in all", ""],
        ["", "", ""],
        ["MiB", "Files left out", "Reason"],
        ["---", "---", "---"],
    ]
    rows += [[_mib(entry), entry["files"][0], entry["reason"]] for entry in bundle["files_left_out"]]
    rows += [["", "", ""], ["", "Packages left out", "Reason"], ["", "---", "---"]]
    rows += [["", name, reason] for name, reason in bundle["packages_left_out"].items()]
    table = "".join(f"{left:>5}  {middle:<35} {right}".rstrip() + "\n" for left, middle, right in rows)
    return _README.format(**bundle, needs="\n    ".join(bundle["given"]), table=table)


def _mib(entry: Mapping[str, Any]) -> str:
    return f"{entry['bytes'] / MIB:.1f}"


def pack(folder: Path, archive: Path) -> None:
    """Write a folder into an archive, compressed if its name ends in .xz, in an order, with owners and times that are
    always the same."""
    # FILTER_X86 makes the addresses of calls absolute, so that they repeat.
    filters = [{"id": lzma.FILTER_X86}] if "x86_64" in archive.name else []
    filters += [{"id": lzma.FILTER_LZMA2, "preset": 9}]
    with (
        lzma.open(archive, "wb", filters=filters) if archive.suffix == ".xz" else archive.open("wb") as file,
        tarfile.open(fileobj=file, mode="w") as tar,
    ):
        for path in _files(folder):
            tar.add(path, str(path.relative_to(folder.parent)), filter=_plain)


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o755 if info.mode & 0o100 else 0o644
    info.mtime = _MTIME
    return info


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
