"""A result says of which dtype its tensors were, and is refused if its row says another one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import checkpoints, facts, harness, report
from benchmarks.engine import sweep

ARGS = argparse.Namespace(device="cpu", quick=True)


@pytest.fixture(autouse=True)
def of_this_test_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(facts, "_dtypes", set())
    monkeypatch.setattr(harness, "commit", lambda: "unknown")
    monkeypatch.setenv(harness.RESULTS_VARIABLE, str(tmp_path))
    monkeypatch.setenv(facts.FILE_VARIABLE, str(tmp_path / "facts.jsonl"))


def test_an_engine_is_of_the_dtype_of_the_row_whatever_its_config_says(tmp_path: Path) -> None:
    """The benchmark of graphs made its config without a dtype, and its steps, of float32, were "not explained"."""
    config = checkpoints.config_of("tiny")
    assert config.dtype is None
    with sweep.make_llm(config, "cpu", sweep.QUICK, warm_up=False, num_threads=1):
        harness.finish("graphs-tiny", ARGS, {"graphs": 1}, {})
    assert json.loads((tmp_path / "graphs-tiny.json").read_text())["dtype"] == "bfloat16"
    assert facts.noted_dtypes() == "bfloat16"
    lines = (tmp_path / "facts.jsonl").read_text().splitlines()
    assert {json.loads(line)["dtype"] for line in lines} == {"bfloat16"}


@pytest.mark.parametrize(
    ("name", "measured", "refused"),
    [
        ("graphs-tiny", ["torch.float32"], "is of float32, and benchmarks/figures.yaml says bfloat16"),
        ("graphs-tiny", ["bfloat16", "float32"], "is of bfloat16, float32"),
        ("throughput-llama-3-8b", [], "is of no recorded dtype"),
        ("attention", ["torch.bfloat16"], None),
        ("routing", [], None),  # measures no tensors
    ],
)
def test_a_result_of_another_dtype_is_not_written(
    name: str, measured: list[str], refused: str | None, tmp_path: Path
) -> None:
    facts.note_dtypes(*measured)
    if refused is None:
        harness.finish(name, ARGS, {}, {})
    else:
        with pytest.raises(SystemExit, match=refused):
            harness.finish(name, ARGS, {}, {})
    assert (tmp_path / f"{name}.json").exists() == (refused is None)


@pytest.mark.parametrize(
    ("device", "content", "refused"),
    [
        ("cuda", {"dtype": "bfloat16"}, False),
        ("cuda", {"dtype": "float32"}, True),
        ("cuda", {}, True),
        ("cpu", {"dtype": "float32"}, True),
        ("cpu", {"dtype": None}, True),
        ("cpu", {}, False),  # from before dtypes were recorded
    ],
)
def test_a_result_of_another_dtype_is_not_read(
    device: str, content: dict[str, str | None], refused: bool, tmp_path: Path
) -> None:
    folder = tmp_path / device
    folder.mkdir()
    (folder / "attention.json").write_text(json.dumps(content | {"raw": None}))
    if refused:
        with pytest.raises(ValueError, match=r"figures\.yaml says bfloat16"):
            report.result("attention", folder)
    else:
        assert report.result("attention", folder) == content
