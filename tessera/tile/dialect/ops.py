"""The tile dialect: what a fused kernel computes, before anything is said about how.

A kernel is a set of named axes, parallel ones and reduced ones, and a straight-line body over *values*. A value
varies over some of the axes: `!tile.value<f32, ["i", "r"]>` has one element for every (i, r). Elementwise
operators broadcast by axis name; `reduce` removes an axis: the reduced one, or, for sums that are only finished and
stored, one parallel axis, which is then *sequential*: whoever runs the kernel loops along it. Memory is reached only
by `load` and `store`, at an element offset that is an index expression over axes, symbols (sizes, one index argument
of the kernel each, in order) and, for gathers, integer values `_0`, `_1`, …. Blocks, loops, threads and masks come
later, from a Schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import (
    AnyFloat,
    ArrayAttr,
    FloatAttr,
    IndexType,
    IntegerAttr,
    IntegerType,
    StringAttr,
)
from xdsl.ir import (
    Block,
    Dialect,
    Operation,
    Region,
    SSAValue,
)
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.traits import IsolatedFromAbove, NoTerminator, Pure
from xdsl.utils.exceptions import VerifyException

from tessera.tile.dialect.functions import FUNCTIONS
from tessera.tile.dialect.index import Index
from tessera.tile.dialect.types import (
    I1,
    I64,
    AxisAttr,
    BufferType,
    IndexAttr,
    ValueType,
    axes_of,
    element_of,
    value_type,
)

PARALLEL, REDUCE = "parallel", "reduce"
REDUCTIONS = ("sum", "prod", "max", "min", "any", "all", "argmax", "argmin")
SCANS = ("sum", "prod", "max", "min")


@irdl_op_definition
class KernelOp(IRDLOperation):
    """A kernel. Block arguments: buffers first, then one index per symbol."""

    name = "tile.kernel"
    sym_name = prop_def(StringAttr)
    axes = prop_def(ArrayAttr[AxisAttr])
    symbol_names = prop_def(ArrayAttr[StringAttr])
    body = region_def("single_block")
    traits = traits_def(NoTerminator(), IsolatedFromAbove())

    def __init__(self, name: str, axes: Sequence[AxisAttr], symbols: Sequence[str], body: Region) -> None:
        names = ArrayAttr([StringAttr(s) for s in symbols])
        properties = {"sym_name": StringAttr(name), "axes": ArrayAttr(axes), "symbol_names": names}
        super().__init__(properties=properties, regions=[body])

    @property
    def block(self) -> Block:
        return self.body.block

    @property
    def buffers(self) -> list[SSAValue]:
        return [a for a in self.block.args if isinstance(a.type, BufferType)]

    @property
    def symbols(self) -> list[SSAValue]:
        return [a for a in self.block.args if isinstance(a.type, IndexType)]

    def axis_names(self, kind: str | None = None) -> tuple[str, ...]:
        return tuple(a.axis.data for a in self.axes if kind is None or a.kind.data == kind)

    def axis(self, name: str) -> AxisAttr:
        return next(a for a in self.axes if a.axis.data == name)

    @property
    def sequential_axis(self) -> str | None:
        """The parallel axis along which something is summed: whoever runs the kernel goes along it in a loop."""
        for op in self.block.ops:
            if isinstance(op, ReduceOp) and self.axis(op.axis.data).kind.data == PARALLEL:
                return op.axis.data
        return None

    def sums_along(self, axis: str) -> list[ReduceOp]:
        return [op for op in self.block.ops if isinstance(op, ReduceOp) and op.axis.data == axis]

    def verify_(self) -> None:
        names = self.axis_names()
        if len(set(names)) != len(names):
            raise VerifyException(f"axes must have different names, got {names}")
        for a in self.axes:
            if a.kind.data not in (PARALLEL, REDUCE):
                raise VerifyException(f"axis {a.axis.data}: expected parallel or reduce, got {a.kind.data}")
            _check_names(f"the size of axis {a.axis.data}", a.size, {s.data for s in self.symbol_names})
        if len(self.symbol_names) != len(self.symbols):
            raise VerifyException(f"expected one index argument per symbol {self.symbol_names}")
        args = list(self.block.args)
        kinds = [isinstance(a.type, IndexType) for a in args]
        if kinds != sorted(kinds) or not all(isinstance(a.type, (BufferType, IndexType)) for a in args):
            raise VerifyException("expected buffers, then index symbols, as arguments of a kernel")
        for op in self.block.ops:
            for result in op.results:
                if isinstance(result.type, ValueType):
                    _check_axes(op, result.type.axis_names, names)
        _check_sequential(self)


def _check_axes(op: Operation, axes: tuple[str, ...], known: tuple[str, ...]) -> None:
    order = [known.index(a) if a in known else -1 for a in axes]
    if -1 in order or order != sorted(set(order)):
        raise VerifyException(f"{op.name}: a value varies over {axes}; expected some of {known}, in that order")


def _check_sequential(kernel: KernelOp) -> None:
    """What is summed along a parallel axis is a row of sums; nothing that varies along that axis may wait for it."""
    along = kernel.sequential_axis
    if along is None:
        return
    row = kernel.axis_names(REDUCE)
    done: set[SSAValue] = set()
    for op in kernel.block.ops:
        if isinstance(op, ReduceOp) and kernel.axis(op.axis.data).kind.data == PARALLEL:
            wide = isinstance(e := element_of(op.arg), (AnyFloat, IntegerType)) and e.bitwidth >= 32
            if op.axis.data != along or op.kind.data != "sum" or not row or row[0] not in axes_of(op.arg) or not wide:
                raise VerifyException(f"tile.reduce: expected a sum of rows of 32 or 64 bits along {along}, got {op}")
            done.add(op.result)
        elif done & set(op.operands):
            used = {a for v in op.operands if isinstance(v.type, ValueType) for a in axes_of(v)}
            used |= op.at.expr.names() if isinstance(op, (LoadOp, StoreOp, IotaOp)) else set()
            if along in used or isinstance(op, (ReduceOp, ScanOp, ContractOp)):
                raise VerifyException(f"{op.name}: a sum along {along} may only be finished and stored")
            done.update(op.results)


def _kernel_of(op: Operation) -> KernelOp:
    parent = op.parent_op()
    if not isinstance(parent, KernelOp):
        raise VerifyException(f"{op.name} stands outside a tile.kernel")
    return parent


def _check_at(op: Operation, at: IndexAttr, indices: Sequence[SSAValue]) -> set[str]:
    """The axes that an index expression walks, itself or by way of gathered values."""
    kernel = _kernel_of(op)
    known = {*kernel.axis_names(), *(s.data for s in kernel.symbol_names), *(f"_{i}" for i in range(len(indices)))}
    _check_names(op.name, at, known)
    for v in indices:
        if not isinstance(e := element_of(v), IntegerType) or e == I1:
            raise VerifyException(f"{op.name}: expected an integer as an index, got {v.type}")
    return at.expr.names() & set(kernel.axis_names()) | _axes(indices)


def _check_names(where: str, at: IndexAttr, known: set[str]) -> None:
    try:
        unknown = at.expr.names() - known
    except ValueError as error:
        raise VerifyException(f"{where}: {error}") from None
    if unknown:
        raise VerifyException(f"{where}: {sorted(unknown)} in {at.text.data!r}; known are {sorted(known)}")


def _axes(values: Sequence[SSAValue]) -> set[str]:
    return {a for v in values for a in axes_of(v)}


def _check_covers(op: Operation, result: SSAValue, used: set[str]) -> None:
    """A result has an element for every point at which it was computed."""
    if lost := used - set(axes_of(result)):
        raise VerifyException(
            f"{op.name}: the result varies over {axes_of(result)}, but is made along {sorted(lost)} too"
        )


def _check_mask(op: Operation, mask: SSAValue | None) -> list[SSAValue]:
    if mask is not None and element_of(mask) != I1:
        raise VerifyException(f"{op.name}: expected a mask of i1, got {mask.type}")
    return [] if mask is None else [mask]


def _check_kind(op: Operation, kind: StringAttr, known: Sequence[str]) -> None:
    if kind.data not in known:
        raise VerifyException(f"{op.name}: expected one of {', '.join(known)}, got {kind.data}")


def axes_used(names: tuple[str, ...], expr: Index, values: Sequence[SSAValue]) -> tuple[str, ...]:
    """Axes that an expression, or the values beside it, vary over, in the kernel's order."""
    used = set(expr.names())
    for v in values:
        used |= set(axes_of(v))
    return tuple(n for n in names if n in used)


@irdl_op_definition
class LoadOp(IRDLOperation):
    """Elements of a buffer at `at`; where `mask` is false, `other` (zero if not given)."""

    name = "tile.load"
    buffer = operand_def(BufferType)
    indices = var_operand_def(ValueType)
    mask = opt_operand_def(ValueType)
    other = opt_operand_def(ValueType)
    at = prop_def(IndexAttr)
    result = result_def(ValueType)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def()

    def verify_(self) -> None:
        used = _check_at(self, self.at, self.indices) | _axes(_check_mask(self, self.mask))
        if element_of(self.result) != element_of(self.buffer):
            raise VerifyException("tile.load: the result has the buffer's element type")
        if self.other is not None and element_of(self.other) != element_of(self.result):
            raise VerifyException(f"tile.load: expected other to be {element_of(self.result)}, got {self.other.type}")
        _check_covers(self, self.result, used | _axes([self.other] if self.other is not None else []))


@irdl_op_definition
class StoreOp(IRDLOperation):
    """Write a value to a buffer at `at`, where `mask` holds. `mode`: "set", "add" (atomic)."""

    name = "tile.store"
    value = operand_def(ValueType)
    buffer = operand_def(BufferType)
    indices = var_operand_def(ValueType)
    mask = opt_operand_def(ValueType)
    at = prop_def(IndexAttr)
    mode = prop_def(StringAttr)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)

    def verify_(self) -> None:
        _check_at(self, self.at, self.indices)
        _check_mask(self, self.mask)
        if element_of(self.value) != element_of(self.buffer):
            raise VerifyException(f"tile.store: expected {element_of(self.buffer)}, got {element_of(self.value)}")
        if self.mode.data not in ("set", "add"):
            raise VerifyException(f"tile.store: mode is set or add, got {self.mode.data}")


@irdl_op_definition
class IotaOp(IRDLOperation):
    """The integer `at` itself: positions, for masks, arange and random offsets."""

    name = "tile.iota"
    indices = var_operand_def(ValueType)
    at = prop_def(IndexAttr)
    result = result_def(ValueType)
    traits = traits_def(Pure())

    def verify_(self) -> None:
        if element_of(self.result) != I64:
            raise VerifyException(f"tile.iota: expected an i64, got {self.result.type}")
        _check_covers(self, self.result, _check_at(self, self.at, self.indices))


@irdl_op_definition
class ConstantOp(IRDLOperation):
    """A number; it varies over no axis."""

    name = "tile.constant"
    value = prop_def(IntegerAttr | FloatAttr)
    result = result_def(ValueType)
    traits = traits_def(Pure())

    def verify_(self) -> None:
        number = self.value
        assert isinstance(number, (IntegerAttr, FloatAttr))
        if self.result.type != value_type(number.type, ()):
            raise VerifyException(f"tile.constant: expected {value_type(number.type, ())}, got {self.result.type}")


@irdl_op_definition
class ApplyOp(IRDLOperation):
    """An elementwise function, by name (see `functions`); arguments broadcast by axis."""

    name = "tile.apply"
    fn = prop_def(StringAttr)
    args = var_operand_def(ValueType)
    result = result_def(ValueType)
    traits = traits_def(Pure())

    def verify_(self) -> None:
        fn = FUNCTIONS.get(self.fn.data)
        if fn is None:
            raise VerifyException(f"tile.apply: no function {self.fn.data!r}; there are {', '.join(FUNCTIONS)}")
        if len(self.args) != fn.arity:
            raise VerifyException(f"tile.apply: {fn.name} takes {fn.arity} arguments, got {len(self.args)}")
        chosen = list(self.args)[1:] if fn.name == "select" else list(self.args)
        if len({element_of(a) for a in chosen}) > 1 or (fn.name == "select" and element_of(self.args[0]) != I1):
            raise VerifyException(
                f"tile.apply: {fn.name} of {', '.join(str(a.type) for a in self.args)}; cast them first"
            )
        element = I1 if fn.predicate else element_of(chosen[-1])
        if element_of(self.result) != element:
            raise VerifyException(f"tile.apply: {fn.name} gives {element} here, got {self.result.type}")
        _check_covers(self, self.result, _axes(self.args))


@irdl_op_definition
class CastOp(IRDLOperation):
    """Convert to another element type, as PyTorch's `.to` does."""

    name = "tile.cast"
    arg = operand_def(ValueType)
    result = result_def(ValueType)
    traits = traits_def(Pure())

    def verify_(self) -> None:
        if axes_of(self.arg) != axes_of(self.result):
            raise VerifyException("tile.cast: the result varies over the argument's axes")


@irdl_op_definition
class ReduceOp(IRDLOperation):
    """Combine over one axis: sum, prod, max, min (NaN wins), any, all, argmax, argmin (first wins, i64)."""

    name = "tile.reduce"
    kind = prop_def(StringAttr)
    axis = prop_def(StringAttr)
    arg = operand_def(ValueType)
    result = result_def(ValueType)
    traits = traits_def(Pure())

    def verify_(self) -> None:
        _check_kind(self, self.kind, REDUCTIONS)
        left = tuple(a for a in axes_of(self.arg) if a != self.axis.data)
        if self.axis.data not in axes_of(self.arg) or axes_of(self.result) != left:
            raise VerifyException(
                f"tile.reduce: {self.axis.data} of {axes_of(self.arg)} leaves {left}, got {axes_of(self.result)}"
            )
        element = I64 if self.kind.data.startswith("arg") else element_of(self.arg)
        if element_of(self.result) != element:
            raise VerifyException(f"tile.reduce: {self.kind.data} gives {element} here, got {self.result.type}")


@irdl_op_definition
class ReduceExpOp(IRDLOperation):
    """The two sums of a softmax in one walk: the largest element along an axis, and the sum of fn(element - largest).

    `fn` is exp or exp2. `infinite` says what an infinite largest element is taken as in that difference: "itself"
    (the total is then NaN), or "zero", as logsumexp has it. NaN wins in both results.
    """

    name = "tile.reduce_exp"
    fn = prop_def(StringAttr)
    axis = prop_def(StringAttr)
    infinite = prop_def(StringAttr)
    arg = operand_def(ValueType)
    top = result_def(ValueType)
    total = result_def(ValueType)
    traits = traits_def(Pure())

    def verify_(self) -> None:
        left = value_type(element_of(self.arg), [a for a in axes_of(self.arg) if a != self.axis.data])
        if self.axis.data not in axes_of(self.arg) or (self.top.type, self.total.type) != (left, left):
            raise VerifyException(
                f"tile.reduce_exp: {self.axis.data} of {self.arg.type} leaves two of {left}, "
                f"got {self.top.type} and {self.total.type}"
            )
        if not isinstance(element_of(self.arg), AnyFloat):
            raise VerifyException(f"tile.reduce_exp: expected floats, got {element_of(self.arg)}")
        if self.fn.data not in ("exp", "exp2") or self.infinite.data not in ("itself", "zero"):
            raise VerifyException(
                f"tile.reduce_exp: fn is exp or exp2 and infinite is itself or zero, "
                f"got {self.fn.data} and {self.infinite.data}"
            )


@irdl_op_definition
class ScanOp(IRDLOperation):
    """Running combination along one axis: sum, prod, max, min."""

    name = "tile.scan"
    kind = prop_def(StringAttr)
    axis = prop_def(StringAttr)
    arg = operand_def(ValueType)
    result = result_def(ValueType)
    traits = traits_def(Pure())

    def verify_(self) -> None:
        _check_kind(self, self.kind, SCANS)
        if self.axis.data not in axes_of(self.arg) or self.result.type != self.arg.type:
            raise VerifyException(
                f"tile.scan: {self.axis.data} of {self.arg.type} gives just that type, got {self.result.type}"
            )


@irdl_op_definition
class ContractOp(IRDLOperation):
    """Sum over one axis of a product, on the matrix units: (m, k) by (k, n) gives (m, n), batch axes shared."""

    name = "tile.contract"
    axis = prop_def(StringAttr)
    lhs = operand_def(ValueType)
    rhs = operand_def(ValueType)
    result = result_def(ValueType)
    traits = traits_def(Pure())

    def verify_(self) -> None:
        axis = self.axis.data
        left = _axes([self.lhs, self.rhs]) - {axis}
        both = axis in axes_of(self.lhs) and axis in axes_of(self.rhs)
        if not both or set(axes_of(self.result)) != left or not isinstance(element_of(self.result), AnyFloat):
            raise VerifyException(
                f"tile.contract: {self.lhs.type} by {self.rhs.type} along {axis} gives floats over {sorted(left)}, "
                f"got {self.result.type}"
            )


@irdl_op_definition
class RandomOp(IRDLOperation):
    """32 random bits (as i64 in [0, 2^32)) for a seed and an offset; the same bits on every target.

    Philox 4x32-7 gives four words at a time, and every one of them is used: offset o is word o % 4 of the block that
    the counter o // 4 gives. The counter's four words are (low, high, 0, 0) of that 64-bit number, the key's two are
    (low, high) of the 64-bit seed. Four neighbours that one thread holds then cost one block.
    """

    name = "tile.random"
    seed = operand_def(ValueType)
    offset = operand_def(ValueType)
    result = result_def(ValueType)
    traits = traits_def(Pure())

    def verify_(self) -> None:
        if {element_of(v) for v in (self.seed, self.offset, self.result)} != {I64}:
            raise VerifyException(
                f"tile.random: expected i64 for seed, offset and result, got {self.seed.type}, {self.offset.type} "
                f"and {self.result.type}"
            )
        _check_covers(self, self.result, _axes([self.seed, self.offset]))


Tile = Dialect(
    "tile",
    [
        KernelOp, LoadOp, StoreOp, IotaOp, ConstantOp, ApplyOp, CastOp, ReduceOp, ReduceExpOp,
        ScanOp, ContractOp, RandomOp,
    ],
    [BufferType, ValueType, AxisAttr, IndexAttr],
)  # fmt: skip
