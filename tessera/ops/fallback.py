"""PyTorch's own formulas, one operator at a time.

An operator with no rule of ours is differentiated and batched by running PyTorch's derivative (autograd,
forward-mode AD, vmap) of that one operator on fake tensors and recording what it does. What comes back is a
Trace to be inlined. Results are remembered by the operator and the types of its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tessera.ir import fake
from tessera.ir.builder import Builder, aten
from tessera.ir.equation import Equation, Special, Value, map_values, values_in
from tessera.ir.record import record
from tessera.ir.rewrite import Rewrite
from tessera.ir.schema import is_random, schema_of
from tessera.ir.trace import Trace
from tessera.ir.types import Size, TensorType, contiguous_strides, overlaps_itself, size_hint, size_key
from tessera.ops.custom import is_float
from tessera.ops.op import rules
from tessera.ops.pullback import is_opaque, opaque_vjp
from tessera.ops.twins import is_unwritten, is_users, twins
from tessera.torch_internals import shapes
from tessera.torch_internals.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from tessera.util.errors import DerivativeError, RuleError

_memory: dict[tuple, object] = {}


def data_dependent() -> tuple[type[Exception], ...]:
    """What a formula ends in that asks for what only the run knows. One stands on SymPy, which is not loaded for it."""
    return DataDependentOutputException, DynamicOutputShapeException, shapes.GuardOnDataDependentSymNode


@dataclass(frozen=True)
class Formula:
    """A traced derivative: inputs are the equation's values, then cotangents or tangents.

    For a vjp, the first `split` equations are the forward, `outputs[:results]` what the operator gives, and
    the rest the gradients of the wanted values.
    """

    trace: Trace
    results: int
    split: int = 0
    active: tuple[bool, ...] = ()  # which results depend differentiably on the wanted values


def vjp_formula(
    eqn: Equation,
    wanted: list[Value],
    mode: FakeTensorMode,
    pulled: tuple[bool, ...] | None = None,
    again: bool = False,
) -> Formula:
    """Forward and backward of one equation, by autograd.

    The formula takes a cotangent for every differentiable result. Where `pulled` is given, only those count:
    PyTorch's formulas differ where a result has none (the derivative of an SVD's singular values alone is finite
    where that of its vectors is not), so zeros in its place would not do. With `again`, the formula can itself be
    differentiated: some (linalg.solve's) are otherwise written over what the forward kernel noted, which carries
    no gradient.
    """
    values = list(dict.fromkeys(eqn.inputs()))
    mask = tuple(v in wanted for v in values)

    def make(twin: Equation, still: frozenset[Value]) -> Formula:
        sought = tuple(v in wanted and v not in still for v in values)
        return _trace_vjp(twin, values, mask, sought, pulled, mode, again)

    def formula() -> Formula:
        try:
            if not is_opaque(eqn):
                return _attempt(eqn, make, again)
        except data_dependent():
            pass  # the formula looks at data: it runs as one equation, whose own derivative is another such
        active = tuple(v.is_differentiable for v in eqn.results())
        return Formula(opaque_vjp(eqn, values, mask, mode), len(active), 1, active)

    return _remember("vjp", eqn, (mask, pulled, again), mode, formula)


def _trace_vjp(
    eqn: Equation,
    values: list[Value],
    mask: tuple[bool, ...],
    sought: tuple[bool, ...],
    pulled: tuple[bool, ...] | None,
    mode: FakeTensorMode,
    again: bool,
) -> Formula:
    """Gradients come for the values in `mask`; those not `sought` are held fixed and get None."""
    builder = Builder("vjp_formula", mode)
    split = 0
    active: tuple[bool, ...] = ()
    floats = [v for v in eqn.results() if v.is_differentiable]

    def run(*fakes: torch.Tensor) -> list[object]:
        nonlocal split, active
        primals, cts = fakes[: len(values)], fakes[len(values) :]
        out = _apply(eqn, values, primals)
        results = _results(out, eqn)
        split = len(builder.equations)
        active = tuple(isinstance(r, torch.Tensor) and r.requires_grad for r in results)
        heads = list(zip((r for r in results if is_float(r)), cts, strict=True))
        heads = [(o, c) for i, (o, c) in enumerate(heads) if o.requires_grad and (pulled is None or pulled[i])]
        sources = [x for x, wanted in zip(primals, sought, strict=True) if wanted]
        grads: list = [None] * len(sources)
        if heads:
            outs, seeds = zip(*heads, strict=True)
            grads = list(torch.autograd.grad(outs, sources, seeds, allow_unused=True, create_graph=again))
        sought_grads = iter(grads)
        return [*results, *(next(sought_grads) if s else None for m, s in zip(mask, sought, strict=True) if m)]

    declared = rules(eqn.op)
    layout = declared.cotangent if declared is not None and declared.cotangent is not None else dense
    fakes = [fake.fake_of(v.tensor, mode) for v in values] + [fake.fake_of(layout(v.tensor), mode) for v in floats]
    for x, wanted in zip(fakes, sought, strict=False):
        x.requires_grad = wanted
    names = [f"x{i}" for i in range(len(values))] + [f"ct{i}" for i in range(len(floats))]
    with torch.enable_grad():
        trace = kernels_of(run, fakes, names, builder)
    return _without_detach(trace, len(eqn.results()), split, active)


def jvp_formula(eqn: Equation, moving: list[Value], mode: FakeTensorMode) -> Formula:
    """Results and their tangents; inputs are the equation's values, then tangents of the moving ones."""
    if is_opaque(eqn):
        raise RuleError(f"forward mode through {eqn.op}, a derivative that looks at data, is not to be had; use vjp")
    values = list(dict.fromkeys(eqn.inputs()))
    mask = tuple(v in moving for v in values)

    def make(twin: Equation, still: frozenset[Value]) -> Formula:
        return _trace_jvp(twin, values, mask, tuple(v in moving and v not in still for v in values), mode)

    with torch.enable_grad():  # formulas are remembered: a no_grad around this call must not show in them
        return _remember("jvp", eqn, mask, mode, lambda: _attempt(eqn, make))


def _trace_jvp(
    eqn: Equation, values: list[Value], given: tuple[bool, ...], mask: tuple[bool, ...], mode: FakeTensorMode
) -> Formula:
    """Tangents come for the values in `given`; those not in `mask` are not used."""
    moving = [v for v, m in zip(values, given, strict=True) if m]

    def used(tangents: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        there = iter(tangents)
        return tuple(t for t, m in ((next(there), m) for g, m in zip(given, mask, strict=True) if g) if m)

    def split(primals: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], Callable]:
        def op(*xs: torch.Tensor) -> tuple:
            rest = iter(xs)
            full = [next(rest) if m else p for p, m in zip(primals, mask, strict=True)]
            results = _results(_apply(eqn, values, full), eqn)
            return tuple(r for r in results if is_float(r)), tuple(r for r in results if not is_float(r))

        return tuple(p for p, m in zip(primals, mask, strict=True) if m), op

    def arrange(diff: tuple, other: tuple, tangents: tuple) -> list[object]:
        """Results in the equation's order, then one tangent (or None) for each."""
        d, o, t = iter(diff), iter(other), iter(tangents)
        outs, moved = [], []
        for v in eqn.results():
            outs.append(next(d) if v.is_differentiable else next(o))
            moved.append(next(t) if v.is_differentiable else None)
        return [*outs, *moved]

    def forward_mode(*fakes: torch.Tensor) -> list[object]:
        sources, op = split(fakes[: len(values)])
        diff, tangents, other = torch.func.jvp(op, sources, used(fakes[len(values) :]), has_aux=True)  # type: ignore[misc]
        return arrange(diff, other, tangents)

    def double_reverse(*fakes: torch.Tensor) -> list[object]:
        """Forward mode through reverse: the vjp is linear in its cotangent, so transpose it."""
        sources, op = split(fakes[: len(values)])
        diff, pull, other = torch.func.vjp(op, *sources, has_aux=True)  # type: ignore[misc]
        seeds = tuple(torch.zeros_like(o) for o in diff)
        pull_pull = torch.func.vjp(lambda *cts: pull(cts), *seeds)[1]
        return arrange(diff, other, pull_pull(used(fakes[len(values) :])))

    def registered(*fakes: torch.Tensor) -> list[object]:
        """The same by plain autograd, which alone knows a backward that was registered in Python."""
        sources, op = split(fakes[: len(values)])
        inputs = [x.detach().requires_grad_() for x in sources]
        diff, other = op(*inputs)
        seeds = [torch.zeros_like(o, requires_grad=True) for o in diff]
        heads = [(o, seed) for o, seed in zip(diff, seeds, strict=True) if o.requires_grad]
        if not heads:
            raise NotImplementedError(f"{eqn.op} has no derivative")
        outs, cts = zip(*heads, strict=True)
        pulled = torch.autograd.grad(outs, inputs, cts, create_graph=True, materialize_grads=True)
        tied = [(g, t) for g, t in zip(pulled, used(fakes[len(values) :]), strict=True) if g.requires_grad]
        grads, ts = zip(*tied, strict=True) if tied else ((), ())
        return arrange(diff, other, torch.autograd.grad(grads, seeds, ts, materialize_grads=True))

    fakes = [fake.fake_of(v.tensor, mode) for v in values] + [fake.fake_of(dense(v.tensor), mode) for v in moving]
    names = [f"x{i}" for i in range(len(values))] + [f"t{i}" for i in range(len(moving))]

    def traced(how: Callable) -> Trace:
        return kernels_of(how, fakes, names, Builder("jvp_formula", mode))

    if _from_a_library(eqn):
        return _without_detach(traced(registered), len(eqn.results()), 0)
    try:
        if eqn.op in _HELD:
            raise NotImplementedError(f"forward mode of {eqn.op} is not to be differentiated")
        trace = traced(forward_mode)
        if _strays(trace):
            raise NotImplementedError(f"forward mode of {eqn.op} computes on tensors without data")
    except (NotImplementedError, RuntimeError):
        trace = traced(double_reverse)
    return _without_detach(trace, len(eqn.results()), 0)


# PyTorch's tangents of these read the factors that the kernel noted, which carry no derivative, or divide by zero and
# write over it (an eigenvalue less itself): differentiated again they would be wrong. Its reverse formulas are written
# over the operands where a gradient will be differentiated.
_HELD = frozenset(
    (
        torch.ops.aten._linalg_det.default,
        torch.ops.aten.linalg_eig.default,
        torch.ops.aten._linalg_eigh.default,
        torch.ops.aten._linalg_slogdet.default,
        torch.ops.aten._linalg_solve_ex.default,
    )
)


def _from_a_library(eqn: Equation) -> bool:
    """An operator whose backward is registered in Python has no tangent: forward mode would give zeros in silence."""
    return not isinstance(eqn.op, Special) and eqn.op.namespace not in ("aten", "prims")


def batch_formula(
    eqn: Equation,
    batched: dict[Value, TensorType],
    mode: FakeTensorMode,
    size: Size | None = None,
    randomness: str = "different",
) -> Formula:
    """Results with the batch at dimension 0; `batched` gives the types that carry it there, `size` how large it
    is where none does."""
    size = next(iter(batched.values())).shape[0] if size is None else size
    values = list(dict.fromkeys(eqn.inputs()))
    mask = tuple(v in batched for v in values)
    keys = tuple(t.key() for t in batched.values())

    def make(twin: Equation, _: frozenset[Value]) -> Formula:
        in_dims = (0, *(0 if m else None for m in mask))
        fakes = [fake.fake_of(batched.get(v, v.tensor), mode) for v in values]

        def run(*xs: torch.Tensor) -> list[object]:
            def op(_: torch.Tensor, *row: torch.Tensor) -> tuple:
                return tuple(_results(_apply(twin, values, row), eqn))

            # The first argument only says how large the batch is: an operator that draws may have no other.
            return list(torch.func.vmap(op, in_dims, randomness=randomness)(rows, *xs))

        rows = fake.fake_of(TensorType(torch.float32, (size,), (1,), torch.device("cpu")), mode)
        names = [f"x{i}" for i in range(len(values))]
        return Formula(kernels_of(run, fakes, names, Builder("batch_formula", mode)), len(eqn.results()))

    # What draws otherwise is no twin where all examples are to share a draw.
    attempt = (
        partial(make, eqn, frozenset()) if randomness == "same" and is_random(eqn.op) else partial(_attempt, eqn, make)
    )
    return _remember("batch", eqn, (mask, keys, size_key(size), randomness), mode, attempt)


# --- helpers ---


def conform(t: Value, like: TensorType) -> Value:
    """`t` in the layout a formula was traced for: a view that holds there may not hold in another."""
    if t.tensor.bits[0]:
        t = aten.resolve_conj(t)
    if t.tensor.bits[1]:
        t = aten.resolve_neg(t)
    want = [(size_key(n), size_key(s)) for n, s in zip(like.shape, like.stride, strict=True)]
    have = [(size_key(n), size_key(s)) for n, s in zip(t.shape, t.tensor.stride, strict=True)]
    if all(w == h or w[0] == 1 for w, h in zip(want, have, strict=True)):
        return t
    order = _widest_first(like)  # dense in that order is enough for any view
    if order == list(range(t.ndim)):
        return aten.clone(t, memory_format=torch.contiguous_format)
    back = [order.index(i) for i in range(t.ndim)]
    return aten.permute(aten.clone(aten.permute(t, order), memory_format=torch.contiguous_format), back)


_FIXED = re.compile(r"not differentiable with respect to argument '(\w+)'")


# PyTorch's gradients of these read what the kernel noted (norms) and hold it still when they are differentiated again.
_NOTED = frozenset((torch.ops.aten._weight_norm_interface.default,))


def _attempt(eqn: Equation, make: Callable[[Equation, frozenset[Value]], Formula], again: bool = True) -> Formula:
    """PyTorch's formula of the equation, or of one that computes the same where PyTorch has none, or none to be
    differentiated `again`."""
    failure: Exception | None = None
    for twin in (*twins(eqn), eqn) if again and eqn.op in _NOTED else (eqn, *twins(eqn)):
        try:
            return make(twin, frozenset())
        except data_dependent():  # a formula that looks at data; what computes the same may differentiate otherwise
            raise
        except (RuntimeError, NotImplementedError) as error:
            failure = failure or error
            if is_unwritten(error) and is_users(eqn):
                break
            fixed = _FIXED.search(str(error))
            if fixed and twin is eqn and str(eqn.op).endswith("_backward.default"):
                # what a forward kernel noted for its backward (a count, a mask): no gradient ever reaches it
                positional, keyword = eqn.bound()
                names = [p.name for p in schema_of(eqn.op).params]  # type: ignore[arg-type]
                held = dict(zip(names, [*positional, *keyword.values()], strict=True))[fixed[1]]
                return make(eqn, frozenset(values_in(held)))
    assert failure is not None
    raise failure


def kernels_of(run: Callable, fakes: list[FakeTensor], names: list[str], builder: Builder) -> Trace:
    """What a function does on fake tensors, composites in their parts; nobody's line is noted."""
    return record(run, fakes, names, lambda _: False, builder, whole=False, locate=False)[0]


def call_key(eqn: Equation, mode: FakeTensorMode) -> tuple:
    """Equal for calls of one operator over arguments of the same types, of which the same ones are the same."""
    pattern = tuple(list(dict.fromkeys(eqn.inputs())).index(v) for v in eqn.inputs())
    env = id(mode.shape_env) if fake.mentions_symbols((eqn.args, eqn.kwargs)) else None
    return (eqn.op, fake.argument_key(eqn.args), fake.argument_key(eqn.kwargs), pattern, env)


def _remember(kind: str, eqn: Equation, extra: object, mode: FakeTensorMode, make: Callable[[], Formula]) -> Formula:
    key = (kind, call_key(eqn, mode), extra)
    if key not in _memory:
        try:
            _memory[key] = make()
        except RuleError:
            raise
        except Exception as error:
            if is_unwritten(error):
                raise DerivativeError(f"{eqn.source or eqn.op}: {error}") from error
            raise RuleError(
                f"PyTorch's own {kind} formula of {eqn.op} could not be traced ({type(error).__name__}: {error}); "
                f"it was called at {eqn.source or 'an unknown line'}. Give it a rule with tessera.register_operator."
            ) from error
    return _memory[key]  # type: ignore[return-value]


def _without_detach(trace: Trace, results: int, split: int, active: tuple[bool, ...] = ()) -> Formula:
    """A formula that can be differentiated again. Autograd hands saved results on through detach although they
    stay tied to their history, and runs backward under no_grad: neither is part of the formula's meaning."""
    rewrite, ahead = Rewrite(trace), split
    for index, eqn in enumerate(rewrite):
        if eqn.op is torch.ops.aten.detach.default:
            rewrite.rename(eqn.out, eqn.inputs()[0])
            ahead -= index < split
        else:
            rewrite.keep(eqn.with_(tags=frozenset()))
    return Formula(rewrite.finish(), results, ahead, active)


def _strays(trace: Trace) -> bool:
    """Some equation makes a tensor without data: PyTorch works out shapes of lazy zero tangents on the meta device,
    and the recorder sees that too."""
    meta = torch.device("meta")
    own = any(isinstance(v.type, TensorType) and v.type.device == meta for v in trace.inputs)
    return not own and any(eqn.kwargs.get("device") == meta for eqn in trace.equations)


def _apply(eqn: Equation, values: list[Value], tensors: tuple | list) -> object:
    env = dict(zip(values, tensors, strict=True))
    fn = eqn.op.fn if isinstance(eqn.op, Special) else eqn.op
    return fn(*map_values(eqn.args, env.__getitem__), **map_values(eqn.kwargs, env.__getitem__))  # type: ignore[misc]


def _results(out: object, eqn: Equation) -> list:
    listed = list(out) if isinstance(out, (tuple, list)) else [out] if eqn.outputs else []
    # a formula PyTorch keeps in Python may give a row more or less than the operator (layer_norm's, of a vector)
    return [
        r.reshape(v.shape) if isinstance(r, torch.Tensor) and r.ndim != v.ndim else r
        for r, v in zip(listed, eqn.outputs, strict=True)
        if v is not None
    ]


def like_result(t: TensorType) -> TensorType:
    """A program takes a cotangent as its result lies, contiguous where the result's memory overlaps itself."""
    stride = contiguous_strides(t.shape) if overlaps_itself(t.shape, t.stride) else t.stride
    return TensorType(t.dtype, t.shape, stride, t.device)


def dense(t: TensorType) -> TensorType:
    """A formula takes a cotangent or tangent with its value's order of dimensions, but without gaps; contiguous where
    the value's memory overlaps itself."""
    if any(size_key(n) == 0 for n in t.shape):
        stride = t.stride
    else:
        order = None if overlaps_itself(t.shape, t.stride) else _widest_first(t)
        stride = contiguous_strides(t.shape, order)
    return TensorType(t.dtype, t.shape, stride, t.device)


def _widest_first(t: TensorType) -> list[int]:
    """Dimensions from the widest stride to the narrowest."""
    return sorted(range(len(t.shape)), key=lambda i: -size_hint(t.stride[i]))
