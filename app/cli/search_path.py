"""Where modules are imported from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import app


def add_working_directory() -> None:
    """Let modules of the working directory be imported, for `import_path`, but after all others: a folder `app` of the
    user's must not hide ours."""
    script_folder = os.path.dirname(os.path.realpath(sys.argv[0]))
    if sys.path[:1] == [script_folder]:  # of the console script; Ray would put it in front of its workers' paths
        del sys.path[0]
    # Ours explicitly: an editable installation's are found after every folder of the path.
    for folder in (str(Path(app.__path__[0]).parent), os.getcwd()):
        if folder not in sys.path:
            sys.path.append(folder)
