"""reinplace: caches are written where they are, dead values are written over, and nobody can tell."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from programs import assert_same, trace_of
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.ir.interp import run
from tessera.ir.lifetimes import lifetimes
from tessera.ir.printer import compile_trace
from tessera.passes.clean.canonicalise import canonicalise
from tessera.passes.clean.cse import cse
from tessera.passes.clean.dce import dce
from tessera.passes.clean.fold import fold
from tessera.passes.memory.reinplace import reinplace
from tessera.passes.memory.schedule import schedule


def final(fn, *args):
    """The program as it is run, checked against the recorded one."""
    trace = trace_of(fn, *args)
    after = reinplace(schedule(dce(cse(fold(canonicalise(trace, differentiable=False))))))
    assert_same(trace, after, *args)
    return after


class Largest(TorchDispatchMode):
    """The largest tensor that any operator allocates."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {a.untyped_storage().data_ptr() for a in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(a)}
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if torch.is_tensor(t) and t.untyped_storage().data_ptr() not in known:
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return out


K = torch.randn(2, 4, 1, 16)


def by_slice(cache, k):
    cache[:, :, 3:4] = k
    return F.scaled_dot_product_attention(k, cache, cache)


def by_index_copy(cache, k):
    cache.index_copy_(2, torch.tensor([3]), k)
    return F.scaled_dot_product_attention(k, cache, cache)


def by_index_put(cache, k):
    cache[:, :, torch.tensor([3])] = k
    return (k @ cache.transpose(-1, -2)).sum(-1)


def by_select(cache, k):
    cache.select(2, 3).copy_(k[:, :, 0])
    return cache[:, :, :4].sum(2)


def by_transpose(cache, k):
    cache.transpose(1, 2)[:, 3] = k[:, :, 0]
    return (k * cache[:, :, 3:4]).sum(-1)


def by_view(cache, k):
    cache.view(8, 64, 16)[:, 3] = k.reshape(8, 16)
    return (k @ cache.transpose(-1, -2)).sum(-1)


def by_nested_views(cache, k):
    part = cache[1]
    part[:, 2:4][:, 1:2] = k[0]
    return (k[0] @ part.transpose(-1, -2)).sum(-1)


def by_cast(cache, k):
    cache[:, :, 3:4] = k.double()
    return cache[:, :, 3] + 1


def twice(cache, k):
    cache[:, :, 3:4] = k
    first = F.scaled_dot_product_attention(k, cache, cache)
    cache[:, :, 4:5] = first
    return F.scaled_dot_product_attention(k, cache, cache)


def masked(cache, k):
    cache.masked_fill_(k > 1, 0.0)
    return cache[0].sum()


CACHES = [
    by_slice,
    by_index_copy,
    by_index_put,
    by_select,
    by_transpose,
    by_view,
    by_nested_views,
    by_cast,
    twice,
    masked,
]


@pytest.mark.parametrize("write", CACHES, ids=lambda f: f.__name__)
def test_a_cache_is_never_copied(write):
    cache = torch.randn(2, 4, 64, 16)
    after = final(write, cache, K)
    assert not after.mutations
    compiled = compile_trace(after, dead=lifetimes(after))
    where = cache.data_ptr()
    with Largest() as largest:
        compiled(cache, K)
    assert cache.data_ptr() == where
    assert largest.elements < cache.numel()


def test_counters_and_running_means():
    def fn(count, mean, x):
        count.add_(1)
        mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return (x - mean) / count

    after = final(fn, torch.tensor(3), torch.randn(4), torch.randn(2, 4))
    assert not after.mutations
    assert {"add_", "mul_"} <= {eqn.op._opname for eqn in after.equations}


def test_old_contents_read_later():
    def fn(x):
        old = x * 1
        x.add_(1)
        return x.sum(), old

    def late(x, y):
        z = x.t()
        w = x + 1
        x.copy_(y)
        return w * 2, z

    assert not final(fn, torch.randn(3, 3)).mutations
    final(late, torch.randn(3, 3), torch.randn(3, 3))


def test_overlapping_source():
    def shift(x):
        x[1:] = x[:-1].clone()
        return x.sum()

    def exchange(x):
        old = x[:2].clone()
        x[:2] = x[2:]
        x[2:] = old
        return x.sum()

    def transpose(x):
        x.copy_(x.t().clone())

    for fn in (shift, exchange, transpose):
        final(fn, torch.randn(4, 4))


def test_two_inputs_exchanged():
    def fn(x, y):
        old = x.clone()
        x.copy_(y)
        y.copy_(old)

    final(fn, torch.randn(4), torch.randn(4))


def test_copies_at_the_end_do_not_see_each_other():
    """Mutations {x: y, y: x} with sequential copies would lose x; so would an output that shows x."""
    trace = trace_of(lambda x, y: (x.t(), y), torch.randn(2, 2), torch.randn(2, 2))
    x, y = trace.inputs
    crossed = trace.with_(mutations={x: y, y: x})
    a, b = torch.randn(2, 2), torch.randn(2, 2)
    assert_same(crossed, reinplace(crossed), a, b)
    compiled = compile_trace(reinplace(crossed))
    assert_same(crossed, reinplace(crossed), a, b, runner=lambda _, *xs: compiled(*xs))


def test_dead_values_are_written_over():
    after = final(lambda x: ((x @ x + 1).relu() * 2).sum(), torch.randn(4, 4))
    assert [eqn.op._opname for eqn in after.equations] == ["matmul", "add_", "relu_", "mul_", "sum"]
    swapped = final(lambda x: x * x.exp(), torch.randn(4))
    assert [eqn.op._opname for eqn in swapped.equations] == ["exp", "mul_"]


def test_live_and_foreign_values_are_not():
    def names(fn, *args):
        return [eqn.op._opname for eqn in final(fn, *args).equations]

    x = torch.randn(4, 4)
    assert names(lambda x: x.relu(), x) == ["relu"]  # an input
    assert names(lambda x: (y := x.exp(), y + 1), x) == ["exp", "add"]  # an output
    assert names(lambda x: (y := x.exp().t(), y.relu()), x)[-1] == "relu"  # a view of an output
    assert "add_" not in names(lambda x: (y := x.exp()).t() + 1 + y.sum(), x)[:3]
    assert names(lambda x: x.exp()[:1].expand(4, 4) + 1, x)[-1] == "add"  # overlaps itself
    assert names(lambda x: (x.exp() > 0) + 1, x)[-1] == "add"  # another dtype
    assert names(lambda x: (y := x.exp()) + y.t(), x)[-1] == "add"  # reads itself in another layout
    assert names(lambda x: torch.tensor([1.0, 2.0]) + x, torch.randn(2))[-1] == "add"  # a constant


def test_custom_operator_that_writes():
    @torch.library.custom_op("tessera_test_passes::bump", mutates_args={"x"})
    def bump(x: torch.Tensor, by: torch.Tensor) -> None:
        x.add_(by)

    def fn(cache, k):
        torch.ops.tessera_test_passes.bump(cache, k)
        return cache.sum()

    after = final(fn, torch.randn(4, 4), torch.randn(4))
    assert not after.mutations and after.equations[0].op is torch.ops.tessera_test_passes.bump.default
    x, by = torch.ones(4, 4), torch.ones(4)
    assert run(after, x, by)[0] == 32 and (x == 2).all()
