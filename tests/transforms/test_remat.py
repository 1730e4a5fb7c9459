"""Splitting a joint trace: the two halves compute what the whole computes, and save no more than asked."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import tessera
from tessera.frontends.functional.trace import trace_function
from tessera.ir.printer import compile_trace
from tessera.ir.schema import has_effect
from tessera.ir.verify import verify
from tessera.transforms.mincut import min_cut
from tessera.transforms.remat import remat
from tessera.transforms.vjp import vjp
from tessera.util.errors import OptionError


def mlp(x, w1, w2):
    h = F.layer_norm(x @ w1, (16,)).sigmoid()
    return F.softmax(h @ w2, -1).log()


def split_of(fn, *args, **options):
    traced = trace_function(fn, args)
    joint = vjp(traced.trace, list(traced.trace.inputs))
    return joint, remat(joint, **options)


def run(split, args, cts):
    out = compile_trace(split.forward)(*args)
    count = len(out) - len(split.saved)
    return out[:count], compile_trace(split.backward)(*out[count:], *cts)


ARGS = (torch.randn(8, 4), torch.randn(4, 16), torch.randn(16, 5))


@pytest.mark.parametrize("policy", ["none", "views", "cheap", "auto"])
def test_halves_compute_the_gradients(policy):
    args = [a.clone().requires_grad_() for a in ARGS]
    want = mlp(*args)
    ct = torch.randn_like(want)
    grads = torch.autograd.grad(want, args, ct)
    _, split = split_of(mlp, *ARGS, policy=policy)
    verify(split.forward)
    verify(split.backward)
    (got,), mine = run(split, ARGS, [ct])
    torch.testing.assert_close(got, want)
    for a, b in zip(mine, grads, strict=True):
        torch.testing.assert_close(a, b)


def test_what_is_written_anyway_is_saved_rather_than_what_a_kernel_would_write_too():
    _, split = split_of(lambda x, w, b: F.gelu(x @ w + b), *ARGS[:2], torch.randn(16), policy="cheap")
    product = next(e for e in split.forward.equations if e.op._opname in ("matmul", "mm")).out
    assert product in split.saved and not any(v.name.startswith("add") for v in split.saved)


def test_cheap_recomputation_saves_less():
    def chain(x, w):
        return torch.sigmoid((x @ w).sin()).exp().tanh() * 2

    _, views = split_of(chain, *ARGS[:2], policy="views")
    _, cheap = split_of(chain, *ARGS[:2], policy="cheap")
    assert cheap.saved_bytes < views.saved_bytes


def test_an_output_that_backward_reads_is_not_made_again_from_more_inputs():
    def residual(x, rest):
        h = x + rest
        return h, h.sin()

    _, split = split_of(residual, torch.randn(8, 4), torch.randn(8, 4), policy="cheap")
    assert [v.name for v in split.saved] == [split.forward.outputs[0].name] and split.saved_bytes == 0


def test_a_mask_is_saved_rather_than_an_input_that_tells_nothing_else():
    """As in eager, which keeps the condition of a where: the input may be written then."""
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    _, split = split_of(lambda x, y: torch.where(x + 1 > 0, y, -y), x, y, policy="cheap")
    assert [v.dtype for v in split.saved] == [torch.bool]
    _, split = split_of(lambda x, y: torch.where(x + 1 > 0, y, -y) * x, x, y, policy="cheap")
    assert torch.bool not in [v.dtype for v in split.saved]  # it is saved, and tells the mask too
    _, split = split_of(lambda x, y: torch.where(x > 0, y, -y), torch.randn(1, 4), y, policy="cheap")
    assert [v.shape for v in split.saved] == [(1, 4)]


def test_budget_is_kept_where_it_can_be():
    sizes = []
    for budget in (0, 600, 10**6):
        _, split = split_of(mlp, *ARGS, budget=budget)
        sizes.append(split.saved_bytes)
        assert split.saved_bytes <= budget
    assert sizes[0] == 0


def test_of_equal_layers_as_many_run_again_as_the_budget_asks():
    """Not all or none; and those that are saved stand apart, so that no long chain runs again at once."""

    def deep(x, *weights):
        for w in weights:
            x = (x @ w).sin()
        return x

    args = (torch.randn(32, 16), *(torch.randn(16, 16) for _ in range(12)))
    one = 32 * 16 * 4
    kept = {}
    for layers in (12, 6, 3):
        _, split = split_of(deep, *args, policy="cheap", budget=layers * one)
        kept[layers] = split.saved_bytes // one
        assert 0 < layers - 1 <= kept[layers] <= layers
        names = [e.op._opname for e in split.backward.equations]
        first = names.index("mm", 1)  # a gradient's
        assert names[:first].count("matmul") <= 12 // layers + 1
        compare = run(split, args, [torch.ones(32, 16)])[1]
        whole = run(split_of(deep, *args)[1], args, [torch.ones(32, 16)])[1]
        for a, b in zip(compare, whole, strict=True):
            torch.testing.assert_close(a, b)


def test_random_equations_never_run_twice():
    def f(x):
        return F.dropout(x.sin(), 0.5).exp() * x

    _, split = split_of(f, torch.randn(64), budget=0)
    assert not any(has_effect(e) for e in split.backward.equations)
    assert any(has_effect(e) for e in split.forward.equations)


def test_what_convolutions_read_is_saved():
    def net(x, w, v):
        return F.conv2d(F.conv2d(x, w).relu(), v)

    args = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(5, 4, 3, 3)
    _, split = split_of(net, *args, policy="cheap")
    names = [getattr(e.op, "_opname", "") for e in split.backward.equations]
    assert "relu" not in names and "convolution_backward" in names
    _, linear = split_of(lambda x, w, v: (x @ w).exp().sin() @ v, *ARGS, policy="cheap")
    assert "sin" in [getattr(e.op, "_opname", "") for e in linear.backward.equations]


def test_sums_that_forward_writes_anyway_are_saved():
    """The sums of a residual network, not the branches they are made of: backward would add these up again."""

    def net(x, w):
        x = x[:, 1:] * 2  # what it starts from is a little smaller than the sums
        x = torch.cat([x[:, :1], x], 1)
        for _ in range(3):
            x = x + x.sin() @ w
        return x.sin()

    joint, split = split_of(net, torch.randn(64, 16), torch.randn(16, 16), policy="cheap")
    sums = [e for e in split.forward.equations if getattr(e.op, "_opname", "") == "add"]
    assert len(sums) == 3 and not [e for e in split.backward.equations if e.out in {s.out for s in sums}]
    assert {e.out for e in sums[:2]} <= set(split.saved)


def after_norms(x, w):
    """A residual network that is normalised behind each sum; the sums are no one's but the norms'."""
    for _ in range(4):
        x = (x + x @ w).sin() * 2
    return x.exp()


def with_views(x, w):
    for _ in range(4):
        x = (x.view(8, -1, 16) + (x @ w).view(8, -1, 16)).sin().view(-1, 16) * 2
    return x.exp()


@pytest.mark.parametrize("fn", [after_norms, with_views])
def test_no_layer_is_computed_again_from_the_one_before_it(fn, monkeypatch):
    """All sums would be there at once, since the first gradient wants the last one."""
    args = torch.randn(64, 16) / 8, torch.randn(16, 16) / 8
    _, chained = split_of(fn, *args, policy="cheap")
    monkeypatch.setattr("tessera.transforms.remat.LARGE", 1)
    _, split = split_of(fn, *args, policy="cheap")
    assert depth(chained) >= 3 and depth(split) <= 1
    assert split.saved_bytes <= 1.02 * chained.saved_bytes
    given = [a.requires_grad_() for a in args]
    want = fn(*given)
    ct = torch.randn_like(want)
    (got,), mine = run(split, [a.detach() for a in args], [ct])
    torch.testing.assert_close(got, want)
    for a, b in zip(mine, torch.autograd.grad(want, given, ct), strict=True):
        torch.testing.assert_close(a, b)


def depth(split):
    """How many sums, one of the other, backward computes again."""
    sums = {e.out for e in split.forward.equations if e.opname == "add"}
    deep = dict.fromkeys(split.backward.inputs, 0)
    for eqn in split.backward.equations:
        below = max((deep[v] for v in eqn.inputs()), default=0)
        deep |= dict.fromkeys(eqn.results(), below + any(v in sums for v in eqn.results()))
    return max(deep[e.out] for e in split.backward.equations if e.opname in ("sin", "cos"))


def test_a_layer_is_computed_again_where_saving_it_takes_more(monkeypatch):
    """Branches that are saved for another reason: their sums would come on top."""
    monkeypatch.setattr("tessera.transforms.remat.LARGE", 1)

    def net(x, w):
        for _ in range(4):
            y = x @ w
            x = (x + y).sin() * y.cos()
        return x

    _, split = split_of(net, torch.randn(64, 16), torch.randn(16, 16), policy="cheap")
    makers = split.forward.makers()
    assert not [v for v in split.saved if v in makers and makers[v].opname == "add"]


def padded(x, w):
    """Each layer's convolution reads a padded copy, and so does a gradient what was padded."""
    for _ in range(3):
        y = F.conv1d(F.pad(x, (2, 0)), w).relu()
        x = (x + F.conv1d(F.pad(y, (1, 1)), w)).relu()
    return x


def joined(x, w):
    """The way up of a U-Net, whose convolution reads both halves side by side."""
    down = F.conv1d(x, w, padding=1).relu()
    up = F.conv1d(down.sin(), w, padding=1).relu()
    both = torch.cat([up, down], 1)
    return F.conv1d(both, torch.cat([w, w], 1), padding=1).relu()


def nested(x, w):
    """What was joined is padded then."""
    both = torch.cat([F.conv1d(x, w, padding=1).relu(), x * 2], 1)
    return F.conv1d(F.pad(both, (1, 1)), torch.cat([w, w], 1)).sigmoid()


@pytest.mark.parametrize("fn", [padded, joined, nested])
def test_what_lies_in_a_saved_value_is_read_there(fn, monkeypatch):
    monkeypatch.setattr("tessera.transforms.remat.LARGE", 1)
    args = [torch.randn(2, 6, 20).requires_grad_(), torch.randn(6, 6, 3).requires_grad_()]
    want = fn(*args)
    ct = torch.randn_like(want)
    grads = torch.autograd.grad(want, args, ct)
    plain = [a.detach() for a in args]
    _, split = split_of(fn, *plain, policy="cheap")
    verify(split.forward)
    verify(split.backward)
    makers = split.forward.makers()
    outer = [v for v in split.saved if v in makers and makers[v].opname in ("constant_pad_nd", "cat")]
    assert outer and not {x for v in outer for x in makers[v].inputs()} & set(split.saved) - set(split.forward.inputs)
    slices = [e for e in split.backward.equations if e.opname == "slice" and e.inputs()[0] in split.backward.inputs]
    assert len(slices) >= (5 if fn is padded else 1)
    (got,), mine = run(split, plain, [ct])
    torch.testing.assert_close(got, want)
    for a, b in zip(mine, grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("fn", [padded, joined, nested])
def test_kernels_read_what_lies_in_a_saved_value(fn, monkeypatch):
    monkeypatch.setattr("tessera.transforms.remat.LARGE", 1)
    args = [torch.randn(2, 6, 20).requires_grad_(), torch.randn(6, 6, 3).requires_grad_()]
    want, got = fn(*args), tessera.jit(fn)(*args)
    torch.testing.assert_close(got, want)
    ct = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, args, ct), torch.autograd.grad(want, args, ct), strict=True):
        torch.testing.assert_close(a, b)


def test_what_a_library_reads_or_is_small_is_saved_itself(monkeypatch):
    def net(x, w):
        y = F.conv1d(x, w, padding=1).relu()
        return F.conv1d(F.pad(y, (2, 0)), w), F.conv1d(y, w)

    args = torch.randn(2, 6, 20), torch.randn(6, 6, 3)
    assert all(not name.startswith("slice") for name in backward_names(padded, *args))  # small
    monkeypatch.setattr("tessera.transforms.remat.LARGE", 1)
    assert all(not name.startswith("slice") for name in backward_names(net, *args))


def backward_names(fn, *args):
    _, split = split_of(fn, *args, policy="cheap")
    return [e.opname for e in split.backward.equations]


def test_a_copy_of_what_is_saved_is_made_again(monkeypatch):
    """A convolution wants the first half as it lies alone. Backward reads that half where it lay, too."""

    def coupled(x, w, v):
        first, second = F.conv2d(x, v).chunk(2, 1)
        return F.conv2d(first.clone(), w, padding=1) * second.exp() * first.tanh()

    shapes = (2, 6, 8, 8), (3, 3, 3, 3), (6, 6, 1, 1)
    args = [torch.randn(shape).requires_grad_() for shape in shapes]
    want = coupled(*args)
    ct = torch.randn_like(want)
    grads = torch.autograd.grad(want, args, ct)
    plain = [a.detach() for a in args]
    saved = {}
    for least in (1 << 18, 1):
        monkeypatch.setattr("tessera.transforms.remat.COPIED", least)
        _, split = split_of(coupled, *plain, policy="cheap")
        verify(split.backward)
        saved[least] = split.saved_bytes
        (got,), mine = run(split, plain, [ct])
        torch.testing.assert_close(got, want)
        for a, b in zip(mine, grads, strict=True):
            torch.testing.assert_close(a, b)
    assert saved[1] == saved[1 << 18] - 4 * args[0].numel() // 2


def test_unknown_policy():
    traced = trace_function(torch.sin, (torch.ones(2),))
    with pytest.raises(OptionError, match="views"):
        remat(vjp(traced.trace, list(traced.trace.inputs)), "some")


def test_min_cut_against_brute_force():
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        nodes = ["s", "a", "b", "c", "t"]
        edges: dict = {}
        for u, v in itertools.permutations(nodes, 2):
            capacity = int(torch.randint(0, 6, (), generator=generator))
            if capacity and u != "t" and v != "s":
                edges.setdefault(u, {})[v] = float(capacity)

        def cut(side, edges=edges):
            return sum(c for u, to in edges.items() for v, c in to.items() if u in side and v not in side)

        inner = ["a", "b", "c"]
        best = min(cut({"s", *chosen}) for n in range(4) for chosen in itertools.combinations(inner, n))
        assert cut(min_cut(edges, "s", "t")) == best


def test_parts_of_what_a_library_wrote_are_saved_as_one() -> None:
    """Each part keeps all of it in memory; fifteen of sixteen rows are no fewer bytes than all."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = (x @ w).view(4, 2, 8).unbind(0)
        return (rows[0] * rows[1] * rows[2]).sin().sum()

    fast = tessera.jit(fn, executors=["tile", "aten"], strict=True)
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    got, want = fast(x, w), fn(x, w)
    for a, b in zip(torch.autograd.grad(got, (x, w)), torch.autograd.grad(want, (x, w)), strict=True):
        torch.testing.assert_close(a, b)
    forward = next(s.trace for s in tessera.stages(fast) if s.name == "forward")
    saved = [v for v in forward.outputs[1:] if v not in forward.inputs]
    assert [v.shape for v in saved] == [(8, 8)]  # type: ignore[union-attr]
