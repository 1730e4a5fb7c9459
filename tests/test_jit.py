"""`tessera.jit` against eager PyTorch: results, gradients, side effects, identity."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import namedtuple

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import tessera
from tessera.util.errors import OptionError

PLAIN = ("sdpa", "aten")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield


def strict(fn, **options):
    """Compile so that an internal failure is an error, not an eager fallback; with PyTorch's own kernels, so that
    rounding is eager's and what is saved is what eager saves."""
    return tessera.jit(fn, strict=True, **{"executors": PLAIN, **options})


def twin(*tensors):
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]


def check(fn, *inputs, calls=1, **options):
    """Same outputs, gradients and writes as eager."""
    fast = strict(fn, **options)
    for _ in range(calls):
        mine, theirs = twin(*inputs), twin(*inputs)
        got, want = fast(*mine), fn(*theirs)
        assert_same(got, want)
        assert_same(mine, theirs)
        heads = [(g, w) for g, w in zip(leaves(got), leaves(want), strict=True) if w.requires_grad]
        for g, w in zip(leaves(got), leaves(want), strict=True):
            assert g.requires_grad == w.requires_grad
        if heads:
            sum((g * g.detach().cos()).sum() for g, _ in heads).backward()
            sum((w * w.detach().cos()).sum() for _, w in heads).backward()
            assert_same([t.grad for t in mine], [t.grad for t in theirs])
    return fast


def leaves(tree):
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def assert_same(got, want):
    got, want = torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        if isinstance(w, torch.Tensor):
            torch.testing.assert_close(g, w)
        else:
            assert g == w


# --- what can be compiled ---


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.scale = 2.0

    def forward(self, x):
        return self.bn(self.fc(x)).relu() * self.scale


def test_module_shares_state_with_the_original():
    model = Net()
    fast = tessera.jit(model)
    assert isinstance(fast, Net)
    assert list(fast.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(fast.parameters(), model.parameters(), strict=True))
    fast.eval()
    assert not model.training
    fast.scale = 3.0
    assert model.scale == 3.0


def test_module_trains_like_eager():
    model = Net()
    other = copy.deepcopy(model)
    fast = strict(model)
    for _ in range(3):
        x = torch.randn(5, 4)
        assert_same(fast(x), other(x))
        fast(x).pow(2).sum().backward()
        other(x).pow(2).sum().backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
        assert_same(list(model.buffers()), list(other.buffers()))
    assert model.bn.num_batches_tracked == 6


def test_containers_of_torch_nn_are_captured():
    fast = strict(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    fast(torch.randn(2, 3))
    assert len(tessera.explain(fast).graphs) == 1


def test_method_function_decorator():
    @tessera.jit
    def plain(x):
        return x.sin()

    @tessera.jit(executors=["aten"])
    def configured(x):
        return x.cos()

    class Holder:
        def method(self, x):
            return x.tan()

    x = torch.randn(3)
    assert_same(plain(x), x.sin())
    assert_same(configured(x), x.cos())
    assert_same(tessera.jit(Holder().method)(x), x.tan())


def test_backend_of_torch_compile():
    f = torch.compile(lambda x: F.gelu(x) * 2, backend=tessera.backend)
    x = torch.randn(3, requires_grad=True)
    assert_same(f(x), F.gelu(x) * 2)


def test_jit_of_jit_and_deepcopy():
    inner = tessera.jit(lambda x: x * 2)
    outer = tessera.jit(lambda x: inner(x) + 1)
    assert_same(outer(torch.ones(2)), torch.full((2,), 3.0))
    f = tessera.jit(lambda x: (x.sin() ** 2).sum())
    x = torch.randn(4)
    assert_same(tessera.jit(tessera.grad(f))(x), torch.sin(2 * x))
    assert_same(tessera.grad(lambda x: f(x) * 2)(x), 2 * torch.sin(2 * x))
    fast = copy.deepcopy(tessera.jit(Net()))
    fast(torch.randn(3, 4))


def test_unknown_options_are_refused():
    with pytest.raises(OptionError, match="executor"):
        tessera.jit(lambda x: x, executors=["nobody"])
    with pytest.raises(OptionError, match="frontend"):
        tessera.jit(lambda x: x, frontend="other")
    with pytest.raises(OptionError, match="recompute"):
        tessera.jit(lambda x: x, recompute="everything")
    with pytest.raises(OptionError, match="size"):
        tessera.jit(lambda x: x, memory_budget="many")
    with pytest.raises(OptionError, match="module, function"):
        tessera.jit(3)


# --- writes, views, aliases ---


def test_inplace_on_input_and_on_result():
    def f(x):
        y = x * 2
        y.add_(1)
        x.mul_(3)
        return y, x + 1

    check(f, torch.randn(3))


def test_write_through_views():
    def f(x):
        y = x.clone()
        y[0].add_(1)
        y.t()[1].mul_(2)
        y.view(-1)[2:5] = 0
        return y, y[:, 1:3].mul_(2)

    def pieces(x):
        y = x * 1
        a, b = y.chunk(2, 1)
        a += b
        c, d = y.split([1, 3])
        d[0] = 5
        y.unbind(1)[2].neg_()
        torch.diagonal(y).fill_(7)
        return y, a

    check(f, torch.randn(4, 4), calls=2)
    check(f, torch.randn(4, 4, requires_grad=True))
    check(pieces, torch.randn(4, 4))


def test_write_to_an_input_that_carries_gradients():
    def f(x, w):
        h = x * 1.0
        h[0] = w.sum()
        x.add_(w)
        return h

    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    x2, w2 = twin(x, w)
    got, want = strict(f)(x, w), f(x2, w2)
    assert_same(got, want)
    assert x.requires_grad and x2.requires_grad
    (got.sum() + x.pow(2).sum()).backward()
    (want.sum() + x2.pow(2).sum()).backward()
    assert_same(w.grad, w2.grad)


def test_outputs_that_alias_inputs():
    fast = strict(lambda x: (x, x.view(-1), x[1], x + 1))
    x = torch.randn(2, 3)
    same, flat, row, _ = fast(x)
    assert same is x
    flat[0] = 42.0
    row.zero_()
    assert x[0, 0] == 42.0 and not x[1].any()


def test_returned_input_was_written():
    def f(x):
        x.add_(1)
        return x, x[0]

    x = torch.zeros(2, 2)
    same, row = strict(f)(x)
    assert same is x and row.data_ptr() == x.data_ptr()
    assert_same(x, torch.ones(2, 2))


def test_view_of_input_keeps_its_autograd_history():
    base = torch.randn(3, requires_grad=True)
    x = base * 1.0
    row = strict(lambda x: (x[0:2], x.sin()))(x)[0]
    row.mul_(2)
    x.sum().backward()
    assert_same(base.grad, torch.tensor([2.0, 2.0, 1.0]))


def test_outputs_that_alias_each_other():
    def f(x):
        y = x * 2
        return y, y[0], y.t()

    check(f, torch.randn(3, 3))
    check(f, torch.randn(3, 3, requires_grad=True))
    y, row, _ = strict(f)(torch.ones(2, 2))
    row.zero_()
    assert not y[0].any()


def test_writing_one_of_several_views_of_a_result():
    def f(x):
        y = x * 2
        return y, y[0], y.t()

    def views_only(x):
        y = x * 2
        return y[0], y.view(-1)

    for fn, written, read in ((f, 1, 0), (f, 0, 2), (views_only, 0, 1)):
        x = torch.randn(3, 3, requires_grad=True)
        x2 = x.detach().clone().requires_grad_()
        got, want = strict(fn)(x), fn(x2)
        for outs in (got, want):
            outs[written].mul_(3)
        assert_same(got[read], want[read])
        got[read].sum().backward()
        want[read].sum().backward()
        assert_same(x.grad, x2.grad)


def test_saved_input_is_written():
    def f(x, w):
        y = x * w
        z = x[0] * w
        x.add_(1)
        return y, z

    x, w = torch.randn(3, 3), torch.randn(3, requires_grad=True)
    old = x.clone()
    y, z = strict(f)(x, w)
    assert_same(x, old + 1)
    (y.sum() + z.sum()).backward()  # eager refuses; the program's own meaning is the gradient at the old x
    assert_same(w.grad, old.sum(0) + old[0])


def test_output_changed_before_backward():
    x = torch.randn(3, requires_grad=True)
    out = strict(lambda x: x.exp())(x)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_scalars_tied_weights_and_constants():
    check(lambda x: x * 2.5 + torch.tensor([1.0, 2.0, 3.0]).mul_(2), torch.randn(3, requires_grad=True))
    fast = strict(lambda x, k: x * k)
    for k in (0.5, 0.7, 0.9, 3, 4, 5):
        assert_same(fast(torch.ones(2), k), torch.full((2,), float(k)))

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = nn.Linear(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    model = Tied()
    other = copy.deepcopy(model)
    x = torch.randn(2, 3)
    strict(model)(x).sum().backward()
    other(x).sum().backward()
    assert_same(model.a.weight.grad, other.a.weight.grad)


def test_complex_and_integer_programs():
    check(lambda x: torch.fft.fft(x * (1 + 2j)).abs(), torch.randn(4, dtype=torch.complex64, requires_grad=True))
    check(lambda x: (x // 3, x % 3, x << 2, x.float().mean()), torch.arange(-4, 8))
    check(lambda x: (x & 1).bool() | (x > 3), torch.arange(8))


def test_autograd_inside_the_compiled_function():
    def f(x):
        y = x.detach().requires_grad_()
        (g,) = torch.autograd.grad((y**3).sum(), y)
        return g * x

    x = torch.randn(3)
    fast = tessera.jit(f)
    assert_same(fast(x), f(x))
    assert len(tessera.explain(fast).graphs) == 3  # cut at two lines; what computes the gradient is not compiled again


def test_inputs_that_overlap():
    def f(a, b):
        a.add_(1)
        return b * 2

    base, other = torch.arange(4.0), torch.arange(4.0)
    assert_same(strict(f)(base[:3], base[1:]), f(other[:3], other[1:]))
    assert_same(base, other)


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 2, 64, 4), persistent=False)

    def forward(self, k, pos):
        self.keys[:, :, pos] = k
        return self.keys.sum(-1)


def test_cache_is_written_in_place():
    model = Cache()
    other = copy.deepcopy(model)
    fast = strict(model)
    place = model.keys.data_ptr()
    with torch.no_grad():
        for i in range(4):
            k, pos = torch.randn(1, 2, 1, 4), torch.tensor([i])
            assert_same(fast(k, pos), other(k, pos))
    assert_same(model.keys, other.keys)
    assert model.keys.data_ptr() == place
    program = str(tessera.stages(fast)["reinplace"].trace)
    assert "copy_(keys" not in program  # the whole cache is not copied


def test_write_under_no_grad_keeps_the_history():
    def f(x):
        y = x * 2
        with torch.no_grad():
            y.mul_(3)
        return y * 1

    check(f, torch.randn(3, requires_grad=True))


def test_detach_and_data():
    def f(x):
        y = x * 2
        y.detach().mul_(5)
        return y + x.detach()

    check(f, torch.randn(3, requires_grad=True))


# --- modes ---


def test_no_grad_region_and_inference_mode():
    def f(x):
        with torch.no_grad():
            m = x.max()
        return (x - m).exp()

    check(f, torch.randn(4, requires_grad=True))
    with torch.inference_mode():
        assert_same(strict(f)(torch.ones(3)), torch.ones(3))


def test_autocast_inside_and_outside():
    w = torch.randn(4, 4, requires_grad=True)

    def inside(x):
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ w).float()

    check(inside, torch.randn(4, 4, requires_grad=True))
    fast = strict(lambda x: x @ w)
    with torch.autocast("cpu", torch.bfloat16):
        assert fast(torch.randn(4, 4)).dtype == torch.bfloat16
    assert fast(torch.randn(4, 4)).dtype == torch.float32


def test_randomness_follows_the_seed():
    def f(x):
        return F.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(4) + x.new_empty(4).uniform_()

    fast = strict(f)
    x = torch.randn(4, requires_grad=True)
    torch.manual_seed(3)
    want = f(x)
    torch.manual_seed(3)
    got = fast(x)
    assert_same(got, want)
    grads = torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x)
    assert_same(*grads)


def test_train_eval_switch_and_attribute_change():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    fast = strict(model)
    x = torch.randn(2, 4)
    fast(x)
    model.eval()
    assert_same(fast(x), model(x))
    net = Net().eval()
    fast = strict(net)
    before = fast(x)
    net.scale = 4.0
    assert_same(fast(x), before * 2)


def test_module_hooks_run():
    model = Net().eval()
    seen = []
    model.fc.register_forward_hook(lambda m, args, out: out + 1)
    model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model.register_forward_hook(lambda m, args, out: seen.append(1))
    fast = tessera.jit(model)
    x = torch.randn(2, 4)
    got = fast(x)
    assert seen
    assert_same(got, model(x))


# --- structures, scalars, control flow ---

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Record:
    value: torch.Tensor
    tag: str


def test_structures_in_and_out():
    def f(d, n, flag=True):
        x = d["x"] * n
        return {"pair": Pair(x, x + 1), "list": [x.sum(), 3, None], "flag": flag}, Record(x, "t")

    out, record = strict(f)({"x": torch.ones(2)}, 3, flag=False)
    assert isinstance(out["pair"], Pair) and out["list"][1:] == [3, None] and out["flag"] is False
    assert record.tag == "t"
    assert_same(record.value, torch.full((2,), 3.0))


def test_data_dependent_programs_stay_right():
    def f(x):
        if x.sum() > 0:
            return x[x > 0] * x.abs().max().item()
        return torch.nonzero(x).float()

    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(5)
        assert_same(tessera.jit(f)(x), f(x))


def test_control_flow_operators_train():
    def f(x, flag):
        y = torch.cond(flag, lambda x: x.sin() * 2, lambda x: x.cos(), (x,))
        return y * x

    fast = strict(f)
    for flag in (True, False):
        x = torch.randn(3, requires_grad=True)
        x2 = x.detach().clone().requires_grad_()
        got, want = fast(x, torch.tensor(flag)), f(x2, torch.tensor(flag))
        assert_same(got, want)
        got.sum().backward()
        want.sum().backward()
        assert_same(x.grad, x2.grad)
    assert "tessera.cond(" in str(tessera.stages(fast)["captured"])


def test_graph_break_is_explained():
    def f(x):
        y = x + 1
        print("break here")
        return y * 2

    fast = tessera.jit(f)
    assert_same(fast(torch.ones(2)), torch.full((2,), 4.0))
    told = tessera.explain(fast)
    assert len(told.breaks) == 1 and "test_jit.py" in told.breaks[0].break_line
    assert "print" in str(told)


def test_recompile_is_explained():
    fast = tessera.jit(lambda x, flag: x + 1 if flag else x - 1)
    fast(torch.ones(2), True)
    fast(torch.ones(2), False)
    assert "flag" in tessera.explain(fast).recompiles[0].recompile_reason


# --- dynamic sizes ---


def test_a_size_that_changed_once_stops_recompiling():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    fast = strict(model)
    other = copy.deepcopy(model)
    for size in (3, 5, 7, 11, 2):
        x = torch.randn(size, 4)
        got, want = fast(x), other(x)
        assert_same(got, want)
        got.sum().backward()
        want.sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
    assert len(tessera.explain(fast).graphs) == 2


def test_marked_dimension():
    fast = strict(lambda x: (x.view(-1, 2).sum(0), x.shape[0] * 2))
    for size in (4, 6, 8):
        x = torch.randn(size, 2)
        torch._dynamo.mark_dynamic(x, 0)
        got, count = fast(x)
        assert_same(got, x.sum(0))
        assert count == size * 2
    assert len(tessera.explain(fast).graphs) == 1


# --- training ---


def test_gradients_for_exactly_the_inputs_eager_would_give():
    def f(a, b, c):
        return a * b.detach() + c.int().float()

    a, b, c = (torch.randn(3, requires_grad=True) for _ in range(3))
    out = strict(f)(a, b, c)
    out.sum().backward()
    assert a.grad is not None and b.grad is None and c.grad is None


def test_second_backward_through_a_graph():
    x = torch.randn(3, requires_grad=True)
    out = strict(lambda x: x.sin())(x)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    assert_same(x.grad, 2 * x.detach().cos())
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


def test_memory_budget_saves_less_and_computes_the_same():
    def f(x):
        for _ in range(6):
            x = (x @ x).tanh()
        return x

    x = torch.randn(32, 32, requires_grad=True)
    plain = check(f, x)
    torch._dynamo.reset()
    tight = check(f, x, memory_budget=2 * 32 * 32 * 4)
    saved = [tessera.explain(fast).graphs[0].saved_bytes for fast in (plain, tight)]
    assert saved[1] <= 2 * 32 * 32 * 4 < saved[0]


def test_checkpoint_recomputes():
    def block(x, w):
        return torch.sigmoid(x @ w).sin()

    def f(x, w):
        return torch.utils.checkpoint.checkpoint(block, x, w, use_reentrant=False) * 2

    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    fast = check(f, x, w)
    assert tessera.explain(fast).graphs[0].saved_bytes == 0


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 5 + x * 0


def test_autograd_function_keeps_its_backward():
    check(lambda x: Twice.apply(x).sin(), torch.randn(3, requires_grad=True))


@torch.library.custom_op("tessera_test::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cube.register_fake
def _(x):
    return torch.empty_like(x)


cube.register_autograd(
    lambda ctx, g: g * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("tessera_test::bump", mutates_args={"x"})
def bump(x: torch.Tensor, n: int) -> None:
    x.add_(n)


@torch.library.custom_op("tessera_test::head", mutates_args=())
def head(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return x[: int(n)].sum()


@head.register_fake
def _(x, n):
    return x.new_empty(())


def _head_backward(ctx, g):
    out = torch.zeros(ctx.size)
    out[: int(ctx.n.item())] = g
    return out, None


def _head_context(ctx, inputs, output):
    ctx.size, ctx.n = inputs[0].shape, inputs[1]


head.register_autograd(_head_backward, setup_context=_head_context)


def test_custom_operator_whose_backward_looks_at_data():
    check(lambda x: head(x.sin(), torch.tensor(2)) * 3, torch.randn(4, requires_grad=True))


@torch.library.custom_op("tessera_test::first_rows", mutates_args=())
def first_rows(x: torch.Tensor, w: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return x[: int(n)].sum(0, keepdim=True) @ w


@first_rows.register_fake
def _(x, w, n):
    return x.new_empty(1, w.shape[1])


def _first_rows_backward(ctx, g):
    x, w = ctx.saved_tensors
    of_x, of_w = torch.zeros_like(x), torch.zeros_like(w)
    torch.mm(g, w.T, out=of_x[: int(ctx.n)])  # refused where autograd would note it
    torch.mm(x[: int(ctx.n)].T, g, out=of_w)
    return of_x, of_w, None


def _first_rows_context(ctx, inputs, output):
    ctx.n = inputs[2]
    ctx.save_for_backward(*inputs[:2])


first_rows.register_autograd(_first_rows_backward, setup_context=_first_rows_context)


def test_a_training_step_with_a_backward_that_looks_at_data():
    """Its program runs where gradients are enabled and parameters require them, and yet nothing is noted."""
    model, n = torch.nn.Linear(3, 2, bias=False), torch.tensor(1)
    wanted, x = copy.deepcopy(model), torch.randn(4, 3)

    def loss_of(model, x):
        return first_rows(x.sin(), model.weight.T, n).square().sum()

    step = tessera.train_step(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), strict=True)
    step(x)
    loss_of(wanted, x).backward()
    torch.testing.assert_close(model.weight, wanted.weight - 0.1 * wanted.weight.grad)


def test_custom_operators():
    check(lambda x: cube(x.sin()) + 1, torch.randn(3, requires_grad=True))

    def f(x):
        y = x * 1
        bump(y, 3)
        bump(x, 2)
        return y

    check(f, torch.randn(3))


# --- failures ---


def test_internal_failure_falls_back_with_one_warning(monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("tessera.pipeline.parts.vjp", broken)
    x = torch.randn(3, requires_grad=True)
    fast = tessera.jit(lambda x: x.sin())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = fast(x)
        fast(x)
    assert len([w for w in caught if "planted" in str(w.message)]) == 1
    assert_same(out, x.sin())
    assert "planted" in tessera.explain(fast).eager[0].eager_reason
    torch._dynamo.reset()
    with pytest.raises(Exception, match="planted"):
        strict(lambda x: x.sin())(x)


# --- functional frontend ---


def test_functional_frontend():
    model = Net().eval()
    fast = strict(model, frontend="functional")
    x = torch.randn(3, 4, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    other = copy.deepcopy(model)
    fast(x).sum().backward()
    other(x2).sum().backward()
    assert_same(x.grad, x2.grad)
    assert_same([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
    f = strict(lambda a, b, k=2: {"out": a * b * k}, frontend="functional")
    assert_same(f(torch.ones(2), 3, k=4)["out"], torch.full((2,), 12.0))
    assert_same(f(torch.ones(2), 3)["out"], torch.full((2,), 6.0))


# --- exported programs ---


def test_exported_program():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x, scale=2.0):
            self.count.add_(1)
            return {"out": self.fc(x).relu() * scale, "n": self.count * 1}

    model = Model()
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(model, (torch.randn(3, 4),), dynamic_shapes=({0: batch},))
    fast = tessera.jit(program)
    for size in (2, 5):
        x = torch.randn(size, 4)
        out = fast(x)
        assert_same(out["out"], model.fc(x).relu() * 2.0)
    assert out["n"] == 2
    assert "linear" in str(tessera.stages(fast)["captured"])
    with pytest.raises(tessera.util.errors.InputError, match="structure"):
        fast(torch.randn(2, 4), torch.randn(2))


def test_cotangents_of_any_layout():
    fast = strict(lambda x: (x @ x.t()).view(-1).sin().view(4, 4).t())
    x = torch.randn(4, 4, requires_grad=True)
    want = torch.autograd.grad((x @ x.t()).sin().t().sum(), x)[0]
    assert_same(torch.autograd.grad(fast(x).sum(), x)[0], want)  # an expanded cotangent
    seed = torch.randn(4, 8)[:, ::2]
    assert_same(
        torch.autograd.grad(fast(x), x, seed)[0],
        torch.autograd.grad((x @ x.t()).sin().t(), x, seed)[0],
    )


def test_dropout_in_evaluation_is_its_argument():
    def f(x):
        y = F.dropout(x, 0.5, training=False)
        y.add_(1)
        return x * 2

    check(f, torch.randn(3))
    z = torch.ones(2, 2)
    strict(lambda x: torch.einsum("ij->ji", x).add_(1))(z)
    assert_same(z, torch.full((2, 2), 2.0))


def test_values_and_modules_have_the_users_names():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Sequential(nn.Linear(8, 2)))
    fast = tessera.jit(model, executors=["aten"], strict=True)
    fast(torch.randn(3, 4))
    captured = tessera.stages(fast)["captured"].trace
    assert [v.name for v in captured.inputs if v.name != "input"] == [
        "v_0_weight",
        "v_0_bias",
        "v_2_0_weight",
        "v_2_0_bias",
    ]
    assert [eqn.source.module for eqn in captured.equations] == ["0", "1", "2.0"]
