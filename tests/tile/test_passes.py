"""Passes over tile kernels: what they rewrite, what they must leave alone, and that results stay as they were."""

from __future__ import annotations

import math

import pytest
import torch
from kernels import Case, cases
from xdsl.ir import Attribute, SSAValue

from tessera.tile.dialect.build import KernelBuilder, bf16, f16, f32, f64, i1, i8, i32, i64
from tessera.tile.dialect.index import gathered
from tessera.tile.dialect.interp import run
from tessera.tile.dialect.ops import ApplyOp, KernelOp, LoadOp, StoreOp
from tessera.tile.rewrites.canonicalise import canonicalise
from tessera.tile.rewrites.cse import cse
from tessera.tile.rewrites.dce import dce
from tessera.tile.rewrites.fma import fma
from tessera.tile.rewrites.identities import TABLE
from tessera.tile.rewrites.pipeline import PASSES, optimise
from tessera.util.errors import OptionError

CASES = {case.name: case for case in cases()}


@pytest.mark.parametrize("name", CASES)
def test_optimised_kernels_store_the_same(name: str) -> None:
    case: Case = CASES[name]
    before, after = ([t.clone() for t in case.tensors] for _ in range(2))
    run(case.kernel, before, case.symbols)
    case.check(before)
    run(optimise(case.kernel.clone()), after, case.symbols)
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_every_pass_has_its_own_file() -> None:
    for name, function in PASSES.items():
        assert function.__module__ == f"tessera.tile.rewrites.{name}"


def test_an_unknown_pass_is_refused() -> None:
    with pytest.raises(
        OptionError,
        match="expected one of the passes canonicalise, cse, dce, fma, offline, one_hot, online, got 'licm'",
    ):
        optimise(CASES["pointwise-1000"].kernel.clone(), ["licm"])


class Scratch(KernelBuilder):
    """A kernel over one axis of eight with a value `x` to compute with; what is stored is what is asked about."""

    def __init__(self, element: Attribute = f32) -> None:
        super().__init__("scratch")
        self.i = self.axis("i", 8)
        self.source = self.buffer(element)
        self.x = self.load(self.source, self.i)

    def result(self, v: SSAValue) -> KernelOp:
        self.store(v, self.buffer(v.type.element), self.i)  # type: ignore[attr-defined]
        return self.finish()


def stored(kernel: KernelOp) -> SSAValue:
    return next(op for op in kernel.block.ops if isinstance(op, StoreOp)).value


def names(kernel: KernelOp) -> list[str]:
    return [op.fn.data if isinstance(op, ApplyOp) else op.name for op in kernel.block.ops]


# --- canonicalise: identities ---


@pytest.mark.parametrize(
    "fn, number, element",
    [("mul", 1, f32), ("mul", 1, i32), ("add", 0, i32), ("add", -0.0, f32), ("sub", 0, f32), ("div", 1, f32),
     ("pow", 1, f32), ("floordiv", 1, i64), ("bit_or", 0, i8), ("bit_and", -1, i8), ("logical_and", True, i1)],
)  # fmt: skip
def test_a_neutral_number_goes(fn: str, number: float, element: Attribute) -> None:
    k = Scratch(element)
    kernel = k.result(k.apply(fn, k.x, k.constant(number, element)))
    canonicalise(kernel)
    assert isinstance(stored(kernel).owner, LoadOp)


@pytest.mark.parametrize(
    "fn, number, element",
    [("add", 0.0, f32), ("sub", -0.0, f32), ("mul", 0.0, f32), ("floordiv", 1, f32), ("mul", -0.0, f32)],
)
def test_what_is_not_exact_stays(fn: str, number: float, element: Attribute) -> None:
    k = Scratch(element)
    kernel = k.result(k.apply(fn, k.x, k.constant(number, element)))
    canonicalise(kernel)
    assert isinstance(stored(kernel).owner, ApplyOp) and stored(kernel).owner.fn.data == fn


def test_every_identity_is_exact_on_the_numbers_that_break_identities() -> None:
    """Each rule's function with each special number on the right, the same value twice, and a negated value."""
    special = torch.tensor([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 1e-40])
    binary = sorted({fn for fn, _ in TABLE} - {"select", "abs", "sign", "floor", "ceil", "trunc", "round", "neg"})
    binary = [fn for fn in binary if not fn.startswith(("bit", "sh", "logical"))]
    for fn in binary:
        for number in (0.0, -0.0, 1.0, -1.0, 2.0, -4.0, 0.5, 3.0, math.inf):
            for form in ("right", "left", "same", "negated"):
                k = Scratch()
                c, n = k.constant(number, f32), k.apply("neg", k.x)
                args = {"right": (k.x, c), "left": (c, k.x), "same": (k.x, k.x), "negated": (k.x, n)}[form]
                y = k.apply(fn, *args)
                kernel = k.result(y)
                want = torch.empty(8, dtype=torch.bool if y.type.element == i1 else torch.float32)
                got = want.clone()
                run(kernel, [special, want])
                run(optimise(kernel), [special, got])
                text = f"{fn}, {number}, {form}: {want} became {got}"
                assert torch.equal(want.isnan(), got.isnan()), text
                assert torch.equal(want.nan_to_num(7), got.nan_to_num(7)), text
                assert torch.equal(want.float().signbit() | want.isnan(), got.float().signbit() | got.isnan()), text


def test_constants_are_computed() -> None:
    k = Scratch()
    two = k.apply("exp2", k.cast(k.constant(1, i32), f32))
    kernel = optimise(k.result(k.apply("mul", k.apply("sub", two, k.constant(1.0, f32)), k.x)))
    assert isinstance(stored(kernel).owner, LoadOp)


def test_division_by_zero_of_integers_is_left_for_the_machine() -> None:
    k = Scratch(i64)
    zero = k.apply("floordiv", k.constant(1, i64), k.constant(0, i64))
    kernel = k.result(k.apply("add", k.x, zero))
    canonicalise(kernel)
    assert "floordiv" in names(kernel)


@pytest.mark.parametrize(
    "number, becomes", [(8.0, "mul"), (3.0, "div"), (1e-40, "div"), (2.0**127, "div"), (-0.25, "mul")]
)
def test_division_by_a_power_of_two(number: float, becomes: str) -> None:
    k = Scratch()
    kernel = optimise(k.result(k.apply("div", k.x, k.constant(number, f32))))
    assert names(kernel)[-2] == becomes


def test_select() -> None:
    k = Scratch()
    y, c = k.apply("exp", k.x), k.apply("gt", k.x, k.constant(0.0, f32))
    chosen = k.apply("select", k.constant(True, i1), y, k.x)
    turned = k.apply("select", k.apply("logical_not", c), chosen, k.x)
    truth = k.apply("select", c, k.constant(True, i1), k.constant(False, i1))
    k.store(truth, k.buffer(i1), k.i)
    kernel = optimise(k.result(turned))
    assert stored(kernel).owner.fn.data == "gt"
    last = list(kernel.block.ops)[-1].value.owner
    assert [v.owner.fn.data if isinstance(v.owner, ApplyOp) else v.owner.name for v in last.args] == [
        "gt",
        "tile.load",
        "exp",
    ]


# --- canonicalise: casts, positions, masks ---


@pytest.mark.parametrize(
    "first, middle, last, steps",
    [(bf16, f32, bf16, 0), (f16, f32, f64, 1), (f32, bf16, f32, 2), (i64, i32, i8, 1), (i8, f32, i8, 0),
     (i32, f32, i32, 2), (i32, f64, i32, 0), (i64, i8, i32, 2), (i8, i1, i8, 2), (i1, f32, i1, 0),
     (f16, bf16, f32, 2), (i64, f64, f32, 2)],
)  # fmt: skip
def test_casts_are_joined_where_nothing_is_lost(
    first: Attribute, middle: Attribute, last: Attribute, steps: int
) -> None:
    k = Scratch(first)
    kernel = optimise(k.result(k.cast(k.cast(k.x, middle), last)))
    assert names(kernel).count("tile.cast") == steps


def test_a_constant_out_of_range_is_not_converted() -> None:
    k = Scratch(i32)
    kernel = k.result(k.apply("add", k.x, k.cast(k.constant(math.inf, f32), i32)))
    canonicalise(kernel)
    assert "tile.cast" in names(kernel)


def test_a_gather_by_positions_is_a_plain_load() -> None:
    k = Scratch()
    where = k.apply("sub", k.constant(7, i64), k.iota(k.i))
    kernel = optimise(k.result(k.load(k.source, gathered(0) * 2 + gathered(1), [where, k.iota(k.i * 0)])))
    load = stored(kernel).owner
    assert isinstance(load, LoadOp) and not load.indices and load.at.text.data == "14 + i * (-2)"


def test_positions_that_wrap_around_are_not_index_expressions() -> None:
    k = Scratch(i64)
    kernel = optimise(k.result(k.apply("mul", k.iota(k.i), k.constant(6364136223846793005, i64))))
    assert names(kernel)[-2] == "mul"


def test_a_position_that_loses_its_axis_keeps_its_type() -> None:
    k = Scratch(i64)
    nothing = k.apply("sub", k.iota(k.i), k.iota(k.i))
    kernel = optimise(k.result(nothing))
    got = torch.ones(8, dtype=torch.int64)
    run(kernel, [got.clone(), got])
    assert got.tolist() == [0] * 8


def test_masks_that_are_known() -> None:
    k = Scratch()
    always, never = k.constant(True, i1), k.constant(False, i1)
    k.store(k.load(k.source, k.i, mask=always), k.buffer(f32), k.i, mask=always)
    k.store(k.x, k.buffer(f32), k.i, mask=never)
    kernel = optimise(k.finish())
    assert names(kernel) == ["tile.load", "tile.store"]
    assert all(op.mask is None for op in kernel.block.ops)


# --- cse, dce, fma ---


def test_cse_joins_equal_operations() -> None:
    k = Scratch()
    y = k.apply("add", k.apply("exp", k.x), k.constant(1.0, f32))
    z = k.apply("add", k.constant(1.0, f32), k.apply("exp", k.load(k.source, k.i)))
    kernel = k.result(k.apply("mul", y, z))
    cse(kernel)
    dce(kernel)
    assert names(kernel) == ["tile.load", "exp", "tile.constant", "add", "mul", "tile.store"]


def test_cse_keeps_signed_zeros_and_types_apart() -> None:
    k = Scratch()
    total = k.x
    for value in (0.0, -0.0):
        total = k.apply("add", total, k.apply("div", k.constant(1.0, f32), k.constant(value, f32)))
    kernel = k.result(total)
    cse(kernel)
    assert sum(op.name == "tile.constant" for op in kernel.block.ops) == 3


def test_cse_respects_stores_to_the_same_buffer() -> None:
    k = Scratch()
    other = k.buffer(f32)
    k.store(k.apply("neg", k.x), k.source, k.i)
    k.store(k.load(k.source, k.i), other, k.i)
    kernel = optimise(k.finish())
    x, out = torch.randn(8), torch.empty(8)
    want = -x
    run(kernel, [x, out])
    assert torch.equal(out, want) and names(kernel).count("tile.load") == 2


def test_dce_removes_what_no_store_needs() -> None:
    k = Scratch()
    k.apply("exp", k.load(k.source, k.i))
    kernel = k.result(k.x)
    dce(kernel)
    assert names(kernel) == ["tile.load", "tile.store"] and len(kernel.buffers) == 2


def test_fma_joins_a_product_used_once() -> None:
    k = Scratch()
    product = k.apply("mul", k.x, k.x)
    shared = k.apply("mul", k.x, k.constant(3.0, f32))
    kernel = k.result(k.apply("add", k.apply("add", product, k.x), k.apply("exp", k.apply("add", shared, shared))))
    fma(kernel)
    assert names(kernel).count("fma") == 1 and names(kernel).count("mul") == 1
    integers = Scratch(i32)
    whole = integers.result(integers.apply("add", integers.apply("mul", integers.x, integers.x), integers.x))
    fma(whole)
    assert "fma" not in names(whole)
