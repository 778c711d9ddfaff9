"""The search path of modules."""

from __future__ import annotations

import os
import sys


def add_working_directory() -> None:
    """Let modules of the working directory be imported, for `import_path`, but after all others: a `folio.py` of the
    user's must not hide ours."""
    script_folder = os.path.dirname(os.path.realpath(sys.argv[0]))
    if sys.path[:1] == [script_folder]:  # of the console script; Ray would put it in front of its workers' paths
        del sys.path[0]
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
