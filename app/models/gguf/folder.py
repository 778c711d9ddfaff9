"""Folder of a GGUF model's metadata: config and tokenizer in the usual files, and a file that names the GGUF files."""

from __future__ import annotations

import json
from pathlib import Path

FILES = "gguf.json"


def gguf_files(folder: Path) -> tuple[Path, ...]:
    """The GGUF files that a folder of metadata stands for; none if it is another folder."""
    path = folder / FILES
    return tuple(map(Path, json.loads(path.read_bytes())["files"])) if path.is_file() else ()
