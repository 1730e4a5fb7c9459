"""Types that are inferred are those that the kernels give, also where PyTorch's own rule is wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tessera
from tessera.ir import fake

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)


def check(op: torch._ops.OpOverload, *args: object) -> None:
    real = op(*args)
    with (mode := fake.default_mode()):
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        made = fake.rule_of(op)(*fakes)
    found = [(x.dtype, x.shape, x.stride()) for x in made]
    assert found == [(x.dtype, x.shape, x.stride()) for x in real]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("other", [torch.float32, "same", None])
def test_norms_of_mixed_precision(dtype: torch.dtype, other: torch.dtype | str | None) -> None:
    x, wide = torch.randn(4, 8, 3, 3, dtype=dtype), dtype if other == "same" else torch.float32
    weight = None if other is None else torch.randn(8, dtype=wide)
    mean, var = torch.zeros(8, dtype=wide), torch.ones(8, dtype=wide)
    for training in (True, False):
        tail = (mean, var, training, 0.1, 1e-5)
        check(aten._native_batch_norm_legit_functional.default, x, weight, weight, *tail)
        check(aten.native_batch_norm.default, x, weight, weight, *tail)
    check(aten._native_batch_norm_legit.no_stats, x, weight, weight, True, 0.1, 1e-5)
    check(aten.native_group_norm.default, x, weight, weight, 4, 8, 9, 2, 1e-5)
    stat = aten.native_group_norm(x, weight, weight, 4, 8, 9, 2, 1e-5)[1]
    if weight is not None:
        check(aten.native_group_norm_backward.default, x, x, stat, stat, weight, 4, 8, 9, 2, [True, True, True])


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm2d(8), lambda: nn.BatchNorm2d(8, affine=False),
                                  lambda: nn.GroupNorm(2, 8), lambda: nn.InstanceNorm2d(8, affine=True)],
                         ids=["batch", "plain", "group", "instance"])  # fmt: skip
def test_gradients_of_norms_over_16_bits(norm) -> None:
    """The input has 16 bits, as under autocast, parameters and statistics have 32."""
    torch.manual_seed(0)
    model, x = norm(), torch.randn(4, 8, 3, 3, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for compiled in (False, True):
        mine, x.grad = copy.deepcopy(model), None
        out = (tessera.jit(mine, strict=True) if compiled else mine)(x)
        (out.float() * torch.linspace(-1, 1, 3)).square().sum().backward()
        found.append([out, x.grad, *(p.grad for p in mine.parameters()), *mine.buffers()])
    torch.testing.assert_close(found[1], found[0], rtol=0.03, atol=0.03)
