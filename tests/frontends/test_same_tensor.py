"""One tensor under several names: an argument that the model also holds, two arguments that are one, and then not."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tessera

MASK = torch.ones(2)


class Holder(nn.Module):
    """A model that holds a tensor, one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        mask = torch.ones(2)
        if how == "parameter":
            self.mask = nn.Parameter(mask)
        elif how == "buffer":
            self.register_buffer("mask", mask)
        elif how == "dict":
            self.held = {"mask": mask}
        elif how == "list":
            self.held = [mask]
        elif how == "inner":
            self.inner = Holder("parameter")
        else:
            self.mask = mask

    def find(self) -> torch.Tensor:
        if self.how == "inner":
            return self.inner.find()
        if self.how in ("dict", "list"):
            return self.held["mask" if self.how == "dict" else 0]
        return self.mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 10 + self.find()


class Plain:
    shared = torch.ones(2)

    def __init__(self) -> None:
        self.mask = torch.ones(2)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 10 + self.mask

    def of_class(self, x: torch.Tensor) -> torch.Tensor:
        return x * 10 + Plain.shared


GLOBAL = Holder("attribute")


def reads_a_global(x: torch.Tensor) -> torch.Tensor:
    return x * 10 + MASK


def calls_a_global(x: torch.Tensor) -> torch.Tensor:
    return GLOBAL(x)


def has_a_default(x: torch.Tensor, mask: torch.Tensor = MASK) -> torch.Tensor:
    return x * 10 + mask


def _held(how: str) -> tuple[Callable, torch.Tensor]:
    model = Holder(how)
    return model, model.find()


def _closure() -> tuple[Callable, torch.Tensor]:
    mask = torch.ones(2)
    return lambda x: x * 10 + mask, mask


def _closure_over_model() -> tuple[Callable, torch.Tensor]:
    model = Holder("buffer")
    return lambda x: model(x), model.find()


def _method() -> tuple[Callable, torch.Tensor]:
    model = Holder("attribute")
    return model.forward, model.find()


def _callable() -> tuple[Callable, torch.Tensor]:
    made = Plain()
    return made, made.mask


def _partial() -> tuple[Callable, torch.Tensor]:
    mask = torch.ones(2)
    return functools.partial(lambda mask, x: x * 10 + mask, mask), mask


PROGRAMS: dict[str, Callable[[], tuple[Callable, torch.Tensor]]] = {
    **{how: functools.partial(_held, how) for how in ("parameter", "buffer", "attribute", "dict", "list", "inner")},
    "global": lambda: (reads_a_global, MASK),
    "global model": lambda: (calls_a_global, GLOBAL.find()),
    "default": lambda: (has_a_default, MASK),
    "class attribute": lambda: (Plain().of_class, Plain.shared),
    "closure": _closure,
    "closure over a model": _closure_over_model,
    "method": _method,
    "callable": _callable,
    "partial": _partial,
}
COMPILERS: dict[str, Callable[[Callable], Callable]] = {
    "jit": tessera.jit,
    "functional": tessera.jit(frontend="functional"),
    "torch.compile": functools.partial(torch.compile, backend="tessera"),
}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_argument_that_the_program_holds_itself(program: str, compiler: str) -> None:
    fn, mask = PROGRAMS[program]()
    fast, other = COMPILERS[compiler](fn), torch.full((2,), 5.0)
    for x in (mask, other, mask, other):
        assert torch.equal(fast(x), fn(x))


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_same_tensor_comes_only_later(compiler: str) -> None:
    model = Holder("buffer")
    fast, other = COMPILERS[compiler](model), torch.full((2,), 5.0)
    for x in (other, model.mask, other, model.mask):
        assert torch.equal(fast(x), model(x))


@pytest.mark.parametrize("compiler", COMPILERS)
def test_two_arguments_that_are_one_and_then_two(compiler: str) -> None:
    fast = COMPILERS[compiler](lambda x, y: x * 10 + y)
    a, b = torch.ones(2), torch.full((2,), 5.0)
    for x, y in ((a, a), (a, b), (b, a), (b, b), (a, b)):
        assert torch.equal(fast(x, y), x * 10 + y)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("first", [(0, 1), (0, 0)], ids=["two", "one"])
def test_a_write_is_seen_under_both_names(first: tuple[int, int], compiler: str) -> None:
    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 10 + y

    fast, ours, theirs = COMPILERS[compiler](write), torch.arange(4.0).view(2, 2), torch.arange(4.0).view(2, 2)
    for i, j in (first, (0, 1), (1, 1), (1, 0), (0, 0)):
        assert torch.equal(fast(ours[i], ours[j]), write(theirs[i], theirs[j]))
        assert torch.equal(ours, theirs)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(2))
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, bool, bool]:
        self.count.add_(1)
        return x * 10 + self.count * self.weight, x is self.count, x is self.weight


def test_a_buffer_that_is_written_and_given() -> None:
    model, reference = Counts(), Counts()
    fast = tessera.jit(model)
    for name in (None, "count", None, "weight", "count", None):
        ours, theirs = (torch.ones(2) if name is None else getattr(m, name) for m in (model, reference))
        (y, *same), (expected, *really) = fast(ours), reference(theirs)
        assert torch.equal(y, expected) and same == really


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("offset", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight + self.offset * 3).sum()


@pytest.mark.parametrize("first", ["offset", "weight", "other"])
def test_a_training_step_on_what_the_model_holds(first: str) -> None:
    model = Loss()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    step = tessera.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
    for name in (first, "other", "offset", "weight", "other"):
        x, given = (getattr(m, name, torch.full((2,), 5.0)) for m in (model, reference))
        optimizer.zero_grad()
        loss = reference(given)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(x), loss.detach())
        torch.testing.assert_close(model.weight, reference.weight)


@pytest.mark.parametrize("wrap", [lambda f: f, tessera.jit], ids=["plain", "jit"])
def test_gradients_by_what_the_function_closes_over(wrap: Callable) -> None:
    fast = wrap(tessera.grad(lambda x: (x * x * MASK).sum()))
    for x in (MASK, torch.full((2,), 5.0), MASK):
        assert torch.equal(fast(x), 2 * x)
