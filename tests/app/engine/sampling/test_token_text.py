"""Text is emitted in complete characters, and never a part of a stop string."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase

from folio.app.engine.model.tokenizer import load_tokenizer
from folio.app.engine.sampling.token_text import _BYTE_OF, IncrementalDetokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer("builtin")


def stream(
    tokenizer: PreTrainedTokenizerBase, text: str, stop: list[str], include: bool = False
) -> tuple[list[str], str | None]:
    """The emitted pieces, and the stop string that ended them."""
    output = IncrementalDetokenizer(
        tokenizer.backend_tokenizer, tokenizer.encode("Say: "), stop, include_stop_str=include
    )
    pieces = []
    for token in tokenizer.encode(text):
        piece, stopped = output.push(token)
        pieces.append(piece)
        assert stopped == (output.met is not None)
        if stopped:
            break
    return [*pieces, output.flush()], output.met


@pytest.mark.parametrize("text", ["The key of room 417 is 93.", "naïve café 🙂🙂 日本語", " a\n\tb", "🏳️‍🌈"])
def test_pieces_join_to_the_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    pieces, _ = stream(tokenizer, text, [])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 2


def test_half_a_character_is_never_emitted(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.encode("🙂")
    assert len(tokens) > 1
    output = IncrementalDetokenizer(tokenizer.backend_tokenizer, [], [])
    assert [output.push(token)[0] for token in tokens[:-1]] == [""] * (len(tokens) - 1)
    assert output.flush() == "\ufffd"  # the output ends there


def test_special_tokens_are_text_only_where_they_are_kept(tokenizer: PreTrainedTokenizerBase) -> None:
    """Tool calls begin with a special token in some models."""
    [end], [user] = (tokenizer.encode(token) for token in ("<|end|>", "<|user|>"))
    tokens = [*tokenizer.encode("a "), user, *tokenizer.encode("b é"), end]
    for kept, text in (((), "a b é"), ((user,), "a <|user|>b é")):
        output = IncrementalDetokenizer(tokenizer.backend_tokenizer, [], ["never"], kept=kept)
        assert "".join(output.push(token)[0] for token in tokens) + output.flush() == text
    output = IncrementalDetokenizer(tokenizer.backend_tokenizer, [], ["|>b"], kept=(user,))
    assert "".join(output.push(token)[0] for token in tokens[:4]) == "a <|user"


@pytest.mark.parametrize(
    ("text", "stop", "before", "met"),
    [
        ("one two three", [" two"], "one", " two"),
        ("one two three", ["three", "two"], "one ", "two"),
        ("one two three", ["o three"], "one tw", "o three"),  # across tokens
        ("ababac", ["abac"], "ab", "abac"),  # begins again inside a false start
        ("one two three", ["ne two", "two", "wo"], "o", "ne two"),  # all complete at once: the longest
        ("one two three", ["one two three", "two"], "one ", "two"),  # complete first, though it began later
        ("one two three", ["threes"], "one two three", None),  # held back, then released
        ("one two", ["one two three"], "one two", None),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(
    tokenizer: PreTrainedTokenizerBase, text: str, stop: list[str], before: str, met: str | None, include: bool
) -> None:
    pieces, found = stream(tokenizer, text, stop, include)
    assert ("".join(pieces), found) == (before + (met or "" if include else ""), met)


def letters() -> Tokenizer:
    """Every text of a and b up to three letters is a token."""
    texts = ["".join(c) for n in (1, 2, 3) for c in itertools.product("ab", repeat=n)]
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


LETTERS = letters()
SHORT = st.text("ab", min_size=1, max_size=3)


@settings(deadline=None)
@given(st.lists(SHORT, max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.booleans())
def test_stops_do_not_depend_on_how_text_is_cut(tokens: list[str], stop: list[str], include: bool) -> None:
    """The result equals a search letter by letter."""
    output = IncrementalDetokenizer(LETTERS, [], stop, include_stop_str=include)
    seen, stopped = "", False
    for token in tokens:
        piece, stopped = output.push(LETTERS.token_to_id(token))
        seen += piece
        if stopped:
            break
    seen += output.flush()
    text = expected = "".join(tokens)
    met = None
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            met = max(complete, key=len)
            expected = text[: end if include else end - len(met)]
            break
    assert (seen, output.met, stopped) == (expected, met, met is not None)


def test_text_is_held_back_only_while_it_may_be_a_stop(tokenizer: PreTrainedTokenizerBase) -> None:
    output = IncrementalDetokenizer(tokenizer.backend_tokenizer, [], ["room 5"])
    emitted = ""
    for token in tokenizer.encode("The room 4"):
        emitted += output.push(token)[0]
    assert emitted == "The room 4"


def test_a_prompt_cut_inside_a_character_is_not_echoed(tokenizer: PreTrainedTokenizerBase) -> None:
    """The decoder took a prompt that ends in half a character for output, and emitted all of it."""
    first, *rest = tokenizer.encode("é")
    output = IncrementalDetokenizer(tokenizer.backend_tokenizer, [*tokenizer.encode("secret prompt"), first], [])
    emitted = "".join(output.push(token)[0] for token in (*rest, *tokenizer.encode(" and on")))
    assert "secret" not in emitted
    assert emitted.endswith(" and on")


def byte_fallback() -> Tokenizer:
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"a": 256, "b": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def test_bytes_that_are_no_character_do_not_stop_the_stream() -> None:
    """A byte-fallback tokenizer can rewrite emitted text; the library raises then."""
    output = IncrementalDetokenizer(byte_fallback(), [256], [])
    emitted = "".join(output.push(token)[0] for token in (0x0A, 0xE2, 256, 257, 257))
    assert emitted == "\n\ufffdabb"


@given(st.lists(st.sampled_from([b"\xff", b"\x80", b"a", "é".encode(), "日".encode(), "🙂".encode(), b"\xff" * 20])))
@settings(max_examples=60, deadline=None)
def test_bytes_that_never_become_a_character_are_text(parts: list[bytes]) -> None:
    """Seen: 200 tokens billed, and the text was empty. Characters between such bytes are whole."""
    backend, whole = load_tokenizer("builtin").backend_tokenizer, b"".join(parts)
    ids = {byte: backend.token_to_id(name) for name, byte in _BYTE_OF.items()}
    output = IncrementalDetokenizer(backend, [], [])
    pieces = [output.push(ids[byte])[0] for byte in whole]
    assert "".join(pieces) + output.flush() == whole.decode(errors="replace")
    assert not any(set(run) == {""} for run in zip(*(pieces[start:] for start in range(17)), strict=False))


def test_bytes_of_a_byte_fallback_that_never_become_a_character_are_text() -> None:
    output = IncrementalDetokenizer(byte_fallback(), [256], [])
    pieces = [output.push(token)[0] for token in [0xFF] * 200 + [256]]
    assert "".join(pieces) + output.flush() == "\ufffd" * 200 + "a"
    assert len([piece for piece in pieces if piece]) > 10
