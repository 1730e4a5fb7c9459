"""Views made without gradients, which say of themselves what their base says, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tessera
from tessera.util.errors import CaptureError

FRONTENDS = ("dynamo", "functional")


def copied(x: torch.Tensor) -> torch.Tensor:
    """Windows of a vector, which overlap, are no matrix of its elements."""
    flat = x.unfold(0, 2, 1).reshape(-1)
    with torch.enable_grad():
        return flat * 2


def viewed(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(2, -1)
    with torch.enable_grad():
        return rows * 2


def asked(x: torch.Tensor) -> torch.Tensor:
    return x.detach() + (1 if x.flatten().requires_grad else 2)


def asked_of_a_result(x: torch.Tensor) -> torch.Tensor:
    return x.detach() + (1 if (x * 2).flatten().requires_grad else 2)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("fn", [copied, viewed, asked, asked_of_a_result])
def test_what_requires_gradients(fn: Callable, frontend: str) -> None:
    x = torch.arange(4.0).requires_grad_()
    with torch.no_grad():
        expected, out = fn(x), tessera.jit(fn, frontend=frontend)(x)
    assert out.requires_grad == expected.requires_grad
    assert torch.equal(out, expected)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_base_without_gradients(frontend: str) -> None:
    fast = tessera.jit(viewed, frontend=frontend)
    for x in (torch.ones(4).requires_grad_(), torch.ones(8)[:4].requires_grad_(), torch.ones(4).requires_grad_() * 1):
        with torch.no_grad():
            assert fast(x).requires_grad == viewed(x).requires_grad


def made_outside_of_gradients(x):  # noqa: ANN001, ANN201
    with torch.enable_grad():
        rows = x.sin()
    return rows[None]


def made_inside_without(x):  # noqa: ANN001, ANN201
    rows = x.sin()
    with torch.no_grad():
        first = rows[:1]
    return first


def viewed_again(x):  # noqa: ANN001, ANN201
    rows = x.sin()
    with torch.no_grad():
        first = rows[:2]
    return first[1:]


def beside_what_is_made_of_it(x):  # noqa: ANN001, ANN201
    rows = x.sin()
    with torch.no_grad():
        first = rows[:2]
    return first, first * 2, rows.cos()


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "fn", [made_outside_of_gradients, made_inside_without, viewed_again, beside_what_is_made_of_it]
)
def test_one_view_alone_of_what_has_a_history(fn: Callable, grad: bool, frontend: str) -> None:
    """Made under no_grad it is a leaf, and gradients of what is made of it end there."""
    told = []
    for f in (fn, tessera.jit(fn, frontend=frontend)):
        x = torch.linspace(0, 1, 4, dtype=torch.float64).requires_grad_()
        with torch.set_grad_enabled(grad):
            out = f(x)
        out = out if isinstance(out, tuple) else (out,)
        told.append([(y.requires_grad, y.is_leaf, y.grad_fn is None) for y in out])
        if wanted := [y for y in out if y.requires_grad]:
            sum(y.sum() for y in wanted).backward()  # type: ignore[union-attr]
        told[-1] += [None if y.grad is None else y.grad.tolist() for y in (x, *out) if y.is_leaf]
    assert told[1] == told[0]


def test_parts_of_a_size_that_changes() -> None:
    def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x.tensor_split(2)[1]

    fast = tessera.jit(parts, dynamic=True)
    for size in (4, 6, 7):
        x = torch.arange(float(size)).requires_grad_()
        with torch.no_grad():
            part, expected = fast(x)[1], parts(x)[1]
        assert part.requires_grad
        assert part.data_ptr() == expected.data_ptr()
        assert torch.equal(part, expected)


def test_an_argument_that_is_written_and_then_reshaped() -> None:
    def reshaped(x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x.unsqueeze_(0)

    with pytest.raises(CaptureError, match="changes the shape of an input"):
        tessera.jit(reshaped, frontend="functional")(torch.ones(3))


@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
def test_a_view_of_what_was_written_of_a_leaf_that_is_a_view(frontend: str) -> None:
    """Its base has no gradients, so the view made under no_grad has none, and may be written."""

    def program(x: torch.Tensor) -> torch.Tensor:
        first, second = x.tensor_split(2, 0)
        with torch.no_grad():
            second.add_(0.5)
            row = second.split(1, 0)[0]
        row[0] = -2.0
        return first * row

    def observed(f: Callable) -> tuple[object, ...]:
        x = torch.ones(2, 4).t().requires_grad_()
        out = f(x)
        out.sum().backward()
        return x.tolist(), out.tolist(), None if x.grad is None else x.grad.tolist()

    torch._dynamo.reset()
    assert observed(tessera.jit(program, frontend=frontend)) == observed(program)
