"""`folio check` refuses numbers of ranks that would cut the groups of quantised weights, and says which do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from folio.app.config.checkpoint import rank_faults
from folio.app.models.builtin import resolve_model
from tests.app.engine.model.quantised_checkpoints import KINDS, quantised_file, write_quantised
from tests.conftest import SMALL, MakeCheckpoint


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


def test_quantised_experts_have_one_rank(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint("mixtral", **SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2})
    folder, dense = write_quantised(source, "int4", tmp_path)
    [fault] = rank_faults(folder, 2)
    assert fault.endswith("are quantised, which one rank can compute: use 1")
    assert list(rank_faults(folder, 1)) == list(rank_faults(dense, 2)) == []
