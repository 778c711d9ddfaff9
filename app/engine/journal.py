"""Every decision of the scheduler, taken down so that it can be made again (`app.engine.replay`).

A journal is a file of JSON lines: a header, and then in order

    arrive    a group waits: its priority, tenant and members
    sync      what the engine has changed of sequences since the last step, other than by rule: rolled back, forked, …
    end       a sequence has finished or was cancelled
    budget    of the KV cache, as somebody has set it; for the reader
    step      drafts offered; the answers that the scheduler got; its decisions; free pages afterwards
    done      the step was computed: each sequence that sampled is one token longer, by rule
    abort     it was not: answers and decisions

**What depends on time is an answer.** The scheduler decides by its requests and by what it is told when it asks: how
many pages are free, what is cached, whether a swap or computing again costs less, whether the device gives a block. A
mapper's thread, a clock and other threads have a say in these. So every answer is in the journal, in order, and a
replay gives the same ones: the decisions must then be the same. What tokens are does not matter, and is not in it; ids
and tenants are.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from app.config import EngineConfig
from app.engine.decisions import RecoveryCosts, SchedulerMemory
from app.engine.recovery import Recovery, RecoveryCost
from app.engine.request import Request, SequenceGroup
from app.errors import ConfigError
from vmem import LayerGroup, PrefixMatch, SequenceMemory, SwappedGroup, TokenChain, ViewPolicy, VmemError

VERSION = 1
# Of a sequence, by rule: tokens, computed ones, the most there were of these, forks to come, whether it has blocks.
State = tuple[int, int, int, int, bool]


class Decisions:
    """A step's decisions as they are written. Sequences are numbered as they come.

    Attributes:
        numbers: of the sequences that have not ended.
        made: in the step or abort under way.
        sampled: sequences of the last step that are one token longer when it is done.
    """

    def __init__(self) -> None:
        self.numbers: dict[Request, int] = {}
        self.made: list[list[Any]] = []
        self.sampled: list[Request] = []

    def begun(self, group: SequenceGroup) -> None:
        self.made.append(["begin", self._members(group)])

    def resumed(self, group: SequenceGroup) -> None:
        self.made.append(["resume", self._members(group)])

    def preempted(self, group: SequenceGroup, way: Recovery) -> None:
        self.made.append(["preempt", self._members(group), way])

    def taken_apart(self, group: SequenceGroup) -> None:
        self.made.append(["take apart", self._members(group)])

    def scheduled(self, request: Request, start: int, num_tokens: int, num_drafts: int, samples: bool) -> None:
        self.made.append(["compute", self.numbers[request], start, num_tokens, num_drafts])
        if samples:
            self.sampled.append(request)

    def begin_abort(self) -> None:
        self.made, self.sampled = [], []

    def take(self) -> list[list[Any]]:
        made, self.made = self.made, []
        return made

    def _members(self, group: SequenceGroup) -> list[int]:
        return [self.numbers[request] for request in group.members]


class Journal(Decisions):
    """Writes a journal; a `DecisionLog`. `budget_set` and `close` may be called from any thread.

    Args:
        path: of the file; one that exists is written over.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: str, config: EngineConfig, memory: SchedulerMemory) -> None:
        super().__init__()
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # closed by `close`
        except OSError as error:
            raise ConfigError(f"journal {path!r} cannot be written: {error}") from error
        self._writing = threading.Lock()
        self._memory = memory
        self._count = 0
        self._arriving: list[SequenceGroup] = []
        self._states: dict[Request, State] = {}
        self._together: dict[SequenceGroup, list[Request]] = {}
        self._drafts: list[list[int]] = []
        self.answers: list[list[Any]] = []
        settings = asdict(config)
        for prompts in ("pinned_prompts", "pinned_system_prompts"):
            settings[prompts] = sorted(settings[prompts])  # their names will do
        self._write(
            {
                "journal": VERSION,
                "scheduler": {
                    "max_num_seqs": config.max_num_seqs,
                    "max_num_batched_tokens": config.max_num_batched_tokens,
                    "view": config.kv_view,
                    "policy": config.preemption,
                    "fair_tenants": config.fair_tenants,
                },
                "memory": {
                    "unit_tokens": memory.unit_tokens,
                    "has_states": memory.has_states,
                    "prefix_cache": memory.prefix_cache,
                    "pages_per_step": sum(group.layout.num_slices for group in memory.groups),
                },
                "config": settings,
            }
        )

    def close(self) -> None:
        with self._writing:
            self._file.close()

    def budget_set(self, budget_bytes: int, revision: int) -> None:
        self._write({"event": "budget", "bytes": budget_bytes, "revision": revision})

    # ---- what the scheduler says ----

    def arrived(self, group: SequenceGroup) -> None:
        self._arriving.append(group)

    def ended(self, request: Request) -> None:
        self._write_arrivals()
        number = self.numbers.pop(request, None)
        if number is None:  # a fork of this very moment, which no step has seen
            return
        self._states.pop(request, None)
        members = self._together.get(request.group, [])
        if request in members:
            members.remove(request)
        if not members:
            self._together.pop(request.group, None)
        self._write({"event": "end", "id": number, "tokens": len(request.token_ids)})

    def begin_step(self, groups: Iterable[SequenceGroup], drafts: Mapping[Request, Sequence[int]]) -> None:
        self._write_arrivals()
        self._write_changes(groups)
        self._drafts = [[self.numbers[request], len(guesses)] for request, guesses in drafts.items()]
        self.sampled.clear()

    def end_step(self) -> None:
        line: dict[str, Any] = {"event": "step"}
        if self._drafts:
            line["drafts"] = self._drafts
        self._write(line | {"answers": self._take_answers(), "made": self.take(), "free": self._memory.num_free_pages})

    def done(self, groups: Iterable[SequenceGroup]) -> None:
        self._note_states(groups)
        for request in self.sampled:
            if request in self._states:
                num_tokens, *rest = self._states[request]
                self._states[request] = (num_tokens + 1, *rest)  # type: ignore[assignment]
        self._write({"event": "done"})
        with self._writing:
            self._file.flush()

    def end_abort(self, groups: Iterable[SequenceGroup]) -> None:
        self._note_states(groups)
        self._write({"event": "abort", "answers": self._take_answers(), "made": self.take()})

    # ---- inside ----

    def _take_answers(self) -> list[list[Any]]:
        answers, self.answers[:] = list(self.answers), []
        return answers

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":"), default=str)
        with self._writing:
            if not self._file.closed:
                self._file.write(text + "\n")

    def _write_arrivals(self) -> None:
        for group in self._arriving:
            self._together[group] = list(group.members)
            line = {"event": "arrive", "priority": group.priority, "arrival": group.arrival, "tenant": group.tenant}
            self._write(line | {"lockstep": group.lockstep, "members": [self._add(r) for r in group.members]})
        self._arriving.clear()

    def _add(self, request: Request) -> dict[str, Any]:
        self.numbers[request] = self._count
        self._count += 1
        self._states[request] = _state(request)
        return {
            "id": self.numbers[request],
            "request": request.request_id,
            "index": request.index,
            "prompt": len(request.prompt_token_ids),
            "most": request.max_tokens,
            "state": self._states[request],
            "opened": request.num_cached_tokens is not None,
            "stops_at": request.stops_at,
            "pins": request.pin_name is not None,
            "prompt_logprobs": request.params.prompt_logprobs is not None,
        }

    def _write_changes(self, groups: Iterable[SequenceGroup]) -> None:
        changed, added, together = [], [], []
        for group in groups:
            known = self._together.get(group)
            for request in group.members:
                if request not in self.numbers:
                    mate = next((r for r in group.members if r in self.numbers), None)
                    assert mate is not None, "a group of forks only"
                    added.append(self._add(request) | {"with": self.numbers[mate]})
                elif (state := _state(request)) != self._states.get(request):
                    changed.append([self.numbers[request], *state])
                    self._states[request] = state
            if known != group.members:
                together.append(self._members(group))
                self._together[group] = list(group.members)
        if changed or added or together:
            self._write({"event": "sync", "changed": changed, "added": added, "together": together})

    def _note_states(self, groups: Iterable[SequenceGroup]) -> None:
        for group in groups:
            for request in group.members:
                if request in self.numbers:
                    self._states[request] = _state(request)


def _state(request: Request) -> State:
    tokens = len(request.token_ids), request.num_computed, request.furthest
    return *tokens, request.num_forks, request.memory is not None


class RecordedCosts:
    """A recovery model whose answers are taken down."""

    def __init__(self, costs: RecoveryCosts, answers: list[list[Any]]) -> None:
        self._costs = costs
        self._answers = answers

    def cost(self, sequences: list[tuple[int, int]], num_bytes: int) -> RecoveryCost:
        cost = self._costs.cost(sequences, num_bytes)
        self._answers.append(["cost", [cost.swap_s, cost.recompute_s]])
        return cost


class RecordedMemory:
    """A memory whose answers to the scheduler are taken down. Of `append`, only failures: how many went well since the
    last answer, and the error."""

    def __init__(self, memory: SchedulerMemory, answers: list[list[Any]]) -> None:
        self._memory = memory
        self._answers = answers
        self._num_appends = 0
        self.prefix_cache = memory.prefix_cache

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        return self._memory.groups

    @property
    def unit_tokens(self) -> int:
        return self._memory.unit_tokens

    @property
    def has_states(self) -> bool:
        return self._memory.has_states

    @property
    def num_free_pages(self) -> int:
        return self._note("num_free_pages", self._memory.num_free_pages)

    @property
    def changes(self) -> int:
        return self._note("changes", self._memory.changes)

    def pages_for(self, num_tokens: int) -> int:
        return self._note("pages_for", self._memory.pages_for(num_tokens))

    def pages_to_come(self, sequence: SequenceMemory | None, num_tokens: int) -> int:
        return self._note("pages_to_come", self._memory.pages_to_come(sequence, num_tokens))

    def pages_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        return self._note("pages_needed", self._memory.pages_needed(match, num_tokens))

    def pages_of(self, swapped: SwappedGroup) -> int:
        return self._note("pages_of", self._memory.pages_of(swapped))

    def match(self, chain: TokenChain, token_ids: Sequence[int]) -> PrefixMatch:
        match = self._memory.match(chain, token_ids)
        self._note("match", [match.num_tokens, match.branch_tokens, match.awaited])
        return match

    def shared_tokens(self, sequences: Sequence[SequenceMemory]) -> list[int]:
        return self._note("shared_tokens", self._memory.shared_tokens(sequences))

    def swap_bytes(self, sequences: Sequence[SequenceMemory]) -> int:
        return self._note("swap_bytes", self._memory.swap_bytes(sequences))

    def open(self, policy: ViewPolicy = "auto", *, expected_tokens: int = 0) -> SequenceMemory:
        return self._memory.open(policy, expected_tokens=expected_tokens)

    def reuse(self, sequence: SequenceMemory, chain: TokenChain, token_ids: Sequence[int]) -> int:
        try:
            return self._note("reuse", self._memory.reuse(sequence, chain, token_ids))
        except VmemError as error:
            self._note("reuse", type(error).__name__)
            raise

    def promise(self, sequence: SequenceMemory, num_tokens: int, snapshots: Sequence[int] = ()) -> None:
        self._memory.promise(sequence, num_tokens, snapshots)

    def append(self, sequence: SequenceMemory, num_tokens: int, *, start: int = 0) -> None:
        try:
            self._memory.append(sequence, num_tokens, start=start)
        except VmemError as error:
            self._note("append", [self._num_appends, type(error).__name__])
            raise
        self._num_appends += 1

    def begin(self, sequence: SequenceMemory, token_ids: Sequence[int], start: int, end: int) -> None:
        self._memory.begin(sequence, token_ids, start, end)

    def commit(self) -> None:
        self._memory.commit()
        self._num_appends = 0

    def abort(self) -> None:
        self._memory.abort()
        self._num_appends = 0

    def free(self, sequence: SequenceMemory) -> None:
        self._memory.free(sequence)

    def swap_out(self, sequences: Sequence[SequenceMemory]) -> SwappedGroup:
        try:
            swapped = self._memory.swap_out(sequences)
        except (VmemError, RuntimeError, MemoryError) as error:
            self._note("swap_out", type(error).__name__)
            raise
        self._note("swap_out", len(sequences))
        return swapped

    def swap_in(self, swapped: SwappedGroup) -> list[SequenceMemory]:
        try:
            memories = self._memory.swap_in(swapped)
        except VmemError as error:
            self._note("swap_in", type(error).__name__)
            raise
        self._note("swap_in", len(memories))
        return memories

    def discard(self, swapped: SwappedGroup) -> None:
        self._memory.discard(swapped)

    def _note(self, name: str, answer: Any) -> Any:
        self._answers.append([name, answer])
        self._num_appends = 0
        return answer
