"""A checkpoint that follows a script, for tests of clients: `python -m tests.clients.scripted_model FOLDER`.

Its weights are written by hand (`tests.written_model`), so that it reasons, calls tools and answers in each run:

- it thinks (THOUGHT), then calls `add(2, 3)` if the prompt has tools and no result yet, and otherwise says ANSWER;
- where a grammar asks for JSON, it says STRUCTURED if that is valid;
- elsewhere it chooses the token that ends the output soonest: other JSON is minimal and complete.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tests.written_model import written_model

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

THOUGHT = "Adding up."
ANSWER = "The sum is 5."
CALL = {"a": 2, "b": 3}  # arguments of `add`

END = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END)
TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tools>",
    "</tools>",
    "<tool_response>",
    "</tool_response>",
)
TOOLS, RESULT = MARKS = ("<tools>", "<tool_response>")
_ADD = '\n{"name": "add", "arguments": {'
_FINAL = '\n{"name": "final_result", "arguments": '
_ARGUMENTS, _CLOSE = '"a": 2, ', '"b": 3}}\n'
STRUCTURED = '{"total": 5, "unit": "apples"}'
_CHAINS = (
    ("\n", "<think>", "Adding", " up.", "</think>"),  # a prompt ends with "\n", or with "</think>"
    ("The", " sum", " is", " 5.", END),
    (_ADD, _ARGUMENTS, _CLOSE, "</tool_call>", END),
    (_FINAL, STRUCTURED, END),
    (" ", STRUCTURED),  # arguments of another function
    (END, "The"),  # an output that ignores its end
)
_WORDS = ("Adding", " up.", "The", " sum", " is", " 5.", _ADD, _FINAL, _ARGUMENTS, _CLOSE, STRUCTURED)
# What a token is worth wherever the grammar allows it. The rest is worth nothing, and white space less.
_PREFERRED = {END: 0.9, '"': 0.8, "}": 0.7, "]": 0.6, ",": 0.5, "5": 0.4, "</tool_call>": 0.3, " ": -0.2, "\n": -0.2}

HIDDEN_SIZE, CONTEXT = 288, 8192
_SHARPNESS = 8.0

# In the style of Qwen3's.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Call functions as <tool_call>{"name": …, "arguments": …}</tool_call>. They are:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, tag and word of the script."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: place for place, character in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*TAGS, *_WORDS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The weights of the script."""
    texts = (*TAGS, *_WORDS, *_PREFERRED, "f")
    id_of = {text: tokenizer(text, add_special_tokens=False).input_ids[0] for text in texts}
    written = written_model(tokenizer, range(len(tokenizer)), [id_of[mark] for mark in MARKS], CONTEXT)
    assert written.model.config.hidden_size == HIDDEN_SIZE
    table, last, seen = written.table, written.last, written.seen
    for text, worth in _PREFERRED.items():
        table[id_of[text], 0] = worth
    for chain in _CHAINS:
        for before, following in pairwise(chain):
            table[id_of[following], last[id_of[before]]] = 4.0
    # Behind the reasoning: a call if there are tools and no result yet, else ANSWER, else STRUCTURED.
    call, final = id_of["<tool_call>"], id_of[_FINAL]
    thought, named = last[id_of["</think>"]], last[call]
    tools, result = seen[id_of[TOOLS]], seen[id_of[RESULT]]
    table[id_of["The"], thought], table[id_of[STRUCTURED], thought], table[call, thought] = 4.5, 4.2, 4.0
    table[call, tools], table[call, result] = 0.7, -0.7
    # With a result, functions are preferred whose names begin like `final_result`.
    table[id_of[_ADD], named], table[final, named], table[final, result] = 4.0, 3.5, 0.7
    table[id_of["f"], result] = 0.3
    table *= _SHARPNESS
    return written.model


def write_checkpoint(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_model(tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
