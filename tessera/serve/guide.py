"""Structured output: which tokens keep an answer within a JSON schema, a regular expression or some choices.

In: the settings of a request. Out: a `Guide` for each of its answers, and for every step a mask over the vocabulary,
one bit a token. llguidance parses (the extra `structured`); it bounds what a grammar may cost, so a bad one is refused
when it comes, and one that turns out too hard ends its own answer alone. Masks of a step are computed on several
threads while the device runs the program, since nothing but the choice of tokens needs them.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tessera.serve.finite import counted, has_end, levels
from tessera.util.errors import OptionError

LONGEST = 1 << 16  # characters of a schema, an expression, or all choices
PROPERTIES = 1000  # of a schema: the time to compile it grows with their square
LEVELS = 500  # of a schema, through its references: the parser has a stack
KEPT = 64  # grammars that are kept
SPACE = r"[ \n\t]{0,32}"  # between the parts of JSON: enough for indented text, and not endless
LIMITS = {"verbose_errors": False}  # those that llguidance has are kept, beside how much it tells
KINDS = ("json_schema", "regex", "choices")
END = "<|end of structure|>"  # where the model has no token that ends an answer, the parser gets one of its own


class GuideError(OptionError):
    """A grammar that cannot be followed."""


@functools.cache
def _library() -> ModuleType:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise GuideError("structured output needs llguidance: pip install 'tessera[structured]'") from None


class Guide:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: Any, executor: Any, width: int, barred: int | None):
        self._matcher, self._executor, self._width, self._barred = matcher, executor, width, barred
        self.error: str | None = None

    def follows(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first, the grammar allows next."""
        return self._matcher.validate_tokens(list(tokens))

    def take(self, token: int) -> bool:
        """A token was chosen: can nothing follow it? A token that the grammar does not allow is an error."""
        if not self._matcher.consume_token(token):
            self.error = self.error or f"the grammar cannot go on: {_short(self._matcher.get_error())}"
        return self._matcher.is_stopped()


def masks_of(rows: Sequence[tuple[Guide, tuple[int, ...]]], pinned: bool = False) -> Tensor:
    """A mask for each row: for the token after its guide's place and some guesses; int32 [rows, words]. Rows of one
    answer stand side by side, and the last of them has all of its guesses."""
    asked = dict(rows)
    masks = _masks(list(asked.items()), pinned)
    ends = dict(zip(asked, itertools.accumulate(len(guesses) + 1 for guesses in asked.values()), strict=True))
    places = [ends[guide] - 1 - len(asked[guide]) + len(guesses) for guide, guesses in rows]
    return masks if len(places) == len(masks) else masks[places]


def _masks(asked: Sequence[tuple[Guide, Sequence[int]]], pinned: bool) -> Tensor:
    """Masks for the token after each guide's place, then after each of the guesses."""
    first = asked[0][0]
    rows = sum(len(guesses) + 1 for _, guesses in asked)
    bits = torch.zeros(rows, -(-first._width // 32), dtype=torch.int32, pin_memory=pinned)
    plain, guessed, at = [], [], 0
    for guide, guesses in asked:
        if guesses:
            guessed.append((guide._matcher, at, list(guesses)))
        else:
            plain.append((guide._matcher, at))
        at += len(guesses) + 1
    memory = bits.data_ptr(), bits.shape[1] * bits.itemsize, rows
    if plain:
        first._executor.unsafe_compute_mask_ptr(plain, *memory)
    if guessed:
        first._executor.unsafe_compute_mask_ptr_with_draft_token(guessed, *memory)
    for guide, _ in asked:
        if guide._matcher.is_error():
            guide.error = f"the grammar became too hard: {_short(guide._matcher.get_error())}"
    if first._barred is not None:
        bits[:, first._barred // 32] &= ~torch.tensor(1 << first._barred % 32).to(torch.int32)
    return bits


class Guides:
    """Grammars over one tokenizer, which must be a fast one of transformers."""

    def __init__(self, tokenizer: object, vocabulary: int, stops: Sequence[int]):
        self._tokenizer, self._vocabulary, self._stops = tokenizer, vocabulary, stops
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def guide(self, kind: str, wanted: object) -> Guide:
        """A guide at the beginning of the grammar."""
        text = grammar(kind, wanted)
        with self._lock:
            matcher = self._compiled.get(text) or self._compile(kind, text)
            self._compiled[text] = matcher
            self._compiled.move_to_end(text)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return Guide(matcher.deep_copy(), self._executor, self._words.vocab_size, self._barred)

    def _compile(self, kind: str, text: str) -> Any:
        library = _library()
        matcher = library.LLMatcher(self._words, text, log_level=0, limits=library.LLParserLimits(**LIMITS))
        first = b"" if matcher.is_error() else matcher.compute_bitmask()  # some faults show only here
        if matcher.is_error():
            raise GuideError(f"{kind}: {_short(matcher.get_error())}")
        if not int.from_bytes(first, "little") & ~sum(1 << end for end in self._ends[1]):
            raise GuideError(f"{kind}: no text but the empty one satisfies it")
        return matcher

    @functools.cached_property
    def _executor(self) -> Any:
        return _library().LLExecutor()

    @functools.cached_property
    def _ends(self) -> tuple[str, list[int], int | None]:
        """The tokenizer as JSON, the tokens that end an answer, and one of them that no answer may hold."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            told = type(self._tokenizer).__name__
            raise GuideError(f"structured output needs a fast tokenizer of transformers, got {told}")
        copied = type(backend).from_str(backend.to_str())
        copied.no_padding()
        copied.no_truncation()
        ends = [token for token in self._stops if token < copied.get_vocab_size()]
        if ends:
            return copied.to_str(), ends, None
        copied.add_special_tokens([END])
        return copied.to_str(), [copied.token_to_id(END)], copied.token_to_id(END)

    @property
    def _barred(self) -> int | None:
        return self._ends[2]

    @functools.cached_property
    def _words(self) -> Any:
        text, ends, _ = self._ends
        return _library().LLTokenizer(text, n_vocab=max(self._vocabulary, max(ends) + 1), eos_token=ends)


def grammar(kind: str, wanted: object) -> str:
    """What is asked, as llguidance wants it; refused where it is malformed, huge or has no end."""
    match kind, wanted:
        case "regex", str():
            return _library().LLMatcher.grammar_from_regex(_bounded(kind, wanted))
        case "choices", list() | tuple() if wanted and all(isinstance(x, str) and x for x in wanted):
            listed = _bounded(kind, " | ".join(json.dumps(x, ensure_ascii=False) for x in wanted))
            return _library().LLMatcher.grammar_from_lark(f"start: {listed}")
        case "json_schema", _:
            schema = _schema(wanted)
            try:
                return _library().LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": SPACE})
            except ValueError as error:  # it reads fewer levels of JSON than there may be through references
                raise GuideError(f"json_schema: {_short(str(error))}") from None
    expected = {"regex": "a text", "choices": "at least one text, none of them empty"}
    raise GuideError(f"{kind}: expected {expected[kind]}, got {wanted!r:.80}")


def _schema(wanted: object) -> str:
    try:
        text = wanted if isinstance(wanted, str) else json.dumps(wanted)
        schema = json.loads(_bounded("json_schema", text))
        if not isinstance(schema, dict):
            raise GuideError(f"json_schema: expected an object, got {text:.80}")
        for what, count, most in (("properties", counted(schema), PROPERTIES), ("levels", levels(schema), LEVELS)):
            if count > most:
                raise GuideError(f"json_schema: expected at most {most} {what}, got {count}")
        if not has_end(schema):
            raise GuideError("json_schema: no value satisfies it: what it requires requires itself again, without end")
    except GuideError:
        raise
    except RecursionError:
        raise GuideError(f"json_schema: expected at most {LEVELS} levels, got many more") from None
    except (ValueError, TypeError) as error:
        raise GuideError(f"json_schema: expected JSON: {type(error).__name__}: {error!s:.120}") from None
    return text


def _bounded(kind: str, text: str) -> str:
    if len(text) > LONGEST:
        raise GuideError(f"{kind}: expected at most {LONGEST} characters, got {len(text)}")
    return text


def _short(message: str) -> str:
    return " ".join(message.replace("<non-verbose/>", "").split())[:200]
