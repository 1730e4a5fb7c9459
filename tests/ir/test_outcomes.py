"""Results that are remembered are what running the rule again gives: types, memory, and conditions on sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tessera.frontends.onnx.symbols import symbolic_fake
from tessera.ir import fake
from tessera.ir.remembered import remembered
from tessera.ir.size_rules import left_over, matmul, reshaped
from tessera.ir.types import size_key, type_of
from tessera.torch_internals.fake import FakeTensorMode
from tessera.torch_internals.memory import storage_id
from tessera.torch_internals.shapes import ShapeEnv, new_guards

aten = torch.ops.aten


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def of_any_size(mode: FakeTensorMode, *shape: int, dims: tuple[int, ...] = (0, 1)) -> torch.Tensor:
    return symbolic_fake(torch.empty(shape), mode, dims)


@pytest.mark.parametrize(("op", "runs"), [(aten.exp.default, 1), (aten.alias.default, 2), (aten.exp_.default, 2)])
def test_what_has_memory_of_its_own_is_computed_once(op: torch._ops.OpOverload, runs: int) -> None:
    mode, ran = fake.default_mode(), []

    def rule(x: torch.Tensor) -> torch.Tensor:
        ran.append(x)
        return op(x)

    with mode:
        for x in (torch.empty(5, 771).t(), torch.empty(5, 771).t()):
            out = remembered(rule, op, [x], (x,), {})
            assert isinstance(out, torch.Tensor) and out.fake_mode is mode and out.stride() == (1, 771)
            assert (storage_id(out) == storage_id(x)) == (runs == 2)
    assert len(ran) == runs


CALLS = {
    "own memory": (aten.exp.default, ()),
    "a view": (aten.permute.default, ([1, 0, 2],)),
    "a view that begins later": (aten.slice.Tensor, (2, 1)),
    "several views": (aten.split.Tensor, (3, 2)),
    "a view of another dtype": (aten.view.dtype, (torch.int32,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_programs_over_symbols(mode: FakeTensorMode, name: str) -> None:
    op, rest = CALLS[name]
    ran: list[int] = []

    def rule(*args: object) -> object:
        ran.append(1)
        return op(*args)

    x, other = of_any_size(mode, 5, 7, 6), of_any_size(mode, 5, 7, 6)
    with mode, fake.symbolic_rules():
        first = remembered(rule, op, [x], (x, *rest), {})
        again = remembered(rule, op, [other], (other, *rest), {})
    assert type(first) is type(again) and len(ran) == (2 if "dtype" in name else 1)
    pairs = zip(first, again, strict=True) if isinstance(first, (list, tuple)) else [(first, again)]
    for a, b in pairs:
        assert type_of(a) == type_of(b) and a.device == b.device and str(a.storage_offset()) == str(b.storage_offset())
        assert (storage_id(a) == storage_id(x)) == (storage_id(b) == storage_id(other)) == ("view" in name)


def test_a_view_is_known_again_where_its_tensor_begins_alike(mode: FakeTensorMode) -> None:
    ran: list[int] = []

    def rule(*args: object) -> object:
        ran.append(1)
        return aten.slice.Tensor(*args)

    x = of_any_size(mode, 5, 7, 6)
    with mode, fake.symbolic_rules():
        starts = []
        for start in (0, 1, x.stride(0), 1, x.stride(0)):
            y = torch.ops.aten.as_strided.default(x, x.shape, x.stride(), start)
            starts.append(remembered(rule, aten.slice.Tensor, [y], (y, 2, 1), {}).storage_offset())  # type: ignore[attr-defined]
    keys = [*map(size_key, starts)]
    assert keys[:2] == [1, 2] and keys[3:] == keys[1:3] and keys[2] not in (1, 2) and len(ran) == 3


def test_tensors_of_a_type_have_memories_of_their_own(mode: FakeTensorMode) -> None:
    t = type_of(of_any_size(mode, 5, 7, 6))
    one, other = fake.fakes_of((t, t), mode)
    assert type_of(one) == type_of(other) == t and storage_id(one) != storage_id(other)
    with mode:
        one.add_(1)
        assert storage_id(one.view(-1)) == storage_id(one) != storage_id(other)


def test_a_type_learns_what_its_symbols_are(mode: FakeTensorMode) -> None:
    x = of_any_size(mode, 5, 7, 6)
    t = type_of(x)
    before = t.key()
    assert t.key() is before
    assert x.shape[0] == 5  # a condition: from now on it is a number
    assert t.key() != before and t.key()[1][0] == 5


def test_conditions_are_found_as_often_as_they_are_asked_for(mode: FakeTensorMode) -> None:
    """What held while somebody asked what a call takes for granted is not taken for granted afterwards."""
    x, y = of_any_size(mode, 5, 6, 7, dims=(0,)), of_any_size(mode, 9, 6, 7, dims=(0,))
    env = mode.shape_env
    assert env is not None
    counts = []
    for _ in range(2):
        with new_guards(env) as found, mode, fake.symbolic_rules():
            remembered(_needs_three, aten.add.Tensor, [x, y], (x, y), {})
        counts.append(len(found))
    assert counts == [1, 1]
    for _ in range(2):
        with mode, fake.symbolic_rules(), env.suppress_guards():
            remembered(_needs_three, aten.add.Tensor, [x, y], (x, y), {})
    assert len(env.guards) == 0
    with mode, fake.symbolic_rules():
        remembered(_needs_three, aten.add.Tensor, [x, y], (x, y), {})
    assert len(env.guards) == 1


def _needs_three(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    assert x.shape[0] * 2 != y.shape[0]  # a condition
    return torch.empty_like(x)


Shapes = tuple[tuple[int, ...], tuple[int, ...]]
PRODUCTS: list[Shapes] = [((5, 7, 4), (4, 6)), ((5, 4), (4, 6)), ((5, 3, 7, 4), (5, 3, 4, 7)), ((5, 7, 4), (1, 4, 6))]


@pytest.mark.parametrize("shapes", PRODUCTS)
@pytest.mark.parametrize("turned", [False, True])
def test_products_lie_as_pytorch_says(mode: FakeTensorMode, shapes: Shapes, turned: bool) -> None:
    a, b = shapes
    x, y = of_any_size(mode, *a, dims=(0, len(a) - 2)), of_any_size(mode, *b, dims=(0,) if b[0] == 5 else ())
    with mode, fake.symbolic_rules():
        x = x.mT.clone(memory_format=torch.contiguous_format).mT if turned else x
        ours = matmul(x, y)
        assert ours is not None and type_of(ours) == type_of(aten.matmul.default(x, y))


@pytest.mark.parametrize("shapes", [((4,), (5, 4, 6)), ((3, 4), (5, 4, 6)), ((5, 7, 4), (4,)), ((5, 7, 4), (9, 6))])
def test_other_products_are_pytorchs(mode: FakeTensorMode, shapes: Shapes) -> None:
    x, y = (of_any_size(mode, *shape, dims=(0,) if shape[0] == 5 else ()) for shape in shapes)
    with mode:
        assert matmul(x, y) is None


def test_reshapes_of_rows(mode: FakeTensorMode) -> None:
    x = of_any_size(mode, 5, 4, 7, 6, dims=(0, 2))
    b, _, t, _ = x.shape
    with mode, fake.symbolic_rules():
        for size in ([b * 4, t, 6], [b, 4 * t * 6], [b, 2, 2, t, 6]):
            ours = reshaped(x, size)
            assert ours is not None and type_of(ours) == type_of(aten.reshape.default(x, size))
            assert storage_id(ours) == storage_id(x)
        assert reshaped(x, [b * 4, t, 7]) is None  # another number of elements
        assert reshaped(x.permute(0, 2, 1, 3), [b * t, 24]) is None


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (lambda b, t: [-1, t, 6], lambda b, t: [4 * b, t, 6]),
        (lambda b, t: [b, -1, 2], lambda b, t: [b, 12 * t, 2]),
        (lambda b, t: [b, t, -1, 12], lambda b, t: [b, t, 2, 12]),
        (lambda b, t: [b, t, -1, 5], lambda b, t: [b, t, -1, 5]),  # not without a division
        (lambda b, t: [b + 1, -1], lambda b, t: [b + 1, -1]),
        (lambda b, t: [b, -1, 0], lambda b, t: [b, -1, 0]),
    ],
)
def test_what_a_reshape_leaves_over(mode: FakeTensorMode, target: Callable, expected: Callable) -> None:
    x = of_any_size(mode, 5, 4, 7, 6, dims=(0, 2))
    b, _, t, _ = x.shape
    assert list(map(size_key, left_over(x.shape, target(b, t)))) == list(map(size_key, expected(b, t)))
