"""The table at the end of a run: failures first, and never more than a reader of the last lines sees."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.gpu_day.job import Outcome

# Where only the end of the output is visible, the whole table must fit.
MOST_LINES, MOST_CHARACTERS, LINE_CHARACTERS = 80, 11_000, 150
FAILURE_LINES, TAIL_LINES = 48, 5


def table(outcomes: Sequence[Outcome], facts: Sequence[Mapping[str, object]], *, fake: bool = False) -> str:
    """At most 80 lines: failures with their last lines, then successes, failures within jobs, and the main figures."""
    failed = [outcome for outcome in outcomes if outcome.reason]
    lines = [f"{len(outcomes) - len(failed)} of {len(outcomes)} jobs succeeded"]
    if fake:
        lines[0] += "; without a device, so that no number below is a measurement"
    # One line for each failure, and as many of their last lines as fit.
    tail_lines = min(TAIL_LINES, max(0, FAILURE_LINES // max(1, len(failed)) - 1))
    for outcome in failed[:FAILURE_LINES]:
        lines.append(f"FAILED  {outcome.job.name}, {outcome.seconds:.1f} s: {outcome.reason}")
        lines += [f"    | {line}" for line in outcome.tail[len(outcome.tail) - tail_lines :]]
    if succeeded := [f"{o.job.name} {o.seconds:.1f} s" for o in outcomes if not o.reason]:
        lines += _wrap("ok: " + ", ".join(succeeded), 10)
    if counts := Counter(str(fact["outcome"]) for fact in facts if "outcome" in fact):
        lines.append("tests: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    lines += [line for fact in facts if _failed(fact) for line in _wrap(_told(fact), 3)]
    of_jobs = _figures(facts)
    lines += _shared(of_jobs, MOST_LINES - 1 - len(lines), MOST_CHARACTERS - 100 - sum(len(line) + 1 for line in lines))
    return _cut(lines)


def _failed(fact: Mapping[str, object]) -> bool:
    """Whether it is a failure within a job, of a test or a part."""
    return bool(fact.get("shown")) and (bool(fact.get("failed")) or fact.get("outcome") == "failed")


def _told(fact: Mapping[str, object]) -> str:
    return f"{fact.get('job')}, {fact['fact']}: {fact['shown']}"


def _figures(facts: Sequence[Mapping[str, object]]) -> dict[str, list[str]]:
    """Lines of each job: its facts that are to be shown or, of a job that has none, its result's figures."""
    speaking = {fact["job"] for fact in facts if fact.get("shown")}
    lines: dict[str, list[str]] = {}
    for fact in facts:
        job = str(fact.get("job"))
        if fact.get("shown") and not _failed(fact):
            lines.setdefault(job, []).extend(_wrap(_told(fact), 3))
        elif fact.get("figures") and job not in speaking:
            lines.setdefault(job, []).extend(_wrap(f"{job}: {fact['figures']}", 8))
    return lines


def _shared(of_jobs: Mapping[str, Sequence[str]], most: int, characters: int) -> list[str]:
    """The jobs' lines in their order. If there are too many, those of the longest are cut: one job with a line for each
    of its cases would leave none to the jobs after it."""
    most = max(most, 0)
    while True:
        share, left = {}, most
        for i, job in enumerate(sorted(of_jobs, key=lambda job: len(of_jobs[job]))):
            share[job] = min(len(of_jobs[job]), left // (len(of_jobs) - i))
            left -= share[job]
        chosen: list[str] = []
        for job, lines in of_jobs.items():
            cut = share[job] < len(lines)
            chosen += lines[: max(0, share[job] - cut)]
            if cut and share[job]:
                chosen.append(f"{job}: … {len(lines) - share[job] + 1} more lines are in the results")
        if not most or sum(len(line) + 1 for line in chosen) <= characters:
            return chosen
        most -= 1


def _wrap(text: str, most: int) -> list[str]:
    return textwrap.wrap(text, LINE_CHARACTERS, subsequent_indent="    ", max_lines=most, placeholder=" …")


def _cut(lines: Sequence[str]) -> str:
    """As many lines as may be shown, with long ones shortened."""
    kept: list[str] = []
    room = MOST_CHARACTERS
    for line in lines:
        line = line if len(line) <= LINE_CHARACTERS else line[: LINE_CHARACTERS - 1] + "…"
        room -= len(line) + 1
        if room < 100 or len(kept) == MOST_LINES - 1:
            kept.append(f"… {len(lines) - len(kept)} more lines are in the results")
            break
        kept.append(line)
    return "\n".join(kept)


def figures_of(tail: Sequence[str]) -> str:
    """The figures in the last line of a benchmark's output, which is JSON."""
    try:
        figures = json.loads(tail[-1])["figures"]
        return ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
    except (IndexError, ValueError, TypeError, KeyError, AttributeError):  # another line, which ends no stage
        return ""
