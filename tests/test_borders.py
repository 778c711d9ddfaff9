"""Packages import downwards, and only what they may."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import folio
from benchmarks.structure import (
    LAYERS,
    MOST_BRANCHES,
    MOST_FUNCTION_LINES,
    MOST_LINES,
    Module,
    both_ways,
    circles,
    core_path,
    crowded,
    upward,
)
from benchmarks.structure import modules as read_modules
from folio.app.engine.model.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
# Libraries that a package does without.
FORBIDDEN = {
    "vmem": {"app", "kernels", "ray", "transformers"},
    "kernels": {"app", "vmem", "ray", "transformers"},
    "app/config": {"ray", "torch", "transformers", "fastapi", "starlette", "vmem", "kernels"},
    "app/models": {"ray", "fastapi", "starlette", "pydantic", "app.engine"},
    "app/engine": {"ray", "fastapi", "starlette", "pydantic"},
    "app/shelf": {"ray", "fastapi", "starlette", "pydantic"},
    "app/fleet": {"ray", "fastapi", "starlette", "pydantic", "transformers"},
    "app/replica": {"ray", "fastapi", "starlette", "pydantic", "transformers"},
    "app/edge": {"ray", "app.engine", "vmem", "kernels"},
    "app/api": {"ray", "kernels"},
    "app/dashboard": {"ray", "kernels"},
    "app/models/builtin": {"ray", "vmem", "kernels", "app.engine"},
    "app/proto": {"ray", "vmem", "kernels", "app.engine"},
}

# Functions that would be worse in parts, each with its reason.
LONG = {"app/cli/serve.py:serve": "a parameter for each option of the command"}
BRANCHED = {
    "app/api/events.py:_only_text": "for each token of a stream",
    "app/api/output/json_text.py:call_header": "reads a call character by character, with a way out behind each",
    "app/api/output/parser.py:_parse": "the parser's loop over text as it comes; its states are its branches",
    "app/engine/request/request.py:_take": "for each token: calls would slow decoding down",
    "app/engine/sampling/state.py:_note_length": "for each token: calls would slow decoding down",
    "app/engine/step/step_loop.py:step": "one step from its launch to its deltas, and each way in which it fails",
    "app/serving/calls.py:_pieces": "for each piece of a stream, and each way in which a stream ends",
    "app/shelf/arbiter.py:_step_towards": "takes one number of free bytes down, in one order",
}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name.removeprefix("folio.") for name in names}


@cache
def modules() -> dict[str, Module]:
    return read_modules(ROOT)


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_no_forbidden_imports(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        for name in imported(path):
            crossed = [f for f in FORBIDDEN[folder] if name == f or name.startswith(f + ".")]
            assert not crossed, f"{path.relative_to(ROOT)} imports {name}"


def test_every_package_has_a_layer_and_imports_downwards() -> None:
    named = [package for row in LAYERS for package in row]
    for name in modules():
        assert name == "app" or any(name == p or name.startswith(p + ".") for p in named), f"no layer has {name}"
    assert upward(modules()) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(modules()) == []


def test_packages_of_the_engine_do_not_import_each_other() -> None:
    assert both_ways(modules(), "app/engine") == []


def test_files_and_functions_are_short() -> None:
    limited = [module for module in modules().values() if not module.path.startswith("kernels/")]
    sizes = {f"{module.path}:{name}": size for module in limited for name, size in module.functions.items()}
    assert {module.path for module in modules().values() if module.lines > MOST_LINES} == set()
    assert {name for name, (lines, _) in sizes.items() if lines > MOST_FUNCTION_LINES} == LONG.keys()
    assert {name for name, (_, count) in sizes.items() if count > MOST_BRANCHES} == BRANCHED.keys()
    assert crowded(ROOT) == []


def test_the_core_path_is_short() -> None:
    """Reading it must stay possible in a day."""
    files = core_path(ROOT)
    assert 0 < len(files) <= 17
    assert sum((ROOT / path).read_text().count("\n") for path in files) <= 5_000


def test_no_test_imports_another() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        others = [name for name in imported(path) if re.match(r"tests(\.\w+)*\.test_\w+\.", name)]
        assert others == [], path


def test_only_serving_imports_ray() -> None:
    without = [
        module.path
        for module in modules().values()
        if module.name.startswith("app.serving.")
        and not any(re.match(r"ray(\.|$)|app\.serving\.", name) for name in imported(ROOT / module.path))
        and not module.path.endswith("__init__.py")
    ]
    assert without == []


@pytest.mark.processes
def test_the_engine_imports_where_ray_and_gpu_libraries_are_missing() -> None:
    code = """
import sys
for name in ("ray", "triton", "cuda", "fastapi", "pydantic"):
    sys.modules[name] = None  # makes an import of it fail
from folio import app, kernels, vmem
import folio.app.engine
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_front_has_the_public_names() -> None:
    from folio import LLM, AsyncEngine, ChatCompletionRequest, Folio, SamplingParams

    assert {LLM, AsyncEngine, ChatCompletionRequest, Folio, SamplingParams} <= {
        getattr(folio, name) for name in dir(folio) if not name.startswith("_")
    }
    with pytest.raises(AttributeError, match="module 'folio' has no attribute 'Foil'"):
        folio.Foil  # noqa: B018


@pytest.mark.processes
def test_heavy_libraries_are_imported_where_they_are_needed() -> None:
    """Regression: a start took 40 s, because each process of Serve imported torch and transformers; the client took
    seven."""
    code = """
import sys
def check(*names):
    assert not (found := [name for name in names if name in sys.modules]), found
import folio.vmem, folio.kernels, folio.app.engine, folio.app.client
from folio import ChatCompletionRequest, Folio, SamplingParams
Folio("http://127.0.0.1:8000")
check("torch", "transformers", "ray")
# Serve's controller, and all that it starts
import folio.app.main, folio.app.serving.autoscaling, folio.app.serving.router
check("torch", "transformers")
from folio.app.compat.transformers import imported_without_torch
from folio.app.engine.model.tokenizer import load_tokenizer
with imported_without_torch():  # an ingress
    tokenizer = load_tokenizer("builtin")
check("torch")
light = tokenizer.apply_chat_template([{"role": "user", "content": "What is Folio?"}], return_dict=False)
print(light)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    whole = load_tokenizer("builtin").apply_chat_template(
        [{"role": "user", "content": "What is Folio?"}], return_dict=False
    )
    assert done.stdout == f"{whole}\n"
