"""Random numbers under vmap: refused, shared, or drawn for every example, from a generator or PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tessera as t
from tessera.util.config import config
from tessera.util.errors import InputError

SIZE = 4

OVERWRITING = {
    "random_": lambda x, **g: x.random_(**g),
    "random_ to": lambda x, **g: x.random_(100, **g),
    "random_ between": lambda x, **g: x.random_(-5, 100, **g),
    "normal_": lambda x, **g: x.normal_(**g),
    "uniform_": lambda x, **g: x.uniform_(**g),
    "bernoulli_": lambda x, **g: x.bernoulli_(0.4, **g),
    "cauchy_": lambda x, **g: x.cauchy_(**g),
    "exponential_": lambda x, **g: x.exponential_(**g),
    "geometric_": lambda x, **g: x.geometric_(0.1, **g),
    "log_normal_": lambda x, **g: x.log_normal_(**g),
}
PARAMETRISED = {
    "bernoulli": lambda p, **g: torch.bernoulli(p, **g),
    "normal": lambda p, **g: torch.normal(p, p, **g),
    "poisson": lambda p, **g: torch.poisson(p * 20, **g),
    "binomial": lambda p, **g: torch.binomial(p * 0 + 30, p, **g),
    "multinomial": lambda p, **g: torch.multinomial(p, 9, **g),
}
SHAPED = {
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "dropout": lambda x: F.dropout(x.cos() * 0 + 1),
    "alpha_dropout": lambda x: F.alpha_dropout(x * 0 + 1, training=True),
    "dropout1d": lambda x: F.dropout1d(torch.ones(64, 2) + x.sum() * 0),
    "randn": lambda x: torch.randn(8) + 0 * x.sum(),
    "randint": lambda x: torch.randint(0, 1000, (8,)) + 0 * x.sum(),
    "randperm": lambda x: torch.randperm(50) + 0 * x.sum(),
}


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.func does not take over."""
    monkeypatch.setattr(config, "strict", True)


def differ(rows: torch.Tensor) -> bool:
    return all(not torch.equal(rows[i], rows[j]) for i in range(SIZE) for j in range(i))


def alike(rows: torch.Tensor) -> bool:
    return all(torch.equal(rows[0], r) for r in rows)


def drawing(use: bool) -> tuple[dict, Callable]:
    """Arguments with or without a generator, and what starts the numbers over."""
    generator = torch.Generator()
    if use:
        return {"generator": generator}, lambda: generator.manual_seed(7)
    return {}, lambda: torch.manual_seed(7)


@pytest.mark.parametrize("use_generator", [False, True])
@pytest.mark.parametrize("name", OVERWRITING)
def test_what_overwrites_a_tensor(name: str, use_generator: bool) -> None:
    given, restart = drawing(use_generator)

    def f(x: torch.Tensor) -> torch.Tensor:
        return OVERWRITING[name](x, **given)

    for dim in (0, -1):
        x = torch.zeros(SIZE, 3, 8).movedim(0, dim).contiguous()
        restart()
        made = t.vmap(f, dim, randomness="different")(x)
        assert differ(made)
        assert_close(x.movedim(dim, 0), made)  # the tensor itself was written
        restart()
        assert_close(made, f(torch.zeros_like(x).movedim(dim, 0)))  # and with eager's numbers
        restart()
        made = t.vmap(f, dim, randomness="same")(x)
        restart()
        assert alike(made) and torch.equal(made[0], f(torch.zeros(3, 8)))
        assert_close(x.movedim(dim, 0), made)


@pytest.mark.parametrize("use_generator", [False, True])
@pytest.mark.parametrize("name", PARAMETRISED)
def test_distributions_that_differ_share_no_draw(name: str, use_generator: bool) -> None:
    given, restart = drawing(use_generator)
    p = torch.full((SIZE, 40), 0.5)

    def f(p: torch.Tensor, _: torch.Tensor | None = None) -> torch.Tensor:
        return PARAMETRISED[name](p, **given)

    restart()
    made = t.vmap(f, randomness="different")(p)
    restart()
    assert differ(made) and torch.equal(made, f(p))
    with pytest.raises(RuntimeError, match="differs between examples"):
        t.vmap(f, randomness="same")(p)
    restart()
    made = t.vmap(f, (None, 0), randomness="same")(p[0], torch.ones(SIZE))
    restart()
    assert alike(made) and torch.equal(made[0], f(p[0]))


@pytest.mark.parametrize("name", SHAPED)
def test_what_only_has_a_shape(name: str) -> None:
    x = torch.zeros(SIZE, 64)
    assert differ(t.vmap(SHAPED[name], randomness="different")(x))
    assert alike(t.vmap(SHAPED[name], randomness="same")(x))


@pytest.mark.parametrize("f", [*SHAPED.values(), *PARAMETRISED.values(), *OVERWRITING.values()])
def test_refused_unless_said(f: Callable) -> None:
    with pytest.raises(InputError, match="randomness"):
        t.vmap(f)(torch.full((SIZE, 64), 0.5))
    with pytest.raises(RuntimeError, match=r"test_vmap_random\.py:\d+"):
        t.vmap(f, randomness="error")(torch.full((SIZE, 64), 0.5))


def test_one_tensor_is_not_overwritten_with_many_draws() -> None:
    f = t.vmap(lambda x, _: x.normal_(), (None, 0), randomness="different")
    with pytest.raises(RuntimeError, match="not batched"):
        f(torch.zeros(3), torch.ones(SIZE))
    x = torch.zeros(3)
    made = t.vmap(lambda x, _: x.normal_(), (None, 0), randomness="same")(x, torch.ones(SIZE))
    assert alike(made) and torch.equal(made[0], x)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_chunks(size: int) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    x = torch.zeros(SIZE, 5)
    torch.manual_seed(3)
    whole = t.vmap(f, randomness="same")(x)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(t.vmap(f, randomness="same", chunk_size=size)(x), whole)
    assert torch.equal(torch.rand(1), after)
    assert differ(t.vmap(f, randomness="different", chunk_size=size)(x))
    inside = t.vmap(lambda x: t.vmap(f, randomness="same", chunk_size=size)(x), randomness="same")(x.expand(2, SIZE, 5))
    assert alike(inside[0]) and torch.equal(inside[0], inside[1])


def test_columns_of_a_jacobian() -> None:
    x = torch.full((3,), 0.5)
    with pytest.raises(RuntimeError, match="randomness"):
        t.jacfwd(torch.bernoulli)(x)
    for randomness in ("same", "different"):
        assert_close(t.jacfwd(torch.bernoulli, randomness=randomness)(x), torch.zeros(3, 3))
