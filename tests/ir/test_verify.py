"""The verifier accepts recorded programs and points at what breaks a rule."""

from __future__ import annotations

import pytest
import torch
from programs import random_program, trace_of

import tessera
from tessera.ir.equation import Value
from tessera.ir.types import TensorType
from tessera.ir.verify import verify
from tessera.util.config import override
from tessera.util.errors import VerifyError


def small():
    return trace_of(lambda x, y: (x * y).sum(0) + x[0], torch.randn(3, 4), torch.randn(3, 4))


@pytest.mark.parametrize("seed", range(20))
def test_recorded_programs_are_well_formed(seed):
    fn, args = random_program(seed)
    verify(trace_of(fn, *args))


def test_symbolic_sizes():
    trace = trace_of(lambda x: x.reshape(-1, 2, x.shape[0]) * x.shape[0], torch.randn(6, 4), dynamic=(0,))
    verify(trace)
    with pytest.raises(VerifyError, match="which no input or result before it binds"):
        verify(trace.with_(symbols={}))


def test_symbols_that_only_types_mention():
    """A backward program may take tensors of symbolic sizes and compute with no size at all."""
    for dtype in (torch.float32, torch.bfloat16):  # of one name, in two shape environments
        fast = tessera.jit(lambda x: (x * 2).relu(), executors=["aten"], dynamic=True, strict=True)
        x = torch.randn(5, 3, dtype=dtype, requires_grad=True)
        with override(verify=True):
            fast(x).sum().backward()
        assert torch.equal(x.grad, 2 * (x > 0).to(dtype))


def test_a_size_that_a_guard_fixed():
    """Types from before the guard and after it are the same."""

    def f(x):
        before = x * 2
        assert x.shape[0] == 4
        return before, x * 3

    trace = trace_of(f, torch.randn(4, 6), dynamic=(0,))
    verify(trace)
    before, after = trace.outputs
    assert before.type == after.type and after.type.key()[1] == (4, 6)
    assert all(type(size) is int for size in after.shape)


def test_sizes_known_at_run_time():
    verify(trace_of(lambda x: torch.nonzero(x) + 1, torch.randn(4), dynamic=(0,)))


def fails(trace, message):
    with pytest.raises(VerifyError, match=message) as caught:
        verify(trace)
    return str(caught.value)


def test_use_before_definition():
    trace = small()
    first, *rest = trace.equations
    text = fails(trace.with_(equations=(*rest, first)), "not defined before it")
    assert text.count(">>>") == 1 and "aten.sum(mul" in text.split(">>>")[1].splitlines()[0]


def test_defined_twice():
    trace = small()
    fails(trace.with_(equations=(*trace.equations, trace.equations[0])), "defined twice")


def test_two_values_of_one_name():
    trace = small()
    first, second, *rest = trace.equations
    twin = Value(first.out.name, second.out.type)
    fails(trace.with_(equations=(first, second.with_(outputs=(twin,)), *rest)), "two values are called mul")


@pytest.mark.parametrize("name", ["class", "torch", "3x", "a-b"])
def test_names_are_identifiers(name):
    trace = small()
    first = trace.equations[0]
    fails(trace.with_(equations=(first.with_(outputs=(Value(name, first.out.type),)),)), "not a name")


def test_wrong_type():
    trace = small()
    first = trace.equations[0]
    t = first.out.tensor
    for wrong in (
        TensorType(torch.float64, t.shape, t.stride, t.device),
        TensorType(t.dtype, (3, 5), t.stride, t.device),
        TensorType(t.dtype, t.shape, (1, 3), t.device),
    ):
        changed = first.with_(outputs=(Value("mul", wrong),))
        fails(trace.with_(equations=(changed,), outputs=()), "mul is said to be")


def test_output_and_mutation():
    trace = small()
    stranger = Value("stranger", trace.inputs[0].type)
    fails(trace.with_(outputs=(stranger,)), "the trace returns stranger")
    fails(trace.with_(mutations={stranger: trace.inputs[0]}), "is mutated but is no input")
    fails(trace.with_(mutations={trace.inputs[0]: trace.equations[-1].out}), "cannot hold")


def test_only_equations_around_the_fault_are_shown():
    trace = trace_of(lambda x: [x := x + i for i in range(1, 31)][-1], torch.randn(2))
    broken = list(trace.equations)
    broken[15] = broken[15].with_(args=(Value("ghost", trace.inputs[0].type), 1))
    text = fails(trace.with_(equations=tuple(broken)), "ghost")
    assert len(text.splitlines()) < 18 and "…" in text


def test_a_number_that_only_the_run_knows() -> None:
    """With dynamic sizes a module's float comes in as a tensor, and is read from it."""

    class Scaled(torch.nn.Module):
        factor = 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    torch._dynamo.reset()
    model, x = Scaled(), torch.randn(3)
    fast = tessera.jit(model, dynamic=True, strict=True)
    with override(verify=True):
        assert torch.equal(fast(x), model(x))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_what_embedding_bag_gives_its_backward_has_sizes_of_its_own(mode):
    """They differ with whether the table wants gradients, which types do not say."""
    weight = torch.randn(3, 10).t().requires_grad_()
    indices, offsets = torch.randint(0, 10, (12,))[::2], torch.tensor([0, 3, 6])

    def bags(w):
        return torch.nn.functional.embedding_bag(indices, w, offsets, mode=mode, include_last_offset=True)

    with override(verify=True):
        out = tessera.jit(bags, strict=True)(weight)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), weight), torch.autograd.grad(bags(weight).sum(), weight))
