"""Runs the Python blocks of all pages in one process: libraries are imported once. `python -m tests.docs.runner`.

Each line of the input is a JSON object with `page` and `code`, and each answer one with `output` and, after an
exception, `error`. Blocks of a page share their variables and their event loop.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import sys
import traceback
from typing import Any


class Page:
    """The state that the blocks of a page share."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._loop: asyncio.Runner | None = None

    def run(self, code: str) -> dict[str, str]:
        """Run a block, which may await outside of functions, as in `python -m asyncio`."""
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                compiled = compile(code, self.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
                begun = eval(compiled, self._names)
                if inspect.iscoroutine(begun):
                    self._loop = self._loop or asyncio.Runner()
                    self._loop.run(begun)
        except BaseException:  # noqa: BLE001  # the reader gets it
            return {"output": printed.getvalue(), "error": traceback.format_exc()}
        return {"output": printed.getvalue()}

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
        if "ray" in sys.modules and (ray := sys.modules["ray"]).is_initialized():
            ray.shutdown()


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else prints does not mix with the answers
    page: Page | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if page is None or page.name != asked["page"]:
            if page is not None:
                page.close()
            page = Page(asked["page"])
        print(json.dumps(page.run(asked["code"])), file=answers, flush=True)
    if page is not None:
        page.close()


if __name__ == "__main__":
    main()
