"""The built-in model: its name and folder. It was trained by `tools/builtin_model`."""

from pathlib import Path

BUILTIN = "builtin"
BUILTIN_DESCRIPTION = (
    "a toy of 3 million parameters for first steps and tests; serve a real model with `folio serve MODEL`"
)
BUILTIN_FOLDER = Path(__file__).parent / "model"


def resolve_model(model: str) -> str:
    """The folder or Hub id behind a model's name."""
    return str(BUILTIN_FOLDER) if model == BUILTIN else model
