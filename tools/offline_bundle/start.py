#!/usr/bin/env python3
"""The command `folio` of an offline archive: `python3 bin/folio serve`. It works from any folder."""

import json
import os
import platform
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
SITE = HERE / "site"


def main() -> int:
    bundle = json.loads((HERE / "bundle.json").read_text(encoding="utf-8"))
    target, here = (
        (bundle["python"], bundle["machine"]),
        (f"{sys.version_info[0]}.{sys.version_info[1]}", platform.machine()),
    )
    if target != here:
        print(
            f"folio: this archive is for Python {target[0]} on {target[1]}, and this is Python {here[0]} on {here[1]} "
            f"({sys.executable}); run it as `python{target[0]} {__file__}`, or build another one",
            file=sys.stderr,
        )
        return 2
    if os.pathsep in str(SITE):
        print(
            f"folio: {SITE} has a {os.pathsep!r}, which separates paths in PYTHONPATH; move the folder", file=sys.stderr
        )
        return 2
    # For this process, and those that Ray starts. Before what is installed: these versions were tested together.
    sys.path.insert(1, str(SITE))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    missing = [text for text in map(problem, bundle["given"]) if text]
    if missing:
        print(f"folio: {'; '.join(missing)}; install it for {sys.executable}", file=sys.stderr)
        return 2
    from folio.app.cli.main import main as folio

    return folio()


def problem(need: str) -> "str | None":
    """The problem with a package that the machine has to have; `None` if there is none."""
    from importlib.metadata import PackageNotFoundError, version  # not above: Python 3.7 lacks it, and gets the error

    from packaging.requirements import Requirement

    required = Requirement(need)
    try:
        found = version(required.name)
    except PackageNotFoundError:
        return f"{need} is not installed"
    if required.specifier.contains(found, prereleases=True):
        return None
    return f"{required.name} is {found}, and {need} is needed"


if __name__ == "__main__":
    sys.exit(main())
