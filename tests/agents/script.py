"""A checkpoint that follows a script, for runs of coding agents. Its weights are written by hand.

Its marks (`tests.written_model`) are words that decide what it says. The model

- says HELLO;
- counts slowly, if the prompt has the word SLOW, so that there is time to kill its replica, and says COUNTED;
- given an agent's errand and tools, calls the first tool; with the word of the first result, the second; with that of
  the second result, says READ. The words are in the files that the tools read, and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.written_model import written_model

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

Step = str | Mapping[str, Any]  # a text, or a call's name and arguments

HELLO, READ, COUNTED = "Greetings from the script.", "Both files were read.", "Counted to the end."
SLOW, FIRST, SECOND = "word-slowly", "word-kingfisher", "word-nightjar"
CONTEXT = 1 << 16

REPLY, CALL, END_OF_CALL, TOOLS, END = "<|reply|>", "<tool_call>", "</tool_call>", "<|tools|>", "<|im_end|>"
PAD = "<|endoftext|>"
SPECIAL = (PAD, "<|im_start|>", END, REPLY, TOOLS)
_TICKS = [f" tick{number}" for number in range(400)]
_VOCABULARY = 6000

# In the style of Qwen3's.
_TEMPLATE = """\
{%- if tools %}<|im_start|>system
<|tools|>Call tools as <tool_call>{"name": …, "arguments": …}</tool_call>. They are:
{%- for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
<|reply|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<|reply|>{% endif %}"""


def write_checkpoint(folder: Path, errands: Mapping[str, tuple[Step, Step]], corpus: list[str]) -> None:
    """Write the model.

    Args:
        errands: an agent's mark → what the model says for the first and for the second file.
        corpus: texts for the vocabulary, so that long prompts are few tokens.
    """
    steps = {mark: (_chain(first), _chain(second)) for mark, (first, second) in errands.items()}
    chains = [[HELLO, END], [READ, END], [*_TICKS, COUNTED, END]] + [chain for pair in steps.values() for chain in pair]
    marks = [SLOW, FIRST, SECOND, TOOLS, *errands]
    known = list(dict.fromkeys([*SPECIAL, CALL, *marks, *(text for chain in chains for text in chain)]))
    tokenizer = _tokenizer(known, corpus)
    tokenizer.save_pretrained(folder)
    _model(tokenizer, known, marks, chains, steps).save_pretrained(folder)


def _chain(step: Step) -> list[str]:
    return [step, END] if isinstance(step, str) else [CALL, f"\n{json.dumps(step)}\n", END_OF_CALL, END]


def _tokenizer(known: list[str], corpus: list[str]) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in known if text not in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=_TEMPLATE)


def _model(
    tokenizer: PreTrainedTokenizerFast,
    known: list[str],
    marks: list[str],
    chains: list[list[str]],
    steps: Mapping[str, tuple[list[str], list[str]]],
) -> LlamaForCausalLM:
    id_of = {text: tokenizer.get_vocab()[text] for text in known}
    written = written_model(tokenizer, [id_of[text] for text in known], [id_of[mark] for mark in marks], CONTEXT)
    table, last, seen = written.table, written.last, written.seen
    table[id_of[END], 0] = 1.0  # elsewhere the reply ends
    # A chain is never left; at its start the sum of what was seen decides.
    for chain in chains:
        for before, following in pairwise(chain):
            table[id_of[following], last[id_of[before]]] = 40.0
    scores = [(HELLO, REPLY, 20, {}), (_TICKS[0], REPLY, 18, {SLOW: 4}), (READ, REPLY, 12, {SECOND: 16})]
    scores.append((CALL, REPLY, 16, {TOOLS: 3} | dict.fromkeys(steps, 3)))
    for mark, pair in steps.items():
        (start_1, last_1), (start_2, last_2) = [
            (chain[1], CALL) if chain[0] == CALL else (chain[0], REPLY) for chain in pair
        ]
        scores += [(start_1, last_1, 16, {mark: 6}), (start_2, last_2, 15, {mark: 6, FIRST: 4})]
    for text, before, base, more in scores:
        table[id_of[text], last[id_of[before]]] = base
        for mark, worth in more.items():
            table[id_of[text], seen[id_of[mark]]] = worth
    return written.model
