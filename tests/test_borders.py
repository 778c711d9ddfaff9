"""Who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "vmem": {"app", "kernels", "ray", "transformers"},
    "kernels": {"app", "vmem", "ray", "transformers"},
    "app/engine": {"ray", "fastapi", "starlette", "pydantic", "app.serving", "app.openai"},
    "app/fleet": {"ray", "fastapi", "starlette", "pydantic", "transformers", "app.engine", "app.serving", "app.openai"},
    "app/edge": {"ray", "app.engine", "app.serving", "vmem", "kernels"},
    "app/openai": {"ray", "app.serving", "vmem", "kernels"},
    "app/builtin": {"ray", "vmem", "kernels", "app.engine", "app.serving"},
}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_no_forbidden_imports(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        for name in imported(path):
            crossed = [f for f in FORBIDDEN[folder] if name == f or name.startswith(f + ".")]
            assert not crossed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.processes
def test_the_engine_imports_where_ray_and_gpu_libraries_are_missing() -> None:
    code = """
import sys
for name in ("ray", "triton", "cuda", "fastapi", "pydantic"):
    sys.modules[name] = None  # makes an import of it fail
import vmem, kernels, app.engine
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
