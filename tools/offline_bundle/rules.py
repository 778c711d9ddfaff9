"""Files and packages that an offline archive leaves out, with reasons."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

# Packages that the machine has, with what they bring along.
GIVEN = {
    "torch": "its build is the device's, and gigabytes",
    "transformers": "the models' code, whose version the user chooses",
    "huggingface-hub": "transformers bounds its version from both sides",
    "numpy": "what torch and transformers of that machine were compiled for",
    "safetensors": "as transformers wants it",
    "tokenizers": "transformers bounds its version from both sides",
}
# Packages that ray[serve] names and that nothing imports here; what they alone need is left out with them.
UNUSED = {
    "cryptography": "for requests to Google's clouds, which no module here makes",
    "py-spy": "Ray's dashboard runs it to show the stacks of workers",
    "virtualenv": "for a runtime_env that installs packages, which needs a network",
}


@dataclass(frozen=True)
class Row:
    """Files of packages that are left out. `patterns`: of paths below the folder of packages; `*` matches `/`, too."""

    patterns: tuple[str, ...]
    reason: str


TRIMMED = (
    Row(("ray/jars/*", "ray/cpp/*"), "Ray for Java and C++"),
    Row(
        tuple(f"ray/{part}/*" for part in ("air", "data", "llm", "rllib", "serve/llm", "train", "tune", "workflow")),
        "Ray's libraries for training and data; Serve imports none of them",
    ),
    Row(("ray/dashboard/client/*",), "the page of Ray's dashboard; Folio has its own"),
    Row(("*/tests/*",), "tests of packages"),
    Row(("*/__pycache__/*", "*.pyc"), "Python compiles modules again"),
    Row(("*.js.map",), "for debuggers of JavaScript"),
    Row(("*.pyi", "*.pyx", "*.pxd", "*/py.typed"), "for type checkers and Cython"),
    Row(
        tuple(f"*.dist-info/{name}" for name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "sboms/*")),
        "for pip; RECORD would name files that are left out",
    ),
)
_LICENSE = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|THIRD_PARTY)", re.IGNORECASE)


def trimmed_by(path: str) -> Row | None:
    """The row by which a file of a package is left out, or `None`. Licences stay."""
    if _LICENSE.match(path.rpartition("/")[2]):
        return None
    return next((row for row in TRIMMED if any(fnmatchcase(path, pattern) for pattern in row.patterns)), None)


def site_path(path: str, info: str) -> str | None:
    """The path of a wheel's or an installed package's file below the folder of packages, or `None` if its place is
    another one, as of commands and headers. Licences go to those of the package.

    Args:
        info: the package's folder of metadata, NAME-VERSION.dist-info.
    """
    if match := re.match(r"[^/]+\.data/(?:purelib|platlib)/(.+)", path):
        return match[1]
    if path.startswith("../") or re.match(r"[^/]+\.data/", path):
        name = path.rpartition("/")[2]
        return f"{info}/licenses/{name}" if _LICENSE.match(name) else None
    return path
