"""Names of the formats in which models write calls of functions and reasoning.

They are the names of vLLM's `--tool-call-parser` and `--reasoning-parser`. The syntaxes are in
`folio.app.api.output.formats`.
"""

from typing import Literal

ToolParserName = Literal[
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "granite",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "llama4_pythonic",
    "minimax",
    "minimax_m2",
    "mistral",
    "mistral_v11",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    "xlam",
]
ReasoningParserName = Literal[
    "auto",
    "none",
    "deepseek_r1",
    "glm45",
    "granite",
    "minimax_m2",
    "mistral",
    "nemotron",
    "openai",
    "qwen3",
    "seed_oss",
]
