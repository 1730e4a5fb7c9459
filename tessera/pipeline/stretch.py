"""A program of few equal layers made one of many.

In: a final program of the short captured program, which inputs of it belong to which layer, and how many layers are
missing. Out: the program with as many more of its repeats in the middle. Nothing is compiled: a further repeat is the
equations of the one before it over the next layer's inputs. A program that does not repeat itself as its layers do is
refused (`NotRepeated`); then the whole program has to be compiled.

Why that is right: a repeat computes, from what the one before it left and from one layer's inputs, what the next one
needs. The repeats on both sides of the cut do the same, so a layer more is a repeat more. A program may have several
runs of repeats, such as counters that are all updated in the beginning: each reads inputs that no other one reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from tessera.ir.block import Block
from tessera.ir.builder import Builder
from tessera.ir.equation import Equation, Special, Value
from tessera.ir.fake import argument_key
from tessera.ir.repeats import Repeats, Search
from tessera.ir.signature import signature
from tessera.ir.trace import Trace
from tessera.pipeline.shorten import Chain

ALIKE = 3  # repeats that must be alike


class NotRepeated(Exception):
    """The program does not repeat itself as its layers do."""


Series = tuple[tuple, int]  # what a value is in its repeat or layer, and the number of that
LAYER = -1  # in place of the number of a run: an input of a layer


class Stretched:
    """One program and what it becomes. `step` is -1 where later repeats belong to earlier layers."""

    def __init__(self, trace: Trace, chains: Sequence[Chain], gone: int, step: int) -> None:
        self.trace, self.chains, self.gone, self.step = trace, chains, gone, step
        left = [chain.left(gone) for chain in chains]
        self.where = {v: (role, i) for role, values in enumerate(left) for i, v in enumerate(values)}
        self.runs: list[_Run] = []
        self.builder: Builder | None = None
        open_ = {self.where[v][0] for eqn in trace.equations for v in eqn.inputs() if v in self.where}
        while open_:
            role = min(open_)
            run = _Run(self, trace.with_(equations=self.equations), role)
            self.runs.append(run)
            if not run.roles <= open_:
                raise NotRepeated(f"{trace.name} reads a layer's inputs in several places")
            open_ -= run.roles

    @property
    def equations(self) -> tuple[Equation, ...]:
        return self.runs[-1].equations if self.runs else self.trace.equations

    def names(self) -> Builder:
        """Who gives names that are free."""
        if self.builder is None:
            self.builder = Builder.over(self.trace)
            self.builder.reserve(v for chain in self.chains for v in chain.values)
        return self.builder

    def layer(self, role: int, i: int) -> Value:
        values = self.chains[role].values
        if not 0 <= i < len(values):
            raise NotRepeated(f"{self.trace.name} reads layers in another order than they stand in")
        return values[i]

    # --- results ---

    def series(self, v: object) -> Series | None:
        """What a result is in its repeat or layer, and in which; None where it is in none."""
        if not isinstance(v, Value):
            return None
        if v in self.where:
            role, i = self.where[v]
            return (LAYER, role), i
        for number, run in enumerate(self.runs):
            if (there := run.series(v)) is not None:
                return (number, *there[0]), there[1]
        return None

    def before(self, key: tuple) -> int:
        """How many of these stand before those that come in."""
        return self.chains[key[1]].before if key[0] == LAYER else self.runs[key[0]].middle

    def element(self, key: tuple, turn: int) -> Value:
        """What is this in a repeat, or layer, of the whole program."""
        return self.layer(key[1], turn) if key[0] == LAYER else self.runs[key[0]].element(key[1:], turn)

    def spread(self, values: Sequence[object], before: int) -> list[object]:
        """Results that belong to the layers of the short program, one each, as those of all layers."""
        if values[before - 1] is None and values[before] is None:
            return [*values[:before], *[None] * self.gone, *values[before:]]
        low, high = self.series(values[before - 1]), self.series(values[before])
        step = 1 if low is not None and low[0][0] == LAYER else self.step
        if low is None or high is None or high != (low[0], low[1] + step):
            raise NotRepeated(f"{self.trace.name} does not give of each layer the same")
        key = low[0]
        down, up = (0, self.gone) if step > 0 else (self.gone, 0)
        start = low[1] + down
        return [
            *(self._moved(v, key, down) for v in values[:before]),
            *(self.element(key, start + step * k) for k in range(1, self.gone + 1)),
            *(self._moved(v, key, up) for v in values[before:]),
        ]

    def _moved(self, v: object, key: tuple, turns: int) -> object:
        there = self.series(v)
        if there is None:
            return v  # in front of the repeats, or behind them
        if there[0] != key:
            raise NotRepeated(f"{self.trace.name} does not give of each layer the same")
        return self.element(key, there[1] + turns)


class _Run:
    """One run of repeats, and what the program becomes by it."""

    def __init__(self, whole: Stretched, trace: Trace, role: int) -> None:
        self.whole, self.trace, self.gone = whole, trace, whole.gone
        self.places = trace.places()
        self.run = self._around(role)
        self.roles = {whole.where[v][0] for v in self.run.following}
        self.middle = self.run.count // 2  # repeats before the cut
        self.cut = self.run.first + self.middle * self.run.period
        self.common = self._common()
        self.copies: list[dict[Value, Value]] = []  # of the repeat before the cut, for each further one
        self.equations = self._stretched()
        self._check_repeats()
        self._check_readers()

    def _around(self, role: int) -> Repeats:
        """The run in which each repeat reads the next layer's inputs."""
        self.numbers = [_number(eqn) for eqn in self.trace.equations]
        search = Search(self.trace, self.numbers, self._follows)
        for place, period in self._periods(role):
            run = search.around(place, period)
            if run is not None and run.count >= ALIKE and any(self.whole.where[v][0] == role for v in run.following):
                return run
        raise NotRepeated(f"{self.trace.name} has no run of equations that follows its layers")

    def _periods(self, role: int) -> Iterator[tuple[int, int]]:
        """Where a layer's input is read, and how far away that of the next one."""
        chain = self.whole.chains[role]
        low, high = chain.left(self.gone)[chain.before - 1 : chain.before + 1]
        readers: dict[Value, list[int]] = {low: [], high: []}
        for i, eqn in enumerate(self.trace.equations):
            for v in {*eqn.inputs()} & readers.keys():
                readers[v].append(i)
        for one, other in zip(readers[low], readers[high], strict=False):
            if (other - one) * self.whole.step > 0:
                yield min(one, other), abs(other - one)

    def _follows(self, x: Value, y: Value) -> bool:
        one, next_ = self.whole.where.get(x), self.whole.where.get(y)
        return one is not None and next_ is not None and next_ == (one[0], one[1] + self.whole.step)

    # --- equations ---

    def _stretched(self) -> tuple[Equation, ...]:
        equations, run, builder = self.trace.equations, self.run, self.whole.names()
        first = self._inputs_after(0)
        stretched = [_over(eqn, first) for eqn in equations[: self.cut]]
        last = equations[self.cut - run.period : self.cut]
        reads = list(dict.fromkeys(v for eqn in last for v in eqn.inputs()))
        for turn in range(1, self.gone + 1):
            names = {v: builder.value(v.name, v.type) for eqn in last for v in eqn.results()}
            self.copies.append(names)
            env = {v: self._after(v, turn) for v in reads}
            stretched += [eqn.over(env, tuple(v and names[v] for v in eqn.outputs)) for eqn in last]
        env = self._inputs_after(self.gone)
        behind = dict(env)
        for i in range(self.cut, len(equations)):
            reads = equations[i].inputs()
            if i < run.end:
                env.update({v: self._after(v, self.gone) for v in reads if v not in env})
            elif any(run.first <= self.places.get(v, -1) < self.cut for v in reads):
                raise NotRepeated(f"{self.trace.name}: {equations[i].op} reads from many layers")
            stretched.append(_over(equations[i], env if i < run.end else behind))
        return tuple(stretched)

    def _common(self) -> set[Value]:
        """What all repeats read."""
        equations, period = self.trace.equations, self.run.period
        turns = range(self.run.first, self.run.end - period)
        both = ((equations[i].inputs(), equations[i + period].inputs()) for i in turns)
        return {x for one, other in both for x, y in zip(one, other, strict=True) if x is y}

    def _inputs_after(self, turns: int) -> dict[Value, Value]:
        mine = (v for v, (role, _) in self.whole.where.items() if role in self.roles)
        moved = {v: self._after(v, turns) for v in mine}
        return {v: new for v, new in moved.items() if new is not v}

    def _after(self, v: Value, turns: int) -> Value:
        """What stands where `v` does, so many repeats later."""
        if (place := self.whole.where.get(v)) is not None:
            role, i = place
            return self.whole.layer(role, i + turns if self.whole.step > 0 else i + self.gone - turns)
        place = self.places.get(v)
        if place is None or place >= self.cut or v in self.common:
            return v
        key, turn = self._made(v, place)
        return self.element(key, turn + turns)

    def _check_repeats(self) -> None:
        """Each repeat of the whole program is like the one before it, over the next layer's inputs."""
        roles = ((role, self.whole.chains[role].values) for role in self.roles)
        where = {v: (role, i) for role, values in roles for i, v in enumerate(values)}
        last = self.numbers[self.cut - self.run.period : self.cut]
        numbers = [*self.numbers[: self.cut], *last * self.gone, *self.numbers[self.cut :]]
        trace = self.trace.with_(equations=self.equations, outputs=(), mutations={})

        def follows(x: Value, y: Value) -> bool:
            return x in where and where.get(y) == (where[x][0], where[x][1] + self.whole.step)

        run = Search(trace, numbers, follows).around(self.cut, self.run.period)
        if run is None or run.first > self.run.first or run.end < self.run.end + self.gone * self.run.period:
            raise NotRepeated(f"{self.trace.name} does not repeat itself")

    def _check_readers(self) -> None:
        """As many equations read a layer's inputs as before."""
        chains = [self.whole.chains[role] for role in self.roles]
        before = Counter(v for eqn in self.trace.equations for v in eqn.inputs() if v in self.whole.where)
        inputs = {v for chain in chains for v in chain.values}
        after = Counter(v for eqn in self.equations for v in eqn.inputs() if v in inputs)
        for chain in chains:
            left = [before[v] for v in chain.left(self.gone)]
            low, high = left[: chain.before], left[chain.before :]
            if low[-1] != high[0] or [after[v] for v in chain.values] != [*low, *[high[0]] * self.gone, *high]:
                raise NotRepeated(f"{self.trace.name} does not read each layer's inputs alike")

    # --- what they give ---

    def series(self, v: Value) -> Series | None:
        place = self.places.get(v)
        if place is None or not self.run.first <= place < self.run.end:
            return None
        return self._made(v, place)

    def _made(self, v: Value, place: int) -> Series:
        turn, offset = divmod(place - self.run.first, self.run.period)  # what the first repeat reads has the turn -1
        return (offset, self.trace.equations[place].outputs.index(v)), turn

    def element(self, key: tuple, turn: int) -> Value:
        if turn >= self.middle + self.gone:
            return self._output(turn - self.gone, *key)
        if turn < self.middle:
            return self._output(turn, *key)
        return self.copies[turn - self.middle][self._output(self.middle - 1, *key)]

    def _output(self, turn: int, offset: int, index: int) -> Value:
        v = self.trace.equations[self.run.first + turn * self.run.period + offset].outputs[index]
        assert v is not None
        return v


def _over(eqn: Equation, env: dict[Value, Value]) -> Equation:
    return eqn.substitute(env) if any(v in env for v in eqn.inputs()) else eqn


def _number(eqn: Equation) -> Hashable:
    """What a claimed equation has in common with others: the kernel that it calls, types and constants."""
    op = eqn.op
    if not isinstance(op, Special):
        return signature(eqn)
    if any(isinstance(a, Block) for a in eqn.args):
        return eqn
    reads = eqn.inputs()
    types = tuple(None if v is None else v.type.key() for v in eqn.outputs)
    same = tuple(map(reads.index, reads))
    return _callee(op), argument_key(eqn.args), argument_key(eqn.kwargs), types, eqn.many, same


def _callee(op: Special) -> Hashable:
    if op.recipe is not None:
        return op.namespace, id(op.fn if op.kernel is None else op.kernel.origin), op.recipe.over
    return op if op.of is None else (op.namespace, op.of, op.fn)
