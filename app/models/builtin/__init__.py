"""The built-in model: its name and folder. It was trained by `tools/builtin_model`."""

from contextlib import suppress
from pathlib import Path

from folio.app.errors import ModelError
from folio.app.models.gguf.hub import is_hub_file
from folio.app.models.gguf.names import resolve_gguf
from folio.app.models.named import BUILTIN, NAMED

__all__ = ["BUILTIN", "BUILTIN_DESCRIPTION", "BUILTIN_FOLDER", "local_folder", "resolve_model"]

BUILTIN_DESCRIPTION = (
    "a toy of 3 million parameters for first steps and tests; `folio pull smollm2` fetches a real model"
)
BUILTIN_FOLDER = Path(__file__).parent / "model"


def resolve_model(model: str) -> str:
    """The folder or Hub id behind a model's name; of a GGUF file the folder of its metadata. Raises `ModelError`."""
    if model == BUILTIN:
        return str(BUILTIN_FOLDER)
    model = str(NAMED[model].path) if model in NAMED else model
    return resolve_gguf(model) or model


def local_folder(model: str) -> Path:
    """The same as a path, but nothing is downloaded: the name itself if it is the Hub's, or of a damaged GGUF file, of
    which `name_fault` and `checkpoint_faults` tell."""
    with suppress(ModelError):
        return Path(model if is_hub_file(model) else resolve_model(model))
    return Path(model)
