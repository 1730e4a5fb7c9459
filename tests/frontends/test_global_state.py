"""Switches of PyTorch's that a program sets hold after it, as eager's do; calls on fake tensors; async functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import tessera
from tessera.util.errors import CaptureError, InputError, OptionError


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)


def at_the_end(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch.set_grad_enabled(False)
    return y


def at_the_start(x: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    return x * 2


def before_a_break(x: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    y = x * 2
    torch._dynamo.graph_break()
    return y * 3


def off_and_on(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    torch.set_grad_enabled(False)
    z = y * 3
    torch.set_grad_enabled(True)
    return y, z


def nothing_else(x: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    return x


def deterministic(x: torch.Tensor) -> torch.Tensor:
    torch.use_deterministic_algorithms(True)
    return x * 2


def default_dtype(x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    return torch.ones(2) + x


def default_dtype_and_back(x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    y = torch.ones(2)
    torch.set_default_dtype(torch.float32)
    return y


def _state() -> tuple:
    return torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()


def _seen(fn: Callable, grad: bool = True) -> list[tuple]:
    """What two calls give, and leave behind."""
    found = []
    for _ in range(2):
        torch.set_grad_enabled(grad)
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        out = fn(torch.ones(2, requires_grad=True))
        outs = out if isinstance(out, tuple) else (out,)
        found.append((_state(), [(y.tolist(), y.dtype, y.requires_grad) for y in outs]))
    return found


PROGRAMS = [at_the_end, at_the_start, before_a_break, off_and_on, nothing_else, deterministic, default_dtype]


@pytest.mark.parametrize("fn", [*PROGRAMS, default_dtype_and_back], ids=lambda f: f.__name__)
@pytest.mark.parametrize("compiler", ["jit", "torch.compile"])
def test_what_a_program_sets_holds_after_it(fn: Callable, compiler: str) -> None:
    fast = tessera.jit(fn) if compiler == "jit" else torch.compile(fn, backend="tessera")
    assert _seen(fast) == _seen(fn)


@pytest.mark.parametrize("fn", [at_the_end, at_the_start, off_and_on], ids=lambda f: f.__name__)
def test_a_traced_function_leaves_grad_mode_as_it_should(fn: Callable) -> None:
    assert _seen(tessera.jit(fn, frontend="functional")) == _seen(fn)


def on(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch.set_grad_enabled(True)
    return y * x


def on_at_the_end(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    part = y[:1]
    y.mul_(3)
    torch.set_grad_enabled(True)
    return y, part


def on_for_a_part(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch.set_grad_enabled(True)
    y = x * 2
    torch.set_grad_enabled(False)
    return y, y * x


def the_other_way(x: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(not torch.is_grad_enabled())
    return x * 2


@pytest.mark.parametrize("fn", [on, on_at_the_end, on_for_a_part, the_other_way], ids=lambda f: f.__name__)
@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
def test_gradients_that_a_program_turns_on_are_on_after_it(fn: Callable, frontend: str) -> None:
    fast = tessera.jit(fn, frontend=frontend)
    for grad in (False, True, False):
        assert _seen(fast, grad) == _seen(fn, grad)


@pytest.mark.parametrize("fn", [deterministic, default_dtype, lambda x: torch.manual_seed(1) and x * 2])
def test_a_traced_function_may_not_set_what_equations_do_not_say(fn: Callable) -> None:
    with pytest.raises(CaptureError, match="acts once"):
        tessera.jit(fn, frontend="functional")(torch.ones(2))


@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
def test_fake_tensors_of_the_users_own(frontend: str) -> None:
    fast = tessera.jit(lambda x: (x * 2).sum(), frontend=frontend)
    real = fast(torch.ones(4, 3))
    with FakeTensorMode():
        fake = fast(torch.ones(4, 3))
    assert isinstance(fake, FakeTensor) and fake.shape == ()
    assert torch.equal(fast(torch.ones(4, 3)), real)


def test_a_model_made_of_fake_tensors() -> None:
    with FakeTensorMode():
        model = torch.nn.Linear(3, 2)
        tessera.jit(model)(torch.ones(4, 3)).sum().backward()
        assert isinstance(model.weight.grad, FakeTensor) and model.weight.grad.shape == (2, 3)
        step = tessera.train_step(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(InputError, match="FakeTensorMode"):
            step(torch.ones(4, 3))


async def coroutine(x: torch.Tensor) -> torch.Tensor:
    return x * 2


async def stream(x: torch.Tensor):  # noqa: ANN201
    yield x * 2


def generator(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for i in range(3):
        yield x * i


class Waits(torch.nn.Module):
    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("fn", [coroutine, stream, Waits()], ids=["coroutine", "stream", "module"])
@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
def test_async_functions_are_refused(fn: Callable, frontend: str) -> None:
    with pytest.raises(OptionError, match="async function"):
        tessera.jit(fn, frontend=frontend)


def test_generators() -> None:
    x = torch.ones(2)
    assert [y.tolist() for y in tessera.jit(generator)(x)] == [y.tolist() for y in generator(x)]
    with pytest.raises(OptionError, match="a generator"):
        tessera.jit(generator, frontend="functional")
