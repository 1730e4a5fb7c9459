"""References to tiles and expressions over them, read.

In: text such as `x[0:16, :]^T` or `gelu(a + b[0:4]) * 0.5`. Out: a `Ref` or a tree, or an `Unread` that says what was
expected. Nesting is bounded, so that no text is too deep to read.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator

from tessera.machines.spatial.schema import FUNCTIONS, INFIX
from tessera.spatial.listing.types import Call, Index, Ref, Span, Tree

NAME = r"[A-Za-z_][\w.]{0,200}"
DEEPEST = 60  # brackets
LONGEST = 200  # functions over each other; in a + b + c there are two
_REF = re.compile(rf"({NAME})(?:\[([^\[\]]*)\])?(\^T)?")
_SPAN = re.compile(r"([0-9]{1,12}):([0-9]{1,12})(?::([0-9]{1,6}))?")
_DIGITS = r"[0-9]{1,40}\.?[0-9]{0,40}(?:e[+-]?[0-9]{1,4})?"
_TOKEN = re.compile(rf" *(?:({_DIGITS})|({NAME})\(|({NAME}(?:\[[^\[\]]*\])?(?:\^T)?)|(<=|>=|==|!=|[-+*/()<>,]))")
_OPERATORS = {symbol: name for name, symbol in INFIX.items()}
_LEVELS = (["<", "<=", ">", ">=", "==", "!="], ["+", "-"], ["*", "/"])


class Unread(ValueError):
    """A text that is not what it should be; the message says what was expected."""


def read_ref(text: str) -> Ref:
    if (match := _REF.fullmatch(text)) is None:
        raise Unread(f"expected a buffer, name, name[slices] or name^T; got {text[:100]!r}")
    index = () if match[2] is None else tuple(_index(part.strip()) for part in match[2].split(","))
    if len(index) > 8:
        raise Unread(f"expected at most 8 dimensions; got {text[:100]!r}")
    if sum(isinstance(of, str) for of in index) > 1:
        raise Unread(f"expected one buffer of indices; got {text[:100]!r}")
    return Ref(match[1], index, match[3] is not None)


def _index(text: str) -> Index:
    if text == ":":
        return None
    if match := _SPAN.fullmatch(text):
        span = Span(int(match[1]), int(match[2]), int(match[3] or 1))
        if span.start >= span.stop or not span.step:
            raise Unread(f"expected a slice that holds something; got {text!r}")
        return span
    if re.fullmatch(r"[0-9]{1,12}", text):
        return int(text)
    if re.fullmatch(NAME, text):
        return text
    raise Unread(f"expected `:`, start:stop, a number or a buffer of indices; got {text[:100]!r}")


def read_tree(text: str) -> Tree:
    return _Reader(text).whole()


class _Reader:
    """A parser by descent; `tokens` is what is left, last first."""

    def __init__(self, text: str) -> None:
        self.text, self.depth = text, 0
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text):
            if (match := _TOKEN.match(text, at)) is None:
                raise self.unread(f"something else at {text[at : at + 20]!r}")
            kind = ("number", "function", "ref", "symbol")[(match.lastindex or 1) - 1]
            self.tokens.append((kind, match[match.lastindex or 1]))
            at = match.end()
        self.tokens.reverse()

    def unread(self, got: str) -> Unread:
        return Unread(f"expected an expression over tiles; got {got} in {self.text[:100]!r}")

    def whole(self) -> Tree:
        tree = self.level(0)
        if self.tokens:
            raise self.unread(f"{self.tokens[-1][1]!r}")
        if any(depth > LONGEST for depth in _depths(tree)):
            raise self.unread(f"more than {LONGEST} functions over each other")
        return tree

    def level(self, number: int) -> Tree:
        if number == len(_LEVELS):
            return self.unary()
        left = self.level(number + 1)
        while self.tokens and self.tokens[-1][0] == "symbol" and self.tokens[-1][1] in _LEVELS[number]:
            symbol = self.tokens.pop()[1]
            left = Call(_OPERATORS[symbol], (left, self.level(number + 1)))
        return left

    def unary(self) -> Tree:
        if self.tokens and self.tokens[-1] == ("symbol", "-"):
            self.tokens.pop()
            operand = self.nested(self.unary)
            return Call("neg", (operand,)) if isinstance(operand, Call | Ref) else -operand
        return self.primary()

    def nested(self, read, *arguments) -> Tree:
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.unread(f"more than {DEEPEST} brackets")
        tree = read(*arguments)
        self.depth -= 1
        return tree

    def primary(self) -> Tree:
        kind, text = self.tokens.pop() if self.tokens else ("end", "its end")
        match kind:
            case "number":
                return float(text) if re.search(r"[.e]", text) else int(text)
            case "function":
                return self.call(text)
            case "ref":
                return math.inf if text == "inf" else read_ref(text)
        if text != "(":
            raise self.unread(repr(text))
        tree = self.nested(self.level, 0)
        self.symbol(")")
        return tree

    def call(self, name: str) -> Tree:
        if name not in FUNCTIONS:
            near = difflib.get_close_matches(name, FUNCTIONS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise Unread(f"expected a function out of {', '.join(FUNCTIONS)}{hint}; got {name[:100]!r}")
        operands = [self.nested(self.level, 0)]
        while self.tokens and self.tokens[-1] == ("symbol", ","):
            self.tokens.pop()
            operands.append(self.nested(self.level, 0))
        self.symbol(")")
        if len(operands) != FUNCTIONS[name]:
            raise Unread(f"expected {FUNCTIONS[name]} operands of {name}; got {len(operands)}")
        return Call(name, tuple(operands))

    def symbol(self, wanted: str) -> None:
        kind, text = self.tokens.pop() if self.tokens else ("end", "its end")
        if (kind, text) != ("symbol", wanted):
            raise Unread(f"expected {wanted!r}, got {text!r} in {self.text[:100]!r}")


def _depths(tree: Tree) -> Iterator[int]:
    """How many functions stand over each number and tile; whoever calls this need not know how deep that may be."""
    left = [(tree, 0)]
    while left:
        of, depth = left.pop()
        if isinstance(of, Call):
            left += [(operand, depth + 1) for operand in of.operands]
        else:
            yield depth
