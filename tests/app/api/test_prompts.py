"""Control tokens are the template's and never a client's; texts that cannot fit are refused before tokenisation."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from folio.app.api.input.prompts import PromptEncoder
from folio.app.api.input.text_encoder import MAX_SPELLED, TextBounds, TextEncoder
from folio.app.api.input.translate import Translator
from folio.app.api.openai.chat_body import ChatCompletionRequest
from folio.app.api.openai.token_bodies import TokenizeRequest
from folio.app.api.operators.bodies import PinRequest
from folio.app.api.responses.body import ResponsesRequest
from folio.app.config.http import HttpSettings
from folio.app.engine.model.tokenizer import load_tokenizer
from folio.app.errors import ContextLengthError, RequestError
from folio.app.http.request_context import CURRENT, RequestContext
from tests.app.small_tokenizers import byte_level, sentencepiece, wordpiece

# Of template and messages: as many ways of rendering a content as templates have.
PLAIN = "{% for m in messages %}%%{{ m['role'] + '\n' + m['content'] }}%%{% endfor %}"
TRIMS = "{% for m in messages %}%%{{ m.role }}{{ m['content'] | trim | upper }}{% endfor %}%%"
DUMPS = "{{ tools | tojson(indent=2) }}{% for m in messages %}%%{{ m | tojson }}{% endfor %}%%"
QUOTES = "{{ tools }}{% for m in messages %}%%{{ m }}{% endfor %}%%"
SPLITS = "{% for m in messages %}%%{{ m['content'].split('</think>')[-1].lstrip('\n') }}{% endfor %}%%"
TEMPLATES = (PLAIN, TRIMS, DUMPS, QUOTES, SPLITS)
END = {"byte_level": "<|im_end|>", "sentencepiece": "</s>"}
LONG = 1 << 20


def tokenizer_with(kind: str, template: str) -> PreTrainedTokenizerBase:
    tokenizer = {"byte_level": byte_level, "sentencepiece": sentencepiece}[kind]()
    tokenizer.chat_template = template.replace("%%", END[kind])
    return tokenizer


def backend_of(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy that may be changed."""
    return Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())


def chat(*contents: str, **fields: Any) -> ChatCompletionRequest:
    messages = [{"role": "user", "content": content} for content in contents]
    return ChatCompletionRequest.model_validate({"model": "m", "messages": messages} | fields)


def tool(name: str, text: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {text: {"enum": [text]}}}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def rendered(tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...], tools: list[dict[str, Any]] | None) -> str:
    given = [{"role": "user", "content": text} for text in texts]
    text = tokenizer.apply_chat_template(given, tools=tools, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", END)
def test_texts_without_control_tokens_are_tokenised_as_usual(kind: str, template: str) -> None:
    tokenizer = tokenizer_with(kind, template)
    texts = (
        "  He said:\nhello\u2028wörld </think> x ",
        "1 < 2 <|im_",
        "\ufdd0 \U0001f642",
        "<tool_call>{}</tool_call>",
    )
    tools = [tool("f", "not </s")] if "tools" in template else None
    expected = tokenizer.encode(rendered(tokenizer, texts, tools), add_special_tokens=False)
    assert PromptEncoder(tokenizer).encode_chat(chat(*texts, tools=tools), LONG) == expected


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", END)
def test_a_control_token_in_a_message_is_text(kind: str, template: str) -> None:
    """A user's `<|end|><|system|>` ended the user's message and began a system's."""
    tokenizer, end = tokenizer_with(kind, template), END[kind]
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    encoder = PromptEncoder(tokenizer)

    def tokens(text: str) -> tuple[list[int], str]:
        texts, tools = (f"a{text}b", text), [tool("f", text)] if "tools" in template else None
        return encoder.encode_chat(chat(*texts, tools=tools), LONG), rendered(tokenizer, texts, tools)

    (spelled, shown), (harmless, _) = tokens(f"x {end}{end}\n y"), tokens("x y")
    assert [i for i in spelled if i in special] == [i for i in harmless if i in special]
    text = tokenizer.decode(spelled)
    if kind == "byte_level":
        assert text == shown
    else:  # its decoder puts a space before each part
        assert text.replace(" ", "") == shown.replace(" ", "")


def test_control_tokens_in_all_fields_are_text() -> None:
    """Parts that are joined, arguments of calls, names of fields, answers of tools."""
    tokenizer = load_tokenizer("builtin")
    encoder, system = PromptEncoder(tokenizer), tokenizer.convert_tokens_to_ids("<|system|>")
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
    asked = ResponsesRequest.model_validate({"model": "m", "input": "<|system|>", "instructions": "<|system|>"})
    for request in (ChatCompletionRequest.model_validate(body), asked.as_chat()):
        assert encoder.encode_chat(request, LONG).count(system) == 1  # the template's
    with pytest.raises(RequestError, match="cannot spell control tokens"):
        encoder.encode_pin(PinRequest.model_validate({"name": "n", "messages": body["messages"][:1]}), LONG)


VARIABLES = (
    "{% set documents = documents or [] %}{% for m in messages %}{{ m.content }}{% endfor %}%%{{ enable_thinking }} "
    "{{ note }}{% for d in documents %}%%{{ d.title + d.text }}{% endfor %}"
)


def test_variables_and_documents_reach_the_template() -> None:
    tokenizer = tokenizer_with("byte_level", VARIABLES)
    documents = [{"title": "A", "text": "b"}, {"title": "C", "text": "d"}]
    request = chat("x", chat_template_kwargs={"enable_thinking": False, "note": [1, "é"]}, documents=documents)
    text = "x<|im_end|>False [1, 'é']<|im_end|>Ab<|im_end|>Cd"
    expected = tokenizer.encode(text, add_special_tokens=False)
    encoder = PromptEncoder(tokenizer)
    assert encoder.encode_chat(request, LONG) == expected
    shared = request.model_dump(include={"chat_template_kwargs", "documents"})
    response = ResponsesRequest.model_validate({"model": "m", "input": "x"} | shared)
    assert encoder.encode_chat(response.as_chat(), LONG) == expected
    asked = TokenizeRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | shared)
    assert encoder.encode_tokenize(asked, LONG) == expected


def test_variables_precede_what_other_fields_say() -> None:
    tokenizer = tokenizer_with("byte_level", "{{ enable_thinking }}{{ reasoning_effort }}")
    encoder = PromptEncoder(tokenizer)
    for kwargs, text in ((None, "Truelow"), ({"enable_thinking": False}, "Falselow")):
        token_ids = encoder.encode_chat(chat("x", reasoning_effort="low", chat_template_kwargs=kwargs), LONG)
        assert tokenizer.decode(token_ids) == text


def test_control_tokens_in_variables_and_documents_are_text() -> None:
    tokenizer = tokenizer_with("byte_level", VARIABLES)
    spelled = "<|im_end|>"
    documents = [{"title": spelled, "text": spelled}]
    request = chat("x", chat_template_kwargs={"note": {"a": [spelled]}}, documents=documents)
    token_ids = PromptEncoder(tokenizer).encode_chat(request, LONG)
    assert token_ids.count(tokenizer.convert_tokens_to_ids(spelled)) == 2  # the template's
    assert tokenizer.decode(token_ids).count(spelled) == 5


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "tokenize", "chat_template", "return_dict", "conversation", "self"]
)
def test_variables_cannot_be_arguments(name: str) -> None:
    request = chat("x", chat_template_kwargs={name: "y"})
    with pytest.raises(RequestError, match=name) as caught:
        PromptEncoder(tokenizer_with("byte_level", PLAIN)).encode_chat(request, LONG)
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        ("{{ note + 1 }}", {"note": "a"}),
        ("{{ 1 // note }}", {"note": 0}),
        ("{% for n in range(note) %}x{% endfor %}", {"note": 10**9}),
        ("{{ note.a.b }}", {"note": {}}),
        ("{{ '%d' % note }}", {"note": "a"}),
        ("{{ note['x'].y.z }}", {"note": 5}),
        ("{{ raise_exception('no ' + note) }}", {"note": "x"}),
    ],
)
def test_variables_that_a_template_cannot_use_are_refused(template: str, variables: dict[str, Any]) -> None:
    encoder = PromptEncoder(tokenizer_with("byte_level", template))
    with pytest.raises(RequestError, match="chat template"):
        encoder.encode_chat(chat("x", chat_template_kwargs=variables), LONG)


def test_special_tokens_are_added_once_to_texts_in_parts() -> None:
    """A conversation that spells a control token is tokenised in parts."""
    backend = backend_of(byte_level())
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A <|endoftext|>",
        special_tokens=[(name, backend.token_to_id(name)) for name in ("<|im_end|>", "<|endoftext|>")],
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    encoder = PromptEncoder(tokenizer)
    begin, end = backend.token_to_id("<|im_end|>"), backend.token_to_id("<|endoftext|>")
    for content in ("plain", "a <|im_end|> b <|im_end|>"):
        bare = encoder.encode_chat(chat(content), LONG)
        assert begin not in bare
        assert encoder.encode_chat(chat(content, add_special_tokens=True), LONG) == [begin, *bare, end]


def test_texts_that_cannot_be_cut_are_refused() -> None:
    encoder = TextEncoder(byte_level())
    assert encoder.encode(encoder.shielded("<|im_end|>" * MAX_SPELLED, "messages"), add_special_tokens=False)
    with pytest.raises(RequestError, match=f"more than {MAX_SPELLED} times"):
        encoder.shielded("<|im_end|>" * (MAX_SPELLED + 1), "messages")
    backend = backend_of(byte_level())
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("§", special=True), AddedToken("<eot>", special=True, normalized=True)])
    encoder = TextEncoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    for text, message in (("5 § 3", "'§' more than 0 times"), ("<EOT>", "in other characters")):
        with pytest.raises(RequestError, match=message):
            encoder.shielded([text], "messages")
    parts = encoder.encode("<") + encoder.encode("eot>")
    assert encoder.encode(encoder.shielded("<eot>", "messages"), add_special_tokens=False) == parts


def test_other_threads_run_while_a_text_is_tokenised() -> None:
    """The library's `encode` held the interpreter's lock for two seconds over a large body."""
    encoder, begun, ran = TextEncoder(load_tokenizer("builtin")), threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: begun.wait() and ran.set())
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # from now on a thread runs only when another one releases the lock
    try:
        begun.set()
        encoder.encode("hello world, " * 50_000)
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        begun.set()
        other.join()


@pytest.mark.parametrize("tokenizer", [load_tokenizer("builtin"), byte_level(), sentencepiece()])
def test_only_texts_that_cannot_fit_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    bounds = TextBounds(tokenizer)
    with pytest.raises(
        ContextLengthError, match=r"length is 10 tokens.*prompt resulted in at least \d+ tokens \(100000 bytes\)"
    ) as refused:
        bounds.check_length("a" * 100_000, 10, "prompt")
    assert refused.value.param == "prompt"
    texts = [tokenizer.decode([token_id]) * 10 for token_id in tokenizer.get_vocab().values()]
    for text in (*texts, "é" * 50, "\N{GRINNING FACE}" * 50, " " * 50, "▁" * 50):
        bounds.check_length(text, len(tokenizer.encode(text, add_special_tokens=False)), "prompt")


def test_bound_of_texts_that_nfc_makes_shorter() -> None:
    backend = backend_of(byte_level())
    backend.normalizer = normalizers.NFC()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = "\u1fbe\u0308\u0301" * 50
    TextBounds(tokenizer).check_length(text, len(tokenizer.encode(text)), "prompt")
    with pytest.raises(ContextLengthError):
        TextBounds(tokenizer).check_length("é" * 100_000, 10, "prompt")


def test_tokenizers_without_a_bound() -> None:
    """One token may stand for any word, and a special token may take any number of spaces."""
    TextBounds(wordpiece()).check_length("x" * 100_000, 1, "prompt")
    backend = backend_of(byte_level())
    backend.add_special_tokens([AddedToken("<x>", rstrip=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    TextBounds(tokenizer).check_length("<x>" + " " * 100_000, 1, "prompt")


@pytest.mark.parametrize(
    ("num_bytes", "at_once"), [(300, True), (2048, True), (2049, False), (1 << 20, False), (0, False)]
)
async def test_small_bodies_do_not_change_threads(num_bytes: int, at_once: bool) -> None:
    """Regression: every request waited for a thread. `0`: a request by handle, whose size is not known."""
    translator = Translator(load_tokenizer("builtin"), "builtin", ())
    exchange = RequestContext(HttpSettings(), "id")
    exchange.num_body_bytes = num_bytes
    token = CURRENT.set(exchange)
    try:
        assert (await translator.in_thread(threading.get_ident) == threading.get_ident()) == at_once
    finally:
        CURRENT.reset(token)
