"""What a caller may do with the results of a compiled program: write them, differentiate some, compare objects."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tessera

FRONTENDS = ["dynamo", "functional"]


def compiled(fn: Callable, frontend: str) -> Callable:
    torch._dynamo.reset()
    return tessera.jit(fn, executors=["aten"], frontend=frontend)


def joined(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x], 1).t()


def part(x: torch.Tensor) -> torch.Tensor:
    return (x * 2)[1:]


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("fn", [joined, part])
@pytest.mark.parametrize("grad", [True, False])
def test_a_result_that_is_a_view_may_be_written(fn: Callable, frontend: str, grad: bool) -> None:
    found = []
    for f in (fn, compiled(fn, frontend)):
        x = torch.arange(6.0).reshape(3, 2).requires_grad_()
        out = f(x)
        with torch.set_grad_enabled(grad):
            out.mul_(3)
        out.square().sum().backward()
        found.append((out.detach(), x.grad))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_what_a_partial_gradient_does_not_reach_has_none(frontend: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * z).sum(), y.exp() * z

    for place, reached in ((0, (True, False, True)), (1, (False, True, True))):
        args = [torch.ones(3, requires_grad=True) for _ in range(3)]
        compiled(fn, frontend)(*args)[place].sum().backward()
        assert tuple(x.grad is not None for x in args) == reached


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_partial_gradient_is_not_spoilt_by_results_left_out(frontend: str) -> None:
    """Zero times the infinite derivative of another result would be NaN, also where that is accumulated later."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, y.sqrt()

    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    first, second = compiled(fn, frontend)(x, y)
    first.sum().backward(retain_graph=True)
    assert y.grad is None
    second.sum().backward()
    assert y.grad is not None and bool(y.grad.isinf().all())


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_contents_of_a_view_of_a_leaf_are_written_behind_autograds_back(frontend: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x.detach().mul_(2)
        return x * 3

    found = []
    for f in (fn, compiled(fn, frontend)):
        leaf = torch.ones(4, requires_grad=True)
        out = f(leaf[1:])
        out.sum().backward()
        found.append((leaf.detach(), out.detach(), leaf.grad))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def through_itself(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x * 3


def through_a_part(x: torch.Tensor) -> torch.Tensor:
    x[0] = 0
    return x * 3


def through_what_gives_it_back(x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.dropout(x, 0.5, training=False).contiguous()
    y.movedim(0, -1).lerp_(x.movedim(0, -1), 0.5)
    return y * 3


def through_memory(x: torch.Tensor) -> torch.Tensor:
    x.as_strided((2,), (1,)).zero_()
    return x * 3


def through_a_list(x: torch.Tensor) -> torch.Tensor:
    torch._foreach_add_([x.t()], 1.0)
    return x * 3


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "fn", [through_itself, through_a_part, through_what_gives_it_back, through_memory, through_a_list]
)
def test_a_leaf_that_requires_gradients_is_not_written(fn: Callable, whole: bool, frontend: str) -> None:
    for f in (fn, compiled(fn, frontend)):
        leaf = torch.ones(2, 2, requires_grad=True)
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            f(leaf if whole else leaf[:])
        assert leaf.eq(1).all()
        with torch.no_grad():
            f(leaf if whole else leaf[:])


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_an_argument_that_is_written_unseen_keeps_its_history(frontend: str) -> None:
    """A hook that is set on it afterwards sees what flows back to it."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        x.detach().mul_(-1)
        return y

    found = []
    for f in (fn, compiled(fn, frontend)):
        leaf, seen = torch.arange(4.0).requires_grad_(), []
        x = leaf * 1
        before = x.grad_fn
        out = f(x)
        assert x.grad_fn is before
        x.register_hook(seen.append)
        out.sum().backward()
        found.append([*seen, leaf.grad])
    torch.testing.assert_close(*found)


def _under_no_grad(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        w.mul_(2)
    return x.exp() * w.detach()


def _detached(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    w[1:].detach().mul_(2)
    return x.exp() * w.detach()


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("write", [_under_no_grad, _detached])
@pytest.mark.parametrize("region", [True, False], ids=["region", "checkpoint"])
def test_a_body_that_writes_unseen_leaves_its_operand_its_history(
    region: bool, write: Callable, leaf: bool, frontend: str
) -> None:
    block = torch.compiler.nested_compile_region(write)

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return block(x, w) if region else checkpoint(write, x, w, use_reentrant=False)

    want = torch.tensor([2.0 if write is _under_no_grad else 1.0, 2.0, 2.0])
    x, w = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    w = w if leaf else w * 1
    before = w.grad_fn
    out = compiled(fn, frontend)(x, w)
    torch.testing.assert_close(w.detach(), want)
    torch.testing.assert_close(out.detach(), want)
    assert w.requires_grad and w.grad_fn is before


@torch.library.custom_op("tessera_tests::raise_by", mutates_args={"x"})
def raise_by(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("leaf", [True, False])
def test_autograd_does_not_see_what_a_custom_operator_writes(leaf: bool, frontend: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise_by(x, y)
        return x * y

    found = []
    for f in (fn, compiled(fn, frontend)):
        start, y = torch.ones(3, requires_grad=True), torch.arange(3.0).requires_grad_()
        x = start if leaf else start * 1
        before = x.grad_fn
        out = f(x, y)
        assert x.grad_fn is before
        out.sum().backward()
        found.append([out, x.detach(), start.grad, y.grad])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_hooks_of_what_no_result_depends_on_are_silent(frontend: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + (y > 0)

    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    seen: list[torch.Tensor] = []
    y.register_hook(seen.append)
    compiled(fn, frontend)(x, y).sum().backward()
    assert not seen and y.grad is None and torch.equal(x.grad, torch.full((3,), 2.0))


def test_functional_tracing_gives_the_same_tensor_twice() -> None:
    def fn(x: torch.Tensor) -> tuple:
        y = x * 2
        view = y.t()
        return view, y, {"again": view}, x[0], None

    view, y, again, row, nothing = compiled(fn, "functional")(torch.ones(2, 3))
    assert again["again"] is view and view._base is not None and view.data_ptr() == y.data_ptr()
    assert row.shape == (3,) and nothing is None


def test_functional_tracing_gives_what_it_closes_over_itself() -> None:
    held = torch.nn.Parameter(torch.ones(2, 3))

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return held, held.t(), x @ held

    same, view, product = compiled(fn, "functional")(torch.ones(4, 2))
    assert same is held and view.data_ptr() == held.data_ptr()
    (view.sum() + product.sum()).backward()
    assert held.grad is not None and torch.equal(held.grad, torch.full((2, 3), 5.0))


def _written_part(x: torch.Tensor) -> torch.Tensor:
    part = (x * 2)[..., 1:]
    part.add_(part)
    return part


def _written_transposed(x: torch.Tensor) -> torch.Tensor:
    turned = (x * 2).t()
    turned.scatter_(0, turned.argsort(0), 0.5)
    return turned


def _written_whole(x: torch.Tensor) -> torch.Tensor:
    y = x.t() * 2
    y.index_fill_(0, torch.tensor([0]), 1.0)
    return y


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("fn", [_written_part, _written_transposed, _written_whole])
@pytest.mark.parametrize("grad", [True, False])
def test_a_written_result_keeps_its_layout(fn: Callable, frontend: str, grad: bool) -> None:
    found = []
    for f in (fn, compiled(fn, frontend)):
        x = torch.arange(12.0).reshape(4, 3).requires_grad_(grad)
        out = f(x)
        if grad:
            out.square().sum().backward()
        found.append((out, x.grad))
    (want, want_grad), (got, got_grad) = found
    assert got.stride() == want.stride() and torch.equal(got, want)
    assert got_grad is want_grad is None if not grad else torch.equal(got_grad, want_grad)


class Sign(torch.autograd.Function):
    """The second result has no gradient, though it floats."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN001
        sign = (x > 0).to(x.dtype)
        ctx.mark_non_differentiable(sign)
        return x * sign, sign

    @staticmethod
    def backward(ctx, g: torch.Tensor, _: object) -> torch.Tensor:  # noqa: ANN001
        return g


@pytest.mark.parametrize("place", [0, 1])
def test_results_of_a_function_that_it_marks_have_no_gradient(place: int) -> None:
    x = torch.ones(3, requires_grad=True)
    fast = compiled(lambda x: Sign.apply(x)[place].reshape(3, 1) * 2, "functional")
    assert fast(x).requires_grad is (place == 0)


@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
def test_a_leaf_written_unseen_and_copied_elsewhere(frontend: str) -> None:
    """Both end up with equal contents, and only the copy has a history: the leaf is written inside."""

    def fn(leaf: torch.Tensor, copy: torch.Tensor) -> None:
        with torch.no_grad():
            leaf.copy_(leaf.exp())
        copy.copy_(leaf)

    fast = tessera.jit(fn, frontend=frontend, strict=True)
    seen = []
    for call in (fn, fast):
        leaf, copy = torch.linspace(-1, 1, 6).requires_grad_(), torch.zeros(6)
        call(leaf, copy)
        copy.square().sum().backward()
        seen.append((leaf.detach(), leaf.is_leaf, copy.detach(), copy.requires_grad, leaf.grad))
    torch.testing.assert_close(seen[0], seen[1])


def zeros_and_a_part(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.zeros(4)
    return y, y[:2]


def a_part_and_a_detached_argument(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.detach()
    return y[1:], y, y[:2]


def parts_of_one_detached_result(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x * 2).detach()
    z = y.view(2, 2)
    return z[1], x + 1, y[:2], z, y[:2]


def detached_twice(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    return y.detach(), y, y.detach()[:2]


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(
    "fn", [zeros_and_a_part, a_part_and_a_detached_argument, parts_of_one_detached_result, detached_twice]
)
def test_writing_a_view_of_a_detached_tensor_gives_that_one_a_history(fn: Callable, frontend: str) -> None:
    def seen(fn: Callable) -> list:
        x, w = torch.arange(4.0).requires_grad_(), torch.full((2,), 3.0, requires_grad=True)
        out = fn(x)
        out[-1].copy_(w * 2)
        grads = [
            torch.autograd.grad(o.square().sum(), (x, w), retain_graph=True, allow_unused=True)
            for o in out
            if o.requires_grad
        ]
        return [[o.detach() for o in out], [o.requires_grad for o in out], grads]

    torch.testing.assert_close(seen(tessera.jit(fn, strict=True, frontend=frontend)), seen(fn))
