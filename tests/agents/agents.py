"""The coding agents: how each is installed, pointed at Folio and run without a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.agents.script import CONTEXT, Step

# In texts below: {url} is the server's, {model} the model's name, {prompt} what the user says.


@dataclass(frozen=True, slots=True)
class Agent:
    """A row of the table in `docs/clients.md`.

    Attributes:
        package: as `package.json` or `requirements.txt` has it.
        first, again: command lines of a session's first turn, and of further ones if that needs no terminal. They run
            in a folder of their own, with a home directory of their own.
        real: arguments for the real model, whose context of 8,192 tokens the agent's instructions and tools exceed.
        steps: what the scripted model says for the first and the second file.
        env, files: environment, and files, of the home directory (`~/…`) or of the working folder.
    """

    name: str
    package: str
    api: str
    first: tuple[str, ...]
    again: tuple[str, ...]
    steps: tuple[Step, Step]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    real: tuple[str, ...] = ()

    @property
    def errand(self) -> str:
        """The word that makes the scripted model say `steps`."""
        return f"word-errand-{self.name.lower().replace(' ', '-')}"

    def command(self, prompt: str, model: str, url: str, again: bool) -> list[str]:
        more = () if model == "scripted" else self.real
        return [
            filled(part, prompt=prompt, model=model, url=url)
            for part in (*(self.again if again else self.first), *more)
        ]


def filled(text: str, **values: str) -> str:
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _call(name: str, **arguments: object) -> Step:
    return {"name": name, "arguments": arguments}


_OPENCODE = {
    "model": "folio/{model}",
    "small_model": "folio/{model}",
    "permission": "allow",
    "autoupdate": False,
    "agent": {"plain": {"mode": "primary", "prompt": "Be brief.", "tools": {"*": False}}},
    "provider": {
        "folio": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "none"},
            "models": {"{model}": {"limit": {"context": CONTEXT, "output": 4096}}},
        }
    },
}
_CODEX = """\
model = "{model}"
model_provider = "folio"

[model_providers.folio]
name = "Folio"
base_url = "{url}/v1"
wire_api = "responses"
"""
_CONTINUE = f"""\
name: Folio
version: 1.0.0
schema: v1
models:
  - name: folio
    provider: openai
    model: {{model}}
    apiBase: {{url}}/v1
    apiKey: none
    roles: [chat]
    capabilities: [tool_use]
    defaultCompletionOptions: {{contextLength: {CONTEXT}, maxTokens: 512}}
"""
_CLINE = {
    "version": 1,
    "lastUsedProvider": "openai-compatible",
    "providers": {
        "openai-compatible": {
            "settings": {
                "provider": "openai-compatible",
                "apiKey": "none",
                "model": "{model}",
                "baseUrl": "{url}/v1",
            },
            "updatedAt": "2026-01-01T00:00:00.000Z",
            "tokenSource": "manual",
        }
    },
}
# Aider has no tools: it edits files, runs a test and goes on with what that printed.
_AIDER_TEST = "grep -q second answer.txt && cat two.txt || cat one.txt; false"
_CODEX_RUN = ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_AIDER_RUN = (
    *("aider", "--model", "openai/{model}", "--no-git", "--yes-always", "--no-check-update", "--analytics-disable"),
    *("--no-show-model-warnings", "--auto-test", "--test-cmd", _AIDER_TEST, "--message", "{prompt}"),
)

AGENTS = (
    Agent(
        "Claude Code",
        "@anthropic-ai/claude-code",
        "messages",
        ("claude", "-p", "{prompt}", "--allowedTools", "Bash,Read"),
        ("claude", "-c", "-p", "{prompt}", "--allowedTools", "Bash,Read"),
        (_call("Bash", command="cat one.txt"), _call("Read", file_path="two.txt")),
        env={
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        real=("--tools", "", "--system-prompt", "Be brief."),
    ),
    Agent(
        "Codex",
        "@openai/codex",
        "responses",
        (*_CODEX_RUN, "{prompt}"),
        (*_CODEX_RUN, "resume", "--last", "{prompt}"),
        (_call("exec_command", cmd="cat one.txt"), _call("exec_command", cmd="cat two.txt", login=False)),
        files={"~/.codex/config.toml": _CODEX},
        real=("--disable", "multi_agent", "--disable", "goals"),
    ),
    Agent(
        "opencode",
        "opencode-ai",
        "chat",
        ("opencode", "run", "{prompt}"),
        ("opencode", "run", "-c", "{prompt}"),
        (_call("bash", command="cat one.txt"), _call("read", filePath="two.txt")),
        files={"~/.config/opencode/opencode.json": json.dumps(_OPENCODE, indent=2)},
        real=("--agent", "plain"),
    ),
    Agent(
        "Qwen Code",
        "@qwen-code/qwen-code",
        "chat",
        ("qwen", "--auth-type", "openai", "-y", "-p", "{prompt}"),
        ("qwen", "--auth-type", "openai", "-y", "-c", "-p", "{prompt}"),
        (
            _call("run_shell_command", command="cat one.txt", is_background=False),
            _call("read_file", file_path="{work}/two.txt"),
        ),
        env={"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "{model}"},
        real=("--bare", "--system-prompt", "Be brief."),
    ),
    Agent(
        "Cline",
        "cline",
        "chat",
        ("cline", "{prompt}"),
        (),
        (
            _call("run_commands", commands=["cat one.txt"]),
            _call("read_files", files=[{"path": "{work}/two.txt"}]),
        ),
        files={"~/.cline/data/settings/providers.json": json.dumps(_CLINE, indent=2)},
    ),
    Agent(
        "Continue",
        "@continuedev/cli",
        "chat",
        ("cn", "--config", "folio.yaml", "--auto", "-p", "{prompt}"),
        ("cn", "--config", "folio.yaml", "--auto", "--resume", "-p", "{prompt}"),
        (_call("Bash", command="cat one.txt"), _call("Read", filepath="two.txt")),
        files={"folio.yaml": _CONTINUE},
    ),
    Agent(
        "aider",
        "aider-chat",
        "chat",
        _AIDER_RUN,
        (*_AIDER_RUN, "--restore-chat-history"),
        ("answer.txt\n```\nfirst\n```\n", "answer.txt\n```\nsecond\n```\n"),
        env={"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "none"},
    ),
)


def steps(agent: Agent, work: Path) -> tuple[Step, Step]:
    """What the scripted model says, for a working folder."""
    first, second = (json.loads(filled(json.dumps(step), work=str(work))) for step in agent.steps)
    return first, second
