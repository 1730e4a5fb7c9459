"""Hooks on gradients, set in the forward or on modules, before and after compiling, against eager PyTorch."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tessera
from tessera.torch_internals.higher_order import register_hook


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self, how: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.how = nn.Linear(4, 4, dtype=torch.float64), how
        self.log: list = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, x)


def changed(m, x):  # noqa: ANN001, ANN201
    h = m.linear(x)
    h.register_hook(lambda g: g * 10)
    return h.tanh()


def read_before(m, x):  # noqa: ANN001, ANN201
    """A hook sees the whole gradient, that of earlier readers too."""
    h = m.linear(x)
    a = h * 2
    h.register_hook(lambda g: g * 10 + 1)
    return a.sin() + h * 3


def looked_at(m, x):  # noqa: ANN001, ANN201
    h = m.linear(x)
    h.register_hook(lambda g: m.log.append(g.sum().item()))
    return h.tanh()


def read_before_and_looked_at(m, x):  # noqa: ANN001, ANN201
    h = m.linear(x)
    a = h * 2
    h.register_hook(lambda g: m.log.append(g.sum().item()))
    return a.sin() + h


def two(m, x):  # noqa: ANN001, ANN201
    h = m.linear(x)
    h.register_hook(lambda g: g * 2)
    h.register_hook(lambda g: g + 1)
    return h.tanh()


def removed(m, x):  # noqa: ANN001, ANN201
    h = m.linear(x)
    h.register_hook(lambda g: g * 2).remove()
    return h.tanh()


def on_argument(m, x):  # noqa: ANN001, ANN201
    x.register_hook(lambda g: g * 2)
    return m.linear(x).tanh()


def retained(m, x):  # noqa: ANN001, ANN201
    h = m.linear(x)
    h.retain_grad()
    m.log.append(h)
    return h.tanh()


def closing_over(m, x):  # noqa: ANN001, ANN201
    h, k = m.linear(x), x * 3
    h.register_hook(lambda g: g * k)
    return h.tanh() * k


def on_view(m, x):  # noqa: ANN001, ANN201
    h = m.linear(x).view(-1)
    h.register_hook(lambda g: g * 2)
    return h.tanh()


def then_written(m, x):  # noqa: ANN001, ANN201
    h = m.linear(x)
    h.register_hook(lambda g: g * 2)
    return h.mul_(3).tanh()


def on_result(m, x):  # noqa: ANN001, ANN201
    h = m.linear(x)
    h.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return h


IN_FORWARD = (
    changed, read_before, looked_at, read_before_and_looked_at, two, removed, on_argument, retained, closing_over,
    on_view, then_written, on_result,
)  # fmt: skip


def gradients(how: Callable, compiled: Callable) -> list:
    model, x = Model(how), torch.arange(8, dtype=torch.float64).view(2, 4).requires_grad_()
    fast = compiled(model)
    for _ in range(2):
        fast(x).sum().backward()
    logged = [y.grad if isinstance(y, torch.Tensor) else y for y in model.log]
    return [x.grad, *(p.grad for p in model.parameters()), *logged]


def assert_same(got: list, want: list) -> None:
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("how", IN_FORWARD, ids=lambda f: f.__name__)
def test_hooks_in_the_forward(how: Callable) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Tessera could not")  # one that cannot be compiled is expected, no failure
        assert_same(gradients(how, tessera.jit), gradients(how, lambda m: m))


@pytest.mark.skipif(register_hook is None, reason="Dynamo ends its graph at a hook")
@pytest.mark.parametrize("how", (changed, read_before, closing_over, then_written), ids=lambda f: f.__name__)
def test_hooks_that_are_compiled(how: Callable) -> None:
    made: list = []
    gradients(how, lambda m: made.append(tessera.jit(m, strict=True, fullgraph=True)) or made[-1])
    (graph,) = tessera.explain(made[0]).graphs
    assert not graph.eager_reason and not graph.break_reason


def test_why_a_graph_with_a_hook_runs_eagerly() -> None:
    fast = tessera.jit(Model(read_before_and_looked_at))
    fast(torch.ones(2, 4, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert any("between results" in g.eager_reason for g in tessera.explain(fast).graphs)


def test_a_hook_that_raises() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        def refuse(g: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such gradient")

        h = x * 2
        h.register_hook(refuse)
        return h.sin()

    out = tessera.jit(f)(torch.ones(3, requires_grad=True))
    with pytest.raises(ValueError, match="no such gradient"):
        out.sum().backward()


# --- hooks that are set on modules and parameters ---

SET: dict[str, Callable] = {
    "parameter": lambda m, log: m[0].weight.register_hook(lambda g: log.append(g.sum().item()) or g * 2),
    "accumulated": lambda m, log: m[0].bias.register_post_accumulate_grad_hook(lambda p: log.append(p.grad[0].item())),
    "backward": lambda m, log: m[0].register_full_backward_hook(lambda _, gi, go: log.append(go[0].sum().item())),
    "backward, changing": lambda m, log: m[2].register_full_backward_hook(lambda _, gi, go: (gi[0] * 2,)),
    "before backward": lambda m, log: m[0].register_full_backward_pre_hook(lambda _, go: (go[0] * 3,)),
    "forward": lambda m, log: m[0].register_forward_hook(lambda _, args, y: y * 2),
    "before forward": lambda m, log: m[0].register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
    "of the whole": lambda m, log: m.register_full_backward_hook(lambda _, gi, go: (gi[0] * 2,)),
}  # fmt: skip


@pytest.mark.parametrize("late", [False, True], ids=["before compiling", "after compiling"])
@pytest.mark.parametrize("name", SET)
def test_hooks_of_modules_come_and_go(name: str, late: bool) -> None:
    def run(compiled: Callable) -> list:
        torch.manual_seed(0)
        model, log = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), []
        handle = None if late else SET[name](model, log)
        fast, x = compiled(model), torch.arange(8.0).view(2, 4).requires_grad_()
        fast(x).sum().backward()
        if late:
            handle = SET[name](model, log)
            fast(x).sum().backward()
        handle.remove()
        fast(x).sum().backward()
        return [x.grad, *(p.grad for p in model.parameters()), *log]

    assert_same(run(lambda m: tessera.jit(m, executors=("sdpa", "aten"))), run(lambda m: m))


@torch._dynamo.config.patch(compiled_autograd=True)
def test_hooks_of_modules_with_compiled_autograd() -> None:
    def run(compiled: Callable) -> list:
        torch.manual_seed(0)
        model, log = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), []
        model[0].register_full_backward_hook(lambda _, gi, go: log.append(go[0].sum().item()))
        x = torch.ones(2, 4, requires_grad=True)
        compiled(model)(x).sum().backward()
        return [x.grad, *(p.grad for p in model.parameters()), *log]

    assert_same(run(tessera.jit), run(lambda m: m))


def test_explain_does_not_send_users_to_compiled_autograd() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_full_backward_hook(lambda *_: None)
    fast = tessera.jit(model)
    fast(torch.ones(2, 4, requires_grad=True))
    assert "config.compiled_autograd" not in str(tessera.explain(fast))


def _hooked(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.sin()
    y.register_hook(lambda g: 2 * g)
    return (y,)


def _hooked_and_read(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    (y,) = _hooked(x)
    return y, (y * 3).sum(), y.exp()


def _seen_through_a_view(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    (y,) = _hooked(x)
    return y[0], (y * 3).sum()


@pytest.mark.parametrize("f", [_hooked, _hooked_and_read, _seen_through_a_view])
def test_whoever_asks_outside_gets_what_the_hook_inside_made(f: Callable) -> None:
    told = []
    for g in (f, tessera.jit(f)):
        x = torch.linspace(0, 1, 4, dtype=torch.float64).requires_grad_()
        results, seen = g(x), []
        for y in results:
            y.retain_grad()
        results[0].register_hook(lambda grad, seen=seen: seen.append(grad.tolist()))
        sum(y.sum() for y in results).backward()  # type: ignore[union-attr]
        told.append((seen, [t.grad.tolist() for t in (x, *results)]))
    assert told[1] == told[0]


def test_a_hook_where_there_is_no_gradient_is_refused() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda g: g * 2)
        return y

    for compiled in (tessera.jit(f), torch.compile(f, backend="tessera")):
        x = torch.ones(3, requires_grad=True)
        with torch.no_grad(), pytest.raises(RuntimeError, match="doesn't require gradient"):
            compiled(x)
        compiled(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((3,), 4.0))


NO_SOURCE = """
def program(x):
    h = x * x
    y = h.exp()
    h.register_hook(seen)
    return y
"""


@pytest.mark.parametrize("known", [True, False], ids=["source", "no source"])
def test_a_hook_that_ends_a_graph_sees_what_its_results_bring(known: bool) -> None:
    """Also where nobody can read the line that sets it."""
    log: list = []

    def seen(g: torch.Tensor) -> torch.Tensor:
        log.append(g.clone())
        return g * 2

    name = "<known program>" if known else "<unknown program>"
    if known:
        linecache.cache[name] = (len(NO_SOURCE), None, NO_SOURCE.splitlines(keepends=True), name)
    scope: dict = {"seen": seen}
    exec(compile(NO_SOURCE, name, "exec"), scope)
    results = []
    for f in (scope["program"], tessera.jit(scope["program"])):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        f(x).sum().backward()
        results.append([x.grad, log.pop()])
    torch.testing.assert_close(results[1], results[0])


def test_a_hook_on_a_result_that_no_gradient_reaches_is_not_called() -> None:
    log: list = []

    def f(x: torch.Tensor) -> torch.Tensor:
        y, dead = x.sin(), x.cos()
        dead.register_hook(log.append)
        return y * 2

    x = torch.ones(3, requires_grad=True)
    tessera.jit(f)(x).sum().backward()
    assert not log
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


def test_a_hook_that_is_set_under_no_grad() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        with torch.no_grad():
            y.register_hook(lambda g: g * 3)
        return y.exp()

    results = []
    for g in (f, tessera.jit(f)):
        x = torch.ones(3, requires_grad=True)
        g(x).sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(results[1], results[0])


def _whole(x: torch.Tensor) -> torch.Tensor:
    x.mul_(0.25)
    return torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]


def _through_a_view(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[1:] = 3.0
    return torch.autograd.grad(x.square().sum(), x, create_graph=True)[0] * 2


def _part(x: torch.Tensor) -> torch.Tensor:
    y = x[1:]
    y.exp_()
    return torch.autograd.grad(x.square().sum(), x, create_graph=True)[0] + x


@pytest.mark.parametrize("f", [_whole, _through_a_view, _part])
def test_a_gradient_by_an_argument_that_was_written_before(f: Callable) -> None:
    results = []
    for g in (f, tessera.jit(f)):
        x = torch.tensor([1.0, 2.0, -1.0], requires_grad=True)
        out = g(x * 1)
        out.sum().backward()
        results.append([out, x.grad])
    torch.testing.assert_close(results[1], results[0])


def test_a_gradient_by_what_dropout_gives_back_under_no_grad() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        with torch.no_grad():
            same = nn.functional.dropout(h, 0.3, training=False)
        return torch.autograd.grad(same.square().sum(), same, create_graph=True)[0] * h

    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(tessera.jit(program)(x), program(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x)).tanh()


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("place", ["0.linear", "1.norm", "2.linear", "1"])
def test_a_hook_in_one_of_several_equal_blocks(place: str, pre: bool, calls: int) -> None:
    """A graph ends at such a hook, and blocks are compiled one by one: what fits one does not fit the other."""

    def observed(compiled: Callable) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(3))).double()
        f, x = compiled(model), torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
        for _ in range(calls):
            f(x)
        module = model.get_submodule(place)
        if pre:
            module.register_full_backward_pre_hook(lambda m, gradients: tuple(3 * g for g in gradients))
        else:
            module.register_full_backward_hook(lambda m, gradients, _: tuple(2 * g for g in gradients))
        return list(torch.autograd.grad(f(x).square().sum(), [x, *model.parameters()]))

    torch.testing.assert_close(observed(tessera.jit), observed(lambda m: m))


@pytest.mark.parametrize("made", [lambda x: x[:-1], lambda x: x * 1, lambda x: x[:-1].reshape(-1)])
def test_a_hook_that_is_set_after_a_graph_has_ended(made: Callable) -> None:
    """What was computed from the tensor before the break leads through it, too."""

    def hooked(x: torch.Tensor) -> torch.Tensor:
        h = made(x)
        y = 1 - h
        x[0].item()
        h.register_hook(lambda g: g * 10)
        return y

    def asked(x: torch.Tensor) -> torch.Tensor:
        h = made(x)
        y = h.sin().sum()
        x[0].item()
        return torch.autograd.grad(y, h, retain_graph=True)[0] + y

    for f in (hooked, asked):
        seen = []
        for g in (f, tessera.jit(f)):
            x = torch.arange(3.0, requires_grad=True)
            out = g(x)
            out.sum().backward()
            seen.append((out, x.grad))
        torch.testing.assert_close(seen[1], seen[0])
