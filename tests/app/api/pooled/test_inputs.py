"""Texts and pairs as token ids: tokens that the tokenizer adds, templates, truncation."""

from __future__ import annotations

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from folio.app.api.input.prompts import PromptEncoder
from folio.app.api.pooled.inputs import InputEncoder
from folio.app.errors import ContextLengthError, RequestError
from tests.app.small_tokenizers import byte_level

TEMPLATE = "<|im_end|>Q: {query} D: {document}<|im_end|>"


def tokenizer(*, ends: bool = True) -> PreTrainedTokenizerFast:
    """A copy that adds the end of text to texts and between pairs, as Qwen3-Embedding's adds it to texts."""
    copy = PreTrainedTokenizerFast(tokenizer_object=type(byte_level().backend_tokenizer).from_str(state()))
    if ends:
        end = copy.convert_tokens_to_ids("<|endoftext|>")
        copy.backend_tokenizer.post_processor = TemplateProcessing(
            single="$A <|endoftext|>", pair="$A <|endoftext|> $B <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
        )
    return copy


def state() -> str:
    return str(byte_level().backend_tokenizer.to_str())


def encoder(max_model_len: int = 100, truncate_to: int | None = None, *, ends: bool = True) -> InputEncoder:
    return InputEncoder(PromptEncoder(tokenizer(ends=ends)), max_model_len, truncate_to)


def ids(text: str) -> list[int]:
    return [int(i) for i in byte_level().encode(text)]


END = ids("<|endoftext|>")
MARK = ids("<|im_end|>")


def test_the_tokenizers_end_is_added_to_texts_only() -> None:
    assert encoder().encode("the fox", "input") == ids("the fox") + END
    assert encoder().encode(ids("the fox"), "input") == ids("the fox")


@pytest.mark.parametrize("given", ["", []])
def test_nothing_is_refused(given: str | list[int]) -> None:
    with pytest.raises(RequestError, match="input is empty") as refused:
        encoder().encode(given, "input")
    assert refused.value.param == "input"


@pytest.mark.parametrize("given", ["0123456789" * 3, list(range(1, 31))])
def test_long_inputs_are_refused_or_keep_their_last_tokens(given: str | list[int]) -> None:
    whole = ids(given) + END if isinstance(given, str) else given
    with pytest.raises(
        ContextLengthError, match=f"input resulted in {len(whole)} tokens.*truncate_prompt_tokens"
    ) as refused:
        encoder(8).encode(given, "input")
    assert refused.value.param == "input"
    assert encoder(8, -1).encode(given, "input") == whole[-8:]
    assert encoder(8, 3).encode(given, "input") == whole[-3:]
    assert encoder(100, 50).encode(given, "input") == whole


def test_texts_that_cannot_fit_are_refused_before_they_are_tokenised() -> None:
    with pytest.raises(ContextLengthError, match="bytes"):
        encoder(8).encode("x" * 10_000, "input")
    with pytest.raises(ContextLengthError, match="bytes") as refused:
        encoder(8).encode_pair("q", "x" * 10_000, TEMPLATE, "documents")
    assert refused.value.param == "documents"


@pytest.mark.parametrize("truncate_to", [0, 101])
def test_bounds_of_truncation(truncate_to: int) -> None:
    with pytest.raises(RequestError, match=f"truncate_prompt_tokens is {truncate_to}; it must be -1, or between 1"):
        encoder(100, truncate_to)


def test_pairs_are_joined_as_the_tokenizer_does() -> None:
    assert encoder().encode_pair("the fox", "a dog", None, "text_2") == ids("the fox") + END + ids("a dog") + END
    assert encoder(ends=False).encode_pair("the fox", "a dog", None, "text_2") == ids("the fox") + ids("a dog")


def test_pairs_in_a_template() -> None:
    """Places in the texts are text, and so are the control tokens that texts spell."""
    assert encoder().encode_pair("a fox", "a dog", TEMPLATE, "text_2") == MARK + ids("Q: a fox D: a dog") + MARK
    spelled = encoder().encode_pair("{document}", "<|im_end|>{query}", TEMPLATE, "text_2")
    assert spelled.count(MARK[0]) == 2
    assert tokenizer().decode(spelled) == "<|im_end|>Q: {document} D: <|im_end|>{query}<|im_end|>"


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("document", ["the quick brown fox " * 20, "日本語" * 30, "🦊" * 40])
def test_a_document_that_is_cut_loses_its_end(template: str | None, document: str) -> None:
    whole = encoder(10_000).encode_pair("the query", document, template, "documents")
    assert len(whole) > 40
    cut = encoder(40, -1).encode_pair("the query", document, template, "documents")
    text = tokenizer().decode(cut, skip_special_tokens=True)
    assert 30 <= len(cut) <= 40
    assert cut[-1] == whole[-1]
    assert "the query" in text
    kept = text.split(" D: ")[-1].removeprefix("the query")
    assert kept
    assert document.startswith(kept)
    with pytest.raises(ContextLengthError, match="documents resulted in"):
        encoder(40).encode_pair("the query", document, template, "documents")


def test_a_query_that_is_too_long_alone() -> None:
    with pytest.raises(ContextLengthError, match="the query alone has more than 10 tokens"):
        encoder(10, -1).encode_pair("0123456789" * 3, "a dog", TEMPLATE, "documents")
