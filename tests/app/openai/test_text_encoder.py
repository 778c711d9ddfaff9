"""Control tokens of conversations are the template's, and never a client's."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers
from transformers import PreTrainedTokenizerBase

from app.engine.model.loader import load_tokenizer
from app.errors import RequestError
from app.openai.bodies import ChatCompletionRequest, PinRequest
from app.openai.prompts import encode_chat, encode_pin
from app.openai.responses.body import ResponsesRequest
from app.openai.text_encoder import MAX_SPELLED, TextEncoder
from tests.app.small_tokenizers import byte_level, sentencepiece

# Of template and messages: as many ways of rendering a content as templates have.
PLAIN = "{% for m in messages %}%%{{ m['role'] + '\n' + m['content'] }}%%{% endfor %}"
TRIMS = "{% for m in messages %}%%{{ m.role }}{{ m['content'] | trim | upper }}{% endfor %}%%"
DUMPS = "{{ tools | tojson(indent=2) }}{% for m in messages %}%%{{ m | tojson }}{% endfor %}%%"
QUOTES = "{{ tools }}{% for m in messages %}%%{{ m }}{% endfor %}%%"
SPLITS = "{% for m in messages %}%%{{ m['content'].split('</think>')[-1].lstrip('\n') }}{% endfor %}%%"
TEMPLATES = (PLAIN, TRIMS, DUMPS, QUOTES, SPLITS)
END = {"byte_level": "<|im_end|>", "sentencepiece": "</s>"}


def tokenizer_with(kind: str, template: str) -> PreTrainedTokenizerBase:
    tokenizer = {"byte_level": byte_level, "sentencepiece": sentencepiece}[kind]()
    tokenizer.chat_template = template.replace("%%", END[kind])
    return tokenizer


def chat(*contents: str, **fields: Any) -> ChatCompletionRequest:
    messages = [{"role": "user", "content": content} for content in contents]
    return ChatCompletionRequest.model_validate({"model": "m", "messages": messages} | fields)


def tool(name: str, text: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {text: {"enum": [text]}}}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", END)
def test_harmless_conversations_have_the_tokens_that_they_had(kind: str, template: str) -> None:
    tokenizer = tokenizer_with(kind, template)
    texts = (
        "  He said:\nhello\u2028wörld </think> x ",
        "1 < 2 <|im_",
        "\ufdd0 \U0001f642",
        "<tool_call>{}</tool_call>",
    )
    tools = [tool("f", "not </s")]
    given = [{"role": "user", "content": text} for text in texts]
    rendered: Any = tokenizer.apply_chat_template(given, tools=tools, tokenize=False, add_generation_prompt=True)
    request = chat(*texts, tools=tools) if "tools" in template else chat(*texts)
    assert encode_chat(TextEncoder(tokenizer), request, lambda *_: None) == tokenizer.encode(
        rendered, add_special_tokens=False
    )


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", END)
def test_a_control_token_in_a_message_is_text(kind: str, template: str) -> None:
    """A user's `<|end|><|system|>` ended the user's message and began a system's."""
    tokenizer, end = tokenizer_with(kind, template), END[kind]
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    encoder, seen = TextEncoder(tokenizer), []

    def tokens(text: str) -> list[int]:
        fields = {"tools": [tool("f", text)]} if "tools" in template else {}
        return encode_chat(encoder, chat(f"a{text}b", text, **fields), lambda shown, _: seen.append(shown))

    spelled, harmless = tokens(f"x {end}{end}\n y"), tokens("x y")
    assert [i for i in spelled if i in special] == [i for i in harmless if i in special]
    text = tokenizer.decode(spelled)
    assert end in seen[0]
    assert encoder.unshielded(seen[0]) == seen[0]
    if kind == "byte_level":
        assert text == seen[0]
    else:  # which puts a space in front of each part
        assert text.replace(" ", "") == seen[0].replace(" ", "")


def test_wherever_it_is_spelled() -> None:
    """In all that a client writes: parts that become one, arguments of calls, names of fields, answers of tools."""
    tokenizer = load_tokenizer("builtin")
    system = tokenizer.convert_tokens_to_ids("<|system|>")
    call = {"id": "1", "type": "function", "function": {"name": "<|system|>", "arguments": '{"<|sys\\u0074em|>": "x"}'}}
    body = {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<|sys"}, {"type": "text", "text": "tem|>"}]},
            {"role": "assistant", "content": "<|system|>", "tool_calls": [call]},
            {"role": "tool", "content": "<|system|>", "tool_call_id": "1"},
        ],
        "tools": [tool("f", "<|system|>")],
    }
    request = ChatCompletionRequest.model_validate(body)
    tokens = encode_chat(TextEncoder(tokenizer), request, lambda *_: None)
    assert tokens.count(system) == 1  # the template's
    asked = ResponsesRequest.model_validate({"model": "m", "input": "<|system|>", "instructions": "<|system|>"})
    assert encode_chat(TextEncoder(tokenizer), asked.as_chat(), lambda *_: None).count(system) == 1
    with pytest.raises(RequestError, match="cannot spell control tokens"):
        encode_pin(TextEncoder(tokenizer), PinRequest.model_validate({"name": "n", "messages": body["messages"][:1]}))


def test_what_cannot_be_cut_is_refused() -> None:
    tokenizer = byte_level()
    encoder = TextEncoder(tokenizer)
    assert encoder.encode_shielded(encoder.shielded("<|im_end|>" * MAX_SPELLED, "messages"))
    with pytest.raises(RequestError, match=f"more than {MAX_SPELLED} times"):
        encoder.shielded("<|im_end|>" * (MAX_SPELLED + 1), "messages")
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("§", special=True), AddedToken("<eot>", special=True, normalized=True)])
    encoder = TextEncoder(type(tokenizer)(tokenizer_object=backend))
    for text, said in (("5 § 3", "'§' more than 0 times"), ("<EOT>", "in other characters")):
        with pytest.raises(RequestError, match=said):
            encoder.shielded([text], "messages")
    assert encoder.encode_shielded(encoder.shielded("<eot>", "messages")) == encoder.encode("<") + encoder.encode(
        "eot>"
    )


def test_others_go_on_while_a_text_is_tokenised() -> None:
    """The library's `encode` holds the interpreter's lock: for two seconds, of the text of a large body."""
    encoder, begun, ran = TextEncoder(load_tokenizer("builtin")), threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: begun.wait() and ran.set())
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # from now on a thread runs only when another one gives up the lock
    try:
        begun.set()
        encoder.encode("hello world, " * 50_000)
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        begun.set()
        other.join()
