"""A traced call and its derivatives, ready to run.

In: a user's function, its arguments, and which of them to differentiate by. Out: a `Call` (the trace, with the
places of what moves), or a `Pullback` or `Pushforward`: the function's result, computed, and a program that maps
cotangents or tangents. All that does not depend on those is computed once, in the early half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.autograd.graph import disable_saved_tensors_hooks

from tessera.frontends.functional.trace import Traced, trace_function
from tessera.ir import fake
from tessera.ir.equation import Equation, Value, symbols_in
from tessera.ir.replay import replay, sweep
from tessera.ir.schema import is_random
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.torch_internals import pytree
from tessera.transforms.jvp import jvp
from tessera.transforms.vjp import vjp
from tessera.util.errors import InputError, RuleError

Argnums = int | tuple[int, ...]
REVERSE = frozenset(("grad", "vjp", "jacrev"))


class Call:
    """A traced call, and which of its arguments and results take part in differentiation."""

    def __init__(
        self, name: str, func: Callable, args: tuple, kwargs: dict, argnums: Argnums | None, has_aux: bool
    ) -> None:
        self.name, self.has_aux = name, has_aux
        flat, spec = pytree.tree_flatten((args, kwargs))
        places, _ = pytree.tree_unflatten(list(range(len(flat))), spec)
        # places of the arguments to differentiate by, in their structure
        chosen, self.wrt_spec = pytree.tree_flatten(_choose(name, places, argnums))
        self.primals: list[torch.Tensor] = [_check_primal(name, flat[i]) for i in chosen]
        with _without_hooks(name):
            backwards, forwards = (chosen, ()) if name in REVERSE else ((), chosen)
            self.traced: Traced = trace_function(func, args, kwargs, differentiated=backwards, moved=forwards)
        self.trace: Trace = self.traced.trace
        self.wrt = [self.check_input(i) for i in chosen]
        self.results, self.result_spec = self.find_results()

    def args(self) -> list[torch.Tensor]:
        """What a program made of the trace begins its inputs with. Forward mode looks at its arguments through views,
        here made under no_grad: gradients that the function turns on end there."""
        args = self.traced.args
        if self.traced.enables_grad:
            moved = {self.trace.inputs.index(v) for v in self.wrt}
            args = [x.view_as(x) if i in moved else x for i, x in enumerate(args)]
        return args

    def check_input(self, place: int) -> Value:
        v = self.traced.input(place)
        if v in self.trace.mutations and self.name in REVERSE:
            raise InputError(
                f"{self.name}: the function writes into an argument it is differentiated by ({v.name}: {v.type}); "
                "write a copy of it"
            )
        return v

    def find_results(self) -> tuple[list[int], pytree.TreeSpec]:
        """Places of the outputs that are differentiated, and their structure."""
        tree = self.traced.pack(range(len(self.trace.outputs)))
        if self.has_aux:
            if not (isinstance(tree, tuple) and len(tree) == 2):
                raise InputError(
                    f"{self.name}: with has_aux, expected (output, aux) from the function, got {self.traced.out_spec}"
                )
            tree = tree[0]
        places, spec = pytree.tree_flatten(tree)
        if not places:
            raise InputError(f"{self.name}: expected the function to have a non-empty output, got {tree!r}")
        for i in places:
            if not isinstance(self.trace.outputs[i], Value):
                raise InputError(f"{self.name}: expected the function to give tensors, got {self.trace.outputs[i]!r}")
        return places, spec

    def pack(self, outs: Sequence[object]) -> tuple[object, object]:
        tree = self.traced.pack(outs)
        return tree if self.has_aux else (tree, None)  # type: ignore[return-value]

    def pack_results(self, leaves: Sequence[object]) -> object:
        return pytree.tree_unflatten(list(leaves), self.result_spec)

    def output(self, place: int) -> Value:
        return self.trace.outputs[place]  # type: ignore[return-value]

    def check_tangents(self, tangents: object) -> list[torch.Tensor]:
        leaves, spec = pytree.tree_flatten(tangents)
        if spec != self.wrt_spec:
            raise InputError(
                f"{self.name}: expected tangents of the same python structure as the primals, {self.wrt_spec}, "
                f"got {spec}"
            )
        return [_check_like(self.name, "tangent", t, v) for t, v in zip(leaves, self.wrt, strict=True)]


def _without_hooks(name: str) -> AbstractContextManager[None]:
    """What reverse mode keeps is no tensor that autograd saves: hooks around the call or in it would not see it."""
    if name not in REVERSE:
        return nullcontext()
    return disable_saved_tensors_hooks(
        f"{name}: saved tensor hooks do nothing in a transform, which keeps its own tensors; leave them out, or call "
        "tessera.checkpoint in the function to keep less"
    )


def check_primals(name: str, primals: object) -> None:
    if not isinstance(primals, tuple):
        raise InputError(f"{name}: Expected primals to be a tuple, got {type(primals).__name__}")
    if not pytree.tree_leaves(primals):
        raise InputError(f"{name}: expected primals with at least one Tensor, got {primals!r}")


def _check_primal(name: str, x: object) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise InputError(f"{name}: what is differentiated by must only contain Tensors, got {type(x).__name__} {x!r}")
    if not (x.is_floating_point() or x.is_complex()):
        raise InputError(f"{name}: expected floating-point or complex tensors, got one of {x.dtype}")
    return x


def _choose(name: str, places: tuple, argnums: Argnums | None) -> object:
    if argnums is None:
        return places
    if isinstance(argnums, tuple):
        if not all(isinstance(i, int) for i in argnums):
            raise InputError(f"{name}: every one of argnums must be int, got {argnums}")
        chosen = tuple(_choose(name, places, i) for i in argnums)
        if not argnums or len({i % len(places) for i in argnums}) != len(argnums):
            raise InputError(f"{name}: argnums must be unique and name at least one argument, got {argnums}")
        return chosen
    if not isinstance(argnums, int):
        raise InputError(f"{name}: expected argnums to be int or Tuple of ints, got {argnums!r}")
    if not -len(places) <= argnums < len(places):
        raise InputError(f"{name}: argnums={argnums}, but only {len(places)} positional arguments were given")
    return places[argnums]


def _check_like(name: str, what: str, t: object, v: Value) -> torch.Tensor:
    if not isinstance(t, torch.Tensor):
        raise InputError(f"{name}: {what}s must only contain Tensors, got {type(t).__name__}")
    # autograd rounds a cotangent to the dtype of its value; forward mode does nothing of the kind
    rounds = what == "cotangent" and t.is_floating_point() and v.tensor.is_differentiable
    if tuple(t.shape) != tuple(v.shape) or not (t.dtype == v.dtype or rounds):
        raise InputError(
            f"{name}: expected a {what} of type {v.type}, got {TensorType(t.dtype, t.shape, (), t.device)}"
        )
    return t if t.dtype == v.dtype else t.to(v.dtype)


def or_zeros(t: object, like: object) -> torch.Tensor:
    return torch.zeros_like(like) if t is None else t  # type: ignore[arg-type,return-value]


@dataclass(frozen=True)
class Halves:
    """A trace cut in two: what can be computed at once, and the rest, which also reads what the first kept."""

    early: Trace  # outputs: those wanted, then what the late half needs
    late: Trace  # inputs: what the early half kept, then the late inputs
    kept: int

    @staticmethod
    def cut(trace: Trace, late_inputs: Sequence[Value], outputs: int) -> Halves:
        """Late is all that depends on `late_inputs`; the first `outputs` outputs are early ones."""
        after = dependent(trace, late_inputs)
        late = [e for e in trace.equations if any(v in after for v in e.inputs())]
        late_set = set(late)
        early = tuple(e for e in trace.equations if e not in late_set)
        late_trace = sweep(trace.with_(inputs=(), equations=tuple(late), outputs=trace.outputs[outputs:], mutations={}))
        kept = _reads(late_trace, trace, late_inputs)
        late_trace = late_trace.with_(inputs=(*kept, *late_inputs))
        inputs = tuple(v for v in trace.inputs if v not in set(late_inputs))
        first = sweep(trace.with_(inputs=inputs, equations=early, outputs=(*trace.outputs[:outputs], *kept)))
        return Halves(first, late_trace, len(kept))


def dependent(trace: Trace, inputs: Sequence[Value]) -> set[Value]:
    """Everything computed from these inputs, and they themselves."""
    after = set(inputs)
    for eqn in trace.equations:
        if any(v in after for v in eqn.inputs()):
            after.update(eqn.results())
    return after


def _reads(late: Trace, trace: Trace, late_inputs: Sequence[Value]) -> list[Value]:
    """What a half reads that it does not define; sizes are read off the values that bring them."""
    equations: list[Equation] = list(late.equations)
    mentioned = symbols_in([(e.args, e.kwargs) for e in equations])
    given = [*(v for e in equations for v in e.inputs()), *(o for o in late.outputs if isinstance(o, Value))]
    given += [v for symbol, (v, _) in trace.symbols.items() if symbol in mentioned]
    defined = {*(v for e in equations for v in e.results()), *trace.constants, *late_inputs}
    return [v for v in dict.fromkeys(given) if v not in defined]


class Pullback:
    """The result of a call, and its vjp as a function of cotangents."""

    def __init__(self, name: str, func: Callable, args: tuple, argnums: Argnums | None, has_aux: bool) -> None:
        self.call = call = Call(name, func, args, {}, argnums, has_aux)
        heads = [call.output(i) for i in call.results]
        for v in heads:
            if not v.tensor.is_differentiable:
                raise InputError(f"{name}: expected floating-point or complex results, got {v.type}")
        with fake.alone():
            joint = vjp(call.trace, call.wrt, call.traced.mode, pull=heads, again=True)
            count = len(call.trace.outputs)
            seeds = joint.trace.inputs[len(call.trace.inputs) :]
            self.halves = Halves.cut(joint.trace, seeds, count)
        # The joint trace may have renamed outputs: they still stand at their places.
        self.pulled = [joint.trace.outputs[i] for i in call.results]
        self.seeds = dict(zip(joint.pulled, seeds, strict=True))
        # A no_grad around the call is about its result: where the pullback is called, what it kept has a history.
        with torch.enable_grad():
            results = replay(self.halves.early, call.traced.args)
        self.outs, self.kept = results[:count], results[count:]
        if not torch.is_grad_enabled():
            self.outs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, self.outs)
        self.value, self.aux = call.pack(self.outs)

    def cotangents(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One for each seed; a value that is given twice gets the sum."""
        sums: dict[Value, torch.Tensor] = {}
        for v, ct in zip(self.pulled, leaves, strict=True):
            assert isinstance(v, Value)
            sums[v] = sums[v] + ct if v in sums else ct
        return [sums[v] for v in self.seeds]

    def __call__(self, cotangents: object, retain_graph: bool = True, create_graph: bool | None = None) -> object:
        call = self.call
        leaves, spec = pytree.tree_flatten(cotangents)
        if spec != call.result_spec:
            raise InputError(f"{call.name}: Expected pytree structure {call.result_spec} of cotangents, got {spec}")
        pairs = zip(leaves, (call.output(i) for i in call.results), strict=True)
        checked = [_check_like(call.name, "cotangent", ct, v) for ct, v in pairs]
        grads = replay(self.halves.late, [*self.kept, *self.cotangents(checked)])
        full = [or_zeros(g, x) for g, x in zip(grads, call.primals, strict=True)]
        return pytree.tree_unflatten(full, call.wrt_spec)


class Pushforward:
    """The result of a call, and its jvp as a function of tangents."""

    def __init__(self, name: str, func: Callable, args: tuple, argnums: Argnums | None, has_aux: bool) -> None:
        self.call = call = Call(name, func, args, {}, argnums, has_aux)
        count = len(call.trace.outputs)
        with fake.alone():
            pushed = jvp(call.trace, call.wrt, call.traced.mode)
            self.tangents = pushed.inputs[len(call.trace.inputs) :]
            wanted = tuple(pushed.outputs[count + i] for i in call.results)
            # A loop may compute its results and their tangents together; then the results come from the plain trace.
            apart = not any(
                isinstance(o, Value) and o in dependent(pushed, self.tangents) for o in pushed.outputs[:count]
            )
            if apart:
                pushed = pushed.with_(outputs=(*pushed.outputs[:count], *wanted))
            elif any(is_random(e.op) for e in pushed.equations):
                raise RuleError(f"{name}: the function draws random numbers and has control flow; use jvp")
            else:
                pushed = pushed.with_(outputs=wanted, mutations={})
            self.halves = Halves.cut(pushed, self.tangents, count if apart else 0)
        inputs = call.args()
        with call.traced.grad_mode():
            results = replay(self.halves.early, inputs)
            self.outs, self.kept = (results[:count], results[count:]) if apart else ([], results)
            if not apart:
                self.outs = replay(sweep(call.trace), inputs)
        self.value, self.aux = call.pack(self.outs)

    def push(self, tangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with self.call.traced.grad_mode():
            moved = replay(self.halves.late, [*self.kept, *tangents])
        return [or_zeros(t, self.outs[i]) for t, i in zip(moved, self.call.results, strict=True)]
