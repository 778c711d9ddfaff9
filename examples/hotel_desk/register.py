"""Key register: finds the notes that a question needs, without a language model."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path

from ray import serve

KEYS = Path(__file__).with_name("keys.csv")
_ROOM = re.compile(r"(?<!\d)\d{1,6}(?!\d)")


def read_keys(path: Path = KEYS) -> dict[int, int]:
    """Room → key."""
    with path.open(newline="") as lines:
        return {int(row["room"]): int(row["key"]) for row in csv.DictReader(lines)}


def find_notes(keys: Mapping[int, int], question: str, most: int) -> list[str]:
    """At most `most` notes, in order of rooms; none when no room is named. They are those of the rooms that a question
    names, and of the nearest numbers, since a guest may have misread one."""
    named = [int(number) for number in _ROOM.findall(question)]
    if not named:
        return []
    nearest = sorted(keys, key=lambda room: min(abs(room - number) for number in named))
    return [f"The key of room {room} is {keys[room]}." for room in sorted(nearest[:most])]


@serve.deployment(
    max_ongoing_requests=100,
    ray_actor_options={"num_cpus": 0.1},
    autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 20},
)
class KeyRegister:
    """Scales by its own load, independently of Folio."""

    def __init__(self) -> None:
        self._keys = read_keys()

    async def find(self, question: str, most: int = 8) -> list[str]:
        """See `find_notes`."""
        return find_notes(self._keys, question, most)
