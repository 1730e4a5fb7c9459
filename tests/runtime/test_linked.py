"""Results of a compiled graph know of each other.

Whoever asks for the gradient of one by another, or hooks one that others are made of, gets what eager gives.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tessera
from tessera.runtime.linked import Level, levels_of
from tessera.store.program import COUNTS


class Chain(nn.Module):
    """Three results in a row, and one beside them."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.a, self.b, self.c, self.drop = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2), drop

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        first = F.dropout(self.a(x), self.drop).tanh()
        second = F.layer_norm(self.b(first), (4,)) * first
        out = self.c(F.dropout(second, self.drop))
        return {
            "first": first,
            "second": second,
            "out": out,
            "loss": out.square().mean() + first.sum(),
            "other": x.sin(),
        }


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def plain(r, m, x):
    r["loss"].backward()


def retained(r, m, x):
    for k in ("first", "second", "out"):
        r[k].retain_grad()
    r["loss"].backward()
    return [r[k].grad for k in ("first", "second", "out")]


def retained_of_an_inner_result(r, m, x):
    r["first"].retain_grad()
    r["loss"].retain_grad()
    r["second"].sum().backward()
    return [r["first"].grad, r["loss"].grad]


def hooks_that_look(r, m, x):
    seen = []
    for k in ("first", "second"):
        r[k].register_hook(lambda g, k=k: seen.append((k, g.clone())))
    (r["loss"] + r["first"].cos().sum()).backward()
    return [g for _, g in seen], [k for k, _ in seen]


def hooks_that_change(r, m, x):
    r["first"].register_hook(lambda g: g * 3)
    r["second"].register_hook(lambda g: g + 1)
    r["out"].register_hook(lambda g: g.clamp(-0.1, 0.1))
    r["second"].retain_grad()
    (r["loss"] + r["second"].exp().sum() + r["first"].sum()).backward()
    return [r["second"].grad]


def a_hook_of_what_is_gone(r, m, x):
    seen = []
    r["second"].register_hook(lambda g: seen.append(g.clone()))
    loss = r.pop("loss")
    r.clear()
    loss.backward()
    return seen


def a_hook_that_no_gradient_reaches(r, m, x):
    seen = []
    for k in ("other", "loss", "out"):
        r[k].register_hook(lambda g, k=k: seen.append(k) or g * 2)
    handle = r["second"].register_hook(lambda g: g * 5)
    handle.remove()
    r["second"].sum().backward()
    return seen


def grad_by_results(r, m, x):
    return torch.autograd.grad(r["loss"], [r["first"], r["second"], m.a.weight], retain_graph=True)


def grad_by_one(r, m, x):
    return torch.autograd.grad(r["out"].sum(), r["second"])


def grad_by_parameters(r, m, x):
    return torch.autograd.grad(r["loss"], list(m.parameters()))


def not_used(r, m, x):
    return torch.autograd.grad(r["other"].sum(), [r["first"], r["second"], x], allow_unused=True)


def inner_by_outer(r, m, x):
    return torch.autograd.grad(r["first"].sum(), [r["loss"], m.a.weight], allow_unused=True)


def backward_for_named(r, m, x):
    r["loss"].backward(inputs=[r["first"], m.b.weight, x])
    return [r["first"].grad]


def then_from_there(r, m, x):
    (g,) = torch.autograd.grad(r["loss"], r["second"], retain_graph=True)
    r["second"].backward(g * 2)
    return [g]


def twice(r, m, x):
    r["first"].retain_grad()
    r["loss"].backward(retain_graph=True)
    r["second"].sum().backward()
    return [r["first"].grad]


def created(r, m, x):
    (g,) = torch.autograd.grad(r["out"].square().sum(), r["first"], create_graph=True)
    (g.square().sum() + r["loss"]).backward()
    return [g]


def created_by_parameters(r, m, x):
    g = torch.autograd.grad(r["loss"], [x, m.a.weight], create_graph=True)
    torch.stack([one.square().sum() for one in g]).sum().backward()
    return g


def batched(r, m, x):
    rows = torch.eye(4, dtype=x.dtype).reshape(4, 2, 2)
    return torch.autograd.grad(r["out"], [r["second"], m.c.weight], rows, is_grads_batched=True)


def written_later(r, m, x):
    r["first"].retain_grad()
    r["loss"].mul_(2)
    (r["out"].sum() + r["loss"]).backward()
    return [r["first"].grad]


def views(r, m, x):
    row = r["second"][0]
    row.retain_grad()
    (row.sum() + r["loss"]).backward()
    return [row.grad]


WAYS = [
    plain, retained, retained_of_an_inner_result, hooks_that_look, hooks_that_change, a_hook_of_what_is_gone,
    a_hook_that_no_gradient_reaches,
    grad_by_results, grad_by_one, grad_by_parameters, not_used, inner_by_outer, backward_for_named, then_from_there,
    twice, created, created_by_parameters, batched, written_later, views,
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> tuple[Chain, object]:
    torch.manual_seed(0)
    model = Chain().double()
    return model, tessera.jit(model, strict=True)


def ran(fn, model: nn.Module, x: torch.Tensor, way) -> tuple:
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    got = way(fn(x), model, x)
    return got, gradients(model), x.grad


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_results_know_of_each_other(way, model) -> None:
    eager, compiled = model
    x = torch.randn(2, 3, dtype=torch.float64)
    assert_same(ran(compiled, eager, x, way), ran(eager, eager, x, way))


def assert_same(got: object, expected: object) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        assert got.requires_grad == expected.requires_grad
        torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-9, atol=1e-11)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)  # type: ignore[arg-type]
        for one, other in zip(got, expected, strict=True):  # type: ignore[call-overload]
            assert_same(one, other)
    else:
        assert got == expected


def test_what_was_drawn_at_random_is_not_drawn_again() -> None:
    model = Chain(drop=0.5).double()
    compiled, x = tessera.jit(model, strict=True), torch.randn(64, 3, dtype=torch.float64)
    torch.manual_seed(1)
    result = compiled(x)
    state = torch.get_rng_state()
    (by_second,) = torch.autograd.grad(result["out"].sum(), result["second"], retain_graph=True)
    by_first, weight = torch.autograd.grad(result["out"].sum(), [result["first"], model.a.weight], retain_graph=True)
    assert torch.equal(torch.get_rng_state(), state)
    kept = by_second != 0  # half of `second` was dropped, and what was not counts twice
    expected = torch.where(kept, 2 * model.c.weight.sum(0), 0.0)
    torch.testing.assert_close(by_second, expected)
    through = torch.autograd.grad(result["first"], model.a.weight, by_first)[0]
    torch.testing.assert_close(through, weight)


def test_nothing_is_computed_while_nobody_asks(monkeypatch) -> None:
    model = Chain().double()
    compiled = tessera.jit(model, strict=True)
    monkeypatch.setattr(
        "tessera.runtime.double_backward.DoubleBackward.between", lambda *_: pytest.fail("nobody asked for it")
    )
    compiled(torch.randn(2, 3, dtype=torch.float64))["loss"].backward()
    loss = compiled(torch.randn(2, 3, dtype=torch.float64))["loss"]  # what it is made of is gone: nobody can name it
    torch.autograd.grad(loss, list(model.parameters()))


def test_hidden_states_of_a_deep_model() -> None:
    """Of a model of equal layers the program is made of that of a few."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x):
            states = [x := layer(x).tanh() for layer in self.layers]
            return states, x.square().sum()

    model = Deep().double()
    compiled, x = tessera.jit(model, strict=True), torch.randn(2, 4, dtype=torch.float64)
    grads = []
    for fn in (compiled, model):
        states, loss = fn(x)
        for state in states:
            state.retain_grad()
        loss.backward()
        grads.append([state.grad for state in states])
    assert_same(*grads)


def test_programs_from_the_disk_know_too(tmp_path, monkeypatch) -> None:
    model, x, grads = Chain().double(), torch.randn(2, 3, dtype=torch.float64), []
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    monkeypatch.setitem(COUNTS, "loaded", 0)
    with tessera.override(program_cache=True):
        for _ in range(2):
            torch._dynamo.reset()
            compiled = tessera.jit(model)
            result = compiled(x)
            grads.append(torch.autograd.grad(result["loss"], [result["first"], result["second"]]))
    assert COUNTS["loaded"] == 1
    result = model(x)
    expected = torch.autograd.grad(result["loss"], [result["first"], result["second"]])
    assert_same(grads, [expected, expected])


def test_a_call_leaves_nothing_behind() -> None:
    model = Chain().double()
    compiled = tessera.jit(model, strict=True)
    result = compiled(torch.randn(2, 3, dtype=torch.float64))
    result["first"].retain_grad()
    result["loss"].backward()
    gone = [weakref.ref(result["first"]), weakref.ref(result["loss"].grad_fn)]
    enabled = gc.isenabled()
    gc.disable()
    try:
        del result
        assert [one() for one in gone] == [None, None]
    finally:
        if enabled:
            gc.enable()


def test_a_result_that_equals_what_it_is_made_of() -> None:
    """One value stands for both then."""

    def program(x):
        first = x.sin()
        second = -first
        return first, second, -second

    compiled, grads = tessera.jit(program, strict=True), []
    for fn in (compiled, program):
        x = torch.linspace(0, 1, 3, dtype=torch.float64).requires_grad_()
        first, second, third = fn(x)
        (first.sum() + second.exp().sum() + third.cos().sum()).backward()
        grads.append([first.detach(), second.detach(), third.detach(), x.grad])
    assert_same(*grads)


def test_levels() -> None:
    assert levels_of((), 3) == ()
    assert levels_of([(), (), ()], 3) == ()
    assert levels_of([(2,), (0, 3), (), ()], 4) == (Level((0,), (2,)), Level((1,), (0, 3)))
    assert levels_of([(), (0,), (0,)], 3) == (Level((1, 2), (0,)),)
    assert levels_of([(), (2,), (0,)], 2) == (Level((), (), (2,)), Level((1,), (2,)))
