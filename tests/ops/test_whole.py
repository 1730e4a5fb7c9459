"""Operators kept whole, against eager: values, gradients, second derivatives both ways, batches, sizes."""

from __future__ import annotations

import pytest
import torch
from programs import trace_of
from whole import CASES, Case

from tessera.ir.equation import Value
from tessera.ir.printer import compile_trace
from tessera.ir.trace import Trace
from tessera.ir.types import type_of
from tessera.passes.clean.dce import dce
from tessera.transforms.jvp import jvp
from tessera.transforms.vjp import Joint, vjp
from tessera.transforms.vmap import vmap

pytestmark = pytest.mark.filterwarnings("ignore")
every = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def places(c: Case) -> list[int]:
    return [i for i, x in enumerate(c.tensors) if x.is_floating_point()]


def joint_of(c: Case, tensors: tuple[torch.Tensor, ...]) -> Joint:
    trace = trace_of(c.fn, *tensors)
    return vjp(trace, [trace.inputs[i] for i in places(c)])


def like(v: Value) -> torch.Tensor:
    """Something to give a trace for one of its inputs: of its type, strides included."""
    return torch.empty_strided(v.shape, v.tensor.stride, dtype=v.dtype, device=v.tensor.device).normal_()


def stacked(x: torch.Tensor) -> torch.Tensor:
    """Three rows laid out as x is."""
    return x.new_empty_strided((3, *x.shape), (x.numel(), *x.stride())).copy_(torch.stack([x, x * 0.9, x * 0.8]))


def run(trace: Trace, *args: torch.Tensor) -> tuple:
    return compile_trace(dce(trace))(*args)


def gradients(fn, tensors: tuple, where: list[int], ct: torch.Tensor, graph: bool = False):  # noqa: ANN001, ANN201
    xs = [x.detach().clone().requires_grad_(i in where) for i, x in enumerate(tensors)]
    y = fn(*xs)
    return xs, y, torch.autograd.grad(y, [xs[i] for i in where], ct, create_graph=graph, allow_unused=True)


def assert_agree(got: object, want: torch.Tensor | None, tolerance: float = 1e-9) -> None:
    if got is None or want is None:
        there = want if got is None else got
        assert there is None or not there.any()  # type: ignore[attr-defined]
        return
    torch.testing.assert_close(got, want.detach(), rtol=tolerance, atol=tolerance)


@every
def test_capture_keeps_it(name: str) -> None:
    c = CASES[name]
    if c.keeps:
        assert [eqn.op._opname for eqn in dce(trace_of(c.fn, *c.tensors)).equations][-1] == c.keeps


SINGLE = [n for n in CASES if n.split()[0] in ("linear", "layer_norm", "rms_norm", "softmax", "attention", "conv2d")]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((n, torch.float64) for n in CASES), *((n, torch.float32) for n in SINGLE)]
)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    c = CASES[name]
    tensors = tuple(x.to(dtype) if x.is_floating_point() else x for x in c.tensors)
    joint = joint_of(c, tensors)
    ct = like(joint.trace.inputs[-1])
    _, y, want = gradients(c.fn, tensors, places(c), ct)
    got = run(joint.trace, *tensors, ct)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    assert_agree(got[0], y, tolerance)
    for g, w in zip(got[1:], want, strict=True):
        assert_agree(g, w, tolerance)


@every
def test_gradients_of_gradients(name: str) -> None:
    c = CASES[name]
    where = places(c)
    once = joint_of(c, c.tensors)
    made = [(i, v) for i, v in zip(where, once.trace.outputs[1:], strict=True) if v is not None]
    twice = vjp(once.trace.with_(outputs=tuple(v for _, v in made)), [once.trace.inputs[i] for i in where])
    ct = like(once.trace.inputs[-1])
    xs, _, grads = gradients(c.plain or c.fn, c.tensors, where, ct, graph=True)
    seeds = {v: like(v) for _, v in made}
    moved = {twice.trace.outputs[k]: seeds[v] for k, (_, v) in enumerate(made)}  # a rule may rename a result
    got = run(twice.trace, *c.tensors, ct, *(moved[v] for v in twice.pulled))[len(made) :]
    pairs = [(grads[where.index(i)], seeds[v]) for i, v in made]
    pairs = [(g, s) for g, s in pairs if g is not None and g.requires_grad]
    if not pairs:
        assert all(g is None or not g.any() for g in got)
        return
    heads, given = zip(*pairs, strict=True)
    want = torch.autograd.grad(heads, [xs[i] for i in where], given, allow_unused=True)
    for g, w in zip(got, want, strict=True):
        assert_agree(g, w, 1e-8)


# PyTorch's forward mode moves a padding row that its reverse mode holds still, and has no embedding_bag.
@pytest.mark.parametrize("name", [n for n in CASES if n not in ("embedding padded", "embedding_bag")])
def test_tangents_of_gradients(name: str) -> None:
    """Forward over reverse is the transpose of reverse over reverse."""
    c = CASES[name]
    where = places(c)
    joint = joint_of(c, c.tensors)
    pushed = jvp(joint.trace, [joint.trace.inputs[i] for i in where])
    ct = like(joint.trace.inputs[-1])
    tangents = [torch.randn_like(c.tensors[i]) for i in where]
    got = run(pushed, *c.tensors, ct, *tangents)
    results = len(joint.trace.outputs)
    xs, y, grads = gradients(c.plain or c.fn, c.tensors, where, ct, graph=True)
    # <seed, tangent of y> and <seed, tangent of gradient>, by reverse mode alone
    for out, tangent in zip([y, *grads], got[results:], strict=True):
        if tangent is None:
            continue
        seed = torch.randn_like(out)
        pulled = [None] * len(where)
        if out is not None and out.requires_grad:
            pulled = torch.autograd.grad(out, [xs[i] for i in where], seed, retain_graph=True, allow_unused=True)
        want = sum(((p * t).sum() for p, t in zip(pulled, tangents, strict=True) if p is not None), torch.tensor(0.0))
        torch.testing.assert_close((seed * tangent).sum(), want.to(torch.float64), rtol=1e-7, atol=1e-8)


@every
@pytest.mark.parametrize("what", ["result", "gradients"])
def test_batches(name: str, what: str) -> None:
    """All tensors batched together; for results, also each alone."""
    c = CASES[name]
    trace = trace_of(c.fn, *c.tensors) if what == "result" else joint_of(c, c.tensors).trace
    rows = [*c.tensors, *map(like, trace.inputs[len(c.tensors) :])]
    single = compile_trace(dce(trace))
    floats = [i for i, x in enumerate(rows) if x.is_floating_point()]
    alone = [[i] for i in floats] if what == "result" and len(floats) > 1 else []
    for chosen in [floats, *alone]:
        full = [stacked(x) if i in chosen else x for i, x in enumerate(rows)]
        made = vmap(trace, {trace.inputs[i]: (type_of(full[i]), 0) for i in chosen}, 3)
        got = run(made.trace, *full)
        want = [single(*(x[k] if i in chosen else x for i, x in enumerate(full))) for k in range(3)]
        for g, on, w in zip(got, made.on, zip(*want, strict=True), strict=True):
            assert_agree(g, w[0] if not on or w[0] is None else torch.stack(w))


SIZES = [
    "linear of a batch",
    "matmul batch matrix",
    "matmul heads",
    "layer_norm",
    "rms_norm",
    "softmax",
    "attention",
]


@pytest.mark.parametrize("name", [*SIZES, "conv2d", "matmul batch batch"])
def test_one_trace_serves_every_size(name: str) -> None:
    c = CASES[name]
    shared = [i for i in places(c) if c.tensors[i].shape[0] == c.tensors[0].shape[0] and c.tensors[i].ndim > 1]
    together = tuple(shared) if name.startswith(("attention", "matmul b", "matmul h", "cross")) else (0,)
    together = (0,) if name == "matmul batch matrix" else together
    trace = trace_of(lambda *xs: c.fn(*xs), *c.tensors, dynamic=together[:1])
    if len(together) > 1:  # operands whose sizes must agree: cut from one input
        trace = trace_of(lambda x, *xs: c.fn(x, *(y[: x.shape[0]] for y in xs)), *c.tensors, dynamic=(0,))
    joint = vjp(trace, [trace.inputs[i] for i in places(c)])
    compiled = compile_trace(dce(joint.trace))
    for n in (c.tensors[0].shape[0], 1 + c.tensors[0].shape[0] // 2):
        tensors = tuple(x[:n] if i == 0 else x for i, x in enumerate(c.tensors))
        fn = c.fn if len(together) == 1 else lambda x, *xs: c.fn(x, *(y[: x.shape[0]] for y in xs))
        ct = torch.randn_like(fn(*tensors))
        want = gradients(fn, tensors, places(c), ct)[2]
        for g, w in zip(compiled(*tensors, ct)[1:], want, strict=True):
            assert_agree(g, w)
