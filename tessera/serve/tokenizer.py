"""A tokenizer without transformers: what the engine asks of one, by the package tokenizers alone.

In: a `tokenizer.json`, the chat template, and tokens that have names. Out: a `Fast`, which gives what the tokenizer of
transformers gave that they were taken of. `fast` asks both when an artifact is written; one that differs, as its class
may have code of its own, is read by transformers for ever. To import that takes seconds where packages lie without
bytecode or the disk is cold, and it reads the whole vocabulary a second time.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from tessera.serve.text import BROKEN
from tessera.util.errors import OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Methods of a tokenizer of transformers that must be the usual ones.
USUAL = (
    "encode", "_encode_plus", "decode", "_decode", "convert_ids_to_tokens", "_convert_id_to_token",
    "apply_chat_template", "get_chat_template", "backend_tokenizer", "special_tokens_map",
)  # fmt: skip
TEXTS = (
    "", " ", "the cat", " The  cat, it 's 3.14159 - isn't it ?\n\n\tx = {'a': [1, 22, 333]};", "a" * 100,
    "größer ☃ 数 e\u0301 \U0001f642\u200d\u2194\ufe0f", "\r\n  \u00a0\u200b\ufeff\x00",
)  # fmt: skip
TRIED = 4096  # tokens that are written one by one
_SAID = [("user", "Hello,\n  you <b>{{ x }}</b> \"'"), ("assistant", " Hi 🙂 "), ("user", "3 > 2?")]
_CHATS = (_SAID[:1], _SAID[:2], _SAID, [("system", " Be brief. "), *_SAID], [("tool", "7"), *_SAID])


# How tokenizers over bytes write them: printable ones as they are, the others as characters from 256 on.
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(b): b for b in _PRINTED} | {chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*_PRINTED}))}


def token_bytes(text: str, written: str | None) -> bytes:
    """What a token stands for, which may be a part of a character: `text` is what a decoder makes of the token alone,
    `written` how it stands in the vocabulary."""
    if written is not None and written.startswith("\u2581") and not text.startswith(" "):
        return b" " + text.encode()  # decoders leave out the first space
    if BROKEN not in text or written is None:
        return text.encode()
    if match := re.fullmatch(r"<0x([0-9A-F]{2})>", written):
        return bytes([int(match[1], 16)])
    return bytes(_BYTES[c] for c in written) if all(c in _BYTES for c in written) else text.encode()


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer; those of transformers have it."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


def unshown(tokenizer: Tokenizer | None, stops: Sequence[str], vocabulary: int) -> list[int]:
    """Tokens that are written as one of the stop texts, and that no text shows, such as `<|im_end|>`."""
    if tokenizer is None:
        raise OptionError("stop: expected a tokenizer, since stop texts are text; stop_tokens does without")
    return [
        token
        for stop in stops
        for token in tokenizer.encode(stop)
        if tokenizer.decode([token], skip_special_tokens=False) == stop
        and not tokenizer.decode([token], skip_special_tokens=True)
        and token < vocabulary
    ]


class Fast:
    """`chat_template` is jinja's; `named`: `bos_token` and the like, which templates may write."""

    def __init__(self, data: str, chat_template: str | None = None, named: Mapping[str, str] | None = None):
        self.backend_tokenizer = importlib.import_module("tokenizers").Tokenizer.from_str(data)
        self.backend_tokenizer.no_padding()
        self.backend_tokenizer.no_truncation()
        self.chat_template, self.special_tokens_map = chat_template, dict(named or {})

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return self.backend_tokenizer.id_to_token(token)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], tokenize: bool = False, add_generation_prompt: bool = False
    ) -> str | list[int]:
        assert self.chat_template is not None
        text = importlib.import_module("tessera.serve.chat").rendered(
            self.chat_template, messages, self.special_tokens_map, add_generation_prompt
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def fast(tokenizer: PreTrainedTokenizerBase, data: str) -> Fast | None:
    """The same tokenizer without transformers, from what it wrote as its `tokenizer.json`; None where it is not."""
    usual = importlib.import_module("transformers").PreTrainedTokenizerFast
    if not isinstance(tokenizer, usual) or any(_of(type(tokenizer), n) is not _of(usual, n) for n in USUAL):
        return None
    if not isinstance(tokenizer.chat_template, str | None):  # several, with names
        return None
    found = Fast(data, tokenizer.chat_template, tokenizer.special_tokens_map)
    return found if alike(found, tokenizer) else None


def _of(kind: type, name: str) -> object:
    return getattr(kind, name, None)


def alike(one: Fast, other: PreTrainedTokenizerBase) -> bool:
    """Do both read and write the same, as far as can be tried?"""
    if len(one) != len(other):
        return False
    added = [token.content for token in one.backend_tokenizer.get_added_tokens_decoder().values()]
    texts = [*TEXTS, *(f"a{token} {token}b" for token in added)]
    draws = random.Random(0)
    tokens = [[i] for i in range(0, len(one), max(1, len(one) // TRIED))]
    tokens += [draws.choices(range(len(one)), k=16) for _ in range(256)] + [one.encode(text) for text in texts]
    trials: list[Callable[[Fast | PreTrainedTokenizerBase], object]] = [
        lambda it: [it.encode(text, add_special_tokens=special) for text in texts for special in (True, False)],
        lambda it: [it.decode(some, skip_special_tokens=skip) for some in tokens for skip in (True, False)],
        lambda it: [it.convert_ids_to_tokens(some[0]) for some in tokens if some],
    ]
    if one.chat_template is not None:
        trials += [_chat(said, answers) for said in _CHATS for answers in (True, False)]
    return all(_outcome(trial, one) == _outcome(trial, other) for trial in trials)


def _chat(said: Sequence[tuple[str, str]], answers: bool) -> Callable[[Fast | PreTrainedTokenizerBase], object]:
    messages = [{"role": role, "content": text} for role, text in said]
    return lambda it: it.apply_chat_template(messages, tokenize=False, add_generation_prompt=answers)


def _outcome(trial: Callable[[Fast | PreTrainedTokenizerBase], object], of: Fast | PreTrainedTokenizerBase) -> object:
    """What it gives; or the kind of its error, since a template may refuse a conversation."""
    try:
        return trial(of)
    except Exception as error:
        return type(error).__name__
