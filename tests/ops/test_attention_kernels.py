"""Derivatives of PyTorch's attention kernels, by their types alone: most of the kernels need a GPU."""

from __future__ import annotations

import torch

from tessera.ir.builder import Builder, aten
from tessera.ir.types import TensorType, contiguous_strides
from tessera.ir.verify import verify
from tessera.ops.attention import by_token
from tessera.transforms.vjp import vjp

CUDA = torch.device("cuda:0")


def of(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> TensorType:
    return TensorType(dtype, shape, contiguous_strides(shape), device or torch.device("cpu"))


def test_memory_efficient_attention_by_itself() -> None:
    """It gives sizes beside tensors, and its backward reads them."""
    builder = Builder("attention")
    q, k, v = (builder.input(name, of(2, 8, 4, 16)) for name in "qkv")
    bias = builder.input("bias", of(2, 4, 8, 8))
    op = torch.ops.aten._efficient_attention_forward.default
    with builder:
        out = builder.emit(op, q, k, v, bias, None, None, None, None, 0.0, 0, True)
    joint = vjp(builder.finish([out[0], out[4]]), [q, k, v, bias])  # type: ignore[index]
    verify(joint.trace)
    _, size, *grads = joint.trace.outputs
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape, bias.shape]
    assert size == 8


def test_cotangents_of_attention_on_a_gpu() -> None:
    """By token where a library's kernel reads them so; there is none for double precision."""
    assert by_token(of(2, 4, 8, 16, dtype=torch.bfloat16, device=CUDA)).stride == (512, 16, 64, 1)
    assert by_token(of(2, 4, 8, 16, dtype=torch.float64, device=CUDA)).stride == (512, 128, 16, 1)
    assert by_token(of(2, 4, 8, 16)).stride == (512, 128, 16, 1)


def test_a_mask_that_wants_a_gradient_leaves_the_strides_as_recorded() -> None:
    """Plain arithmetic takes the place of the kernel, whose result lies by token: views of it were recorded so."""
    builder = Builder("attention")
    tokens = [builder.input(name, of(2, 8, 4, 16)) for name in "qkv"]
    bias = builder.input("bias", of(1, 4, 8, 8))
    with builder:
        q, k, v = (aten.transpose(x, 1, 2) for x in tokens)
        y = aten.scaled_dot_product_attention(q, k, v, aten.sin(bias))
        rows = aten.transpose(y, 1, 2)
    joint = vjp(builder.finish([rows]), [*tokens, bias])
    verify(joint.trace)
    again, *grads = joint.trace.outputs
    assert again.tensor.stride == rows.tensor.stride
    assert [g.shape for g in grads] == [x.shape for x in (*tokens, bias)]
