"""Expressions that split a text before byte-level BPE, by the names that GGUF files have for them.

They are those of the models' own tokenizers; `llama-vocab.cpp` lists the names.
"""

from __future__ import annotations

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASES[0]}|{_CASES[1]}|\p{{N}}|{_PATHS}|{_SPACES}"
_GPT4O = rf"{_CASES[0]}{_ENDINGS}?|{_CASES[1]}{_ENDINGS}?|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"


def _named(names: str, *splits: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(names.split(), splits)


# Name in `tokenizer.ggml.pre` → the expressions, each applied to the parts that those before it leave.
SPLITS: dict[str, tuple[str, ...]] = {
    **_named("gpt-2 phi-2 mpt olmo jais gigachat a.x-4.0 mellum exaone4 trillion granite-docling", _GPT2),
    **_named("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", r"\p{N}", _GPT2),
    **_named("llama3 llama-v3 llama-bpe falcon3 pixtral midm-2.0 lfm2 dbrx smaug-bpe chatglm-bpe glm4", _LLAMA3),
    **_named("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open", _QWEN2),
    **_named("tekken", _TEKKEN),
    **_named("gpt-4o llama4 kanana2", _GPT4O),
    **_named("seed-coder", _SEED),
    **_named("deepseek-v3 hunyuan-dense", r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3),
    **_named("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    **_named("minicpm5", r"\p{N}{1,3}", rf"{_ENDINGS}|{_LETTERS}|\p{{N}}+|{_SIGNS}|{_SPACES}"),
    # As llama.cpp takes files that do not say.
    **_named("default", r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
# Whole words that are tokens are taken before their merges, and texts begin with BOS unless the file says otherwise.
MERGES_LATE = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2", "tekken"))
# Texts are brought into Unicode's form NFC before.
NORMALISED = frozenset(("qwen2", "deepseek-r1-qwen"))
