"""A checkpoint that follows a script, for runs of coding agents. Its weights are written by hand.

A Llama of one layer. The residual stream has a dimension that is always 1, one for each token of the script, and one
for each mark: a word that attention finds anywhere in the prompt. The output layer is a table from the last token and
the marks to the next token, so that the model

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
_HEAD_DIM, _VOCABULARY = 16, 6000

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
    known = list(dict.fromkeys([*SPECIAL, *marks, *(text for chain in chains for text in chain)]))
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
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    vocabulary = tokenizer.get_vocab()
    id_of = {text: vocabulary[text] for text in known}
    own = {text: place for place, text in enumerate(known, start=1)}  # dimensions; 0 is always 1
    seen = {mark: 1 + len(known) + place for place, mark in enumerate(marks)}
    unit = 16 * len(marks)
    hidden = -(-(1 + len(known) + len(marks)) // unit) * unit
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=len(marks),
        num_key_value_heads=len(marks),
        head_dim=_HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},  # the last dimensions hardly rotate
        bos_token_id=None,
        eos_token_id=id_of[END],
        pad_token_id=id_of[PAD],
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=id_of[END], pad_token_id=id_of[PAD])
    layer, embeddings, table = model.model.layers[0], model.model.embed_tokens.weight, model.lm_head.weight

    with torch.no_grad():
        for parameter in (embeddings, table, layer.mlp.down_proj.weight, *layer.self_attn.parameters()):
            parameter.zero_()
        embeddings[:, 0] = 1.0
        embeddings[[id_of[text] for text in known], list(own.values())] = 1.0
        length = (hidden / 2) ** 0.5  # of the two dimensions that are 1, behind the norm
        for head, mark in enumerate(marks):
            first, slow = head * _HEAD_DIM, head * _HEAD_DIM + _HEAD_DIM // 2 - 1
            layer.self_attn.q_proj.weight[slow, 0] = _HEAD_DIM**0.5 * 6 / length
            layer.self_attn.k_proj.weight[slow, own[mark]] = 6 / length
            layer.self_attn.v_proj.weight[first, own[mark]] = 1 / length
            layer.self_attn.o_proj.weight[seen[mark], first] = 1.0
        table[id_of[END], 0] = 1.0  # elsewhere the reply ends
        # [next token, last token or mark]: a chain is never left; at its start the sum of what was seen decides.
        for chain in chains:
            for last, following in pairwise(chain):
                table[id_of[following], own[last]] = 40.0
        scores = [(HELLO, REPLY, 20, {}), (_TICKS[0], REPLY, 18, {SLOW: 4}), (READ, REPLY, 12, {SECOND: 16})]
        scores.append((CALL, REPLY, 16, {TOOLS: 3} | dict.fromkeys(steps, 3)))
        for mark, pair in steps.items():
            (start_1, last_1), (start_2, last_2) = [
                (chain[1], CALL) if chain[0] == CALL else (chain[0], REPLY) for chain in pair
            ]
            scores += [(start_1, last_1, 16, {mark: 6}), (start_2, last_2, 15, {mark: 6, FIRST: 4})]
        for text, last, base, more in scores:
            table[id_of[text], own[last]] = base
            for mark, worth in more.items():
                table[id_of[text], seen[mark]] = worth
    return model
