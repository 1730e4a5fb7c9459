"""Results that share memory, detached views, and flags that a traced program asks for."""

from __future__ import annotations

import pytest
import torch

import tessera
from tessera.util.errors import CaptureError

FRONTENDS = ["dynamo", "functional"]


def compiled(fn, frontend="functional"):  # noqa: ANN001, ANN201
    return tessera.jit(fn, executors=["aten"], frontend=frontend)


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_detached_view_that_is_written_without_gradients_stays_a_view(frontend, grad):  # noqa: ANN001
    def program(x):  # noqa: ANN001, ANN202
        v = x.detach()
        v[1:].abs_()
        return v

    x = torch.tensor([-1.0, -2.0, 3.0]).requires_grad_(grad)
    out = compiled(program, frontend)(x)
    assert same_memory(out, x) and not out.requires_grad
    assert torch.equal(x.detach(), torch.tensor([-1.0, 2.0, 3.0]))


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_detached_view_of_a_result_that_a_call_under_no_grad_writes_is_a_view(frontend):  # noqa: ANN001
    def program(x):  # noqa: ANN001, ANN202
        total = x.sum()
        return torch.add(total, 1, out=total.detach()), total

    with torch.no_grad():
        view, total = compiled(program, frontend)(torch.ones(3).requires_grad_())
    assert same_memory(view, total) and view == total == 4


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("scale", [1, 2])
def test_what_is_copied_without_gradients_lies_in_its_own_memory(frontend, scale):  # noqa: ANN001
    def program(x):  # noqa: ANN001, ANN202
        a, b, c = x.sin(), x.cos() * scale, torch.zeros(3)
        with torch.no_grad():
            b.add_(1)
            a.copy_(b)
            c.copy_(torch.arange(3.0))
        return a, b, c

    x = torch.randn(3).requires_grad_()
    f = compiled(program, frontend)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            a, b, c = f(x)
            expected = program(x)
        assert not same_memory(a, b)
        with torch.no_grad():
            a.zero_(), c.zero_()  # nobody else's, and not the next call's
            b, c = b, f(x)[2]
        assert torch.equal(b, expected[1]) and torch.equal(c, expected[2])


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_detached_view_that_is_written_with_gradients_has_a_history_of_its_own(frontend):  # noqa: ANN001
    def program(x, w):  # noqa: ANN001, ANN202
        v = (x * 2).detach()
        v.mul_(w)
        return v, v[0]

    results = []
    for f in (program, compiled(program, frontend)):
        x, w = torch.ones(3).requires_grad_(), torch.full((3,), 2.0).requires_grad_()
        v, first = f(x, w)
        assert same_memory(v, first)
        (v.sum() + first).backward()
        assert x.grad is None
        results.append(w.grad)
    assert torch.equal(*results)


def _times_weight(x, w):  # noqa: ANN001, ANN202
    v = x.detach()
    v *= w
    return v


def _part_times_weight(x, w):  # noqa: ANN001, ANN202
    v = x[1:].detach()
    v[1].mul_(w[0])
    return v[1], x * 2, v


def _part_of_memory_times_weight(x, w):  # noqa: ANN001, ANN202
    v = x.detach()
    v.add_(w.exp())
    return v[1:]


def _twice_detached_times_weight(x, w):  # noqa: ANN001, ANN202
    v = x.detach()
    v.detach().mul_(w)
    return v, v.view(-1)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("how", ["leaf", "result", "plain"])
@pytest.mark.parametrize(
    "program", [_times_weight, _part_times_weight, _part_of_memory_times_weight, _twice_detached_times_weight]
)
def test_a_detached_argument_that_is_written_with_gradients_is_its_memory_still(program, how, frontend):  # noqa: ANN001
    found = []
    for f in (program, compiled(program, frontend)):
        leaf, w = torch.arange(3.0).requires_grad_(how != "plain"), torch.full((3,), 2.0).requires_grad_()
        x = leaf * 1 if how == "result" else leaf
        for _ in range(2):
            out = f(x, w)
            out = out if isinstance(out, tuple) else (out,)
            about = [(same_memory(o, x), o.storage_offset(), o.requires_grad, o.is_leaf) for o in out]
            if heads := [o for o in out if o.requires_grad]:
                sum(o.square().sum() for o in heads).backward(retain_graph=True)
            found.append([about, *(o.detach().clone() for o in out), x.detach().clone(), leaf.grad, w.grad])
    for got, want in ((found[2], found[0]), (found[3], found[1])):
        assert got[0] == want[0]
        torch.testing.assert_close(got[1:], want[1:])


def test_two_views_of_a_literal_share_it():
    def program(x):  # noqa: ANN001, ANN202
        v = x.new_tensor([1, 2])
        v.imag.pow_(2)
        return v.real, v.imag

    a, b = compiled(program)(torch.ones(2, dtype=torch.complex128))
    assert same_memory(a, b)


def test_a_written_view_of_a_reshaped_result_keeps_its_strides():
    def program(x):  # noqa: ANN001, ANN202
        v = torch.ones(4, 3).reshape(x.shape).diagonal(1)
        v.cumsum_(0)
        return v

    x = torch.ones(4, 3)
    want, out = program(x), compiled(program)(x)
    assert torch.equal(want, out) and want.stride() == out.stride()


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_write_behind_a_view_that_no_grad_made_keeps_the_history(frontend):  # noqa: ANN001
    def program(x):  # noqa: ANN001, ANN202
        with torch.no_grad():
            v = x.view(-1)
        v.detach().mul_(3.0)
        return x * 2

    results = []
    for f in (program, compiled(program, frontend)):
        leaf = torch.ones(2, 2).requires_grad_()
        out = f(leaf * 1)
        out.sum().backward()
        results.append((out.detach(), leaf.grad))
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)


def test_a_traced_program_may_ask_whether_a_result_requires_gradients():
    def program(x):  # noqa: ANN001, ANN202
        y = x * 2
        with torch.no_grad():
            quiet = y + 1
        return y if y.requires_grad and not y.detach().requires_grad and not quiet.requires_grad else -y

    f = compiled(program)
    for grad in (True, False):
        x = torch.ones(2).requires_grad_(grad)
        assert torch.equal(f(x), program(x))
    assert "requires_grad" not in vars(torch.Tensor)


def test_a_traced_program_turns_gradients_on():
    def program(x):  # noqa: ANN001, ANN202
        quiet = x * 3
        with torch.enable_grad():
            return quiet, x * 2

    x = torch.ones(2).requires_grad_()
    with torch.no_grad():
        quiet, loud = compiled(program)(x)
    assert not quiet.requires_grad and loud.requires_grad
    loud.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))


def test_a_result_given_twice_by_a_call_that_runs_eagerly():
    def program(x, y):  # noqa: ANN001, ANN202
        x.mul_(2)
        a = y * 1
        return a, a, y * 3

    x = torch.ones(2)
    first, second, third = compiled(program)(x, x.view(-1))  # one program cannot say what a write does to both
    assert first is second
    assert torch.equal(first, torch.full((2,), 2.0)) and torch.equal(third, torch.full((2,), 6.0))


def _write_expanded(x):  # noqa: ANN001, ANN202
    v = x.expand(2, *x.shape)
    v[0] += 1
    return x * 1


def test_a_write_through_an_expanded_tensor_is_refused_by_tracing():
    with pytest.raises(CaptureError, match="expanded"):
        compiled(_write_expanded)(torch.zeros(3))


@pytest.mark.filterwarnings("error:Tessera could not compile")
def test_a_write_through_an_expanded_tensor_runs_eagerly():
    assert torch.equal(compiled(_write_expanded, "dynamo")(torch.zeros(3)), torch.ones(3))


def test_an_expanded_tensor_that_repeats_nothing_is_written():
    def program(x):  # noqa: ANN001, ANN202
        x.expand(1, *x.shape)[0].add_(1)
        return x * 1

    assert torch.equal(compiled(program)(torch.zeros(3)), torch.ones(3))


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("of_input", [True, False])
def test_a_view_that_is_given_back_twice_is_one_object(frontend, of_input):  # noqa: ANN001
    def program(x):  # noqa: ANN001, ANN202
        view = (x if of_input else x * 2)[1:]
        view.mul_(2)
        return [view, view.type(torch.float64), view.contiguous(), view.view_as(view), view.view_as(view), view]

    want, got = (f(torch.arange(3.0, dtype=torch.float64)) for f in (program, compiled(program, frontend)))
    torch.testing.assert_close(got, want)
    assert [[a is b for b in got] for a in got] == [[a is b for b in want] for a in want]
    assert all(same_memory(y, got[0]) for y in got)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_what_follows_a_written_tensor_lies_as_it_does(frontend):  # noqa: ANN001
    def program(x):  # noqa: ANN001, ANN202
        y = torch.full_like(x, 2).movedim(0, -1)
        y.triu_()
        wide = torch.zeros(3, 8, dtype=x.dtype).t()[::2, :]
        wide.tril_()
        filled, sums = torch.full_like(y, 2), wide + 1
        return filled.reshape(y.shape), y.exp(), sums.view_as(sums), torch.empty_like(wide).fill_(1)

    want, got = (f(torch.arange(12.0).view(3, 4)) for f in (program, compiled(program, frontend)))
    torch.testing.assert_close(got, want)
    assert [y.stride() for y in got] == [y.stride() for y in want]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_view_of_a_written_input_whose_size_changes(frontend):  # noqa: ANN001
    def program(x):  # noqa: ANN001, ANN202
        v = x.view(*x.shape, 1)
        v.select(2, 0).mul_(2)
        return v, x.reshape(1, -1, 2)

    fast = compiled(program, frontend)
    for n in (3, 4, 5):
        x = torch.ones(n, 2)
        v, w = fast(x)
        assert same_memory(v, x) and same_memory(w, x) and v.shape == (n, 2, 1)
        assert torch.equal(x, torch.full((n, 2), 2.0))


def _half(x):  # noqa: ANN001, ANN202
    return x[: x.shape[0] // 2]


def _narrowed(x):  # noqa: ANN001, ANN202
    return x.narrow(0, x.shape[0] - 3, 2).t()


def _split(x):  # noqa: ANN001, ANN202
    return x.tensor_split(2)[1][..., None]


def _selected(x):  # noqa: ANN001, ANN202
    return x.view(-1)[x.shape[0] :].view(x.shape[0] - 1, x.shape[1], 1).select(0, x.shape[0] - 2)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("view", [_half, _narrowed, _split, _selected])
def test_a_view_of_a_written_input_at_a_place_that_follows_from_its_size(view, grad):  # noqa: ANN001
    def program(x):  # noqa: ANN001, ANN202
        x.mul_(2)
        return view(x), x.sum()

    torch._dynamo.reset()
    fast = tessera.jit(program, executors=["aten"], dynamic=True, strict=True)
    for n in (4, 6, 7):
        found = []
        for f in (program, fast):
            leaf = torch.arange(float(n * n)).view(n, n).requires_grad_(grad)
            x = leaf * 1
            out, total = f(x)
            assert same_memory(out, x)
            about = (out.storage_offset(), out.stride(), out.shape, out.requires_grad)
            out.add_(1)  # the caller goes on writing
            if grad:
                (out.square().sum() + x.sum() + total).backward()
            found.append([about, x.detach(), leaf.grad])
        assert found[0][0] == found[1][0]
        torch.testing.assert_close(found[1][1:], found[0][1:])
