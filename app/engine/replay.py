"""Make a journal's decisions again: `python -m app.engine.replay FILE`.

A fresh scheduler gets the arrivals, ends and changes of a journal, in order, and to whatever it asks the answer that
the one before it got. What it asks and decides must be the same; the first difference is reported. Nothing is computed,
and no memory is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.engine.journal import VERSION, Decisions
from app.engine.params import SamplingParams
from app.engine.recovery import RecoveryCost
from app.engine.request import Request, SequenceGroup
from app.engine.scheduler import Scheduler
from app.errors import ConfigError
from vmem import (
    LayerGroup,
    MapError,
    OutOfPages,
    OutOfSwap,
    PrefixMatch,
    SequenceMemory,
    StateLayout,
    SwappedGroup,
    TokenChain,
    ViewPolicy,
    VmemError,
)

_NOTHING_SWAPPED = SwappedGroup((), (), (), 0)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a replay.

    Attributes:
        difference: the first one, with its line; `None` if all decisions were the same.
    """

    num_steps: int
    num_decisions: int
    difference: str | None


class _DiffersError(Exception):
    pass


class _Script:
    """A `SchedulerMemory` and `RecoveryCosts` that answers from a journal."""

    def __init__(self, *, unit_tokens: int, has_states: bool, prefix_cache: bool, pages_per_step: int) -> None:
        self.unit_tokens = unit_tokens
        self.has_states = has_states
        self.prefix_cache = prefix_cache
        self.groups = (LayerGroup((), StateLayout(payload_bytes=pages_per_step, page_bytes=1)),)
        self._answers: list[list[Any]] = []
        self._at = 0
        self._num_appends = 0

    def load(self, answers: list[list[Any]]) -> None:
        self._answers, self._at = answers, 0

    def check_used(self) -> None:
        if self._at < len(self._answers):
            raise _DiffersError(f"it did not ask for {self._answers[self._at][0]}, as it had then")

    def _answer(self, name: str) -> Any:
        asked, answer = self._answers[self._at] if self._at < len(self._answers) else ("nothing", None)
        if asked != name:
            raise _DiffersError(f"it asked for {name}; then it had asked for {asked}")
        self._at += 1
        self._num_appends = 0
        return answer

    def _answer_or_raise(self, name: str) -> Any:
        answer = self._answer(name)
        if isinstance(answer, str):
            raise _error(answer)
        return answer

    @property
    def num_free_pages(self) -> int:
        return self._answer("num_free_pages")

    @property
    def changes(self) -> int:
        return self._answer("changes")

    def pages_for(self, num_tokens: int) -> int:
        return self._answer("pages_for")

    def pages_to_come(self, sequence: SequenceMemory | None, num_tokens: int) -> int:
        return self._answer("pages_to_come")

    def pages_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        return self._answer("pages_needed")

    def pages_of(self, swapped: SwappedGroup) -> int:
        return self._answer("pages_of")

    def match(self, chain: TokenChain, token_ids: Sequence[int]) -> PrefixMatch:
        num_tokens, branch_tokens, awaited = self._answer("match")
        return PrefixMatch((), None, num_tokens, branch_tokens, awaited)

    def shared_tokens(self, sequences: Sequence[SequenceMemory]) -> list[int]:
        return self._answer("shared_tokens")

    def swap_bytes(self, sequences: Sequence[SequenceMemory]) -> int:
        return self._answer("swap_bytes")

    def cost(self, sequences: list[tuple[int, int]], num_bytes: int) -> RecoveryCost:
        return RecoveryCost(*self._answer("cost"))

    def open(self, policy: ViewPolicy = "auto", *, expected_tokens: int = 0) -> SequenceMemory:
        return SequenceMemory(policy, ())

    def reuse(self, sequence: SequenceMemory, chain: TokenChain, token_ids: Sequence[int]) -> int:
        return self._answer_or_raise("reuse")

    def promise(self, sequence: SequenceMemory, num_tokens: int, snapshots: Sequence[int] = ()) -> None:
        pass

    def append(self, sequence: SequenceMemory, num_tokens: int, *, start: int = 0) -> None:
        if self._at < len(self._answers):
            name, answer = self._answers[self._at]
            if name == "append" and answer[0] == self._num_appends:
                self._answer("append")
                raise _error(answer[1])
        self._num_appends += 1

    def begin(self, sequence: SequenceMemory, token_ids: Sequence[int], start: int, end: int) -> None:
        pass

    def commit(self) -> None:
        self._num_appends = 0

    def abort(self) -> None:
        self._num_appends = 0

    def free(self, sequence: SequenceMemory) -> None:
        pass

    def swap_out(self, sequences: Sequence[SequenceMemory]) -> SwappedGroup:
        self._answer_or_raise("swap_out")
        return _NOTHING_SWAPPED

    def swap_in(self, swapped: SwappedGroup) -> list[SequenceMemory]:
        return [SequenceMemory("block_table", ()) for _ in range(self._answer_or_raise("swap_in"))]

    def discard(self, swapped: SwappedGroup) -> None:
        pass


def _error(name: str) -> Exception:
    match name:
        case "OutOfPages":
            return OutOfPages(0, 0)
        case "OutOfSwap" | "RuntimeError" | "MemoryError":
            return OutOfSwap(name)
        case "MapError":
            return MapError(name)
    return VmemError(name)


class _Log(Decisions):
    """A `DecisionLog` that keeps a step's decisions for comparison."""

    def arrived(self, group: SequenceGroup) -> None:
        pass

    def ended(self, request: Request) -> None:
        del self.numbers[request]

    def begin_step(self, groups: Iterable[SequenceGroup], drafts: object) -> None:
        self.made, self.sampled = [], []

    def end_step(self) -> None:
        pass

    def done(self, groups: Iterable[SequenceGroup]) -> None:
        pass

    def end_abort(self, groups: Iterable[SequenceGroup]) -> None:
        pass


class _Player:
    def __init__(self, header: dict[str, Any]) -> None:
        self._script = _Script(**header["memory"])
        self._log = _Log()
        self._scheduler = Scheduler(self._script, recovery=self._script, log=self._log, **header["scheduler"])
        self._requests: dict[int, Request] = {}
        self.num_steps = 0
        self.num_decisions = 0

    def play(self, line: dict[str, Any]) -> None:
        match line["event"]:
            case "arrive":
                group = SequenceGroup(
                    line["priority"], line["arrival"], lockstep=line["lockstep"], tenant=line["tenant"]
                )
                for member in line["members"]:
                    self._add(member, group)
                self._scheduler.add(group)
            case "sync":
                self._sync(line)
            case "end":
                self._scheduler.remove(self._requests.pop(line["id"]))
            case "step":
                self._step(line)
            case "done":
                self._scheduler.done()
                for request in self._log.sampled:
                    request.token_ids.append(0)
            case "abort":
                self._script.load(line["answers"])
                self._scheduler.abort()
                self._script.check_used()
                # In the order in which they lie in the batch, which is the model's business.
                self._compare(sorted(line["made"]), sorted(self._log.take()))
            case "budget":
                pass
            case other:
                raise ConfigError(f"the journal has an event {other!r}, which this version does not know")

    def _step(self, line: dict[str, Any]) -> None:
        self.num_steps += 1
        self._script.load(line["answers"])
        drafts = {self._requests[number]: (0,) * count for number, count in line.get("drafts", ())}
        try:
            self._scheduler.schedule(drafts)
        except VmemError as error:  # so it was then: the device refused, and `abort` follows
            if not _is_refusal(line["answers"]):
                raise _DiffersError(f"it failed with {error!r}; then it did not") from error
        self._scheduler.take_hopeless()
        self._script.check_used()
        self._compare(line["made"], self._log.take())

    def _compare(self, then: list[list[Any]], now: list[list[Any]]) -> None:
        for i in range(max(len(then), len(now))):
            was = then[i] if i < len(then) else "nothing"
            is_ = now[i] if i < len(now) else "nothing"
            if was != is_:
                raise _DiffersError(f"decision {i} is {is_}; then it was {was}")
        self.num_decisions += len(then)

    def _sync(self, line: dict[str, Any]) -> None:
        for member in line["added"]:
            self._add(member, self._requests[member["with"]].group)
        for number, *state in line["changed"]:
            _set_state(self._requests[number], state)
        for numbers in line["together"]:
            members = [self._requests[number] for number in numbers]
            members[0].group.members[:] = members

    def _add(self, member: dict[str, Any], group: SequenceGroup) -> None:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0 if member["prompt_logprobs"] else None)
        chain = TokenChain(self._script.unit_tokens)
        prompt = [0] * member["prompt"]
        request = Request(member["request"], prompt, params, member["most"], None, chain, group, [])
        request.index = member["index"]
        request.stops_at = tuple(member["stops_at"])
        request.pin_name = "" if member["pins"] else None
        request.num_cached_tokens = 0 if member["opened"] else None
        _set_state(request, member["state"])
        self._requests[member["id"]] = request
        self._log.numbers[request] = member["id"]


def _set_state(request: Request, state: Sequence[Any]) -> None:
    num_tokens, request.num_computed, request.furthest, request.num_forks, has_memory = state
    request.token_ids[:] = [0] * num_tokens
    if has_memory != (request.memory is not None):
        request.memory = SequenceMemory("block_table", ()) if has_memory else None


def _is_refusal(answers: list[list[Any]]) -> bool:
    if not answers or answers[-1][0] not in ("append", "reuse", "swap_in", "swap_out"):
        return False
    answer = answers[-1][1]
    return isinstance(answer[1] if isinstance(answer, list) else answer, str)


def replay(lines: Iterable[str]) -> Replayed:
    """Make the decisions of a journal again, up to the first that differs.

    Args:
        lines: of the file, each with its end; a last one without is left out, because its writer was cut off.

    Raises:
        ConfigError: it is no journal of this version.
    """
    player: _Player | None = None
    for number, text in enumerate(lines, 1):
        if not text.endswith("\n"):
            break
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"line {number} of the journal is not JSON: {error}") from error
        if player is None:
            if not isinstance(line, dict) or line.get("journal") != VERSION:
                raise ConfigError(f"this is no journal of version {VERSION}, but begins with {text[:60]!r}")
            player = _Player(line)
            continue
        try:
            player.play(line)
        except _DiffersError as difference:
            return Replayed(player.num_steps, player.num_decisions, f"line {number}: {difference}")
    if player is None:
        raise ConfigError("the journal is empty")
    return Replayed(player.num_steps, player.num_decisions, None)


def main() -> int:
    """Print what came of it; 1 if a decision differs."""
    parser = argparse.ArgumentParser(description="Make the decisions of a journal again.")
    parser.add_argument("journal", type=Path)
    with parser.parse_args().journal.open(encoding="utf-8") as lines:
        replayed = replay(lines)
    print(f"{replayed.num_decisions} decisions in {replayed.num_steps} steps", end="")
    print(" are the same" if replayed.difference is None else f" are the same; then {replayed.difference}")
    return int(replayed.difference is not None)


if __name__ == "__main__":
    sys.exit(main())
