"""Calls and checkpoints: one equation with a sub-trace, printed once, and everything still computes what eager does."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import tessera
from tessera.frontends.functional.bodies import structure
from tessera.ir.call import CALL, CHECKPOINT, in_place
from tessera.ir.equation import recompute_region
from tessera.ir.interp import run
from tessera.ir.verify import verify
from tessera.util.config import override
from tessera.util.errors import EditError, VerifyError


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    with override(verify=True, strict=True, executors="sdpa,aten"):  # rounding as eager's
        yield


@torch.compiler.nested_compile_region
def block(x, w):
    return F.gelu(x @ w) + x


def repeated(x, w, v):
    for weight in (w, v, w):
        x = block(x, weight)
    return x.sin()


def checkpointed(x, w, v):
    h = checkpoint(lambda a: torch.sigmoid(a @ w).sin(), x, use_reentrant=False)
    return checkpoint(lambda a: torch.sigmoid(a @ v).cos(), h, use_reentrant=False) * 2


def tensors(count=3):
    return [torch.randn(4, 4, requires_grad=True) for _ in range(count)]


def captured(fast):
    return tessera.stages(fast)["captured"].trace


def ops(trace):
    return [e.op for e in trace.equations]


def train(f, args, kwargs=None):
    """Results, gradients and what the arguments hold afterwards, from copies of the arguments and one seed."""
    leaves = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
    torch.manual_seed(1)
    inputs = [a * 1 if a.requires_grad else a for a in leaves]  # so that they may be written
    outs = f(*inputs)
    listed = outs if isinstance(outs, tuple) else (outs,)
    wanted = [a for a in leaves if a.requires_grad]
    grads = torch.autograd.grad(sum(o.square().sum() for o in listed), wanted, allow_unused=True)
    return [*listed, *(g for g in grads if g is not None), *inputs]


def check(f, *args, like=None, **options):
    fast = tessera.jit(f, **options)
    assert_close(train(fast, args), train(like or f, args))
    return fast


# --- what is captured -----------------------------------------------------------------------------


def test_a_repeated_block_is_one_body():
    fast = check(repeated, *tensors())
    trace = captured(fast)
    calls = [e for e in trace.equations if e.op is CALL]
    assert len(calls) == 3 and len({id(e.args[0]) for e in calls}) == 1
    assert str(trace).count("def block(x, w):") == 1 and str(trace).count("tessera.call(block, ") == 3
    assert str(trace).index("def block") < str(trace).index("def repeated_0")
    assert not [e for e in tessera.stages(fast)["inline"].trace.equations if e.op is CALL]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x).relu()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_checkpointed_layers_share_a_body_and_keep_their_modules():
    model, x = Stack(), torch.randn(2, 4)
    fast = tessera.jit(model)
    fast(x).sum().backward()
    text = str(captured(fast))
    assert text.count("def Layer(x, fc_weight, fc_bias):") == 1
    assert re.search(r"tessera\.checkpoint\(Layer, checkpoint_1, \w*layers_2_fc_weight, \w*layers_2_fc_bias\)", text)
    modules = [e.source.module for e in tessera.stages(fast)["inline"].trace.equations]
    wanted = [f"layers.{i}{part}" for i in range(3) for part in (".fc", "")]
    assert all(map(str.endswith, modules, wanted)) and len(modules) == len(wanted)  # older Dynamo puts a scope before
    assert str(tessera.trace(model, x)).count("def Layer(") == 1


def test_checkpoint_recomputes_and_saves_nothing_more():
    args = tensors()
    fast = check(checkpointed, *args)
    assert [op for op in ops(captured(fast)) if op is CHECKPOINT] == [CHECKPOINT] * 2
    plain = tessera.jit(lambda x, w, v: torch.sigmoid(torch.sigmoid(x @ w).sin() @ v).cos() * 2)
    plain(*args)
    saved = [tessera.explain(f).graphs[0].saved_bytes for f in (fast, plain)]
    assert saved[0] == 4 * 16 and saved[1] > saved[0]  # what stands between the two checkpoints


def test_what_a_checkpoint_gives_back_may_be_written():
    """Backward runs the checkpoint again, and does not read the result."""
    fast = tessera.jit(lambda x: checkpoint(lambda x: torch.softmax(x * 2, -1), x, use_reentrant=False))
    x = torch.linspace(-1, 1, 4).requires_grad_()
    want = torch.autograd.grad(torch.softmax(x * 2, -1)[0], x)
    out = fast(x)
    with torch.no_grad():
        out.add_(1)
    assert_close(torch.autograd.grad(out[0], x), want)


def test_a_stack_of_checkpoints_keeps_what_stands_between():
    def f(x, *weights):
        for w in weights:
            x = tessera.checkpoint(lambda x, w: torch.tanh(x @ w).sin().exp())(x, w)
        return x

    fast = check(f, *tensors(6))
    graph = tessera.explain(fast).graphs[0]
    assert graph.saved_bytes == 4 * 4 * 16 and len(graph.saved) == 4  # the operand of each but the first


def test_dropout_inside_a_checkpoint_draws_once():
    def f(x, w):
        return checkpoint(lambda x: F.dropout(torch.tanh(x @ w), 0.5).sin(), x, use_reentrant=False)

    fast = check(f, *tensors(2))
    backward = tessera.stages(fast)["backward"].trace
    assert not [e for e in backward.equations if "dropout" in str(e.op) or "bernoulli" in str(e.op)]


def test_nested():
    def outer(x, w):
        return checkpoint(lambda a: block(block(a, w), w).sin(), x, use_reentrant=False)

    def f(x, w):
        return checkpoint(outer, x, w, use_reentrant=False) + outer(x, w)

    fast = check(f, *tensors(2))
    text = str(captured(fast))
    assert text.index("def block") < text.index("def outer") < text.index("def f_0")
    assert text.count("def block") == 1
    assert all(recompute_region(e.tags) for e in tessera.stages(fast)["inline"].trace.equations[:-1])


# --- what bodies may do ---------------------------------------------------------------------------


def test_a_body_that_writes_and_gives_views():
    def body(x, y, state):
        state.add_(x.detach())
        y.mul_(2)
        with torch.no_grad():
            y.clamp_(max=3)
        return x.view(-1), y, state.sum(), x * y

    def f(call, x, y, state):
        a, b, total, c = call(x, y, state)
        state.add_(1)
        return a.sin(), b * y, total, c, state

    def checkpointed(*xs):
        return f(lambda *ys: checkpoint(body, *ys, use_reentrant=False), *xs)

    x, y = tensors(2)
    # eager's own checkpoint refuses to run again what was overwritten
    fast = check(checkpointed, x, y, torch.zeros(4, 4), like=lambda *xs: f(body, *xs))
    assert CHECKPOINT in ops(captured(fast))


def test_operands_that_share_memory():
    def body(x, row):
        x.mul_(3)
        return row + 1

    def f(x):
        return checkpoint(body, x, x[0], use_reentrant=False) * 2

    check(f, torch.randn(4, 4, requires_grad=True), like=lambda x: body(x, x[0]) * 2)


def test_batch_norm_in_a_checkpoint_updates_its_statistics():
    norm, x = nn.BatchNorm1d(4), torch.randn(8, 4)
    fast = tessera.jit(lambda x: checkpoint(norm, x, use_reentrant=False))
    want = nn.BatchNorm1d(4)
    assert_close(fast(x), want(x))
    assert_close(norm.running_mean, want.running_mean)
    assert_close(norm.running_var, want.running_var)


def test_sizes_known_only_at_run_time():
    def f(x):
        picked = checkpoint(lambda x: x[x > 0].sin(), x, use_reentrant=False)
        return picked.sum() + x.sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(f, torch.randn(6, requires_grad=True))


def test_dynamic_sizes():
    fast = check(repeated, *tensors(), dynamic=True)
    x = torch.randn(7, 4, requires_grad=True)
    w, v = (torch.randn(4, 4) for _ in range(2))
    assert_close(fast(x, w, v), repeated(x, w, v))

    def halves(x):
        return checkpoint(lambda a: a.view(2, -1).sin().sum(0), x, use_reentrant=False)

    check(halves, torch.randn(6, requires_grad=True), dynamic=True)


def test_sizes_among_the_operands_of_a_body():
    """They are found dynamic on the second call."""

    def f(x):
        a, b = x.chunk(2, 1)
        h = checkpoint(lambda z: torch.softmax(z * b.shape[0], 1), b, use_reentrant=False)
        return x.sin() * b.shape[0], h.detach().add_(-1), a

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing runs eagerly
        fast = tessera.jit(f)
        for rows in (3, 5, 6):
            x = torch.randn(rows, 4, requires_grad=True)
            assert_close(fast(x), f(x))


def test_autocast_and_no_grad_reach_into_a_body():
    def f(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = checkpoint(lambda x: (x @ w).sin(), x, use_reentrant=False)
        with torch.no_grad():
            b = checkpoint(lambda x: (x @ w).cos(), x, use_reentrant=False)
        return a.float() * b + x

    check(f, *tensors(2))


def test_tensors_written_in_the_program():
    check(lambda x: checkpoint(lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]), x, use_reentrant=False), *tensors(1))


# --- print, run, edit -----------------------------------------------------------------------------


@pytest.mark.parametrize("f", [repeated, checkpointed])
def test_a_printed_program_runs(f, tmp_path):
    args = tensors()
    trace = tessera.trace(f, *args)
    verify(trace)
    assert_close(run(trace, *args), [f(*args)])
    path = tmp_path / "f.py"
    trace.save(str(path))
    scope: dict = {}
    exec(path.read_text(), scope)
    assert_close(scope[f.__name__](*args), (f(*args),))
    assert_close(train(lambda *xs: scope[f.__name__](*xs)[0], args), train(f, args))


@pytest.mark.parametrize("stage", ["captured", "inline", "canonicalise"])
@pytest.mark.parametrize("f", [repeated, checkpointed])
def test_saved_stages_come_back_the_same(f, stage, tmp_path):
    args = tensors()
    fast = check(f, *args)
    saved = tessera.explain(fast).graphs[0].saved_bytes
    before = tessera.stages(fast)[stage].trace
    path = str(tmp_path / "stage.py")
    tessera.stages(fast)[stage].save(path)
    tessera.edit(fast, path)
    assert_close(train(fast, args), train(f, args))
    after = tessera.stages(fast)[stage].trace
    assert [(e.op, e.tags) for e in after.equations] == [(e.op, e.tags) for e in before.equations]
    assert structure(after)[1:] == structure(before)[1:] or stage == "captured"  # bodies are compared by identity
    assert tessera.explain(fast).graphs[0].saved_bytes == saved


def test_an_edited_body_is_edited_for_every_call(tmp_path):
    args = tensors()
    fast = tessera.jit(repeated)
    fast(*args)
    path = tmp_path / "stage.py"
    tessera.stages(fast)["captured"].save(str(path))
    path.write_text(path.read_text().replace("aten.gelu(", "aten.relu("))
    tessera.edit(fast, str(path))

    def want(x, w, v):
        for weight in (w, v, w):
            x = torch.relu(x @ weight) + x
        return x.sin()

    assert_close(train(fast, args), train(want, args))


def control(x, w):
    picked = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
    turned, _ = tessera.while_loop(lambda x, n: n < 3, lambda x, n: (x * 0.5, n + 1), (x.detach(), torch.tensor(0)))
    carry, rows = tessera.scan(lambda c, r: (c + r, c * r), w[0], w)
    return picked + turned, carry, rows


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, ct):
        return ct * 30 * ctx.saved_tensors[0]


@tessera.custom_vjp
def clipped(x):
    return x * 2


clipped.defvjp(lambda x: (x * 2, x), lambda x, ct: (ct.clamp(-0.1, 0.1) * x,))


@pytest.mark.parametrize("f", [control, lambda x, w: Cube.apply(x) @ w, lambda x, w: clipped(x) @ w])
def test_other_sub_traces_come_back_too(f, tmp_path):
    args = tensors(2)
    fast = check(f, *args, frontend="functional")
    path = str(tmp_path / "stage.py")
    tessera.stages(fast)["captured"].save(path)
    tessera.edit(fast, path)
    assert_close(train(fast, args), train(f, args))


def test_a_body_that_does_not_fit_is_refused(tmp_path):
    fast = tessera.jit(repeated)
    fast(*tensors())
    path = tmp_path / "stage.py"
    tessera.stages(fast)["captured"].save(str(path))
    path.write_text(path.read_text().replace("def block(x, w):", "def block(x):"))
    with pytest.raises(EditError, match="block: expected a function of 2 arguments"):
        tessera.edit(fast, str(path))


def test_operands_of_other_types_are_refused():
    trace = tessera.trace(repeated, *(a.detach() for a in tensors()))
    other = tessera.trace(repeated, torch.randn(2, 4), torch.randn(4, 4), torch.randn(4, 4))
    wrong = trace.equations[0].with_(args=(other.equations[0].args[0], *trace.equations[0].args[1:]))
    with pytest.raises(VerifyError, match="among the operands of block"):
        verify(trace.with_(equations=(wrong, *trace.equations[1:])))


# --- transforms -----------------------------------------------------------------------------------


def plain_repeated(x, w, v):
    for weight in (w, v, w):
        x = F.gelu(x @ weight) + x
    return x.sin()


def plain_checkpointed(x, w, v):
    return torch.sigmoid(torch.sigmoid(x @ w).sin() @ v).cos() * 2


PAIRS = [(repeated, plain_repeated), (checkpointed, plain_checkpointed)]


@pytest.mark.parametrize("f, plain", PAIRS)
def test_transforms(f, plain):
    x, w, v = (a.detach() for a in tensors())
    loss, want = (lambda *a: f(*a).sum()), (lambda *a: plain(*a).sum())
    assert_close(tessera.grad(loss)(x, w, v), torch.func.grad(want)(x, w, v))
    assert_close(tessera.jvp(f, (x, w, v), (w, v, x)), torch.func.jvp(plain, (x, w, v), (w, v, x)))
    rows = torch.randn(3, 4, 4)
    assert_close(tessera.vmap(f, (0, None, None))(rows, w, v), torch.func.vmap(plain, (0, None, None))(rows, w, v))
    per_example = tessera.vmap(tessera.grad(loss, (0, 1)), (0, None, None))(rows, w, v)
    assert_close(per_example, torch.func.vmap(torch.func.grad(want, (0, 1)), (0, None, None))(rows, w, v))
    assert_close(
        tessera.grad(lambda x: tessera.grad(loss)(x, w, v).square().sum())(x),
        torch.func.grad(lambda x: torch.func.grad(want)(x, w, v).square().sum())(x),
    )
    assert_close(tessera.jit(tessera.grad(loss), frontend="functional")(x, w, v), torch.func.grad(want)(x, w, v))


def test_randomness_in_a_body_under_vmap():
    def f(x):
        return tessera.checkpoint(lambda x: F.dropout(x, 0.5))(x)

    x = torch.ones(64, 8)
    assert len(tessera.vmap(f, randomness="different")(x).unique(dim=0)) > 1
    assert len(tessera.vmap(f, randomness="same")(x).unique(dim=0)) == 1


def test_functions_that_close_over_the_program():
    def f(x, w):
        h = x @ w

        @tessera.checkpoint
        def body(y):
            return (y * h).sin() * w

        return body(x).sum()

    def plain(x, w):
        return ((x * (x @ w)).sin() * w).sum()

    x, w = (a.detach() for a in tensors(2))
    assert_close(tessera.grad(f, (0, 1))(x, w), torch.func.grad(plain, (0, 1))(x, w))
    fast = tessera.jit(f, frontend="functional")
    check(f, *tensors(2), frontend="functional")
    fast(x, w)
    assert CHECKPOINT in ops(captured(fast))


def test_in_place_keeps_the_values_a_caller_may_hold():
    trace = tessera.trace(checkpointed, *(a.detach() for a in tensors()))
    flat = in_place(trace)
    assert flat.outputs == trace.outputs and flat.inputs == trace.inputs
    assert not [e for e in flat.equations if e.op is CHECKPOINT]
    assert in_place(flat) is flat


@pytest.mark.parametrize("transform", ["jvp", "jvp twice", "vmap"])
def test_a_checkpoint_inside_a_transform_inside_a_compiled_function(transform):
    def program(x, y):
        return checkpoint(lambda z: (z * y).exp() * y[..., :1], x * 1, use_reentrant=False)

    def whole(x, y):
        tangents = (x.cos(), y.cos())
        match transform:
            case "jvp":
                return torch.func.jvp(program, (x, y), tangents)
            case "jvp twice":
                once = lambda *a: torch.func.jvp(program, a, tangents)[1]  # noqa: E731
                return torch.func.jvp(once, (x, y), tangents)
            case _:
                return torch.func.vmap(program)(x, y)

    x, y = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    fast = tessera.jit(whole)
    assert_close(fast(x, y), whole(x, y))
    assert not tessera.explain(fast).breaks


def test_a_body_that_hands_on_what_it_closes_over():
    """Nothing in it reads the tensor: it is known by being a result alone."""

    def handed(x):
        view = x[0]

        def body(z):
            unread = z + 1  # noqa: F841
            return F.dropout(view, 0.3, training=False), view.t(), view

        return checkpoint(body, x.detach() * 2, use_reentrant=False)

    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        for got, want in zip(tessera.jit(handed, frontend="functional")(x), handed(x), strict=True):
            assert_close(got, want)
    for got, want in zip(tessera.jit(handed, frontend="functional")(x), handed(x), strict=True):
        assert_close(got, want)
        assert got.requires_grad == want.requires_grad
        assert_close(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x))


@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
@pytest.mark.parametrize("used", [False, True])
def test_a_checkpoint_gives_a_history_where_its_result_has_one(frontend: str, used: bool) -> None:
    weight = torch.ones(2, requires_grad=True)

    def body(x: torch.Tensor) -> torch.Tensor:
        scaled = x * weight
        return scaled if used else x * 1

    def f(x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(body, x, use_reentrant=False)
        return y * 2 if y.requires_grad else y * 3

    x = torch.ones(2)
    torch.testing.assert_close(tessera.jit(f, frontend=frontend)(x), f(x))
