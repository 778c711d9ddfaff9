"""`folio check` refuses numbers of ranks that would cut the groups of quantised weights, and says which do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from folio.app.config.checkpoint import rank_faults
from folio.app.models.builtin import resolve_model
from tests.app.engine.model.quantised_checkpoints import KINDS, quantised_file, write_mixture, write_quantised
from tests.app.engine.model.quantised_mixtures import write_mixture_file
from tests.conftest import EXPERTS, SMALL, MakeCheckpoint


@pytest.mark.parametrize(
    ("width", "ranks", "fault"), [(128, 2, ""), (96, 2, "96 inputs of mlp.down_proj"), (96, 1, "")]
)
def test_gguf(tmp_path: Path, width: int, ranks: int, fault: str) -> None:
    folder = Path(resolve_model(str(quantised_file(tmp_path / "m.gguf", width=width))))
    found = list(rank_faults(folder, ranks))
    assert len(found) == bool(fault)
    assert all(fault in one and one.endswith("one scale for each 32: use 1") for one in found)


def test_plain_layers_are_divided_anywhere(tmp_path: Path) -> None:
    plain = tuple(f"blk.{layer}.ffn_down.weight" for layer in range(3))
    path = quantised_file(tmp_path / "m.gguf", width=96, plain=plain)
    assert list(rank_faults(Path(resolve_model(str(path))), 2)) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{"intermediate_size": 128}, {"intermediate_size": 192, "head_dim": 32}])
def test_checkpoints(kind: str, settings: dict[str, Any], make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder, dense = write_quantised(make_checkpoint("llama", **SMALL | settings), kind, tmp_path)
    for ranks in (2, 4):
        [fault] = list(rank_faults(folder, ranks)) or [""]
        if kind == "gptq":
            assert "desc_act" in fault
        elif ranks == 2:
            assert fault == ""
        elif "head_dim" in settings:
            assert "192 inputs of mlp.down_proj" in fault
            assert fault.endswith("for each 32: use 2")
        else:
            assert "64 inputs of self_attn.o_proj" in fault
            assert fault.endswith("for each 32: use 2")
        assert list(rank_faults(dense, ranks)) == []
    assert list(rank_faults(folder, 1)) == []


@pytest.mark.parametrize(
    ("kind", "model", "settings", "fault"),
    [
        ("int4", "mixtral", {"num_local_experts": 4}, "96 inputs of block_sparse_moe.experts.w2"),
        ("fp8", "qwen3_moe", EXPERTS, "32 inputs of mlp.experts.down_proj"),
        ("nf4", "qwen3_moe", EXPERTS | {"moe_intermediate_size": 64}, ""),
        ("int8", "qwen2_moe", EXPERTS | {"moe_intermediate_size": 64}, "32 inputs of mlp.shared_expert.down_proj"),
        ("mxfp4", "gpt_oss", {"num_local_experts": 4}, "96 inputs of mlp.experts.down_proj"),
        ("mxfp4", "gpt_oss", {"num_local_experts": 4, "intermediate_size": 128}, ""),
    ],
)
def test_experts(
    kind: str, model: str, settings: dict[str, Any], fault: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    dense, folder = write_mixture(make_checkpoint(model, **SMALL | {"head_dim": 32} | settings), tmp_path, kind)
    assert not fault or fault in next(rank_faults(folder, 2))
    assert fault or not any(rank_faults(folder, 2))
    assert list(rank_faults(folder, 1)) == list(rank_faults(dense, 2)) == []


def test_experts_of_gguf(tmp_path: Path) -> None:
    write_mixture_file(tmp_path / "m.gguf", "qwen2moe")
    folder = Path(resolve_model(str(tmp_path / "m.gguf")))
    assert list(rank_faults(folder, 2)) == []
    assert "64 inputs of mlp.experts.down_proj" in next(rank_faults(folder, 4))
