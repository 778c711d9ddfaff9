"""Tools in a system message, for chat templates that show none: the words of Qwen's and Hermes's own templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_WORDS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_tools_as_text(messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Messages with all that the template does not show: the tools in the system message, calls in the assistant's
    text, and their results in the user's message.

    Args:
        messages: as templates get them.
        tools: as in the body; `None`: none are shown.
    """
    shown: list[dict[str, Any]] = []
    for message in messages:
        text, calls = message["content"], message.get("tool_calls")
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{text}\n</tool_response>"
        elif calls:
            text = "\n".join([*([text] if text else []), *map(_written, calls)])
        if shown and shown[-1].get("has_results") and message["role"] in ("tool", "user"):
            shown[-1] |= {"content": f"{shown[-1]['content']}\n{text}", "has_results": is_result}
            continue
        others = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id", "name")}
        shown.append(others | {"role": "user" if is_result else message["role"], "content": text})
        shown[-1]["has_results"] = is_result
    if tools:
        _say_first(shown, _WORDS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)))
    return [{name: value for name, value in message.items() if name != "has_results"} for message in shown]


def _written(call: dict[str, Any]) -> str:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n</tool_call>'


def _say_first(shown: list[dict[str, Any]], words: str) -> None:
    """Add words to the system message, or begin with one."""
    if shown and shown[0]["role"] == "system":
        shown[0]["content"] = f"{shown[0]['content']}\n\n{words}"
    else:
        shown.insert(0, {"role": "system", "content": words})
