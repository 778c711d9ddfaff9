"""Train the built-in model: `python -m tools.builtin_model.train --out DIR` (about an hour and a half on 2 CPU cores).

Data from `corpus.py`, transformers' Llama architecture, an ordinary checkpoint folder as the result. Lengths follow a
curriculum: short conversations teach the tasks, long ones teach looking further back. The loss counts answer tokens
only; questions are random. `--start DIR` goes on from a checkpoint.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from folio.app.models.builtin import BUILTIN_FOLDER
from tools.builtin_model import corpus, openings
from tools.builtin_model.corpus import Turn
from tools.builtin_model.muon import Muon
from tools.builtin_model.untrained import MAX_POSITIONS, build_model, sketch_numbers

PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
VOCAB_SIZE = 3072
# Without tools: role, content and end of each message. With tools: the format of Hermes and Qwen.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' }}"
    "{% if messages and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n' }}{% endif %}"
    "{{ 'Functions, in <tools></tools>:\\n<tools>' }}"
    "{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
    '{{ \'\\n</tools>\\nCall one as <tool_call>\\n{"name": name, "arguments": {...}}\\n</tool_call>\' }}'
    "{{ '<|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>\\n' + message['content'] + '\\n</tool_response><|end|>' }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\\n' if message['content'] or not loop.first else '' }}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}"
    "{% endfor %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
IGNORED_LABEL = -100
EVALUATION_SEED = 1_000_003
EVALUATED_LENGTHS = (128, 512, 1024, 2048, 3072)


class Stage(NamedTuple):
    """A share of the training steps, on rows of at most `row_tokens` tokens."""

    row_tokens: int
    share: float


class Mix(NamedTuple):
    """Shares of rows with one task only; other rows have short tasks of every kind."""

    look_up: float
    copy: float
    sums: float
    stories: float
    openings: float


TRAINING_MIX = Mix(look_up=0.4, copy=0.15, sums=0.1, stories=0.1, openings=0.0)
START_MIX = Mix(look_up=0.04, copy=0.04, sums=0.07, stories=0.13, openings=0.63)
POLISHING_MIX = Mix(look_up=0.1, copy=0.4, sums=0.05, stories=0.15, openings=0.2)
CURRICULUM = (Stage(128, 0.2), Stage(256, 0.25), Stage(512, 0.2), Stage(1024, 0.15), Stage(2304, 0.2))
POLISHING, POLISHING_RATE = Stage(1152, 1.0), 0.2
# Going on from a checkpoint: short rows teach what is new, of the others every fourth step is long, mostly copies.
START_ROWS = (128, 256, 256, 1152, 256, 512, 128, 2304)
LONG_ROW = 1024
# Up to this length attention takes less time as two matrix products than fused, on CPUs.
SHORT_ROW = 256


def _texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    texts = []
    for _ in range(6000):
        for turn in (*corpus.short_conversation(rng, 6), *corpus.look_up_conversation(rng, 2, 2)):
            texts += [turn.question, turn.answer]
    return texts


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose vocabulary holds every number of up to three digits after a space, and up to 199 without."""
    numbers = [f" {n}" for n in range(1000)] + [str(n) for n in range(200)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, END, USER, ASSISTANT, SYSTEM],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed) + numbers * 300, trainer)
    return _fast(tokenizer)


def _fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, additional_special_tokens=[USER, ASSISTANT, SYSTEM]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = MAX_POSITIONS
    return fast


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


class Encoder:
    """Conversations as token ids and labels."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._end, self._user, self._assistant, self._system = (
            token_id(tokenizer, token) for token in (END, USER, ASSISTANT, SYSTEM)
        )

    def turn(self, turn: Turn) -> tuple[list[int], list[int]]:
        """(token ids, labels): labels are the answer's tokens and its end; other positions are ignored."""
        encoded = self._tokenizer(
            [turn.question, turn.answer, turn.system], add_special_tokens=False, return_offsets_mapping=True
        )
        question, answer, system = encoded["input_ids"]
        head = [self._user, *question, self._end, self._assistant]
        if turn.system:
            head = [self._system, *system, self._end, *head]
        labels = [
            IGNORED_LABEL if any(first <= begin and end <= last for first, last in turn.given) else token
            for token, (begin, end) in zip(answer, encoded["offset_mapping"][1], strict=True)
        ]
        return [*head, *answer, self._end], [*[IGNORED_LABEL] * len(head), *labels, self._end]

    def row(self, turns: Iterator[Turn], row_tokens: int) -> tuple[list[int], list[int]]:
        """As many whole turns as fit into `row_tokens`."""
        ids: list[int] = []
        labels: list[int] = []
        for turn in turns:
            turn_ids, turn_labels = self.turn(turn)
            if len(ids) + len(turn_ids) > row_tokens:
                break
            ids += turn_ids
            labels += turn_labels
        return ids, labels


def conversation(rng: random.Random, row_tokens: int, mix: Mix) -> Iterator[Turn]:
    """An endless conversation for one row; its first turn takes at most about `row_tokens`."""
    (task,) = rng.choices((*mix._fields, "short"), (*mix, 1.0 - sum(mix)))
    if task == "look_up":  # about 9 tokens a room, 20 a question
        num_rooms = rng.randint(1, max(2, min(240, int(row_tokens * rng.uniform(0.05, 0.95) / 9.5) - 3)))
        yield from corpus.look_up_conversation(rng, num_rooms, row_tokens // 18)
    while task == "copy":  # about 2 tokens an item
        num_items = rng.randint(2, max(4, int(row_tokens * rng.uniform(0.05, 0.48)) - 12))
        yield corpus.copy_turn(rng, min(num_items, 900))
    while task == "sums":
        yield corpus.arithmetic_turn(rng)
    while task == "stories":
        yield from corpus.story_conversation(rng, rng.randint(1, 8), rng.randint(2, 6))
    while task == "openings":
        yield corpus.opening_turn(rng)
    if task == "short":
        yield from corpus.short_conversation(rng, row_tokens // 10)


def batch(
    rng: random.Random, encoder: Encoder, row_tokens: int, num_rows: int, mix: Mix
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both `[num_rows, row_tokens]`."""
    ids = torch.zeros(num_rows, row_tokens, dtype=torch.long)
    labels = torch.full((num_rows, row_tokens), IGNORED_LABEL)
    for i in range(num_rows):
        row_ids: list[int] = []
        while not row_ids:
            row_ids, row_labels = encoder.row(conversation(rng, row_tokens, mix), row_tokens)
        ids[i, : len(row_ids)] = torch.tensor(row_ids)
        labels[i, : len(row_ids)] = torch.tensor(row_labels)
    return ids, labels


@torch.inference_mode()
def evaluate(model: LlamaForCausalLM, encoder: Encoder, num_samples: int, lengths: tuple[int, ...]) -> dict[str, float]:
    """Exact-match accuracy by task on held-out problems: greedy decoding must give the whole answer and then stop.

    Teacher forcing finds the same in one forward pass: greedy decoding follows the answer as long as every prediction
    is right.
    """
    device = model.device
    rng = random.Random(EVALUATION_SEED)
    cases: defaultdict[str, list[Turn]] = defaultdict(list)
    for _ in range(num_samples):
        cases["openings"].append(corpus.opening_turn(rng))
        cases["names and units"] += corpus.story_conversation(rng, rng.randint(2, 8), 1)
        story = corpus.Story(rng, 3)
        asked = story.json_turn()
        cases["JSON"].append(Turn(f"{story.text()} {asked.question}", asked.answer))
        cases["arithmetic (held out)"].append(corpus.arithmetic_turn(rng, held_out=True))
        cases["sort"].append(corpus.sort_turn(rng))
        cases["reverse"].append(corpus.reverse_turn(rng))
    for length in lengths:
        for _ in range(num_samples):
            cases[f"look-up {length}"] += corpus.look_up_conversation(rng, int((length - 24) / 9.4), 1)
            cases[f"copy {length}"].append(corpus.copy_turn(rng, min(900, int(length * 0.48) - 8)))
    accuracy = {}
    for task, turns in cases.items():
        right = 0
        for turn in turns:
            ids, labels = encoder.turn(turn)
            first = next(i for i, label in enumerate(labels) if label != IGNORED_LABEL)
            logits = model(torch.tensor([ids], device=device), logits_to_keep=len(ids) - first + 1).logits[0]
            predicted = logits[:-1].argmax(-1).tolist()
            right += predicted == ids[first:]
        accuracy[task] = right / len(turns)
    return accuracy


def unseen_openings(file: Path) -> list[Turn]:
    """Lines of an intent, a tab, and a message that is not in the corpus."""
    rows = (line.split("\t") for line in file.read_text().splitlines())
    return [Turn(message, openings.answer_to(intent)) for intent, message in rows]


@torch.inference_mode()
def wrong_openings(model: LlamaForCausalLM, encoder: Encoder, turns: list[Turn]) -> list[Turn]:
    """The openings that greedy decoding does not answer as it should."""
    wrong = []
    for turn in turns:
        ids, labels = encoder.turn(turn)
        first = next(i for i, label in enumerate(labels) if label != IGNORED_LABEL)
        logits = model(torch.tensor([ids]), logits_to_keep=len(ids) - first + 1).logits[0]
        if logits[:-1].argmax(-1).tolist() != ids[first:]:
            wrong.append(turn)
    return wrong


def train(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    folder = args.out if args.evaluate or args.polish else args.start
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder) if folder else train_tokenizer(args.seed)
    encoder = Encoder(tokenizer)
    held_out = unseen_openings(args.openings) if args.openings else []
    if args.evaluate:
        model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(args.out)
        nn.Module.to(model, device)
        print(json.dumps(evaluate(model, encoder, args.samples, EVALUATED_LENGTHS), indent=1))
        for turn in (wrong := wrong_openings(model, encoder, held_out)):
            print("wrong:", turn.question, "->", turn.answer)
        print(f"{len(held_out) - len(wrong)} of {len(held_out)} openings of the file are right")
        return
    if args.polish:
        model = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
        stages, mix, top_rate = [POLISHING] * args.steps, POLISHING_MIX, POLISHING_RATE
    elif args.start is not None:
        model = LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32)
        stages = [Stage(START_ROWS[step % len(START_ROWS)], 1.0) for step in range(args.steps)]
        mix, top_rate = START_MIX, args.rate
    else:
        model = build_model(VOCAB_SIZE, token_id(tokenizer, END), token_id(tokenizer, PAD), args.seed)
        sketch_numbers(model, tokenizer)
        stages = [stage for stage in CURRICULUM for _ in range(round(stage.share * args.steps))]
        mix, top_rate = TRAINING_MIX, 1.0
    nn.Module.to(model, device)
    rng = random.Random(args.seed + 1 + args.polish + 2 * (args.start is not None))
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        Muon(hidden, lr=args.muon_lr),
        torch.optim.AdamW(rest, lr=args.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    start = time.perf_counter()
    for step, stage in enumerate(stages, start=1):
        progress = step / len(stages)
        scale = top_rate * min(1.0, step / 100) * min(1.0, (1.0 - progress) / args.decay + 0.01)
        row_mix = POLISHING_MIX if args.start is not None and stage.row_tokens > LONG_ROW else mix
        ids, labels = batch(rng, encoder, stage.row_tokens, max(1, args.batch_tokens // stage.row_tokens), row_mix)
        ids, labels = ids.to(device), labels[:, 1:].to(device)
        counts = labels != IGNORED_LABEL
        model.set_attn_implementation("eager" if stage.row_tokens <= SHORT_ROW and device.type == "cpu" else "sdpa")
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.bf16):
            hidden_states = model.model(input_ids=ids).last_hidden_state[:, :-1]
            logits = model.lm_head(hidden_states[counts])
        loss = functional.cross_entropy(logits.float(), labels[counts])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, base in zip(optimizers, (args.muon_lr, args.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % args.report == 0 or step == len(stages):
            elapsed = time.perf_counter() - start
            remaining = elapsed / step * (len(stages) - step)
            print(
                f"step {step}/{len(stages)}  row {stage.row_tokens}  loss {loss.item():.4f}  "
                f"{step * args.batch_tokens / elapsed:.0f} tokens/s  {remaining / 60:.0f} min left",
                flush=True,
            )
        if step % (args.report * 10) == 0:
            wrong = wrong_openings(model, encoder, held_out)
            print(
                evaluate(model, encoder, 50, (128, 1024)),
                f"{len(held_out) - len(wrong)} of {len(held_out)} openings",
                flush=True,
            )
            save(model, tokenizer, args.out)
    save(model, tokenizer, args.out)
    print(json.dumps(evaluate(model, encoder, args.samples, EVALUATED_LENGTHS), indent=1))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    rounded = copy.deepcopy(model)
    nn.Module.to(rounded, torch.bfloat16)
    rounded.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=BUILTIN_FOLDER)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch-tokens", type=int, default=4608)
    parser.add_argument("--muon-lr", type=float, default=6e-3)
    parser.add_argument("--adam-lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--start", type=Path, help="go on from this checkpoint")
    parser.add_argument(
        "--rate", type=float, default=0.5, help="with --start: the highest learning rate, as a share of the usual one"
    )
    parser.add_argument(
        "--decay", type=float, default=0.4, help="the share of the steps, at the end, in which the rate falls"
    )
    parser.add_argument(
        "--openings", type=Path, help="a file of openings to evaluate as well: lines of intent, tab, message"
    )
    parser.add_argument("--samples", type=int, default=200, help="cases per task in the final evaluation")
    parser.add_argument("--report", type=int, default=50, help="steps between progress lines")
    parser.add_argument(
        "--polish", action="store_true", help="train the checkpoint in --out further, mostly on copying"
    )
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the checkpoint in --out")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
