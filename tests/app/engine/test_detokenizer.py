"""Text comes out whole characters at a time, and never a part of a stop string."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase

from app.engine.detokenizer import TextStream
from app.engine.model_loader import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer("builtin")


def stream(tokenizer: PreTrainedTokenizerBase, text: str, stop: list[str]) -> tuple[list[str], bool]:
    """Pieces as they come out, and whether a stop string ended them."""
    output = TextStream(tokenizer.backend_tokenizer, tokenizer.encode("Say: "), stop)
    pieces = []
    for token in tokenizer.encode(text):
        piece, stopped = output.push(token)
        pieces.append(piece)
        if stopped:
            return pieces, True
    return [*pieces, output.flush()], False


@pytest.mark.parametrize("text", ["The key of room 417 is 93.", "naïve café 🙂🙂 日本語", " a\n\tb", "🏳️‍🌈"])
def test_pieces_join_to_the_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    pieces, _ = stream(tokenizer, text, [])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 2


def test_half_a_character_is_never_emitted(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.encode("🙂")
    assert len(tokens) > 1
    output = TextStream(tokenizer.backend_tokenizer, [], [])
    assert [output.push(token)[0] for token in tokens[:-1]] == [""] * (len(tokens) - 1)
    assert output.flush() == ""


@pytest.mark.parametrize(
    ("text", "stop", "expected", "stopped"),
    [
        ("one two three", [" two"], "one", True),
        ("one two three", ["three", "two"], "one ", True),
        ("one two three", ["o three"], "one tw", True),  # across tokens
        ("ababac", ["abac"], "ab", True),  # begins again inside a false start
        ("one two three", ["threes"], "one two three", False),  # held back, then released
        ("one two", ["one two three"], "one two", False),
    ],
)
def test_stop_strings(
    tokenizer: PreTrainedTokenizerBase, text: str, stop: list[str], expected: str, stopped: bool
) -> None:
    pieces, met = stream(tokenizer, text, stop)
    assert ("".join(pieces), met) == (expected, stopped)


def test_text_is_held_back_only_while_it_may_be_a_stop(tokenizer: PreTrainedTokenizerBase) -> None:
    output = TextStream(tokenizer.backend_tokenizer, [], ["room 5"])
    emitted = ""
    for token in tokenizer.encode("The room 4"):
        emitted += output.push(token)[0]
    assert emitted == "The room 4"


def test_a_prompt_cut_inside_a_character_is_not_echoed(tokenizer: PreTrainedTokenizerBase) -> None:
    """The decoder took a prompt that ends in half a character for output, and emitted all of it."""
    first, *rest = tokenizer.encode("é")
    output = TextStream(tokenizer.backend_tokenizer, [*tokenizer.encode("secret prompt"), first], [])
    emitted = "".join(output.push(token)[0] for token in (*rest, *tokenizer.encode(" and on")))
    assert "secret" not in emitted
    assert emitted.endswith(" and on")


def test_bytes_that_are_no_character_do_not_stop_the_stream() -> None:
    """A byte-fallback tokenizer can rewrite text that is out already; the library raises then."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"a": 256, "b": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    output = TextStream(tokenizer, [256], [])
    emitted = "".join(output.push(token)[0] for token in (0x0A, 0xE2, 256, 257, 257))
    assert emitted.startswith("\n")
    assert emitted.endswith("bb")
