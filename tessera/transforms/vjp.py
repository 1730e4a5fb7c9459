"""Reverse-mode differentiation, from Trace to Trace.

In: a trace and which of its inputs to differentiate. Out: a `Joint` trace whose first equations are the
forward and whose later ones compute the gradients from cotangents of the outputs. Nothing is executed and
nothing is chosen about memory: that is `remat`'s part. The same function serves training, `grad`, `vjp`,
`jacrev` and `hessian`, and its result can be transformed again.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from dataclasses import dataclass

import torch

from tessera.ir.alias import followed
from tessera.ir.builder import Builder, aten
from tessera.ir.call import in_place
from tessera.ir.equation import Arg, Equation, Value, substitute, values_in
from tessera.ir.fake import fake_of, shows_argument
from tessera.ir.layouts import laid_as
from tessera.ir.record import NO_GRAD
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ops.custom import AUTOGRAD_FUNCTION
from tessera.ops.fallback import Formula, conform, like_result, vjp_formula
from tessera.ops.families import cast
from tessera.ops.op import Rules, differentiates, name_of, stops
from tessera.ops.tied import TIED
from tessera.torch_internals.fake import FakeTensorMode
from tessera.util.errors import RuleError


@dataclass(frozen=True)
class Joint:
    """A trace that computes outputs and gradients.

    Inputs: the primal inputs, then one cotangent for each of `pulled` (outputs, then mutated inputs' new
    values, that depend differentiably on `wrt`). Outputs: the primal outputs, then one gradient per `wrt`
    (None where nothing flows). `split` counts the equations of the forward. `carried` are the mutated inputs whose new
    values are among `pulled`: another one may come to hold an equal value, which is none of autograd's business. `tied`
    are those of `wrt` that gradients depend on in name alone (`ops/tied.py`). `histories` are the mutated inputs whose
    new values depend differentiably on `wrt`, pulled or not.
    """

    trace: Trace
    wrt: tuple[Value, ...]
    pulled: tuple[Value, ...]
    split: int
    carried: tuple[Value, ...]
    tied: tuple[Value, ...] = ()
    histories: tuple[Value, ...] = ()


def vjp(
    trace: Trace,
    wrt: list[Value],
    mode: FakeTensorMode | None = None,
    pull: list[Value] | None = None,
    again: bool = False,
    missing: Collection[int] = (),
) -> Joint:
    """The joint program of a trace and the gradients of its results with respect to `wrt`.

    `pull` names the results that get a cotangent, where not all shall; `missing` are places among those that could have
    one and do not. With `again`, PyTorch's formulas are those it uses when a gradient will itself be differentiated.
    """
    trace = in_place(trace)
    builder = Builder.over(trace, mode)
    builder.again = again
    with builder:
        return _Reverse(builder, trace, wrt).run(pull, missing)


class _Reverse:
    def __init__(self, builder: Builder, trace: Trace, wrt: list[Value]) -> None:
        self.builder, self.trace, self.wrt = builder, trace, wrt
        self.active: set[Value] = {v for v in wrt if v.is_differentiable}
        self.rename: dict[Value, Arg] = {}  # results a rule's own forward put in place of the trace's
        self.tape: list[tuple[Equation, object]] = []
        self.cts: dict[Value, Value] = {}
        self.reached: set[Value] = set()  # whose makers autograd runs, be it with no gradient

    def run(self, pull: list[Value] | None, missing: Collection[int]) -> Joint:
        for eqn in self.trace.equations:
            self.forward(eqn)
        split = len(self.builder.equations)
        asked = [self.rename.get(v, v) for v in dict.fromkeys(self.trace.results()) if pull is None or v in pull]
        results = [v for v in asked if isinstance(v, Value)]  # a number has no cotangent
        pulled = [v for v in results if v in self.active]
        pulled = [v for i, v in enumerate(pulled) if i not in missing]
        self.reached.update(pulled)
        for v in pulled:
            ct = self.builder.input(f"ct_{v.name}", like_result(v.tensor))
            self.accumulate(v, ct)
        for eqn, how in reversed(self.tape):
            self.backward(eqn, how)
        grads = [self.cts.get(v) for v in self.wrt]
        outputs = substitute(list(self.trace.outputs), self.rename)
        mutations = {target: self.look(v) for target, v in self.trace.mutations.items()}
        joint = self.builder.finish([*outputs, *grads], mutations)
        carried = tuple(target for target, v in mutations.items() if v in pulled)
        histories = tuple(target for target, v in mutations.items() if v in self.active)
        return Joint(joint, tuple(self.wrt), tuple(pulled), split, carried, _tied(joint, self.wrt), histories)

    def look(self, v: Value) -> Value:
        new = self.rename.get(v, v)
        assert isinstance(new, Value)
        return new

    # --- forward: replay, noting what is differentiable and how ---

    def forward(self, eqn: Equation) -> None:
        if self.rename:
            eqn = eqn.substitute(self.rename)
        wanted = [v for v in dict.fromkeys(followed(eqn)) if v in self.active]
        if not wanted or NO_GRAD in eqn.tags or not any(v.is_differentiable for v in eqn.results()) or stops(eqn):
            self.builder.append(eqn)
            if wanted and NO_GRAD in eqn.tags and not stops(eqn) and shows_argument(eqn, self.builder.mode):
                # PyTorch says of a view that it requires grad if its base does, also of one made under no_grad.
                # What is computed from it gives gradients, which go no further than to the view itself.
                self.active.update(v for v in eqn.results() if v.is_differentiable)
            return
        declared = differentiates(eqn)
        if declared is None:
            self.forward_formula(eqn, wanted)
        elif declared.forward is not None:
            self.forward_rule(eqn, declared)
        else:
            self.builder.append(eqn)
            self.note(eqn, declared, declared.passive)

    def note(self, eqn: Equation, how: object, passive: tuple[int, ...] = ()) -> None:
        self.tape.append((eqn, how))
        for index, v in enumerate(eqn.results()):
            if v.is_differentiable and index not in passive:
                self.active.add(v)

    def forward_rule(self, eqn: Equation, declared: Rules) -> None:
        """A rule with a forward of its own: run it up to its result."""
        assert declared.forward is not None
        positional, keyword = eqn.bound()
        need = [_needs(a, self.active) for a in positional]
        with self.builder.at(eqn), self.builder.in_place_of(eqn.results()):
            rule = declared.forward(need, *positional, **keyword)
            results = next(rule)
        self.replace(eqn, list(results) if eqn.many else [results], rule, declared.passive)

    def forward_formula(self, eqn: Equation, wanted: list[Value]) -> None:
        """PyTorch's formula: its forward equations stand in place of this one."""
        formula = vjp_formula(eqn, wanted, self.builder.mode, again=self.builder.again)
        env: dict[Value, Arg] = dict(zip(formula.trace.inputs, dict.fromkeys(eqn.inputs()), strict=False))
        self.builder.share_constants(formula.trace)
        with self.builder.at(eqn), self.builder.in_place_of(eqn.results()):
            self.builder.replay(formula.trace.equations[: formula.split], env, here=True)
        results = [substitute(o, env) for o in formula.trace.outputs[: formula.results]]
        passive = tuple(i for i, active in enumerate(formula.active) if not active)
        self.replace(eqn, results, (eqn, formula, env, wanted), passive)

    def replace(self, eqn: Equation, results: list[Arg], how: object, passive: tuple[int, ...] = ()) -> None:
        """The equation's results are now these: values, or numbers where a size is known."""
        listed = eqn.results()
        there = [new for new in results if new is not None]
        with self.builder.at(eqn):
            known = [self.laid_as_said(new, old) for old, new in zip(listed, there, strict=True)]
        self.rename.update(zip(listed, known, strict=True))
        values = tuple(new if isinstance(new := self.rename[old], Value) else old for old in listed)
        self.note(eqn.with_(outputs=values, many=True), how, passive)

    def laid_as_said(self, new: Arg, old: Value) -> Arg:
        """A formula may lay its result out in another way than the operator does, as attention whose mask wants a
        gradient; the equations that follow were recorded with the operator's strides."""
        if not isinstance(new, Value) or not isinstance(new.type, TensorType) or new.type.layout is not torch.strided:
            return new
        if new.type.stride == old.tensor.stride or new.type.is_symbolic or old.tensor.is_symbolic:
            return new
        return laid_as(self.builder, new, fake_of(old.tensor, self.builder.mode))

    # --- backward ---

    def backward(self, eqn: Equation, how: object) -> None:
        cts = [self.cts.get(v) for v in eqn.results()]
        reached = not self.reached.isdisjoint(eqn.results())
        if reached:
            self.reached.update(v for v in followed(eqn) if v in self.active)
        # A user's function makes zeros of gradients that are not there; an operator gives none in its turn.
        if all(ct is None for ct in cts) and not (reached and eqn.op is AUTOGRAD_FUNCTION):
            if isinstance(how, Generator):
                how.close()
            return
        with self.builder.at(eqn, note=f"grad of {name_of(eqn)}"):
            match how:
                case Rules():
                    self.backward_rule(eqn, how, cts)
                case Generator():
                    self.backward_generator(eqn, how, cts)
                case (Equation(), Formula(), dict(), list()):
                    self.backward_formula(*how, cts)  # type: ignore[misc]

    def backward_rule(self, eqn: Equation, declared: Rules, cts: list[Value | None]) -> None:
        if declared.zero:
            return
        assert declared.vjp is not None
        positional, keyword = eqn.bound()
        y: object = list(eqn.outputs) if eqn.many else eqn.out
        by_output = iter(cts)
        ct: object = [next(by_output) if v is not None else None for v in eqn.outputs] if eqn.many else cts[0]
        self.collect(positional, declared.vjp(ct, y, *positional, **keyword), eqn)

    def backward_generator(self, eqn: Equation, rule: Generator, cts: list[Value | None]) -> None:
        positional, _ = eqn.bound()
        try:
            rule.send(cts if len(cts) > 1 else cts[0])  # type: ignore[arg-type]
        except StopIteration as stop:
            self.collect(positional, stop.value, eqn)
            return
        raise RuleError(f"the forward rule of {eqn.op} yielded twice; it yields its result once")

    def collect(self, positional: list[Arg], grads: tuple, eqn: Equation) -> None:
        """Add the gradients a rule gave to the arguments they belong to."""
        if not isinstance(grads, (tuple, list)):
            raise RuleError(f"the vjp rule of {eqn.op} gave {grads!r}; expected a tuple, one entry an argument")
        for a, grad in zip(positional, grads, strict=False):
            if grad is None:
                continue
            if isinstance(a, (list, tuple)):
                listed = grad() if callable(grad) else grad
                for item, g in zip(a, listed, strict=True):  # type: ignore[arg-type]
                    self.give(item, g)
            else:
                self.give(a, grad)

    def give(self, a: Arg, grad: object) -> None:
        if isinstance(a, Value) and a in self.active and grad is not None:
            given = grad() if callable(grad) else grad
            if given is not None:
                self.accumulate(a, given)  # type: ignore[arg-type]

    def backward_formula(
        self, eqn: Equation, formula: Formula, env: dict[Value, Arg], wanted: list[Value], cts: list[Value | None]
    ) -> None:
        """The formula's backward equations; one traced for just these cotangents if some are missing."""
        floats = [ct for v, ct in zip(eqn.results(), cts, strict=True) if v.is_differentiable]
        if any(ct is None for ct in floats):
            pulled = tuple(ct is not None for ct in floats)
            other = vjp_formula(eqn, wanted, self.builder.mode, pulled, self.builder.again)
            formula, env = _same_forward(formula, other, env)
            self.builder.share_constants(formula.trace)
        given = formula.trace.inputs[len(dict.fromkeys(eqn.inputs())) :]
        for like, ct in zip(given, floats, strict=True):
            if ct is not None:
                env[like] = conform(ct, like.tensor)
        self.builder.replay(formula.trace.equations[formula.split :], env, here=True)
        for v, grad in zip(wanted, formula.trace.outputs[formula.results :], strict=True):
            if isinstance(grad, Value):
                self.accumulate(v, env.get(grad, grad))  # type: ignore[arg-type]

    def accumulate(self, v: Value, ct: Value) -> None:
        """Sum the cotangents that reach a value, each in that value's own dtype."""
        ct = cast(ct, v.dtype)
        before = self.cts.get(v)
        self.cts[v] = ct if before is None else aten.add(before, ct)


def _tied(trace: Trace, wrt: list[Value]) -> tuple[Value, ...]:
    """The inputs that somebody is tied to."""
    behind = {v for eqn in trace.equations if eqn.op is TIED for v in values_in(eqn.args[1:])}
    if behind:
        for eqn in reversed(trace.equations):
            if any(v in behind for v in eqn.results()):
                behind.update(eqn.inputs())
    return tuple(v for v in wrt if v in behind)


def _same_forward(formula: Formula, other: Formula, env: dict[Value, Arg]) -> tuple[Formula, dict[Value, Arg]]:
    """Another tracing of one operator: its forward is the one that stands in the program already."""
    mine, theirs = formula.trace.equations[: formula.split], other.trace.equations[: other.split]
    if [e.op for e in mine] != [e.op for e in theirs]:
        raise RuleError(f"PyTorch's formula runs {mine} or {theirs} forward, depending on what is differentiated")
    known = {b: env[a] for a, b in zip(formula.trace.inputs, other.trace.inputs, strict=True) if a in env}
    for a, b in zip(mine, theirs, strict=True):
        known.update({y: env[x] for x, y in zip(a.outputs, b.outputs, strict=True) if x is not None and y is not None})
    return other, known


def _needs(a: Arg, active: set[Value]) -> object:
    if isinstance(a, (list, tuple)):
        return [_needs(item, active) for item in a]
    return isinstance(a, Value) and a in active
