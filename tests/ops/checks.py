"""One sample against eager PyTorch: the recorded call, and each of its operator's rules on its own.

A rule is called inside a Builder and the trace it makes is compiled and run; what it computes is compared
with autograd (vjp, second derivative), forward mode (jvp) and a loop over rows (batch).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from samples import Sample
from torch.utils import _pytree as pytree

from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.equation import Equation, Value, map_values
from tessera.ir.printer import compile_trace
from tessera.ir.record import record
from tessera.ir.schema import bind, normalise
from tessera.ir.trace import Trace
from tessera.ir.types import type_of
from tessera.ops.op import is_real, keep_whole, rules
from tessera.transforms.vjp import vjp


class Flat:
    """A sample as a function of its tensors alone."""

    def __init__(self, sample: Sample) -> None:
        self.op = sample.op
        self.eager = sample.eager or sample.op
        self.leaves, self.spec = pytree.tree_flatten((sample.args, sample.kwargs))
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [self.leaves[i] for i in self.places]
        self.moving = [t.is_floating_point() for t in self.tensors]

    def arguments(self, values: list) -> tuple[tuple, dict]:
        leaves = list(self.leaves)
        for i, v in zip(self.places, values, strict=True):
            leaves[i] = v
        return pytree.tree_unflatten(leaves, self.spec)

    def __call__(self, *tensors: torch.Tensor) -> object:
        args, kwargs = self.arguments(list(tensors))
        return self.op(*args, **kwargs)

    def outputs(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = self.arguments(list(tensors))
        out = self.eager(*args, **kwargs)
        return list(out) if isinstance(out, (tuple, list)) else [out]  # type: ignore[list-item]

    def trace(self) -> Trace:
        mode = fake.default_mode()
        fakes = [mode.from_tensor(t, static_shapes=True) for t in self.tensors]
        names = [f"x{i}" for i in range(len(fakes))]
        return record(self, fakes, names, keep_whole, Builder("sample", mode))[0]

    def equation(self, values: list[Value], builder: Builder) -> Equation:
        args, kwargs = normalise(self.op, *self.arguments(values))
        builder.emit(self.op, *args, **kwargs)
        return builder.equations[-1]


def assert_like(got: object, want: torch.Tensor, what: str) -> None:
    got = torch.zeros_like(want) if got is None else got
    assert isinstance(got, torch.Tensor)
    assert got.dtype == want.dtype and got.shape == want.shape, f"{what}: {got.dtype} {tuple(got.shape)}"
    tolerance = 1e-4 if want.dtype == torch.float32 else 1e-7
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}")


def like(t: torch.Tensor) -> torch.Tensor:
    return torch.randn(t.shape, dtype=t.dtype)


def check_forward(flat: Flat) -> None:
    got = compile_trace(flat.trace())(*flat.tensors)
    want = flat.outputs(*flat.tensors)
    for g, w in zip(got, want, strict=True):
        assert_like(g, w, "forward")


def eager(flat: Flat) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    xs = [t.detach().clone().requires_grad_(m) for t, m in zip(flat.tensors, flat.moving, strict=True)]
    return xs, flat.outputs(*xs)


def check_vjp(flat: Flat, second: bool = False) -> bool:
    """Gradients, and with `second` those of the gradients. False where eager has none."""
    xs, outs = eager(flat)
    sources = [x for x in xs if x.requires_grad]
    heads = [o for o in outs if o.requires_grad]
    if not heads:
        return False
    trace = flat.trace()
    joint = vjp(trace, [v for v, m in zip(trace.inputs, flat.moving, strict=True) if m])
    positions = [i for i, v in enumerate(joint.trace.outputs[: len(outs)]) if v in joint.pulled]
    assert [i for i, o in enumerate(outs) if o.requires_grad] == positions, "other outputs ask for gradients"
    cts = [like(o).requires_grad_(second) for o in heads]
    want = torch.autograd.grad(heads, sources, cts, allow_unused=True, create_graph=second)
    got = compile_trace(joint.trace)(*flat.tensors, *(c.detach() for c in cts))[len(outs) :]
    for g, w, x in zip(got, want, sources, strict=True):
        assert_like(g, torch.zeros_like(x) if w is None else w.detach(), "gradient")
    return check_second(flat, joint.trace, len(outs), sources, cts, want) if second else True


def check_second(
    flat: Flat, joint: Trace, results: int, sources: list, cts: list, grads: tuple[torch.Tensor | None, ...]
) -> bool:
    made = [(v, g) for v, g in zip(joint.outputs[results:], grads, strict=True) if isinstance(v, Value)]
    wanted = {v: g for v, g in made if g is not None and g.requires_grad}
    if not wanted:
        return False
    trace = joint.with_(outputs=tuple(v for v, _ in made))
    flags = [*flat.moving, *(True for _ in cts)]
    twice = vjp(trace, [v for v, m in zip(trace.inputs, flags, strict=True) if m])
    pulled = [v for v in twice.pulled if v in wanted]
    seeds = {v: like(wanted[v]) for v in pulled}
    given = [seeds[v] if v in seeds else torch.zeros(v.shape, dtype=v.dtype) for v in twice.pulled]
    want = torch.autograd.grad(
        [wanted[v] for v in pulled], [*sources, *cts], [seeds[v] for v in pulled], allow_unused=True
    )
    got = compile_trace(twice.trace)(*flat.tensors, *(c.detach() for c in cts), *given)[len(made) :]
    for g, w, x in zip(got, want, [*sources, *cts], strict=True):
        assert_like(g, torch.zeros_like(x) if w is None else w, "second derivative")
    return True


def run_rule(flat: Flat, types: list, emit: Callable[[Builder, list[Value]], list]) -> Callable:
    """Compile what a rule emits, over inputs of these tensors' types."""
    builder = Builder("rule")
    values = [builder.input(f"x{i}", type_of(t)) for i, t in enumerate(types)]
    with builder:
        outputs = emit(builder, values)
    return compile_trace(builder.finish(outputs))


def check_jvp(flat: Flat) -> bool:
    found = rules(flat.op)
    assert found is not None
    sources = [t for t, m in zip(flat.tensors, flat.moving, strict=True) if m]
    if found.jvp is None or not sources or not any(o.requires_grad for o in eager(flat)[1]):
        return False
    tangents = [like(t) for t in sources]
    count = len(flat.tensors)

    def emit(builder: Builder, values: list[Value]) -> list:
        eqn = flat.equation(values[:count], builder)
        if found.real and not is_real(eqn) or found.applies is not None and not found.applies(eqn):
            return []
        rest = iter(values[count:])
        ts = {v: next(rest) for v, m in zip(values, flat.moving, strict=False) if m}
        args, kwargs = bind(flat.op, eqn.args, eqn.kwargs)
        moved = [map_values(a, ts.get) if isinstance(a, (Value, list)) else None for a in args]
        y = list(eqn.outputs) if eqn.many else eqn.out
        out = found.jvp(moved, y, *args, **kwargs)
        return list(out) if eqn.many else [out]

    got = run_rule(flat, [*flat.tensors, *tangents], emit)(*flat.tensors, *tangents)
    if not got:
        return False

    def moved_alone(*moving: torch.Tensor) -> tuple:
        rest = iter(moving)
        mixed = [next(rest) if m else t for t, m in zip(flat.tensors, flat.moving, strict=True)]
        return tuple(o for o in flat.outputs(*mixed) if o.is_floating_point())

    try:
        want = torch.func.jvp(moved_alone, tuple(sources), tuple(tangents))[1]
    except (NotImplementedError, RuntimeError):  # no forward mode in PyTorch: reverse twice
        want = torch.autograd.functional.jvp(moved_alone, tuple(sources), tuple(tangents))[1]
    for g, w in zip([g for g in got if g is not None], want, strict=True):
        assert_like(g.expand(w.shape).to(w.dtype), w, "tangent")
    return True


def check_batch(flat: Flat, size: int = 2) -> bool:
    """Every choice of arguments that carry the batch (at most three vary)."""
    found = rules(flat.op)
    assert found is not None
    if found.batch is None or not flat.tensors:
        return False
    for choice in product((True, False), repeat=min(len(flat.tensors), 3)):
        on = [*choice, *(False for _ in flat.tensors[3:])]
        if any(on):
            check_batch_of(flat, found.batch, on, size)
    return True


def check_batch_of(flat: Flat, rule: Callable, on: list[bool], size: int) -> None:
    def rows(t: torch.Tensor) -> torch.Tensor:
        other = t + torch.rand(t.shape, dtype=t.dtype) / 16 if t.is_floating_point() else t.flip(0) if t.ndim else t
        return torch.stack([t, other])

    tensors = [rows(t) if b else t for t, b in zip(flat.tensors, on, strict=True)]
    want = [flat.outputs(*(t[i] if b else t for t, b in zip(tensors, on, strict=True))) for i in range(size)]
    if [o.shape for o in want[0]] != [o.shape for o in want[1]]:
        return  # sizes that depend on data have no batch

    def emit(builder: Builder, values: list[Value]) -> list:
        args, kwargs = bind(flat.op, *flat.arguments(values))
        carried = {v for v, b in zip(values, on, strict=True) if b}

        def flag(a: object) -> object:
            if isinstance(a, list) and any(isinstance(v, Value) for v in a):
                return [flag(v) for v in a]
            return isinstance(a, Value) and a in carried

        out = rule(size, [flag(a) for a in args], *args, **kwargs)
        return list(out) if isinstance(out, (list, tuple)) else [out]

    got = run_rule(flat, tensors, emit)(*tensors)
    if NotImplemented in got:
        return  # the rule leaves these arguments to PyTorch's
    for i, g in enumerate(got):
        assert_like(g, torch.stack([row[i] for row in want]), f"batch {on}")
