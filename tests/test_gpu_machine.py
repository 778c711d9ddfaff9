"""A GPU machine has what the engine needs, and none of the server's packages: no Ray, no pydantic, perhaps no git.

One process in which the import system does not find them (this file, run as a module) does all that is tried there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
MISSING = {"fastapi", "jsonschema", "llguidance", "openai", "pydantic", "ray", "schemathesis", "starlette", "uvicorn"}
MISSING |= {"aiohttp", "matplotlib", "prometheus_client", "psutil"}  # there today, but not promised
if not any(re.match(r"httpx\b", needed) for needed in importlib.metadata.requires("huggingface_hub") or ()):
    MISSING.add("httpx")  # the one of transformers 5.17 brings it along
PACKAGES = ("folio/vmem", "folio/kernels", "folio/app/engine", "benchmarks")
TESTS = ("tests/kernels", "tests/vmem", "tests/app/engine")
ENGINE_TESTS = (
    "tests/app/engine/test_engine.py::test_more_requests_than_sequences",
    "tests/app/engine/sampling/test_structure.py::test_without_llguidance_only_structures_are_refused",
)


class Without:
    """A finder of modules that does not find those in `MISSING`."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in MISSING else self._finder.find_spec(name, path, target)


def failed_imports() -> list[str]:
    """Modules that cannot be imported, with the reason."""
    failed = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        try:
            importlib.import_module(name)
        except ImportError as error:
            failed.append(f"{name}: {error}")
    return failed


def run_pytest(*arguments: str) -> tuple[int, str]:
    """Exit status and output."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = pytest.main(["-q", "-p", "no:cacheprovider", *arguments])
    return int(status), output.getvalue()


def finish_a_benchmark() -> dict[str, Any]:
    """What a benchmark writes, in the folder that `FOLIO_RESULTS` names."""
    from benchmarks import harness

    harness.finish("nothing", argparse.Namespace(device="cpu", quick=False), {}, {})
    result: dict[str, Any] = json.loads((Path(os.environ["FOLIO_RESULTS"]) / "nothing.json").read_text())
    return result


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of it, by the name of the function above."""
    folder = tmp_path_factory.mktemp("gpu_machine")
    environment = os.environ | {"PATH": "", "FOLIO_RESULTS": str(folder)}  # no git, and no compiler either
    process = subprocess.run(
        [sys.executable, "-m", __name__], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr[-3000:]
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def test_every_module_is_imported(tried: dict[str, Any]) -> None:
    """`folio.app.engine.sampling.structure` wanted llguidance, and half of the benchmarks httpx, Ray or aiohttp."""
    assert tried["failed_imports"] == []


def test_every_test_for_a_gpu_is_collected(tried: dict[str, Any]) -> None:
    """`import jsonschema` at the top of one file kept all of them from being run."""
    status, output = tried["collected"]
    assert status == pytest.ExitCode.OK, output[-3000:]


def test_the_engine_runs(tried: dict[str, Any]) -> None:
    status, output = tried["engine"]
    assert status == pytest.ExitCode.OK, output[-3000:]
    assert f"{len(ENGINE_TESTS)} passed" in output


def test_a_benchmark_ends_without_git(tried: dict[str, Any]) -> None:
    """Asking git for the commit raised, and the results of the run were lost."""
    assert tried["benchmark"]["commit"] == "unknown"
    assert tried["benchmark"]["versions"]["ray"] != ""


def main() -> None:
    sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
    tries: dict[str, Callable[[], object]] = {
        "failed_imports": failed_imports,
        "collected": lambda: run_pytest("--collect-only", "-m", "gpu", *TESTS),
        "engine": lambda: run_pytest(*ENGINE_TESTS),
        "benchmark": finish_a_benchmark,
    }
    print(json.dumps({name: attempt() for name, attempt in tries.items()}))


if __name__ == "__main__":
    main()
