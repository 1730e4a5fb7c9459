"""The operators `tessera.check` and `tessera.raise_if`, by which a program raises where a claim does not hold.

In: the text of a condition over sizes, a message, and where each size is read; or a tensor that says so. Out: nothing,
or an error of the kind that eager PyTorch raises. `ir/checks.py` records such equations; running one needs no SymPy.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import CodeType

import torch

from tessera.ir.equation import Equation, Special
from tessera.ir.expression import NAMES
from tessera.torch_internals.fake import FakeTensor
from tessera.torch_internals.shapes import torch_check


def check(text: str, message: str, kind: str = "RuntimeError", **symbols: tuple) -> tuple:
    """Raise unless the text holds. In a program that is being recorded it becomes part of that program."""
    known = {name: value if dim is None else value.shape[dim] for name, (value, dim) in symbols.items()}
    try:
        holds = eval(_code(text), dict(NAMES), known)
    except ArithmeticError:  # a division by a size that is 0: what the program claims has no value, so it does not hold
        holds = False
    if isinstance(holds, torch.SymBool):
        torch_check(holds, lambda: message)
    elif not holds:
        raise KINDS[kind](f"{message} ({', '.join(f'{name} = {n}' for name, n in known.items())})")
    return ()


@functools.lru_cache(maxsize=1024)
def _code(text: str) -> CodeType:
    return compile(text, "<tessera check>", "eval")


KINDS: dict[str, type[Exception]] = {
    e.__name__: e for e in (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, AssertionError)
}
CHECK = Special("check", check, pure=False)


def raise_if(asked: torch.Tensor, answer: bool, message: str, kind: str) -> tuple:
    """Raise where a tensor of one element says so, as a Python `if` on it does."""
    if not isinstance(asked, FakeTensor) and bool(asked) == answer:
        raise KINDS[kind](message)
    return ()


RAISE_IF = Special("raise_if", raise_if, pure=False)


def with_names(eqn: Equation, names: Mapping[str, str]) -> Equation:
    """A check that calls sizes as people do."""
    if eqn.op is not CHECK or not names.keys() & eqn.kwargs.keys():
        return eqn
    symbols = re.compile(rf"\b({'|'.join(names)})\b")
    text, message, *kind = (symbols.sub(lambda m: names[m[1]], str(a)) for a in eqn.args)
    return eqn.with_(args=(text, message, *kind), kwargs={names.get(s, s): where for s, where in eqn.kwargs.items()})
