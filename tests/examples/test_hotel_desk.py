"""The hotel desk without a cluster: what the register finds, how drafts are compared, and the config file."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import cloudpickle
from ray.serve.schema import ServeDeploySchema

from examples.hotel_desk.app import DeskArgs, build_desk
from examples.hotel_desk.desk import api, mean_logprob
from examples.hotel_desk.register import find_notes, read_keys
from folio.app.client import ChatCompletion
from folio.app.main import AppArgs

FOLDER = Path(__file__).parents[2] / "examples/hotel_desk"
KEYS = {101: 11, 102: 22, 103: 33, 201: 44, 301: 55}


@pytest.mark.parametrize(
    ("question", "rooms"),
    [
        ("What is the key of room 102?", [101, 102, 103]),
        ("Rooms 201 and 301, please", [103, 201, 301]),
        ("I have lost 999 keys", [103, 201, 301]),
        ("Hello", []),
    ],
)
def test_the_register_finds_rooms_and_their_neighbours(question: str, rooms: list[int]) -> None:
    assert find_notes(KEYS, question, most=3) == [f"The key of room {room} is {KEYS[room]}." for room in rooms]


def test_the_register_has_each_room_once() -> None:
    keys = read_keys()
    assert len(keys) == len((FOLDER / "keys.csv").read_text().splitlines()) - 1 == 100


def test_the_likelier_draft_is_found() -> None:
    def choice(index: int, *logprobs: float) -> dict[str, Any]:
        tokens = [{"token": "x", "logprob": p, "bytes": None, "top_logprobs": []} for p in logprobs]
        return {"index": index, "message": {"content": "x"}, "logprobs": {"content": tokens}}

    drafts = ChatCompletion.model_validate(
        {
            "id": "a",
            "created": 0,
            "model": "m",
            "choices": [choice(0, -1.0, -3.0), choice(1, -1.0), choice(2)],
            "usage": {
                "prompt_tokens": 1,
                "completion_tokens": 3,
                "total_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        }
    )
    assert [mean_logprob(drafts, index) for index in range(3)] == [-2.0, -1.0, float("-inf")]


def test_the_copy_that_replicas_get_has_the_same_body() -> None:
    """With annotations that are strings it had none, and every question was answered 422."""
    copy = cloudpickle.loads(cloudpickle.dumps(api))
    assert copy.openapi()["paths"]["/ask"]["post"]["requestBody"]["required"] is True


def test_the_config_file_is_valid() -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load((FOLDER / "hotel_desk.yaml").read_text()))
    [folio, desk] = config.applications
    assert AppArgs.model_validate(folio.args).engine.model == "builtin"
    assert DeskArgs.model_validate(desk.args).folio == folio.name
    assert inspect.signature(build_desk).parameters["args"].annotation is DeskArgs  # else Serve passes a dict
    for application in (folio, desk):
        module, _, function = application.import_path.partition(":")
        assert (FOLDER.parents[1] / (module.replace(".", "/") + ".py")).read_text().count(f"def {function}(") == 1
