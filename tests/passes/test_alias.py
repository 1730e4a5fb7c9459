"""Which values share memory."""

# ruff: noqa: E501
from __future__ import annotations

import torch
import torch.nn.functional as F
from programs import random_program, trace_of

import tessera as t
from tessera.ir.equation import map_values, values_in
from tessera.ir.printer import callable_of
from tessera.passes.memory.alias import escaping, roots


def shares(fn, *args):
    """Does the output share memory with the first input?"""
    trace = trace_of(fn, *args)
    return trace.inputs[0] in roots(trace)[values_in(trace.outputs)[0]]


X = torch.randn(4, 4)


def test_views():
    for view in (
        lambda x: x.t(), lambda x: x[1:], lambda x: x.view(16), lambda x: x.reshape(2, 8), lambda x: x.flatten(),
        lambda x: x.expand(2, 4, 4), lambda x: x.unbind(0)[1], lambda x: x.split(2)[0], lambda x: x.detach(),
        lambda x: x.unsqueeze(0).squeeze(0), lambda x: torch.einsum("ij->ji", x), lambda x: x.expand_as(x[None]),
        lambda x: F.dropout(x, 0.5, training=False), lambda x: torch.unsafe_chunk(x, 2)[1], lambda x: torch.unsafe_split(x, 2)[0],
    ):  # fmt: skip
        assert shares(view, X), view


def test_fresh():
    for fresh in (
        lambda x: x + 1, lambda x: x.clone(), lambda x: x.to(torch.float64), lambda x: F.softmax(x, -1),
        lambda x: x @ x, lambda x: torch.cat([x]), lambda x: F.linear(x, x), lambda x: x.index_select(0, torch.tensor([0])),
        lambda x: F.layer_norm(x, (4,)), lambda x: torch.einsum("ij,jk->ik", x, x),
        lambda x: F.dropout(x, 0.5, training=True),
    ):  # fmt: skip
        assert not shares(fresh, X), fresh


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, view):
        return x.view_as(x) if view else x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2, None


def test_a_function_of_the_users_shares_what_its_forward_shares():
    assert shares(lambda x: Twice.apply(x, True)[0], X)
    assert not shares(lambda x: Twice.apply(x, False)[0], X)
    double = t.custom_vjp(lambda x: x * 2)
    double.defvjp(lambda x: (x * 2, None), lambda saved, ct: (ct * 2,))
    assert not shares(lambda x: double(x)[0], X)


def test_what_a_function_gave_is_laid_out_as_it_was_where_its_argument_is_written():
    def f(x):
        y = Twice.apply(x, False)
        row = y[..., 0]
        x.add_(y)
        return row, y

    row, y = t.jit(f, frontend="functional")(X.clone())
    assert row.stride() == (4,) and row.data_ptr() == y.data_ptr()


def test_every_view_really_shares_memory():
    """The analysis never misses sharing that happens at run time."""
    for seed in range(30):
        program, args = random_program(seed)
        trace = trace_of(program, *args)
        of = roots(trace)
        env = {**dict(zip(trace.inputs, args, strict=True)), **trace.constants}
        for eqn in trace.equations:
            out = callable_of(eqn.op)(*map_values(eqn.args, env.__getitem__), **map_values(eqn.kwargs, env.__getitem__))
            env.update(zip(eqn.outputs, out if eqn.many else [out], strict=True))
        values = list(env)
        for i, a in enumerate(values):
            for b in values[:i]:
                if env[a].untyped_storage().data_ptr() == env[b].untyped_storage().data_ptr():
                    assert not of[a].isdisjoint(of[b]), (a, b)


def test_escaping():
    trace = trace_of(lambda x: x.exp().t(), X)
    assert [v.name for v in escaping(trace)] == ["exp"]
