"""Output plan of one request: the parts that outputs may have, their parser, and the grammar that forces them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from folio.app.api.output.formats import OutputFormat
from folio.app.api.output.parser import HarmonyParser, OutputParser, ReasoningSyntax
from folio.app.api.output.syntaxes import Functions, any_of, closed_arguments, listed, up_to
from folio.app.api.tools.choice import ChosenTools
from folio.app.engine.request.turn import Turn
from folio.app.engine.sampling.params import ReasoningBudget, Structure
from folio.app.errors import RequestError

# Arguments of functions that are not strict.
_ANY: Mapping[str, Any] = {"type": "object"}
# White space between the reasoning and a forced output.
_GAP = "/[ \\n]{0,4}/"


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """The plan of a request's outputs.

    Attributes:
        functions: that may be called.
        forced: an output is calls only.
        several: a forced output may have several calls.
        reasoning: at the prompt's end: "begun"; "closed": the output has none; "open": the model decides.
        budget_tokens: most tokens of reasoning; `None`: no bound.
        continues: an output continues a message's content.
        strict: functions whose arguments follow their schema also in calls that are not forced.
        begun: the beginning of a call with which the prompt ends.
    """

    format: OutputFormat = field(default_factory=OutputFormat)
    functions: Functions = field(default_factory=dict)
    forced: bool = False
    several: bool = True
    reasoning: Literal["begun", "open", "closed"] = "open"
    budget_tokens: int | None = None
    continues: bool = False
    strict: Collection[str] = ()
    begun: str = ""

    @property
    def kept_token_ids(self) -> Collection[int]:
        """Special tokens that are part of reasoning and calls: detokenisation keeps their text."""
        known = self.format
        literals = set(known.special_tokens) if known.is_harmony else set()
        if known.reasoning is not None:
            literals |= {known.reasoning.begin, known.reasoning.end}
        if known.tools is not None and self.functions:
            literals |= {*known.tools.literals}
        return [token_id for text, token_id in known.special_tokens.items() if text in literals]

    @property
    def turn(self) -> Turn:
        """The kind of turn, for the prefix cache."""
        known = self.format
        if not self.functions:
            return Turn("chat")
        if self.forced:
            return Turn("calls")
        if known.is_harmony:
            return Turn("tools", ("to=functions.",))
        if known.tools is None:
            return Turn("tools")
        return Turn("tools", known.tools.markers, known.tools.bare)

    def parser(self) -> OutputParser | None:
        """A parser for one output; `None`: all of it is content."""
        known = self.format
        if known.is_harmony:
            return HarmonyParser(None, None, self.functions, forced=self.forced)
        tools = known.tools if self.functions else None
        if tools is None and known.reasoning is None:
            return None
        begun = self.reasoning == "begun"
        return OutputParser(known.reasoning, tools, self.functions, reasons=begun, forced=self.forced, begun=self.begun)

    def structure(self, content: Structure | None) -> Structure | None:
        """The structure of an output.

        Args:
            content: the structure of its content. A forced call has no content, and any other output may be a call
                instead.
        """
        budget = self._budget()
        if self.forced:
            return Structure("calls", f"start: {self._lead} calls\n{self._rules}", budget=budget)
        if content is None and self.strict:
            return Structure("calls", self._text_with_calls(), budget=budget, begun=self.begun)
        if content is None:
            return None if budget is None else Structure("any", "", budget=budget)
        if not self._rules or (self.continues and self.reasoning == "closed"):
            return content
        if self.format.is_harmony:
            answer = f"{self.format.terminal('<|channel|>final<|message|>')} @answer"
        else:
            answer = "@answer"
        start = f"({answer} | calls)" if self.functions and self.format.knows_calls else answer
        return replace(content, frame=f"start: {self._lead} {start}\n{self._rules}", budget=budget)

    @property
    def _lead(self) -> str:
        """The rule before calls and content: the reasoning, if there can be one."""
        return "" if not self.format.reasons or self.reasoning == "closed" else "lead"

    @property
    def _rules(self) -> str:
        """The rules `lead` and `calls`, as far as the output may have them."""
        known, rules = self.format, []
        if self._lead:
            rules += _harmony_lead(known) if known.is_harmony else self._reasoning_rules()
        if self.functions and known.is_harmony:
            rules += _harmony_calls(known, self.functions)
        elif self.functions and known.tools is not None:
            rules.append(known.tools.grammar(self.functions, self.several, known.terminal))
        return "\n".join(rules)

    def _text_with_calls(self) -> str:
        """The grammar of free text in which calls follow the schemas of strict functions, once they have begun.

        Text ends lazily, at the first marker of reasoning or of calls. Special tokens are in no text.
        """
        known = self.format
        functions = {name: s if name in self.strict else _ANY for name, s in self.functions.items()}
        if known.is_harmony:
            return _harmony_text(known, functions)
        assert known.tools is not None
        rules, bare = known.tools.within_text(functions, known.terminal)
        heads = dict.fromkeys(known.tools.markers, "calls")
        parts = ["bare"] if bare else []
        if known.reasoning is not None:
            heads[known.reasoning.begin] = "reasoning"
            rules += "\n" + up_to("reasoning", known.reasoning.end, known.terminal)
        for number, (marker, behind) in enumerate(heads.items()):
            written = known.terminal(marker)
            lazy = "" if "<[" in written else "[lazy]"
            rules += f"\nhead_{number}{lazy}: TEXT {written}"
            parts.append(f"head_{number} {behind}")
        text = f"/(?s:.*)/ & ~/{bare}(?s:.*)/" if bare else "/(?s:.*)/"
        begin = "reasoning " if self.reasoning == "begun" else ""
        return f"start: {begin}({' | '.join(parts)})* TEXT\nTEXT: {text}\n{rules}"

    def _reasoning_rules(self) -> list[str]:
        syntax = self.format.reasoning
        assert syntax is not None
        reasoning = "reasoning" if self.reasoning == "begun" else f"({self.format.terminal(syntax.begin)} reasoning)?"
        return [f"lead: {reasoning} {_GAP}", up_to("reasoning", syntax.end, self.format.terminal)]

    @property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """The texts between which the output reasons, the first one empty if the prompt has it; `None`: it does not."""
        if not self._lead:
            return None
        if self.format.is_harmony:
            return "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
        assert self.format.reasoning is not None
        return "" if self.reasoning == "begun" else self.format.reasoning.begin, self.format.reasoning.end

    def _budget(self) -> ReasoningBudget | None:
        marks = self.reasoning_marks
        return None if self.budget_tokens is None or marks is None else ReasoningBudget(self.budget_tokens, *marks)


def _harmony_lead(known: OutputFormat) -> list[str]:
    begin, end = known.terminal("<|channel|>analysis<|message|>"), known.terminal("<|end|><|start|>assistant")
    return [f"lead: ({begin} /(?s:.*)/ {end})?"]


def _harmony_calls(known: OutputFormat, functions: Functions) -> list[str]:
    """One call, whose end is an end-of-sequence token of the model."""

    def rule(name: str) -> str:
        head = known.terminal(f"{name} <|constrain|>json<|message|>")
        return f"{head} {closed_arguments(functions[name])}"

    begin = known.terminal("<|channel|>commentary to=functions.")
    return [f"calls: {begin} function", *listed(functions, rule)]


def _harmony_text(known: OutputFormat, functions: Functions) -> str:
    """Any messages, of which those to functions are calls."""
    start, channel, constrain, message, end = map(
        known.terminal, ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
    )
    behind = r"([^A-Za-z0-9_.\-](?s:.*))?"  # the name

    def calls(name: str) -> str:
        arguments = f"({constrain} TEXT)? {message} {closed_arguments(functions[name])}"
        to = f"/(?s:.*) to=functions\\.{re.escape(name)}{behind}/"
        return f"(({start} HEAD)? {channel} {to} | {start} {to} {channel} TEXT) {arguments}"

    return "\n".join(
        [
            f"start: message ({end} message)*",
            f"message: ({start} HEAD)? {channel} HEAD ({constrain} TEXT)? {message} TEXT | function",
            f"HEAD: /(?s:.*)/ & ~/(?s:.*) to=functions\\.({any_of(functions)}){behind}/",
            "TEXT: /(?s:.*)/",
            *listed(functions, calls),
        ]
    )


def _reasoning_at(
    syntax: ReasoningSyntax | None, prompt_end: Callable[[], str], continued: str | None
) -> Literal["begun", "open", "closed"]:
    """Whether the outputs begin within the reasoning, before or after it."""
    if continued is not None:
        begun = syntax is not None and continued.rfind(syntax.begin) > continued.rfind(syntax.end)
        return "begun" if begun else "closed"
    if syntax is None:
        return "open"
    end = prompt_end().rstrip()
    if end.endswith(syntax.end):
        return "closed"
    return "begun" if syntax.implied or end.endswith(syntax.begin) else "open"


def plan_output(
    known: OutputFormat,
    tools: ChosenTools,
    prompt_end: Callable[[], str],
    budget_tokens: int | None,
    continued: str | None = None,
) -> OutputPlan:
    """The plan of a chat completion's outputs.

    Args:
        prompt_end: the last characters of the prompt, control tokens included.
        continued: the content of the message that the outputs continue, which may have begun the reasoning.

    Raises:
        RequestError: a call is required in a syntax that is not known.
    """
    functions = tools.functions if known.knows_calls else {}
    if tools.required and not functions:
        raise RequestError("this model's format of calls is not supported; use 'auto' or 'none'", "tool_choice")
    reasoning = _reasoning_at(known.reasoning, prompt_end, continued)
    strict = tools.strict if functions and not tools.required else ()
    continues = continued is not None
    plan = OutputPlan(known, functions, tools.required, tools.several, reasoning, budget_tokens, continues, strict)
    if not functions or continued is None or reasoning == "begun" or tools.required or known.tools is None:
        return plan
    return replace(plan, begun=_begun_call(plan, known.tools.markers, continued))


def _begun_call(plan: OutputPlan, markers: Sequence[str], text: str) -> str:
    """The end of a text from the last marker on, if it ends within the arguments of a call; else empty."""
    begun = text[max((text.rfind(marker) for marker in markers), default=-1) :]
    parser = plan.parser()
    assert parser is not None
    if not begun.startswith(tuple(markers)) or not markers:
        return ""
    parser.push(begun)
    parser.finish()
    return begun if parser.is_cut else ""
