"""Synthetic sessions of agents that pause for tools, beside chats and single completions.

Drawn from the distributions below; none is traced. Pauses and lengths of tools are those of `traffic.agents`.

    requests      of a session                                        ends with
    agent         shared instructions, a task; then calls of tools,   an answer; the user may go on after a while
                  a pause each, and the result added to the prompt
    chat          a shared system prompt, then turns of a user        any answer
    completion    one prompt                                          its output
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.simulator.traffic import ANSWER, CALL, MOONCAKE_UNIT, Arrival, arrival_of, lognormal

# Shares of sessions: agents, chats; the rest are completions.
_AGENTS, _CHATS = 0.25, 0.25
# Of instructions: kinds, the most popular first, and tokens of the longest and of the shortest.
_KINDS, _LONGEST_KIND, _SHORTEST_KIND = 8, 6144, 2048
# Mean tokens: tasks, results of tools, calls, questions of users, answers, completions' prompts.
_TASK, _RESULT, _CALL, _QUESTION, _ANSWER, _PROMPT = 4000.0, 2500.0, 182.0, 800.0, 343.0, 6000.0
# Mean calls before an answer; chance that the user goes on after an answer, and mean seconds until then.
_CALLS, _GOES_ON, _THINKS_S = 8.0, 0.5, 60.0
# Mean seconds of tools, and the share of slow ones.
_FAST_S, _SLOW_S, _SLOW_SHARE = 0.69, 18.6, 0.3
# Nominal seconds of a request for `Arrival.at`: to the first token, and for each token.
_FIRST_S, _TOKEN_S = 0.5, 0.02
_LONGEST = 100_000

CHAT, COMPLETION = "chat", "completion"


@dataclass(slots=True)
class _Turn:
    session: int
    at: float
    kind: str
    num_tokens: int
    num_output_tokens: int
    blocks: list[int]
    pause_s: float


def sessions(count: int, per_s: float, seed: int) -> list[Arrival]:
    """About `count` requests, `per_s` new sessions a second."""
    rng, ids = random.Random(seed), itertools.count(1)
    sizes = [_LONGEST_KIND - (_LONGEST_KIND - _SHORTEST_KIND) * i // (_KINDS - 1) for i in range(_KINDS)]
    kinds = [[next(ids) for _ in range(size // MOONCAKE_UNIT)] for size in sizes]
    drawn: list[_Turn] = []
    at = 0.0
    for session in itertools.count():
        if len(drawn) >= count:
            break
        at += rng.expovariate(per_s)
        sort, instructions = rng.random(), rng.choices(kinds, [1 / rank for rank in range(1, _KINDS + 1)])[0]
        drawn += _session(rng, ids, session, at, sort, instructions)
    drawn.sort(key=lambda turn: turn.at)
    last: dict[int, int] = {}
    arrivals = []
    for number, turn in enumerate(drawn):
        arrival = arrival_of(number, turn.at, turn.num_tokens, turn.num_output_tokens, turn.blocks, next(ids) + 1)
        arrivals.append(
            replace(
                arrival,
                session=f"s{turn.session}",
                kind=turn.kind,
                follows=last.get(turn.session),
                pause_s=turn.pause_s,
            )
        )
        last[turn.session] = number
    return arrivals


def _session(
    rng: random.Random, ids: Iterator[int], session: int, at: float, sort: float, instructions: list[int]
) -> Iterator[_Turn]:
    is_agent, is_chat = sort < _AGENTS, sort < _AGENTS + _CHATS
    ending = ANSWER if is_agent else CHAT if is_chat else COMPLETION
    blocks = instructions.copy() if is_chat else []
    first = {ANSWER: _TASK, CHAT: _QUESTION, COMPLETION: _PROMPT}[ending]
    num_tokens, pause_s = len(blocks) * MOONCAKE_UNIT + lognormal(rng, first, 1.0), 0.0
    while num_tokens < _LONGEST:
        blocks = blocks + [next(ids) for _ in range(num_tokens // MOONCAKE_UNIT - len(blocks))]
        calls = is_agent and rng.random() >= 1 / _CALLS
        num_output_tokens = lognormal(rng, _CALL if calls else _ANSWER, 0.8)
        yield _Turn(session, at, CALL if calls else ending, num_tokens, num_output_tokens, blocks, pause_s)
        if not calls and (not is_chat or rng.random() >= _GOES_ON):
            return
        pause_s = _tool_s(rng) if calls else lognormal(rng, 1000 * _THINKS_S, 0.8) / 1000
        at += _FIRST_S + _TOKEN_S * num_output_tokens + pause_s
        num_tokens += num_output_tokens + lognormal(rng, _RESULT if calls else _QUESTION, 1.1)


def _tool_s(rng: random.Random) -> float:
    return lognormal(rng, 1000 * (_SLOW_S if rng.random() < _SLOW_SHARE else _FAST_S), 0.5) / 1000
