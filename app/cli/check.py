"""`folio check`: faults of a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
folio check serve_config.yaml
folio serve ./my-model --print-config > folio.yaml && folio check folio.yaml
"""


def check(file: Annotated[Path, typer.Argument(help="A configuration file of `folio serve --config`.")]) -> None:
    """Print a configuration file's faults, a line each, and start nothing."""
    from folio.app.checks import load_config
    from folio.app.cli.start.search_path import add_working_directory

    add_working_directory()
    load_config(file)
    print(f"{file}: ok")
