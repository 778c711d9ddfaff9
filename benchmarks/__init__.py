"""Benchmarks of Folio: `python -m benchmarks.NAME` runs NAME.py of whichever group has it.

A command is named after its file, without its group, so that the names in documents and results hold when a file moves:
the groups' folders belong to this package's search path. `serving`, the group, is a command itself. Code imports a file
by its group; a test holds that no two commands have one name.
"""

from __future__ import annotations

from pathlib import Path

GROUPS = ("engine", "serving", "fleet", "gpu", "rivals")
__path__.extend(str(Path(__file__).parent / group) for group in GROUPS)
