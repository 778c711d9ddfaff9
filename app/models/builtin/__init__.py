"""The built-in model: its name and folder. It was trained by `tools/builtin_model`."""

from pathlib import Path

from folio.app.models.named import BUILTIN, NAMED

__all__ = ["BUILTIN", "BUILTIN_DESCRIPTION", "BUILTIN_FOLDER", "resolve_model"]

BUILTIN_DESCRIPTION = (
    "a toy of 3 million parameters for first steps and tests; `folio pull smollm2` fetches a real model"
)
BUILTIN_FOLDER = Path(__file__).parent / "model"


def resolve_model(model: str) -> str:
    """The folder, file or Hub id behind a model's name."""
    if model in NAMED:
        return str(NAMED[model].path)
    return str(BUILTIN_FOLDER) if model == BUILTIN else model
