"""Tokenizers of GGUF files, as transformers loads them from the folder of metadata."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from folio.app.models.gguf.files import read_gguf
from folio.app.models.gguf.folder import metadata_folder
from folio.app.models.gguf.splits import MERGES_LATE, NORMALISED, SPLITS
from tests.app.models.gguf.files import byte_tokens, tiny_llama, write_gguf

# A piece, its score and its type: 1 normal, 2 unknown, 3 control, 4 user-defined, 6 a byte.
_NEWS = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("  ", 0.0, 4), ("<b>", 0.0, 4)]
PIECES = [
    *_NEWS,
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    *((piece, -float(rank), 1) for rank, piece in enumerate(["he", "▁he", "ll", "▁hell", "▁hello", "lo"])),
    *((letter, -100.0 - rank, 1) for rank, letter in enumerate("▁helo wrdbs<>/")),
]


def piece_tokens() -> dict[str, Any]:
    pieces, scores, kinds = zip(*PIECES, strict=True)
    ids = {"bos": 1, "eos": 2, "unknown": 0}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.pre": "default",
        **{f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in ids.items()},
    }


def folder_of(tmp_path: Path, tokens: dict[str, Any]) -> Path:
    settings, tensors = tiny_llama(1)
    settings = {name: value for name, value in settings.items() if not name.startswith("tokenizer.")}
    rows = tensors["token_embd.weight"]
    more = len(PIECES) + 10
    tensors["token_embd.weight"] = rows._replace(shape=(more, 64), data=bytes(more * 64 * 2))
    return metadata_folder(read_gguf(write_gguf(tmp_path / "m.gguf", settings | tokens, tensors)), [tmp_path / "made"])


def loaded(tmp_path: Path, tokens: dict[str, Any]) -> Any:
    folder = folder_of(tmp_path, tokens)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.is_fast
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("hello", " hello  <b>", "é"):  # transformers changes nothing of the file
        assert tokenizer(text).input_ids == plain.encode(text).ids
    return tokenizer


def test_bytes_with_merges(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, byte_tokens())
    assert tokenizer.tokenize("hello hello 12\n") == ["hello", "Ġhello", "Ġ", "1", "2", "Ċ"]  # digits are split off
    text = "<bos>hé \n\thello<eos> 日本"
    ids = tokenizer(text).input_ids
    assert (ids[0], ids.count(1), tokenizer.decode(ids)) == (0, 1, text)
    assert (tokenizer.bos_token, tokenizer.eos_token_id) == ("<bos>", 1)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "default"])
def test_splits_before_merges(tmp_path: Path, pre: str) -> None:
    tokens = byte_tokens() | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}
    expected = {
        "gpt-2": ["Ġ1", "2"],
        "llama-bpe": ["Ġ", "1", "2"],
        "qwen2": ["Ġ", "1", "2"],
        "default": ["Ġ", "1", "2"],
    }
    assert loaded(tmp_path, tokens).tokenize(" 12") == expected[pre]


def test_every_expression_compiles(tmp_path: Path) -> None:
    for number, pre in enumerate(SPLITS):
        folder = tmp_path / str(number)
        folder.mkdir()
        made = folder_of(folder, byte_tokens() | {"tokenizer.ggml.pre": pre})
        tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
        text = "Hello, it's 12345 tests…\r\n\t x  日本語 naïve ﬁ"
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False).removeprefix("<bos>") == text
    assert set(SPLITS) >= MERGES_LATE - {"llama-v3"} | NORMALISED


@pytest.mark.parametrize(
    ("pre", "says", "adds"), [("smollm", None, 0), ("llama-bpe", None, 1), ("llama-bpe", False, 0)]
)
def test_bos_of_bytes(tmp_path: Path, pre: str, says: bool | None, adds: int) -> None:
    tokens = byte_tokens() | {"tokenizer.ggml.pre": pre}
    tokens |= {} if says is None else {"tokenizer.ggml.add_bos_token": says}
    assert loaded(tmp_path, tokens)("hello").input_ids.count(0) == adds


def test_pieces_with_scores(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, piece_tokens())
    # As llama.cpp: each text between tokens that are found whole begins with a space.
    assert tokenizer.tokenize("hello  hello<b>é") == ["▁hello", "  ", "▁hello", "<b>", "▁", "<0xC3>", "<0xA9>"]
    ids = tokenizer("hello").input_ids
    assert (ids[0], ids.count(1), tokenizer.decode(ids)) == (1, 1, "<s> hello")
    assert tokenizer("</s>").input_ids.count(2) == 1


def test_pieces_without_a_space_before(tmp_path: Path) -> None:
    tokens = piece_tokens() | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokenizer = loaded(tmp_path, tokens)
    assert tokenizer.tokenize("hello hello") == ["he", "ll", "o", "▁hello"]
    assert tokenizer.decode(tokenizer("hello  w é").input_ids) == "hello  w é"


def test_merges_of_the_best_scores_come_first(tmp_path: Path) -> None:
    pieces, scores, kinds = (list(part) for part in zip(*PIECES, strict=True))
    tokens = piece_tokens() | {"tokenizer.ggml.add_space_prefix": False}
    assert loaded(tmp_path, tokens).tokenize("llo") == ["ll", "o"]
    scores[pieces.index("lo")] = 1.0
    tokens |= {"tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": kinds}
    assert loaded(tmp_path, tokens).tokenize("llo") == ["l", "lo"]


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    tokens = byte_tokens(special=["<|endoftext|>", "<|im_end|>", "<|eom_id|>", "<tool>", "<|eot_id|>"])
    tokens |= {"tokenizer.ggml.eom_token_id": 3}
    folder = folder_of(tmp_path, tokens)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, 3, 0, 2, 4]


_MESSAGES = [{"role": "user", "content": "hello"}]
_SOURCE = "{% for message in messages %}{{ message.content }}<eos>{% endfor %}"


@pytest.mark.parametrize("source", [_SOURCE, "{{ bos_token }}" + _SOURCE, "<bos>" + _SOURCE])
@pytest.mark.parametrize("adds", [True, False])
def test_bos_of_a_chat_once(tmp_path: Path, source: str, adds: bool) -> None:
    """A template that writes BOS itself does so once; one that does not, has it where other texts have it."""
    tokens = byte_tokens() | {"tokenizer.chat_template": source, "tokenizer.ggml.add_bos_token": adds}
    tokenizer = loaded(tmp_path, tokens)
    text = tokenizer.apply_chat_template(_MESSAGES, tokenize=False)
    assert text.count("<bos>") == (1 if adds or "bos" in source else 0)
    assert tokenizer(text, add_special_tokens=False).input_ids.count(0) == text.count("<bos>")


def test_several_templates(tmp_path: Path) -> None:
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = loaded(tmp_path, byte_tokens() | {"tokenizer.chat_template": _SOURCE} | named)
    assert tokenizer.chat_template == {"default": _SOURCE, "tool_use": "tools"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'; Folio reads gpt2 and llama"),
    "split": ({"tokenizer.ggml.pre": "odd"}, "tokenizer.ggml.pre is 'odd', which Folio does not know"),
    "no tokens": ({"tokenizer.ggml.tokens": []}, "it has 0 tokens for"),
    "numbers": ({"tokenizer.ggml.tokens": [1, 2]}, "has tokenizer.ggml.tokens (1, 2); it must be a list of str"),
    "types": ({"tokenizer.ggml.token_type": [1]}, "it has 1 values in tokenizer.ggml.token_type for 264 tokens"),
    "an id": ({"tokenizer.ggml.eos_token_id": 9999}, "tokenizer.ggml.eos_token_id is 9999, and it has 264 tokens"),
    "a merge": ({"tokenizer.ggml.merges": ["q z"]}, "tokenizer.ggml.merges has 'q z', of something that is no token"),
    "half a merge": (
        {"tokenizer.ggml.merges": ["qz"]},
        "tokenizer.ggml.merges has 'qz', of something that is no token",
    ),
    "scores": ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": []}, "it has 0 values in tokenizer.ggml.sco"),
    "many": ({"tokenizer.ggml.tokens": ["x"] * 999}, "it has 999 tokens for 291 rows of token_embd.weight"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(tmp_path: Path, kind: str) -> None:
    changed, named = REFUSED[kind]
    with pytest.raises(ValueError, match=r"m\.gguf") as error:
        folder_of(tmp_path, byte_tokens() | changed)
    assert named in str(error.value)
    assert list((tmp_path / "made").iterdir()) == []
