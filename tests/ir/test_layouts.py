"""What types say of strides: rules that are true, and operators about which nobody promises anything."""

from __future__ import annotations

import pytest
import torch

from tessera.ir import fake
from tessera.ir.layouts import UNPROMISED, is_unpromised
from tessera.ir.types import type_of
from tessera.ops import uniform  # noqa: F401  (defines the operator)

aten = torch.ops.aten
NAMES = [
    "mul.Tensor", "add.Tensor", "div.Tensor", "maximum.default", "atan2.default", "copysign.Tensor",
    "floor_divide.default", "logaddexp.default", "logical_and.default", "heaviside.default",
]  # fmt: skip


def said(op: torch._ops.OpOverload, *args: object) -> tuple[int, ...]:
    mode = fake.default_mode()
    fakes = [fake.fake_of(type_of(a), mode) if isinstance(a, torch.Tensor) else a for a in args]
    with mode, fake.below_autograd():
        return fake.rule_of(op)(*fakes).stride()


def turned(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(6, 4, dtype=dtype).t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("expanded", [(0, 0), (0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_elementwise_results_of_expanded_arguments(dtype: torch.dtype, expanded: tuple[int, int], name: str) -> None:
    """As the cotangent of a sum is, over something that is laid out otherwise."""
    packet, overload = name.split(".")
    op = getattr(getattr(aten, packet), overload)
    x = torch.ones(6, dtype=dtype).as_strided((4, 6), expanded)
    y = turned(dtype)
    for args in ((x, y), (y, x), (x, x), (x, y.contiguous()), (y, x[0, 0]), (y.unsqueeze(1), y)):
        assert said(op, *args) == op(*args).stride()


@pytest.mark.parametrize("rounding", ["floor", "trunc"])
def test_division_that_rounds(rounding: str) -> None:
    args, mode = (turned(torch.float32), torch.ones(())), fake.default_mode()
    with mode, fake.below_autograd():
        fakes = [fake.fake_of(type_of(t), mode) for t in args]
        made = fake.rule_of(aten.div.Tensor_mode)(*fakes, rounding_mode=rounding)
    assert made.stride() == torch.div(*args, rounding_mode=rounding).stride()


def test_random_functions_of_gapped_arguments() -> None:
    x = torch.randn(5, 10)[:, ::2]
    for op in (aten.uniform.default, aten.exponential.default):
        assert said(op, x) == op(x).stride() == (5, 1)


def test_what_nobody_promises() -> None:
    assert is_unpromised(aten.conv2d.default) and is_unpromised(aten.scaled_dot_product_attention.default)
    assert not is_unpromised(aten.mul.Tensor) and not is_unpromised(torch.ops.tessera.uniform.default)
    assert is_unpromised(aten.pow.Scalar) and not is_unpromised(aten.pow.Tensor_Scalar)
    assert not [name for name in UNPROMISED if not hasattr(aten, name.partition(".")[0])]


def test_operators_of_users_promise_nothing() -> None:
    with torch.library._scoped_library("tessera_layouts", "DEF") as library:
        library.define("fresh(Tensor x) -> Tensor")
        library.define("view(Tensor(a) x) -> Tensor(a)")
        assert is_unpromised(torch.ops.tessera_layouts.fresh.default)
        assert not is_unpromised(torch.ops.tessera_layouts.view.default)
