"""Every model and training step is compiled on its own, however many there are in a process."""

from __future__ import annotations

import gc
import linecache
import weakref

import pytest
import torch
from torch import nn

import tessera
from tessera.frontends.dynamo.frames import OWN_FILE, own_frame

MANY = 10  # more than the entries Dynamo keeps for one code object


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield


def graphs(fast) -> list:
    return fast.__tessera__.backend.graphs


def function_without_source():
    scope: dict = {}
    exec("def double(x):\n    return x * 2", scope)
    return scope["double"]


def closure(by: float = 2.0, *, more: float = 1.0):
    return lambda x, scale=by, *, shift=more: x * scale + shift + by


class Scaled:
    def __init__(self):
        self.by = 3.0

    def times(self, x, more=1.0):
        return x * self.by + more


MAKERS = {
    "module": lambda: nn.Linear(3, 4),
    "no source": function_without_source,
    "no name": lambda: eval("lambda x: x * 2"),
    "closure": closure,
    "decorated": lambda: torch.no_grad()(closure()),  # all that a decorator makes has one code object
    "method": lambda: Scaled().times,
    "disabled": lambda: torch.compiler.disable(closure()),  # who compiles it asks for it, as with torch.compile
    "the same": lambda: torch.nn.functional.normalize,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_none_runs_eagerly_for_there_being_many(make):
    kept = [(fn, tessera.jit(fn, executors="aten")) for fn in (make() for _ in range(MANY))]
    x = torch.randn(2, 3)
    for fn, fast in kept:
        torch.testing.assert_close(fast(x), fn(x))
        assert len(graphs(fast)) == 1 and not graphs(fast)[0].eager_reason


def test_a_function_keeps_its_names_in_guards():
    fast = tessera.jit(lambda wide, by=2: wide * by, executors="aten")
    fast(torch.randn(2, 3))
    assert "wide: float32[2, 3]" in tessera.explain(fast).graphs[0].guards


def test_every_training_step_is_one_program():
    for _ in range(MANY):
        model = nn.Linear(3, 4)
        step = tessera.train_step(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters()), executors="aten")
        step(torch.randn(2, 3))
        assert not step.in_parts


def test_sizes_of_one_model_are_not_anothers():
    """Only a model that has seen a size change is compiled for symbolic ones."""
    one, other = (tessera.jit(nn.Linear(3, 4), executors="aten") for _ in range(2))
    one(torch.randn(2, 3))
    other(torch.randn(5, 3))
    assert not any(v.tensor.is_symbolic for v in graphs(other)[0].compilation.account.stages[0][1].outputs)
    one(torch.randn(5, 3))
    assert any(v.tensor.is_symbolic for v in graphs(one)[1].compilation.account.stages[0][1].outputs)


def test_our_own_lines_are_nobodys_source():
    fast = tessera.jit(nn.Linear(3, 4), executors="aten")
    fast(torch.randn(2, 3))
    assert OWN_FILE not in str(tessera.stages(fast)[0]) and OWN_FILE not in str(tessera.explain(fast))


def test_a_model_goes_with_what_was_compiled_of_it():
    """Dynamo keeps code and backends for good; they must not keep the weights."""
    x = torch.randn(2, 3)

    def trained() -> weakref.ref:
        model = nn.Linear(3, 4)
        fast = tessera.jit(model, executors="aten")
        fast(x).sum().backward()
        return weakref.ref(model.weight)

    def stepped() -> weakref.ref:
        model = nn.Linear(3, 4)
        step = tessera.train_step(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters()), executors="aten")
        step(x)
        return weakref.ref(model.weight)

    for weight in (trained(), stepped()):
        gc.collect()
        assert weight() is None


def test_gradients_outlive_what_was_compiled():
    model, x = nn.Linear(3, 4), torch.randn(2, 3)
    loss = tessera.jit(model, executors="aten")(x).sum()
    gc.collect()
    loss.backward()
    torch.testing.assert_close(model.bias.grad, torch.full((4,), 2.0))


def test_texts_go_with_their_functions():
    frame = own_frame(abs, "size")
    file = frame.__code__.co_filename
    assert frame(-2) == 2 and linecache.getlines(file)[-1] == "    return tessera_model(*args, **kwargs)\n"
    del frame
    gc.collect()
    assert file not in linecache.cache


def test_hooks_of_a_model_that_come_and_go_between_calls() -> None:
    model, x = torch.nn.Linear(2, 2), torch.ones(3, 2, requires_grad=True)
    fast, seen = tessera.jit(model, executors=["aten"]), []
    plain = fast(x)
    for much in (1.0, 5.0):
        handle = model.register_forward_hook(lambda m, args, out, much=much: out + much)
        torch.testing.assert_close(fast(x), plain + much)
        handle.remove()
        torch.testing.assert_close(fast(x), plain)
    model.register_forward_pre_hook(lambda m, args: (args[0] * 0,))
    torch.testing.assert_close(fast(x), model.bias.expand(3, 2))
    model.register_full_backward_hook(lambda m, gave, got: seen.append(got[0]))
    fast(x).sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], torch.ones(3, 2))
