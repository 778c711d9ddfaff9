"""EleutherAI's evaluation harness, with a task of local data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.client import MODEL, QUESTION, Client
from tests.clients.run_tool import run_tool
from tests.clients.scripted_model import ANSWER

pytest.importorskip("lm_eval")

CLIENT = Client("lm-eval", ("lm-eval",))
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{more}
"""
GENERATE = """\
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["<stop>"], max_gen_toks: 32}
metric_list: [{metric: exact_match}]"""
CHOOSE = """\
doc_to_choice: [" sum is 5.", " sum is 6."]
doc_to_target: 0
metric_list: [{metric: acc}]"""


def _results(folder: Path, kind: str, more: str, row: dict[str, str], *options: str) -> dict[str, Any]:
    data = folder / "data.jsonl"
    data.write_text(json.dumps(row) + "\n")
    (folder / "task.yaml").write_text(TASK.format(name="sums", data=data, kind=kind, more=more))
    run_tool(
        "lm_eval", "run", "--tasks", "sums", "--include_path", folder, "--output_path", folder, *options, folder=folder
    )
    [path] = folder.rglob("results*.json")
    return json.loads(path.read_text())["results"]["sums"]


def test_run_chat(url: str, tmp_path: Path) -> None:
    options = ("--model", "local-chat-completions", "--apply_chat_template", "--model_args")
    settings = f"model={MODEL},base_url={url}/v1/chat/completions,num_concurrent=2"
    row = {"question": QUESTION, "answer": ANSWER}
    assert _results(tmp_path, "generate_until", GENERATE, row, *options, settings)["exact_match,none"] == 1.0


def test_run_log_likelihood(url: str, checkpoint: Path, tmp_path: Path) -> None:
    settings = f"model={MODEL},base_url={url}/v1/completions,tokenizer_backend=huggingface,tokenizer={checkpoint}"
    options = ("--model", "local-completions", "--model_args", settings)
    row = {"question": "The", "answer": ""}
    assert _results(tmp_path, "multiple_choice", CHOOSE, row, *options)["acc,none"] == 1.0
