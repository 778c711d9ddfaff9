"""llama.cpp as a rival: its server, its benchmark and its perplexity tool, for this processor.

`python -m benchmarks.llama_cpp --build` compiles them from the sources that the sdist of llama-cpp-python has (ten
minutes on two cores), below `~/.cache/folio/rivals` unless `--folder` names another folder; the programs are in
`llama_cpp/bin` there. CMake and Ninja are wheels in an environment of their own; a C++ compiler must be there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.rivals.processes import FOLDER, Running, server

SOURCES = "llama-cpp-python==0.3.36"
BUILT_WITH = ("cmake==4.4.5", "ninja==1.13.2", "scikit-build-core==1.1.2")  # pip asks the last one for the name
PROGRAMS = ("llama-server", "llama-bench", "llama-perplexity")
OPTIONS = (
    "CMAKE_BUILD_TYPE=Release",
    "GGML_NATIVE=ON",
    "LLAMA_CURL=OFF",
    "LLAMA_USE_PREBUILT_UI=OFF",
    "BUILD_SHARED_LIBS=OFF",
)
SLOTS, SLOT_TOKENS = 16, 1024
_PERPLEXITY = re.compile(r"Final estimate: PPL = ([\d.]+)")


def build(folder: Path = FOLDER) -> None:
    """Compile the programs, unless they are there."""
    if is_built(folder):
        print(f"llama.cpp is there: {folder / 'llama_cpp'}")
        return
    print(f"building llama.cpp of {SOURCES} in {folder / 'llama_cpp'}: ten minutes", flush=True)
    to = folder / "llama_cpp" / "bin"
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        tools, built = Path(scratch, "tools", "bin"), Path(scratch, "build")
        subprocess.run([sys.executable, "-m", "venv", tools.parent], check=True)
        pip = [str(tools / "python"), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", *BUILT_WITH], check=True)
        fetch = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        subprocess.run([*pip, *fetch, "--dest", scratch, SOURCES], check=True)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as sources:
            sources.extractall(scratch, filter="data")
        (source,) = Path(scratch).glob("*/vendor/llama.cpp")
        _repair(source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
        environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
        options = [f"-D{option}" for option in OPTIONS]
        for command in (
            ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(built), *options],
            ["cmake", "--build", str(built), "--target", *PROGRAMS],
        ):
            subprocess.run(command, env=environment, check=True)
        for program in PROGRAMS:
            shutil.copy2(built / "bin" / program, to)


def _repair(file: Path) -> None:
    """Let it run where there is AMX. GCC 12 is told by its own header of 8 of the 64 bytes that this instruction reads,
    never writes the others, and the programs crash at their first product."""
    text, call = file.read_text(), "_tile_loadconfig(&tc);"
    assert text.count(call) == 1
    file.write_text(text.replace(call, f'__asm__ volatile("" :: "m"(tc)); {call}'))


def is_built(folder: Path = FOLDER) -> bool:
    return all((folder / "llama_cpp" / "bin" / program).exists() for program in PROGRAMS)


@contextmanager
def running(model: Path, port: int, folder: Path = FOLDER) -> Iterator[Running]:
    """A server of a GGUF file, with a slot for each of 16 requests and a thread for each core."""
    address = ["--host", "127.0.0.1", "--port", str(port)]
    slots = ["--parallel", str(SLOTS), "--ctx-size", str(SLOTS * SLOT_TOKENS)]
    with server("llama.cpp", [*_command("llama-server", model, folder), *address, *slots], port) as there:
        yield there


def perplexity(model: Path, text: Path, window: int, folder: Path = FOLDER) -> float:
    """Perplexity of the second halves of a text's windows of so many tokens. Raises `RuntimeError`."""
    command = [*_command("llama-perplexity", model, folder), "--file", str(text), "--ctx-size", str(window)]
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace")
    output = ran.stdout + ran.stderr
    if ran.returncode or (found := _PERPLEXITY.search(output)) is None:
        raise RuntimeError(f"llama-perplexity failed: {output[-3000:]}")
    return float(found[1])


def _command(program: str, model: Path, folder: Path) -> list[str]:
    threads = str(len(os.sched_getaffinity(0)))
    return [str(folder / "llama_cpp" / "bin" / program), "--model", str(model), "--threads", threads]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    if args.build:
        build(args.folder)
    state = "built" if is_built(args.folder) else "not built (python -m benchmarks.llama_cpp --build)"
    print(f"llama.cpp is {state} in {args.folder}")


if __name__ == "__main__":
    main()
