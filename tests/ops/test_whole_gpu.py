"""Operators kept whole on CUDA, where eager picks other kernels: values, gradients, bits, kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from programs import trace_of
from test_kernels import eager_kernels, our_kernels
from test_whole import assert_agree, gradients, like, places
from whole import CASES, attention

from tessera.ir.printer import compile_trace
from tessera.ir.types import type_of
from tessera.passes.clean.dce import dce
from tessera.transforms.jvp import jvp
from tessera.transforms.vjp import vjp
from tessera.transforms.vmap import vmap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_device(name: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(x.to("cuda", dtype if x.is_floating_point() else x.dtype) for x in CASES[name].tensors)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    c, tensors = CASES[name], on_device(name, torch.float64)
    trace = trace_of(c.fn, *tensors)
    joint = vjp(trace, [trace.inputs[i] for i in places(c)])
    ct = like(joint.trace.inputs[-1])
    _, y, want = gradients(c.fn, tensors, places(c), ct)
    got = compile_trace(dce(joint.trace))(*tensors, ct)
    for g, w in zip(got, (y, *want), strict=True):
        assert_agree(g, w)
    assert len(our_kernels(c.fn, tensors, ct)) <= len(eager_kernels(c.fn, tensors, ct))


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm plain", "group_norm", "layer_norm", "batch_norm training"])
def test_second_derivatives(name: str) -> None:
    c, tensors = CASES[name], on_device(name, torch.float64)
    trace = trace_of(c.fn, *tensors)
    joint = vjp(trace, list(trace.inputs))
    twice = vjp(joint.trace.with_(outputs=joint.trace.outputs[1:]), list(trace.inputs))
    ct = like(joint.trace.inputs[-1])
    seeds = [torch.randn_like(x) for x in tensors]
    host = [x.cpu() for x in tensors]
    xs, _, grads = gradients(c.fn, tuple(host), places(c), ct.cpu(), graph=True)
    pairs = [(g, s.cpu()) for g, s in zip(grads, seeds, strict=True) if g is not None and g.requires_grad]
    heads, given = zip(*pairs, strict=True)
    want = torch.autograd.grad(heads, xs, given, allow_unused=True)
    by_value = dict(zip(twice.trace.outputs[: len(tensors)], seeds, strict=True))
    got = compile_trace(dce(twice.trace))(*tensors, ct, *(by_value[v] for v in twice.pulled))
    for g, w in zip(got[len(tensors) :], want, strict=True):
        assert_agree(g if g is None else g.cpu(), w, 1e-7)


QKV = (
    [torch.randn(2, 4, 64, 32, generator=torch.Generator().manual_seed(i)).cuda() for i in range(3)]
    if torch.cuda.is_available()
    else []
)  # noqa: E501


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention(dtype: torch.dtype, causal: bool) -> None:
    """Flash in half precision, memory-efficient in single: the choice is eager's, derivatives go on."""
    tensors = tuple(x.to(dtype) for x in QKV)

    def fn(*xs: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*xs, is_causal=causal)

    def plain(*xs: torch.Tensor) -> torch.Tensor:
        causes = torch.ones(64, 64, device="cuda").tril() == 1 if causal else None
        return attention(*xs, causes)

    trace = trace_of(fn, *tensors)
    joint = vjp(trace, list(trace.inputs))
    ct = torch.randn_like(tensors[0])
    _, y, want = gradients(fn, tensors, [0, 1, 2], ct)
    got = compile_trace(dce(joint.trace))(*tensors, ct)
    for g, w in zip(got, (y, *want), strict=True):
        assert_agree(g, w, 1e-2 if dtype == torch.float16 else 1e-4)
    ours = [name for name in our_kernels(fn, tensors, ct) if name != "clone"]  # of the cotangent, laid out by token
    assert ours == eager_kernels(fn, tensors, ct)
    # second derivatives, both ways, against single-precision arithmetic
    wide = tuple(x.float() for x in tensors)
    xs, _, grads = gradients(plain, wide, [0, 1, 2], ct.float(), graph=True)
    seeds = [torch.randn_like(x) for x in tensors]
    twice = vjp(joint.trace.with_(outputs=joint.trace.outputs[1:]), list(trace.inputs))
    second = torch.autograd.grad(grads, xs, [s.float() for s in seeds])
    by_value = dict(zip(twice.trace.outputs[:3], seeds, strict=True))
    back = compile_trace(dce(twice.trace))(*tensors, ct, *(by_value[v] for v in twice.pulled))[3:]
    ahead = compile_trace(dce(jvp(joint.trace, list(trace.inputs))))(*tensors, ct, *seeds)[5:]
    for b, a, w in zip(back, ahead, second, strict=True):  # the second derivative is symmetric
        scale = w.abs().max().item() * (2e-2 if dtype == torch.float16 else 1e-3)
        torch.testing.assert_close(b.float(), w, rtol=0, atol=scale)
        torch.testing.assert_close(a.float(), w, rtol=0, atol=scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_batched_attention(dtype: torch.dtype) -> None:
    tensors = tuple(x.to(dtype) for x in QKV)
    trace = trace_of(lambda *xs: F.scaled_dot_product_attention(*xs), *tensors)
    joint = vjp(trace, list(trace.inputs)).trace
    rows = [*tensors, torch.randn_like(tensors[0])]
    full = [torch.stack([x, x * 0.5]) for x in rows]
    made = vmap(joint, {v: (type_of(x), 0) for v, x in zip(joint.inputs, full, strict=True)}, 2)
    got = compile_trace(dce(made.trace))(*full)
    single = compile_trace(dce(joint))
    for i in range(2):
        for g, w in zip(got, single(*(x[i] for x in full)), strict=True):
            assert_agree(g[i], w, 1e-2 if dtype == torch.float16 else 1e-4)


def test_dropout_draws_the_bits_eager_draws() -> None:
    x = torch.randn(33, 65, device="cuda")
    trace = trace_of(lambda x: F.dropout(x, 0.3), x)
    joint = compile_trace(vjp(trace, list(trace.inputs)).trace)
    source, ct = x.clone().requires_grad_(), torch.randn_like(x)
    torch.manual_seed(1)
    y = F.dropout(source, 0.3)
    (want,) = torch.autograd.grad(y, source, ct)
    torch.manual_seed(1)
    got, grad = joint(x, ct)
    assert torch.equal(got, y) and torch.equal(grad, want)


@pytest.mark.parametrize("fn", [F.softmax, F.log_softmax])
def test_softmax_of_half_precision_in_single(fn) -> None:  # noqa: ANN001
    x = torch.randn(8, 16, device="cuda", dtype=torch.float16)
    ct = torch.randn(8, 16, device="cuda")

    def wide(x: torch.Tensor) -> torch.Tensor:
        return fn(x, -1, dtype=torch.float32)

    trace = trace_of(wide, x)
    got = compile_trace(vjp(trace, list(trace.inputs)).trace)(x, ct)
    _, y, (want,) = gradients(wide, (x,), [0], ct)
    assert torch.equal(got[0], y) and torch.equal(got[1], want)
    assert len(our_kernels(wide, (x,), ct)) <= len(eager_kernels(wide, (x,), ct))
