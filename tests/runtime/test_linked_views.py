"""Results that are views of other results, or lead past them: whoever asks for gradients by them gets eager's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tessera
from tessera.store.program import COUNTS
from tests.runtime.test_linked import assert_same

# --- programs: some results are views, others are made of them ---


def one_view(x):
    rows = x.sin()
    first = rows[:, 0]
    return first, first.exp().sum(), rows


def a_view_of_an_argument(x):
    first = x[:, 0]
    return first, first.exp().sum()


def views_of_arguments(x):
    some = x.view(-1)[2:]
    one = some.reshape(7)[1]
    return x, one, some, some.exp() * one, x.t().sum(0).square()


def without_its_base(x):
    rows = x.sin()
    a, b = rows[0], rows[1]
    return a, b, (a * b).sum()


def of_both(x):
    rows = x.sin()
    first = rows[:, 0]
    return rows, first, first.cos().sum() + rows.square().sum()


def a_view_of_a_view(x):
    rows = x.sin()
    some = rows[1:]
    one = some[0]
    return some, one, one.exp().sum() * some.sum(), rows


def the_inner_view_last(x):
    rows = x.sin()
    some = rows[1:]
    one = some[0]
    return rows, one, some, one.exp().sum()


def by_way_of_a_view_not_given(x):
    rows = x.sin()
    one = rows[1:][0]
    return rows, one, one.exp().sum()


def twice(x):
    rows = x.sin()
    first = rows[0]
    return rows, first, first, first.square()


def several(x):
    a, b, c = x.sin().unbind(1)
    return a, b, c, b.exp(), (a * b + c).sum()


def in_a_row(x):
    rows = x.sin()
    first = rows[0]
    middle = first.exp()
    second = middle[1:]
    return rows, first, middle, second, second.square().sum()


def expanded(x):
    row = x.sin()[0]
    rows = row.expand(4, 3)
    return row, rows, (rows * torch.arange(12.0, dtype=x.dtype).view(4, 3)).sum()


def at_strides(x):
    rows = x.sin()
    some = rows.as_strided((2, 2), (1, 2), 1)
    return rows, some, some.cumsum(0).exp()


def turned(x):
    rows = x.sin()
    columns = rows.t()
    flat = columns.reshape(-1)
    return columns, rows, flat.exp(), columns.t() * 2


def complex_parts(x):
    z = torch.complex(x.sin(), x.cos())
    parts = torch.view_as_real(z)
    return parts, z.conj(), parts.prod(-1).sum(), (z * z.conj()).real.sum()


def written_through(x):
    rows = x.sin()
    first = rows[0]
    first.mul_(2)
    return rows, first, first.exp().sum()


def written_through_a_view_of_a_view(x):
    rows = x * 1
    flat = rows.flatten()
    some = flat[2:5]
    some.mul_(2)
    return some, flat, some.exp().sum() + flat.cos().sum()


def a_view_of_a_view_of_what_was_written(x):
    rows = x * 1
    rows[0].mul_(2)
    flat = rows.flatten()
    some = flat[2:5]
    return some, flat, some.exp().sum() + flat.cos().sum()


def a_detached_view_that_is_kept(x):
    rows = x * 1
    still = rows.detach()
    first = still[0]
    return rows, still, first, rows[0].exp() * first


def written_through_a_view_not_given(x):
    rows = x * 1
    first = rows[0]
    first.mul_(2)
    first.add_(1)
    return rows, first.exp().sum()


def written_through_columns_not_given(x):
    rows = x.sin()
    some = rows.t().unsqueeze(0)[:, 1:]
    some.mul_(2)
    some[0, 1].add_(some[0, 0])
    return rows, some.exp(), some.sum() * rows.sum()


def written_below(x):
    rows = x * 1
    first = rows[0]
    rows.mul_(3)
    return first, first.detach() * first


def both_ways_there_and_back(x):
    a = x.sin().view(-1)
    b = a.view(x.shape) * 2
    return a, b


def negated_twice(x):
    a = -x.sin()
    return a, (-a).exp()


def cast_and_back(x):
    a = x.double().sin()
    return a, a.to(torch.complex128).real * 3


def transposed_and_back(x):
    a = x.sin().t()
    return a, a.t() * 2, a.t().t().exp()


def a_view_without_gradients(x):
    rows = x.sin()
    with torch.no_grad():
        first = rows[0]
    return rows, first, first * rows[0]


def a_view_of_a_view_without_gradients(x):
    rows = x.sin()
    with torch.no_grad():
        first = rows[0]
    some = first[1:]
    return some, first, some.exp() * rows[0, 1:].sum(), rows


PROGRAMS = [
    a_view_of_an_argument, views_of_arguments, one_view, without_its_base, of_both, a_view_of_a_view,
    the_inner_view_last, by_way_of_a_view_not_given, twice, several, in_a_row, expanded, at_strides, turned,
    complex_parts, written_through, written_through_a_view_of_a_view, written_through_a_view_not_given,
    written_through_columns_not_given, a_view_of_a_view_of_what_was_written,
    a_detached_view_that_is_kept, written_below, both_ways_there_and_back, negated_twice, cast_and_back,
    transposed_and_back, a_view_without_gradients, a_view_of_a_view_without_gradients,
]  # fmt: skip

# --- what callers do ---


def total(out) -> torch.Tensor:
    return sum((i + 1.5) * (y.abs() ** 2).sum() for i, y in enumerate(out) if y.requires_grad)  # type: ignore[return-value]


def wanted(out) -> list[torch.Tensor]:
    return [y for y in out if y.requires_grad]


def each_by_all(out, x):
    some = wanted(out)
    return [torch.autograd.grad(y.abs().sum(), [*some, x], retain_graph=True, allow_unused=True) for y in some]


def retained(out, x):
    some = {id(y): y for y in wanted(out)}.values()
    for y in some:
        y.retain_grad()
    total(out).backward()
    return [y.grad for y in some]


def hooks_that_look(out, x):
    seen: dict[int, torch.Tensor] = {}
    for i, y in enumerate(wanted(out)):
        y.register_hook(lambda g, i=i: seen.update({i: g.clone()}))
    total(out).backward()
    return sorted(seen), [seen[i] for i in sorted(seen)]


def hooks_that_change(out, x):
    for i, y in enumerate({id(y): y for y in wanted(out)}.values()):
        y.register_hook(lambda g, i=i: g * (i + 2))
    total(out).backward()


def one_hook_from_the_last(out, x):
    seen = []
    wanted(out)[0].register_hook(lambda g: seen.append(g.clone()) or g.sign())
    wanted(out)[-1].abs().sum().backward()
    return seen


def differentiated_again(out, x):
    grads = torch.autograd.grad(total(out), [*wanted(out), x], create_graph=True, allow_unused=True)
    sum((g.abs() ** 2).sum() for g in grads if g is not None).backward()
    return [None if g is None else g.detach() for g in grads]


def nobody_asks(out, x):
    total(out).backward()


WAYS = [
    each_by_all, retained, hooks_that_look, hooks_that_change, one_hook_from_the_last, differentiated_again,
    nobody_asks,
]  # fmt: skip


def ran(fn, way) -> tuple:
    leaf = torch.linspace(0.1, 1.7, 9, dtype=torch.float64).view(3, 3).requires_grad_()
    x = leaf * 1
    out = fn(x)
    shared = [[one is other for one in out] for other in out]
    got = way(out, x)
    return shared, [y.detach() for y in out], got, leaf.grad


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda fn: fn.__name__)
def test_gradients_by_results(program) -> None:
    compiled = tessera.jit(program, strict=True)
    for way in WAYS:
        assert_same(ran(compiled, way), ran(program, way))


def test_rows_of_gradients() -> None:
    compiled, rows = tessera.jit(in_a_row, strict=True), torch.eye(9, dtype=torch.float64).view(9, 3, 3)[:, 1, :2]

    def way(out, x):
        return torch.autograd.grad(out[3], [out[1], out[0], x], rows, is_grads_batched=True)

    assert_same(ran(compiled, way), ran(in_a_row, way))


def test_views_of_open_sizes() -> None:
    """Where a view needs a size, the program gives it."""

    def program(x):
        rows = x.sin()
        half = rows[: x.shape[0] // 2]
        return half, half.reshape(-1, 3)[0].exp(), rows

    compiled = tessera.jit(program, strict=True, dynamic=True)
    for n in (4, 6, 10):
        grads = []
        for fn in (compiled, program):
            x = torch.linspace(0, 1, 3 * n, dtype=torch.float64).view(n, 3).requires_grad_()
            half, out, rows = fn(x)
            half.retain_grad()
            grads.append([*torch.autograd.grad(out.sum(), [half, rows], retain_graph=True, allow_unused=True)])
            (out.sum() + rows.prod()).backward()
            grads[-1] += [half.grad, x.grad]
        assert_same(*grads)


def test_programs_from_the_disk(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    monkeypatch.setitem(COUNTS, "loaded", 0)
    with tessera.override(program_cache=True):
        for _ in range(2):
            torch._dynamo.reset()
            compiled = tessera.jit(in_a_row)
            assert_same(ran(compiled, retained), ran(in_a_row, retained))
    assert COUNTS["loaded"] == 1


def test_whoever_writes_a_view_writes_its_base() -> None:
    """Views stay views, whoever is made of them."""
    grads = []
    for fn in (tessera.jit(of_both, strict=True), of_both):
        x = torch.linspace(0, 1, 9, dtype=torch.float64).view(3, 3).requires_grad_()
        rows, first, _ = fn(x)
        assert first._base is rows
        first.mul_(2)
        rows.square().sum().backward()
        grads.append([rows.detach(), x.grad])
    assert_same(*grads)


def test_infinite_flows_leave_what_others_put_there() -> None:
    def program(x):
        rows = x.sin()
        first = rows[0]
        return rows, first, 1 / first.abs().sqrt()

    grads = []
    for fn in (tessera.jit(program, strict=True), program):
        x = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
        rows, first, out = fn(x)
        first.retain_grad()
        (rows[1].sum() + out.nan_to_num(posinf=1.0).sum() * 0 + out.clamp(max=3).sum()).backward()
        grads.append([first.grad, x.grad])
    assert [[g.isnan().tolist() for g in one] for one in grads][0] == [
        [g.isnan().tolist() for g in one] for one in grads
    ][1]
    assert_same([g.nan_to_num() for g in grads[0]], [g.nan_to_num() for g in grads[1]])


def test_views_of_weights_and_of_what_another_graph_gave() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(3, 2)

        def forward(self, x):
            hidden = self.a(x).tanh()
            torch._dynamo.graph_break()
            first = hidden[:, :3]
            some = self.b.weight[0]
            return first, some, self.b(first) + first.sum() * some.prod()

    torch.manual_seed(0)
    net = Net().double()
    seen = []
    for fn in (tessera.jit(net), net):
        net.zero_grad()
        first, some, out = fn(torch.ones(2, 4, dtype=torch.float64))
        first.retain_grad()
        hooked: list[torch.Tensor] = []
        some.register_hook(lambda g, hooked=hooked: hooked.append(g.clone()) or g * 2)
        by_some = torch.autograd.grad(out.sum(), [some, first], retain_graph=True)
        (out.square().sum() + some.sum()).backward()
        seen.append([by_some, first.grad, hooked, [p.grad.clone() for p in net.parameters()]])
    assert_same(*seen)
