"""Control flow, calls, and what only orders operations.

While a program is recorded, a branch or a loop whose condition is known is taken as it is known; any other becomes one
equation over sub-traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tessera.frontends.functional import control
from tessera.frontends.stablehlo.module import Block, Operation, Token
from tessera.frontends.stablehlo.registry import COMPOSITES, TABLE, Site, meaning
from tessera.frontends.stablehlo.values import Splat, Value, contents, tensor_of
from tessera.ir.record import recording
from tessera.ir.types import SYMBOLIC

UNROLLED = 16  # turns of a loop that are written one after another


# What a call runs is folded operation by operation: a loop inside it may have to be recorded.
@meaning("call", dialect="func", raw=True, storage=True, folds=False)
def call(site: Site, *operands: Value) -> list[Value]:
    return list(site.machine.call(site["callee"], operands))


@meaning("composite", raw=True, storage=True, folds=False)
def composite(site: Site, *operands: Value) -> list[Value]:
    """Whole, where torch has the operator; otherwise what it says it is made of."""
    whole = COMPOSITES.get(site["name"])
    if whole is not None:
        out = whole(site, *operands)
        if out is not NotImplemented:
            return out if isinstance(out, list) else [out]
    return list(site.machine.call(site["decomposition"], operands))


@meaning("optimization_barrier", raw=True, storage=True)
def optimization_barrier(site: Site, *operands: Value) -> list[Value]:
    return list(operands)


@meaning("after_all", "create_token", raw=True)
def after_all(site: Site, *operands: Value) -> None:
    return None


@meaning("tuple", raw=True, storage=True)
def tuple_(site: Site, *operands: Value) -> Value:
    return tuple(operands)


@meaning("get_tuple_element", raw=True, storage=True)
def get_tuple_element(site: Site, operand: tuple) -> Value:
    return operand[site["index"]]


# --- branches ---


def _branch(site: Site, place: int) -> Callable[[], tuple]:
    return lambda: _tensors(site, site.body(place)())


def _tensors(site: Site, values: Sequence[Value]) -> tuple:
    return tuple(_tensor(site, v) for v in values)


def _tensor(site: Site, value: Value) -> object:
    if isinstance(value, tuple):
        return _tensors(site, value)
    return value if value is None else tensor_of(value, site.device)


@meaning("if", raw=True, storage=True)
def if_(site: Site, pred: Value) -> list[Value]:
    known = contents(pred)
    if known is not None:
        return list(site.body(0 if bool(known.reshape(-1)[0]) else 1)())
    return list(control.cond(pred, _branch(site, 0), _branch(site, 1)))  # type: ignore[call-overload]


@meaning("case", raw=True, storage=True)
def case(site: Site, index: Value) -> list[Value]:
    """The branch of that number; the last one for numbers that have none."""
    last = len(site.operation.regions) - 1
    known = contents(index)
    if known is not None:
        place = int(known.reshape(-1)[0])
        return list(site.body(place if 0 <= place <= last else last)())
    number = tensor_of(index, site.device)

    def choose(place: int) -> tuple:
        if place == last:
            return _branch(site, last)()
        return control.cond(number == place, _branch(site, place), lambda: choose(place + 1))  # type: ignore[return-value]

    return list(choose(0))


# --- loops ---


@meaning("while", raw=True, storage=True)
def while_(site: Site, *carry: Value) -> list[Value]:
    test, body = site.body(0), site.body(1)
    if recording() is None or few_turns(site, carry):
        while bool(contents(test(*carry)[0]).reshape(-1)[0]):  # type: ignore[union-attr]
            carry = body(*carry)
        return list(carry)
    turning = changed(site.region(1))

    def full(tensors: Sequence[object]) -> list:
        """All of the carry: what the body gives back as it came stays what it was, a size a size."""
        rest = iter(tensors)
        return [next(rest) if i in turning else v for i, v in enumerate(carry)]

    def turn(*xs: object) -> tuple:
        out = body(*full(xs))
        return _tensors(site, [out[i] for i in turning])

    start = _tensors(site, [carry[i] for i in turning])
    return full(control.while_loop(lambda *xs: tensor_of(test(*full(xs))[0], site.device), turn, start))


def changed(body: Block) -> list[int]:
    """Places of the carry that the body does not give back as they came. A token says nothing."""
    pairs = zip(body.arguments, body.returns, body.types, strict=True)
    return [i for i, (a, r, t) in enumerate(pairs) if a != r and not isinstance(t, Token)]


def few_turns(site: Site, carry: Sequence[Value]) -> bool:
    """Whether the loop is known to end soon: its condition depends on numbers that are known, such as a counter."""
    test, body = site.region(0), site.region(1)
    counters = _arguments(test, set(test.returns))
    while (more := counters | _arguments(body, {body.returns[i] for i in counters})) != counters:
        counters = more
    values = {i: carry[i] for i in sorted(counters)}
    if not all(isinstance(v, Splat) for v in values.values()):
        return False
    check, turn = _slice(test, test.returns), _slice(body, [body.returns[i] for i in values])
    if not all(map(_plain, (*check.operations, *turn.operations))):
        return False
    for _ in range(UNROLLED + 1):
        given = [values.get(i) for i in range(len(carry))]
        known = contents(site.machine.block(check, given)[0])
        if known is None or isinstance(goes_on := known.reshape(-1)[0], SYMBOLIC):  # as long as an open size
            return False
        if not goes_on:
            return True
        values = dict(zip(values, site.machine.block(turn, given), strict=True))
    return False


def _plain(operation: Operation) -> bool:
    return operation.name == "stablehlo.constant" or (operation.name in TABLE and TABLE[operation.name].elementwise)


def _slice(block: Block, returns: Sequence[int]) -> Block:
    """The block with the operations that lead to these values alone."""
    needed = set(returns)
    kept = []
    for operation in reversed(block.operations):
        if needed & set(operation.results):
            kept.append(operation)
            needed |= operation.reads
    return Block(block.arguments, block.types, tuple(reversed(kept)), tuple(returns))


def _arguments(block: Block, returns: set[int]) -> set[int]:
    """Places of the arguments that these values depend on."""
    needed = set(returns)
    for operation in reversed(block.operations):
        if needed & set(operation.results):
            needed |= operation.reads
    return {i for i, a in enumerate(block.arguments) if a in needed}
