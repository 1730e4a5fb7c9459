"""Sizes as symbols: a program for every size, and the conditions under which it holds.

In: an input of which some dimensions are named in the file. Out: a fake tensor whose sizes there are symbols. What is
recorded, and every pass behind it, may find out something about a symbol; `holds` says for the sizes at hand whether
all of that is true. A size of 0 or 1 is never a symbol, as everywhere in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from tessera.torch_internals.fake import FakeTensor, FakeTensorMode
from tessera.torch_internals.shapes import (
    DimDynamic,
    PythonPrinter,
    ShapeEnv,
    StatelessSymbolicContext,
    unreplaced_expression,
)


def symbolic_fake(x: torch.Tensor, mode: FakeTensorMode, dims: Collection[int]) -> torch.Tensor:
    """Dimensions of one size share a symbol."""
    kinds = [DimDynamic.DUCK if d in dims else DimDynamic.STATIC for d in range(x.ndim)]
    return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))


def without_guards(x: torch.Tensor) -> AbstractContextManager:
    """What PyTorch asks of sizes inside only decides who computes, not what: it is no condition of the program."""
    env = x.fake_mode.shape_env if isinstance(x, FakeTensor) else None
    return nullcontext() if env is None else env.suppress_guards()


def holds(env: ShapeEnv, fakes: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """Whether a program that was made of `fakes` holds for other tensors in their places: those with symbols are
    contiguous."""
    bound: dict[str, str] = {}
    conditions: list[str] = []
    for i, x in enumerate(fakes):
        symbolic = any(isinstance(size, torch.SymInt) for size in x.shape)
        conditions.append(f"tensors[{i}].is_contiguous()" if symbolic else f"tensors[{i}].stride() == {x.stride()}")
        for d, size in enumerate(x.shape):
            here = f"tensors[{i}].shape[{d}]"
            if isinstance(size, torch.SymInt):
                symbol = str(unreplaced_expression(size))
                if symbol in bound:
                    conditions.append(f"{here} == {bound[symbol]}")
                else:
                    bound[symbol] = here
                    conditions.append(f"{here} >= 2")
            else:
                conditions.append(f"{here} == {size}")
    printer = PythonPrinter()
    guards = [printer.doprint(guard.expr) for guard in env.guards]
    inner = "".join(f"    {symbol} = {here}\n" for symbol, here in bound.items())
    ranks = " and ".join(f"len(tensors[{i}].shape) == {x.ndim}" for i, x in enumerate(fakes)) or "True"
    sizes, rest = " and ".join(conditions) or "True", " and ".join(f"({g})" for g in guards) or "True"
    text = f"def holds(tensors):\n    if not ({ranks} and {sizes}):\n        return False\n{inner}    return {rest}\n"
    scope: dict = {}
    exec(text, {"math": __import__("math")}, scope)  # the text is made of sizes and symbols of PyTorch's own
    return scope["holds"]
