"""What strict templates refuse or leave out becomes what they show; later prompts begin as earlier ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from folio.app.models.chat_template.arrangement import Arrangement
from folio.app.models.chat_template.template import ChatTemplate
from tests.app.models.chat_template.templates import TEMPLATES

READY = {name: ChatTemplate(source, {"bos_token": "<bos>"}) for name, source in TEMPLATES.items()}
WITHOUT_TOOLS = ("gemma", "gemma_1", "parts")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def conversation(letters: str) -> list[dict[str, Any]]:
    """s: system, u: user, a: assistant, c: a call, x: one with broken arguments, r: its result, o: an orphan."""
    roles = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "x": "assistant", "r": "tool", "o": "tool"}
    messages: list[dict[str, Any]] = []
    for i, letter in enumerate(letters):
        message: dict[str, Any] = {"role": roles[letter], "content": f"<{letter}{i}>"}
        if letter in "cx":
            function = {"name": "f", "arguments": {"k": f"<{letter}{i}>"} if letter == "c" else f'{{"k": <{letter}{i}>'}
            message |= {"content": "", "tool_calls": [{"id": "call_123", "type": "function", "function": function}]}
        elif letter in "ro":
            message |= {"tool_call_id": "call_123" if letter == "r" else "gone", "name": "f"}
        messages.append(message)
    return messages


def rendered(name: str, letters: str, *, ends: bool = True) -> str:
    template, messages = READY[name], conversation(letters)
    tools = None if name in WITHOUT_TOOLS else TOOLS
    return template.render(template.arrangement.arranged(messages), tools, add_generation_prompt=ends)


ORDERS = (
    "uasu",
    "su",
    "ssu",
    "suasu",
    "uu",
    "suau",
    "au",
    "sau",
    "uaau",
    "s",
    "us",
    "sus",
    "suasua",
    "ssuuaassuu",
    "a",
)
WITH_CALLS = ("ucru", "ucucr", "sucrsu", "ucurru", "uxru", "uxra", "uou", "oua", "suaou", "ucrou", "rcu", "cr")


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_order_of_messages_is_shown_whole(name: str) -> None:
    """Late or several system messages, neighbours of a role, and broken histories were refused, or left out."""
    assert READY[name].fault is None
    for letters in (*ORDERS, *(() if name in WITHOUT_TOOLS else WITH_CALLS)):
        text = rendered(name, letters)
        missing = [f"<{letter}{i}>" for i, letter in enumerate(letters) if f"{letter}{i}" not in text]
        assert not missing, f"{letters}: {text}"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("letters", ["suauau", "suasuau", "ssuuauaua", "uasuasua", "sucrucrua", "suxruoua"])
def test_prompts_of_later_turns_begin_with_those_of_earlier_ones(name: str, letters: str) -> None:
    if name in WITHOUT_TOOLS and set(letters) & set("cxro"):
        return
    turns = [
        n for n in range(1, len(letters) + 1) if letters[n - 1] in "ur" and letters[n : n + 1] in ("a", "c", "x", "")
    ]
    prompts = [rendered(name, letters[:n], ends=False) for n in turns]
    assert len(prompts) > 1
    for earlier, later in itertools.pairwise(prompts):
        assert later.startswith(earlier), f"{earlier!r} / {later!r}"


def test_what_the_probes_find() -> None:
    """No more is changed than a template needs."""
    found = {name: template.arrangement for name, template in READY.items()}
    strict = Arrangement(joins_system=True, reminds=True, joins_users=True, joins_answers=True, first_user="")
    assert found == {
        "chatml": Arrangement(),
        "qwen": Arrangement(joins_system=True, reminds=True, only_user="", wraps_arguments=True),
        "gemma": replace(strict, only_user=""),
        "gemma_1": replace(strict, folds_system=True, joins_system=False),
        "mistral": replace(strict, answer="", shortens_ids=True, quotes_results=True),
        "llama": Arrangement(joins_system=True, reminds=True),
        "deepseek": Arrangement(reminds=True, writes_arguments=True),
        "parts": Arrangement(parts=True),
        "harmony": Arrangement(quotes_results=True),
    }


def test_joined_messages() -> None:
    arrangement = READY["gemma"].arrangement
    shown = arrangement.arranged(conversation("ssuuasu"))
    assert [(message["role"], message["content"]) for message in shown] == [
        ("system", "<s0>\n<s1>"),
        ("user", "<u2>\n<u3>"),
        ("assistant", "<a4>"),
        ("user", "<system-reminder>\n<s5>\n</system-reminder>\n<u6>"),
    ]
    folded = READY["gemma_1"].arrangement.arranged(conversation("su"))
    assert folded == [{"role": "user", "content": "<s0>\n<u1>"}]


def test_results_are_next_to_their_calls() -> None:
    shown = Arrangement().arranged(conversation("ucursra"))
    assert [message["content"] for message in shown] == ["<u0>", "", "<r3>", "<r5>", "<u2>", "<s4>", "<a6>"]
    given = conversation("ucrua")
    assert Arrangement().arranged(given) == given
