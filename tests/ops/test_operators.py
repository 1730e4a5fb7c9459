"""Every declared operator against eager PyTorch, from the table of samples."""

from __future__ import annotations

import pytest
import torch
from checks import Flat, check_batch, check_forward, check_jvp, check_vjp
from samples import TABLE, Sample

from tessera.ir.printer import compile_trace
from tessera.ops.op import registry
from tessera.transforms.vjp import vjp

RANDOM = [name for name in TABLE if registry()[name].family == "random"]
UNDEFINED = ["aten.empty_like", "aten.new_empty"]  # whose values mean nothing
STEADY = [name for name in TABLE if name not in RANDOM and name not in UNDEFINED]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", STEADY)
def test_forward(name: str) -> None:
    for sample in TABLE[name]:
        check_forward(Flat(sample))


@pytest.mark.parametrize("name", [n for n in STEADY if registry()[n].vjp is not None])
def test_vjp(name: str) -> None:
    assert any([check_vjp(Flat(sample)) for sample in TABLE[name]]) or name == "aten.where.Scalar"


@pytest.mark.parametrize("name", [n for n in STEADY if registry()[n].vjp is not None])
def test_second_derivative(name: str) -> None:
    for sample in [s for s in TABLE[name] if not s.edge][:3]:
        check_vjp(Flat(sample), second=True)


@pytest.mark.parametrize("name", [n for n in STEADY if registry()[n].jvp is not None])
def test_jvp(name: str) -> None:
    assert any([check_jvp(Flat(sample)) for sample in TABLE[name] if not sample.edge]) or name == "aten.where.Scalar"


@pytest.mark.parametrize("name", [n for n in STEADY if registry()[n].batch is not None])
def test_batch(name: str) -> None:
    assert any([check_batch(Flat(sample)) for sample in TABLE[name]])


@pytest.mark.parametrize("name", RANDOM)
def test_random_gradients(name: str) -> None:
    """What is drawn differs from call to call; that nothing flows back does not."""
    for sample in TABLE[name]:
        flat = Flat(sample)
        trace = flat.trace()
        moving = [v for v, m in zip(trace.inputs, flat.moving, strict=True) if m]
        joint = vjp(trace, moving)
        assert bool(joint.pulled) == (bool(moving) and not registry()[name].zero)
        cts = [torch.ones(v.shape, dtype=v.dtype) for v in joint.pulled]
        grads = compile_trace(joint.trace)(*flat.tensors, *cts)[1:]
        assert all(g is None or not g.any() for g in grads)


def test_scatter_from_a_larger_source() -> None:
    """Eager cannot differentiate it; what the index does not name gets a zero gradient."""
    torch.manual_seed(0)
    base, src = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    index = torch.tensor([[0, 2], [1, 0]])
    for op in (torch.ops.aten.scatter.src, torch.ops.aten.scatter_add.default):
        trace = Flat(Sample(op, (base, 1, index, src))).trace()
        joint = vjp(trace, list(trace.inputs[::2]))
        x, part = base.clone().requires_grad_(), src.clone().requires_grad_()
        ct = torch.randn_like(base)
        want = torch.autograd.grad(op(x, 1, index, part[:2, :2]), (x, part), ct)
        got = compile_trace(joint.trace)(base, index, src, ct)[1:]
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)
