"""Numbers that are known only when a program runs: computed with, and checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

import tessera


@pytest.fixture(autouse=True)
def captured() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


# Each calls an operator whose result has the name of the function that computes the number.
NUMBERS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "max": lambda x, n: x.max() * max(n, 2) + x.max(),
    "min": lambda x, n: x * min(n, 2) + x.min(),
    "abs": lambda x, n: x * abs(n - 5) + x.abs(),
    "round": lambda x, n: x * round(n / 2) + x.round(),
    "pow": lambda x, n: x * (2.0**n) + x.pow(3),
    "floor": lambda x, n: x * math.floor(n / 2) + x.floor(),
    "ceil": lambda x, n: x * math.ceil(n / 2) + x.ceil(),
    "trunc": lambda x, n: x * math.trunc(n / 2) + x.trunc(),
    "sqrt": lambda x, n: x * math.sqrt(n) + x.sqrt(),
    "int": lambda x, n: x * int(n / 2) + x.int(),
    "float": lambda x, n: x.double() * float(n),
    "sum": lambda x, n: x.sum() * sum([n, n]),
    "slice": lambda x, n: x[1:n] + x[: max(n, 1)].max(),
    "log": lambda x, n: x * math.log(n) + x.log(),
    "bits": lambda x, n: x * ((n << 1) + (n >> 1) + (n & 1)),
    "rest": lambda x, n: x * (n % 2) + x * (n // 2),
}
SOURCES: dict[str, Callable[[torch.Tensor], int]] = {
    "item": lambda t: t.sum().int().item(),
    "nonzero": lambda t: t.nonzero().shape[0],
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str, source: str) -> None:
    def fn(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return NUMBERS[name](x, SOURCES[source](t))

    fast, x = tessera.jit(fn, strict=True), torch.arange(1.0, 7.0)
    for count in (3, 4):
        torch.testing.assert_close(fast(x, torch.ones(count)), fn(x, torch.ones(count)))


def _at_least(x: torch.Tensor) -> torch.Tensor:
    n = (x + 0).item()
    torch._check(n >= 2)
    torch._check(n <= 5)
    return torch.ones(10)[:n]


def _of_a_size(x: torch.Tensor) -> torch.Tensor:
    n = x.nonzero().shape[0]
    torch._check(n == 2)
    return x.nonzero() * 2


def _nothing_depends_on_it(x: torch.Tensor) -> torch.Tensor:
    torch._check(x.nonzero().shape[0] > 1)
    return x * 2


def _of_two(x: torch.Tensor) -> torch.Tensor:
    n, m = (x + 0).item(), (x + 1).item()
    torch._check(n + 1 == m)
    return torch.zeros(n) + torch.ones(4)


def _untold(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.nonzero().shape[0], 3) + torch.ones(2, 3)


def _all_of(x: torch.Tensor) -> torch.Tensor:
    torch._check_tensor_all(x > 0)
    return x * 2


def _trained(x: torch.Tensor) -> torch.Tensor:
    n = x.nonzero().shape[0]
    torch._check(n >= 2)
    return (x.float().requires_grad_() * n).sum()


CLAIMS = [
    (_at_least, 3, (6, 1)),
    (_of_a_size, [1, 1], ([1, 0],)),
    (_nothing_depends_on_it, [1, 1], ([1, 0],)),
    (_of_two, 4, (2,)),
    (_untold, [1, 1], ([1, 0, 1, 1],)),
    (_all_of, [1, 1], ([-1, 1],)),
    (_trained, [1, 1], ([1, 0],)),
]


@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
@pytest.mark.parametrize(("fn", "good", "bad"), CLAIMS, ids=[c[0].__name__ for c in CLAIMS])
def test_claims_are_checked_at_every_call(fn: Callable, good: object, bad: tuple, frontend: str) -> None:
    if frontend == "functional" and fn is _trained:
        pytest.skip("a traced function makes no leaves")
    fast = tessera.jit(fn, frontend=frontend)
    for _ in range(2):
        assert torch.equal(fast(torch.tensor(good)), fn(torch.tensor(good)))
    for wrong in bad:
        with pytest.raises(RuntimeError):
            fn(torch.tensor(wrong))
        with pytest.raises(RuntimeError):
            fast(torch.tensor(wrong))
    assert torch.equal(fast(torch.tensor(good)), fn(torch.tensor(good)))


def test_a_traced_claim_keeps_its_error_and_its_words() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        n = (x + 0).item()
        torch._check_value(n < 5, lambda: "fewer than five, please")
        return x * n

    fast = tessera.jit(fn, frontend="functional")
    assert torch.equal(fast(torch.tensor(3)), fn(torch.tensor(3)))
    with pytest.raises(ValueError, match="fewer than five, please"):
        fast(torch.tensor(7))


@pytest.mark.parametrize("wrap", [lambda f: f, tessera.jit, tessera.jit(frontend="functional"), tessera.vmap])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_over_nothing_gives_what_it_began_with(wrap: Callable, reverse: bool) -> None:
    def fn(carry: torch.Tensor, xs: torch.Tensor) -> tuple:
        return tessera.scan(lambda c, x: (c + x, (c * 2, c.sum().int())), carry, xs, dim=-1, reverse=reverse)

    batch = (3,) if wrap is tessera.vmap else ()
    carry, xs = torch.ones(*batch, 4), torch.ones(*batch, 4, 0)
    last, (doubled, sums) = wrap(fn)(carry, xs)
    assert torch.equal(last, carry) and doubled.shape == xs.shape
    assert sums.shape == (*batch, 0) and sums.dtype == torch.int32


def test_a_scan_over_nothing_has_a_gradient() -> None:
    def loss(carry: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        return tessera.scan(lambda c, x: (c * x, c), carry, xs)[0].square().sum()

    assert torch.equal(tessera.grad(loss)(torch.ones(3), torch.ones(0, 3)), torch.full((3,), 2.0))
    carry = torch.ones(3, requires_grad=True)
    tessera.jit(loss)(carry, torch.ones(0, 3)).backward()
    assert torch.equal(carry.grad, torch.full((3,), 2.0))
