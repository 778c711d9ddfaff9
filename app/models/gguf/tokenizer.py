"""The tokenizer of a GGUF file in the form of the tokenizers library, without importing it.

    gpt2     BPE on bytes, with merges, and an expression that splits the text before it (`tokenizer.ggml.pre`)
    llama    BPE on characters of SentencePiece, whose merges follow from the scores of its tokens; bytes for others

A control token is special, and a user-defined one is found in the text before all others, as by llama.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from folio.app.models.gguf.header import GgufHeader, shown
from folio.app.models.gguf.settings import Settings
from folio.app.models.gguf.splits import MERGES_LATE, NORMALISED, SPLITS

_SPACE = "▁"
# Characters of all parts of all tokens, of which merges are made: Gemma's 262,144 tokens have 20 millions.
_MOST_SCORED = 1 << 28
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
# Setting, and the name of the token in `tokenizer_config.json`.
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# Control tokens that end an answer, though a file may name one of them only.
_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<eos>", "</s>"),
)


class GgufTokenizer:
    """The tokenizer of a file.

    Attributes:
        special: names such as `bos_token` → the token.
        ends: ids that end an answer.
        adds_bos: a text begins with the BOS token.

    Raises:
        ValueError: it is damaged, or of a kind that is not known.
    """

    def __init__(self, header: GgufHeader) -> None:
        self._file = header.files[0]
        settings = Settings(header, "tokenizer")
        self._kind = settings.text("tokenizer.ggml.model")
        self._tokens = settings.items("tokenizer.ggml.tokens", str)
        self._merges = settings.items("tokenizer.ggml.merges", str)
        self._scores = settings.items("tokenizer.ggml.scores", float)
        self._types = settings.items("tokenizer.ggml.token_type", int) or [_NORMAL] * len(self._tokens)
        self._pre = settings.text("tokenizer.ggml.pre", "default")
        is_pieces = self._kind == "llama"
        self._prefixes_space = settings.flag("tokenizer.ggml.add_space_prefix", is_pieces)
        self.adds_bos = settings.flag("tokenizer.ggml.add_bos_token", is_pieces or self._pre in MERGES_LATE)
        self._adds_eos = settings.flag("tokenizer.ggml.add_eos_token", False)
        self._check(embeddings=header.tensors["token_embd.weight"].shape[0])
        ids = {name: self._special_id(settings, name) for name in (*_SPECIAL, "eot", "eom")}
        self._special_ids = {token_id for token_id in ids.values() if token_id is not None}
        self.special = {_SPECIAL[name]: self._tokens[found] for name in _SPECIAL if (found := ids[name]) is not None}
        self.adds_bos = self.adds_bos and "bos_token" in self.special
        self.ends = [found for name in ("eos", "eot", "eom") if (found := ids[name]) is not None]
        control = {self._tokens[i]: i for i, kind in enumerate(self._types) if kind == _CONTROL}
        self.ends += sorted({control[token] for token in _ENDS if token in control} - set(self.ends))

    def document(self) -> dict[str, Any]:
        """The contents of `tokenizer.json`."""
        parts = self._pieces() if self._kind == "llama" else self._bytes()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": list(self._added()),
            **{name: parts.get(name) for name in ("normalizer", "pre_tokenizer")},
            "post_processor": self._post_processor(),
            "decoder": parts["decoder"],
            "model": {
                "type": "BPE",
                **dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix")),
                "unk_token": self.special.get("unk_token") if self._kind == "llama" else None,
                "fuse_unk": self._kind == "llama",
                "byte_fallback": self._kind == "llama",
                "ignore_merges": self._pre in MERGES_LATE,
                "vocab": {token: i for i, token in enumerate(self._tokens)},
                "merges": parts["merges"],
            },
        }

    def _bytes(self) -> dict[str, Any]:
        splits = [
            {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
            for split in SPLITS[self._pre]
        ]
        byte_level = {"type": "ByteLevel", "add_prefix_space": self._prefixes_space, "trim_offsets": True}
        return {
            "normalizer": {"type": "NFC"} if self._pre in NORMALISED else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level | {"use_regex": False}]},
            "decoder": byte_level | {"use_regex": True},
            "merges": list(self._written_merges()),
        }

    def _pieces(self) -> dict[str, Any]:
        spaces: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if self._prefixes_space:
            spaces = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, spaces]}
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        merges = list(self._written_merges()) if self._merges else list(self._scored_merges())
        return {"normalizer": spaces, "decoder": {"type": "Sequence", "decoders": decoders}, "merges": merges}

    def _written_merges(self) -> Iterator[tuple[str, str]]:
        vocabulary = frozenset(self._tokens)
        for merge in self._merges:
            space = merge.find(" ", 1)
            left, right = merge[:space], merge[space + 1 :]
            if space < 0 or not (left in vocabulary and right in vocabulary and left + right in vocabulary):
                raise self._fault(f"tokenizer.ggml.merges has {shown(merge)}, of something that is no token")
            yield left, right

    def _scored_merges(self) -> Iterator[tuple[str, str]]:
        """All pairs of tokens that make a token, those of the best scores first."""
        normal = {token: i for i, token in enumerate(self._tokens) if self._types[i] == _NORMAL}
        for token, _ in sorted(normal.items(), key=lambda item: (-self._scores[item[1]], item[1])):
            for end in range(len(token) - 1, 0, -1):
                if token[:end] in normal and token[end:] in normal:
                    yield token[:end], token[end:]

    def _added(self) -> Iterator[dict[str, Any]]:
        for token_id, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            special = kind in (_CONTROL, _UNKNOWN) or token_id in self._special_ids
            if (special or kind == _USER_DEFINED) and token:
                flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
                yield {"id": token_id, "content": token, **flags, "special": special}

    def _post_processor(self) -> dict[str, Any] | None:
        names = ["bos_token"] * self.adds_bos + ["eos_token"] * self._adds_eos
        around = [self.special[name] for name in names if name in self.special]
        if not around:
            return None

        def template(*sequences: str) -> list[dict[str, Any]]:
            pieces: list[dict[str, Any]] = []
            for kind, sequence in enumerate(sequences):
                own = {"Sequence": {"id": sequence, "type_id": kind}}
                tokens = [{"SpecialToken": {"id": token, "type_id": kind}} for token in around]
                pieces += [*tokens[: self.adds_bos], own, *tokens[self.adds_bos :]]
            return pieces

        ids = {token: self._tokens.index(token) for token in around}
        special = {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in around}
        return {
            "type": "TemplateProcessing",
            "single": template("A"),
            "pair": template("A", "B"),
            "special_tokens": special,
        }

    def _check(self, embeddings: int) -> None:
        if self._kind not in ("gpt2", "llama"):
            raise self._fault(f"tokenizer.ggml.model is {shown(self._kind)}; Folio reads gpt2 and llama")
        if self._kind == "gpt2" and self._pre not in SPLITS:
            raise self._fault(f"tokenizer.ggml.pre is {shown(self._pre)}, which Folio does not know")
        count = len(self._tokens)
        if not 0 < count <= embeddings:
            raise self._fault(f"it has {count} tokens for {embeddings} rows of token_embd.weight")
        if len(self._types) != count:
            raise self._fault(f"it has {len(self._types)} values in tokenizer.ggml.token_type for {count} tokens")
        if self._kind == "llama" and not self._merges and len(self._scores) != count:
            raise self._fault(f"it has {len(self._scores)} values in tokenizer.ggml.scores for {count} tokens")
        self._check_tokens()

    def _check_tokens(self) -> None:
        if any(score != score for score in self._scores):
            raise self._fault("it has scores in tokenizer.ggml.scores that are no numbers")
        token, times = Counter(filter(None, self._tokens)).most_common(1)[0] if any(self._tokens) else ("", 0)
        if times != 1:
            raise self._fault(f"it has the token {shown(token)} {times} times")
        if self._kind == "llama" and sum(len(token) ** 2 for token in self._tokens) > _MOST_SCORED:
            raise self._fault(f"its longest token has {max(map(len, self._tokens))} characters, more than merges allow")

    def _special_id(self, settings: Settings, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if not settings.has(key):
            return None
        if (token_id := settings.integer(key)) >= len(self._tokens):
            raise self._fault(f"{key} is {token_id}, and it has {len(self._tokens)} tokens")
        return token_id

    def _fault(self, reason: str) -> ValueError:
        return ValueError(f"{self._file}: {reason}")
