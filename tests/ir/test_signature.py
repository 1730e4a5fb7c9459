"""Numbers of equations: equal for what computes the same, whatever the values are called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tessera.ir.builder import Builder, aten
from tessera.ir.equation import Value
from tessera.ir.signature import signature
from tessera.ir.types import type_of


def _signature(make: Callable[..., Value], *inputs: torch.Tensor) -> int:
    builder = Builder("program")
    with builder:
        make(*(builder.input("x", type_of(x)) for x in inputs))
    return signature(builder.equations[-1])


X = torch.zeros(2, 3)


def test_names_do_not_count() -> None:
    assert _signature(lambda x, y: aten.add(x, y), X, X) == _signature(lambda y, x: aten.add(x, y), X, X)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda x, y: aten.mul(x, y), (X, X)),  # another operator
        (lambda x, _: aten.add(x, x), (X, X)),  # one value twice
        (lambda x, y: aten.add(x, y, alpha=2), (X, X)),  # another constant
        (lambda x, _: aten.add(x, 1), (X, X)),
        (lambda x, _: aten.add(x, 1.0), (X, X)),
        (lambda x, _: aten.add(x, True), (X, X)),
        (lambda x, y: aten.add(x, y), (X, X.double())),  # another type
        (lambda x, y: aten.add(x, y), (X, torch.zeros(3, 2).t())),  # other strides
    ],
)
def test_all_else_counts(make: Callable[..., Value], inputs: tuple[torch.Tensor, ...]) -> None:
    others = [lambda x, y: aten.add(x, y), lambda x, _: aten.add(x, 0), lambda x, _: aten.add(x, -0.0)]
    assert _signature(make, *inputs) not in {_signature(other, X, X) for other in others}


def test_an_equation_keeps_its_number() -> None:
    builder = Builder("program")
    with builder:
        aten.sin(builder.input("x", type_of(X)))
    (eqn,) = builder.equations
    assert signature(eqn) == signature(eqn) == signature(eqn.with_(tags=frozenset({"no_grad"})))
