"""Whether an optimizer's methods are the ones that a compiled step stands for.

Anybody may put a function of their own in a method's place: on the object, on its class, in a subclass. A compiled step
would pass it by, so whatever is not known to be PyTorch's (or the optimizer's own) makes the optimizer run itself.
Where a function comes from is read off its code: `functools.wraps` copies names and attributes, not code. What PyTorch
wraps around a step (profiling and hooks, a scheduler's note that a step came) changes nothing and is looked through.
"""

from __future__ import annotations

import inspect
import os
import sys
from types import FunctionType, MethodType

import torch

from tessera.ir.equation import short_path
from tessera.optim.rule import described_by

_TORCH = os.path.dirname(torch.__file__) + os.sep
_ELSEWHERE = tuple(os.path.join(_TORCH, name, "") for name in ("_dynamo", "distributed"))  # these compile, or talk


class Method:
    """One method of an optimizer, looked at again only where another function has taken its place."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        self.optimizer, self.name = optimizer, name
        self._seen: tuple[object, object] = (None, None)
        self._replaced = ""

    def replaced(self) -> str:
        """By what the method was replaced, in words; empty where it was not."""
        own = self.optimizer.__dict__.get(self.name)
        seen = own, getattr(type(self.optimizer), self.name)
        if seen[0] is not self._seen[0] or seen[1] is not self._seen[1]:
            self._seen = seen
            self._replaced = _replaced(seen[1] if own is None else own, _homes(self.optimizer), self.name)
        return self._replaced


def wants_closure(optimizer: torch.optim.Optimizer) -> bool:
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    return any(p.default is p.empty for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))


def _homes(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """The file of the class that a rule describes: its methods may be written there."""
    known = described_by(type(optimizer))
    module = sys.modules.get(known.__module__) if known is not None else None
    return frozenset([module.__file__]) if module is not None and module.__file__ else frozenset()


def _replaced(fn: object, homes: frozenset[str], name: str) -> str:
    """The first function of a chain of wrappers that is neither PyTorch's nor the optimizer's."""
    if isinstance(fn, MethodType):
        fn = fn.__func__
    if not isinstance(fn, FunctionType):
        return f"the optimizer's {name} was replaced by a {type(fn).__name__}"
    file = fn.__code__.co_filename
    if file not in homes and (not file.startswith(_TORCH) or file.startswith(_ELSEWHERE)):
        return f"the optimizer's {name} was replaced by a function at {short_path(file)}:{fn.__code__.co_firstlineno}"
    cells = (cell.cell_contents for cell in fn.__closure__ or ())
    inner = (_replaced(x, homes, name) for x in cells if isinstance(x, (FunctionType, MethodType)))
    return next(filter(None, inner), "")
