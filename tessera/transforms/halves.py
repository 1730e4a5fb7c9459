"""A joint trace in two: what runs forward, and what runs when gradients are asked for.

In: a `Joint`, the values that are saved, and those that backward reads inside of saved ones. Out: a forward trace that
also gives what is saved, and a backward trace from saved values and cotangents to gradients. An equation that backward
wants and whose result is not saved stands in both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from tessera.ir.builder import Builder
from tessera.ir.equation import NUMBER, Arg, Equation, Value, substitute, symbols_in, values_in
from tessera.ir.schema import has_effect, is_view
from tessera.ir.trace import Trace
from tessera.ir.types import ScalarType, TensorType
from tessera.transforms.enclosed import Place, read_inside
from tessera.transforms.vjp import Joint


@dataclass(frozen=True)
class Split:
    forward: Trace  # outputs: the program's outputs, new contents of `returned`, then `saved`
    backward: Trace  # inputs: `saved`, then cotangents; outputs: one gradient per wrt
    saved: tuple[Value, ...]
    returned: tuple[Value, ...]  # mutated inputs whose new contents carry gradients: written back outside
    saved_bytes: int

    def saving(self, more: Collection[Value]) -> Split:
        """The same with more values that forward hands to backward."""
        new = tuple(v for v in more if v not in self.saved)
        first = len(self.saved)
        given = self.backward.inputs
        backward = self.backward.with_(inputs=(*given[:first], *new, *given[first:]))
        forward = self.forward.with_(outputs=(*self.forward.outputs, *new))
        return replace(self, forward=forward, backward=backward, saved=(*self.saved, *new))


class Halves:
    """A joint trace by what belongs to the forward and what to the backward."""

    def __init__(self, joint: Joint) -> None:
        self.joint, self.trace = joint, joint.trace
        self.primals = self.trace.inputs[: len(self.trace.inputs) - len(joint.pulled)]
        self.given = set(self.primals)
        self.cts = self.trace.inputs[len(self.primals) :]
        self.outputs = self.trace.outputs[: len(self.trace.outputs) - len(joint.wrt)]
        self.grads = self.trace.outputs[len(self.outputs) :]
        self.maker = self.trace.makers()
        self.early = set(self.trace.equations[: joint.split])
        self.late = self._depends_on_cotangents()
        self.needed = self._needed()

    def _depends_on_cotangents(self) -> set[Equation]:
        tainted: set[Value] = set(self.cts)
        late: set[Equation] = set()
        for eqn in self.trace.equations:
            # Equations of the backward that give no tensor of ours (zeros, full) stay in it too.
            if any(v in tainted for v in eqn.inputs()):
                late.add(eqn)
                tainted.update(eqn.results())
        return late

    def _needed(self) -> set[Equation]:
        """Equations that some gradient depends on, and checks on what backward computes."""
        return set(self._leading_to(self.grads, self.trace.equations, self.late))

    def _leading_to(
        self, results: Arg, equations: Iterable[Equation], effects: set[Equation], symbols: Iterable[str] = ()
    ) -> list[Equation]:
        """The equations that some results depend on, or sizes that are mentioned, and those of `effects` that have an
        effect."""
        wanted, mentioned = set(values_in(results)), set(symbols)
        chosen: list[Equation] = []
        for eqn in reversed(list(equations)):
            binds = any(s in mentioned and v in eqn.results() for s, (v, _) in self.trace.symbols.items())
            effect = eqn in effects and has_effect(eqn)
            if effect or binds or not wanted.isdisjoint(eqn.outputs):
                chosen.append(eqn)
                wanted.update(eqn.inputs())
                if self.trace.symbols:
                    mentioned |= symbols_in((eqn.args, eqn.kwargs))
        return chosen[::-1]

    def bytes(self, saved: list[Value]) -> int:
        """Bytes that are kept only for backward: inputs and outputs are alive anyway."""
        alive = {*self.primals, *self.trace.constants, *values_in(self.outputs)}
        return sum(nbytes(v) for v in saved if v not in alive)

    def split(self, saved: list[Value], held: Mapping[Value, Place]) -> Split:
        mutated = self.trace.mutations
        returned = tuple(t for t in mutated if t in self.joint.carried)
        keep_symbols = self._symbols_for_backward(saved)
        backward_equations = self.backward_equations([*saved, *held])
        before, saved, copies = self._protect(saved, mutated)
        symbols = {s: (v, d) for s, (v, d) in self.trace.symbols.items() if v in saved or v in keep_symbols}
        for s, (v, d) in self.trace.symbols.items():
            if s not in symbols and any(v in e.results() for e in backward_equations):
                symbols[s] = (v, d)
        symbols |= {v.name: (v, None) for v in keep_symbols}
        backward = Trace(
            f"{self.trace.name}_backward",
            (*saved, *held, *keep_symbols, *self.cts),
            tuple(e.substitute(copies) if copies else e for e in backward_equations),
            substitute(self.grads, copies),
            {},
            self.trace.constants,
            symbols,
        )
        backward = read_inside(backward, held)
        saved += [v for v in backward.inputs if v in held]
        forward_results = [*self.outputs, *(mutated[t] for t in returned), *saved, *keep_symbols]
        forward = self.trace.with_(
            inputs=self.primals,
            equations=(*before, *self._forward_equations(forward_results), *self._sizes(keep_symbols)),
            outputs=tuple(forward_results),
            mutations={t: v for t, v in mutated.items() if t not in returned},
        )
        return Split(forward, backward, (*saved, *keep_symbols), returned, self.bytes(saved))

    def _protect(
        self, saved: list[Value], mutated: dict[Value, Value]
    ) -> tuple[list[Equation], list[Value], dict[Value, Value]]:
        """An input that the forward overwrites in place is saved as a copy made before, a view of it as a copy of that
        view."""
        builder = Builder.over(self.trace)
        copies: dict[Value, Value] = {}
        for v in saved:
            root = self._input_root(v)
            if root is not None and root in mutated:
                env: dict[Value, Arg] = {}
                builder.replay(self._views(v), env)
                copies[v] = builder.value(f"{v.name}_saved", v.type)
                builder.equations.append(Equation(torch.ops.aten.clone.default, (env.get(v, v),), {}, (copies[v],)))
        return builder.equations, [copies.get(v, v) for v in saved], copies

    def _input_root(self, v: Value) -> Value | None:
        while v not in self.given:
            eqn = self.maker.get(v)
            if eqn is None or not is_view(eqn.op) or not eqn.inputs():
                return None
            v = eqn.inputs()[0]
        return v

    def _views(self, v: Value) -> list[Equation]:
        """The views that lead from an input to a value."""
        path: list[Equation] = []
        while v not in self.given:
            path.append(self.maker[v])
            v = self.maker[v].inputs()[0]
        return path[::-1]

    def _symbols_for_backward(self, saved: list[Value]) -> list[Value]:
        """Numbers that bind the symbolic sizes backward mentions."""
        used: set[str] = set()
        for eqn in self.trace.equations if self.trace.symbols else ():
            if eqn in self.needed:
                used |= symbols_in((eqn.args, eqn.kwargs))
        keep: list[Value] = []
        for symbol in sorted(used):
            if symbol not in self.trace.symbols:
                continue
            v, dim = self.trace.symbols[symbol]
            if v in saved or v in keep:
                continue
            keep.append(v if dim is None else Value(symbol, ScalarType(int)))  # a dimension is handed over as a number
        return keep

    def _sizes(self, handed: list[Value]) -> list[Equation]:
        """Sizes handed over that are no values of the program yet."""
        where = {v: self.trace.symbols[v.name] for v in handed if v not in self.maker and v not in self.primals}
        return [Equation(NUMBER, (of.shape[dim],), {}, (v,)) for v, (of, dim) in where.items()]  # type: ignore[index]

    def backward_equations(self, saved: list[Value]) -> list[Equation]:
        have = {*saved, *self.cts, *self.trace.constants}
        chosen = {e for e in self.late if has_effect(e)}
        wanted = [v for v in (*values_in(self.grads), *(v for e in chosen for v in e.inputs())) if v not in have]
        while wanted:
            v = wanted.pop()
            eqn = self.maker.get(v)
            if v in have or eqn is None or eqn in chosen:
                continue
            chosen.add(eqn)
            wanted += [x for x in eqn.inputs() if x not in have]
        early = [e for e in self.trace.equations if e in chosen and e not in self.late]
        return _near_their_use(early, [e for e in self.trace.equations if e in chosen and e in self.late])

    def _forward_equations(self, results: list) -> list[Equation]:
        rest = [e for e in self.trace.equations if e not in self.late]
        numbers = [r.name for r in results if isinstance(r, Value)]
        return self._leading_to([*results, *self.trace.mutations.values()], rest, self.early, numbers)


def _near_their_use(early: list[Equation], late: list[Equation]) -> list[Equation]:
    """Recomputed equations run just before the first backward equation that wants them."""
    maker = {v: e for e in early for v in e.results()}
    order: list[Equation] = []
    placed: set[Equation] = set()

    def place(eqn: Equation) -> None:
        stack = [(eqn, False)]
        while stack:
            e, ready = stack.pop()
            if e in placed:
                continue
            if ready:
                placed.add(e)
                order.append(e)
                continue
            stack.append((e, True))
            stack += [(maker[v], False) for v in e.inputs() if v in maker]

    for eqn in late:
        place(eqn)
    for eqn in early:
        place(eqn)
    return order


def nbytes(v: Value) -> int:
    return v.type.nbytes() if isinstance(v.type, TensorType) else 8
