"""`folio plan`: targets, the table, JSON, and what cannot be planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from folio.app.cli.main import main
from folio.app.cli.plan import DEVICES, choose_target
from tests.app.engine.model.quantised_checkpoints import quantised_file
from tests.conftest import HYBRIDS, SMALL, MakeCheckpoint


def test_a_plan(make_checkpoint: MakeCheckpoint, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(make_checkpoint("llama", **SMALL))
    arguments = ["plan", folder, "--device", "l4", "--memory", "16GiB", "--tokens", "1000", "--dtype", "bfloat16"]
    assert main([*arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["device"], figures["device_name"], figures["memory_bytes"]) == ("cuda", "l4", 16 << 30)
    assert figures["kv_layout"] == "sliced"
    assert figures["granularity_bytes"] == 2 << 20
    assert figures["weight_bytes"] == 2 * figures["num_parameters"]
    assert figures["kv_budget_bytes"] == figures["num_pages"] * figures["page_bytes"]
    device = figures["device_plan"]
    parts = ("weight_bytes", "activation_bytes", "graph_bytes", "headroom_bytes", "kv_bytes")
    assert sum(device[name] for name in parts) == int(0.9 * (16 << 30))
    handle_bytes = figures["groups"][0]["handle_bytes"]
    assert device["kv_bytes"] - handle_bytes < figures["kv_budget_bytes"] <= device["kv_bytes"]
    [group] = figures["groups"]
    # Three layers are one slice; 64 tokens are 24 KiB, so that many blocks share an allocation.
    assert (group["block_tokens"], group["num_slices"], group["block_bytes"]) == (64, 1, 64 * 384)
    assert group["handle_bytes"] == group["extent_blocks"] * figures["page_bytes"]
    assert group["handle_bytes"] % (2 << 20) == 0
    assert group["bytes_per_token"] == 3 * 2 * 2 * 16 * 2  # layers, K and V, heads, dimension, bytes
    assert figures["longest_sequence_tokens"] == 1024  # the model's context
    assert figures["num_replicas"] == len(figures["replicas"]) == 6
    assert figures["replicas"][0]["sequences"] == figures["sequences"]
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())  # a long path wraps
    for part in (
        "on l4, 16 GiB",
        "llama, ",
        "(the model's context)",
        "graphs 1 GiB headroom 1 GiB KV cache 12.31 GiB: ",
        "on one device: 6 fit",
    ):
        assert part in shown


def test_recurrent_states_have_a_row(make_checkpoint: MakeCheckpoint, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(make_checkpoint("bamba", **HYBRIDS["bamba"]))
    assert main(["plan", folder, "--memory", "1GiB"]) == 0
    assert "recurrent states" in capsys.readouterr().out


def test_targets() -> None:
    assert choose_target("H100", None).memory_bytes == DEVICES["h100"] == 80 * 10**9
    assert choose_target("h100", 7).memory_bytes == 7
    assert (choose_target("cuda", 7).kind, choose_target(None, 7).kind) == ("cuda", "cpu")
    assert choose_target(None, None).memory_bytes > 1 << 20  # this machine's


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--device", "h1000"], "--device is 'h1000'; choose cpu, cuda, or one of"),
        (["--device", "cuda"], "--device cuda needs --memory, such as 80GiB"),
        (["--memory", "lots"], "'lots' is no size"),
        (["--memory", "1MiB"], "the weights take"),
        (["--memory", "0", "--device", "h100"], "the weights take"),  # regression: 0 was as if not given
        (
            ["--gpu-memory-utilization", "1.5", "--device", "l4"],
            "gpu_memory_utilization is 1.5; it must be above 0 and at most 1",
        ),
        (["--kv-layout", "columns"], "'columns' is not one of 'auto', 'interleaved', 'sliced', 'whole', 'per_layer'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "builtin", *arguments]) == 2
    shown = capsys.readouterr()
    assert line in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_a_folder_without_a_model(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path), "--memory", "1GiB"]) == 2
    assert f"cannot plan {str(tmp_path)!r}: it has no config.json" in capsys.readouterr().err
    assert main(["plan", "./nowhere", "--memory", "1GiB"]) == 2
    assert "cannot plan './nowhere': no such folder exists" in capsys.readouterr().err


def test_weights_that_stay_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = quantised_file(tmp_path / "m.gguf")
    assert main(["plan", str(path), "--memory", "1GiB", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["model"] == str(path)
    assert 0.5 * path.stat().st_size < figures["weight_bytes"] < path.stat().st_size
    assert figures["bits_per_weight"] == pytest.approx(8 * figures["weight_bytes"] / figures["num_parameters"])
    assert main(["plan", str(path), "--memory", "1GiB"]) == 0
    assert "packed: " in capsys.readouterr().out
    assert main(["plan", str(path), "--memory", "1GiB", "--tensor-parallel-size", "2"]) == 2
    assert (
        "--tensor-parallel-size is 2; it would cut groups of the 96 inputs of mlp.down_proj" in capsys.readouterr().err
    )
