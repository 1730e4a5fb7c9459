"""Copies with other strides: what is copied, what is not, and what every copy holds."""

from __future__ import annotations

import pytest
import torch

from tessera.ir.strides import copied, with_strides
from tessera.ir.types import contiguous_strides


@pytest.mark.parametrize("order", [None, (0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_contiguous_strides_are_those_of_a_permuted_tensor(order):
    shape = (2, 3, 4)
    listed = order or (0, 1, 2)
    dense = torch.empty([shape[d] for d in listed]).permute([listed.index(d) for d in range(3)])
    assert dense.shape == shape and contiguous_strides(shape, order) == dense.stride()


def test_what_lies_so_is_not_copied():
    x = torch.randn(2, 3).t()
    assert with_strides(x, (1, 3)) is x
    one = torch.randn(4, 1)
    assert with_strides(one, (1, 17)) is one  # the stride of one element tells nothing
    none = torch.empty(0, 3)
    assert with_strides(none, (1, 5)) is none


@pytest.mark.parametrize("stride", [(3, 1), (1, 2), (5, 1), (0, 1), (1, 0), (0, 0)])
def test_copies_have_the_strides_and_the_numbers(stride):
    x = torch.arange(6.0).reshape(2, 3)
    shown = torch.as_strided(torch.arange(20.0), (2, 3), stride)  # elements at one address are equal
    for source in (shown, shown.clone(memory_format=torch.contiguous_format)):
        copy = copied(source, stride)
        assert torch.equal(copy, shown) and copy.stride() == stride
        assert copy.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
    if 0 not in stride:
        assert torch.equal(with_strides(x, stride), x) and with_strides(x, stride).stride() == stride


def test_a_copy_carries_gradients():
    x = torch.randn(2, 3, requires_grad=True)
    with_strides(x, (1, 2)).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3))
