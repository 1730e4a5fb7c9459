"""What the operators of StableHLO mean, family by family: small programs and the numbers they give."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("jaxlib")

from tessera.frontends.stablehlo import operators  # noqa: E402,F401
from tessera.frontends.stablehlo.capture import Imported  # noqa: E402
from tessera.frontends.stablehlo.parse import parse  # noqa: E402
from tessera.frontends.stablehlo.registry import NoMeaningError  # noqa: E402


def run(text: str, *args: torch.Tensor) -> list:
    return Imported(parse(text)).run(*args)


def binary(op: str, kind: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    t = f"tensor<{a.numel()}x{kind}>"
    text = f"func.func @main(%a: {t}, %b: {t}) -> {t} {{ %0 = stablehlo.{op} %a, %b : {t}\n return %0 : {t} }}"
    return run(text, a, b)[0]


def unary(op: str, kind: str, a: torch.Tensor, out: str | None = None) -> torch.Tensor:
    t, r = f"tensor<{a.numel()}x{kind}>", f"tensor<{a.numel()}x{out or kind}>"
    text = f"func.func @main(%a: {t}) -> {r} {{ %0 = {op} %a : ({t}) -> {r}\n return %0 : {r} }}"
    return run(text, a)[0]


# --- integers ---


def test_division_truncates_and_has_a_quotient_by_zero() -> None:
    a, b = torch.tensor([7, -7, 5, -(2**31)], dtype=torch.int32), torch.tensor([2, 2, 0, -1], dtype=torch.int32)
    assert binary("divide", "i32", a, b).tolist() == [3, -3, -1, -(2**31)]
    assert binary("remainder", "i32", a, b).tolist() == [1, -1, 5, 0]


@pytest.mark.parametrize(("kind", "dtype", "bits"), [("ui16", torch.uint16, 16), ("ui32", torch.uint32, 32)])
def test_unsigned_numbers_wrap(kind: str, dtype: torch.dtype, bits: int) -> None:
    top = 2**bits - 1
    a, b = torch.tensor([top, 3]).to(dtype), torch.tensor([2, 5]).to(dtype)
    assert binary("add", kind, a, b).tolist() == [1, 8]
    assert binary("subtract", kind, a, b).tolist() == [top - 2, top - 1]
    assert binary("divide", kind, a, b).tolist() == [top // 2, 0]
    assert binary("maximum", kind, a, b).tolist() == [top, 5]


def test_unsigned_numbers_of_64_bits() -> None:
    a = torch.tensor([2**64 - 1, 2**63, 10, 3], dtype=torch.uint64)
    b = torch.tensor([3, 2**63 + 1, 2**64 - 2, 0], dtype=torch.uint64)
    assert binary("divide", "ui64", a, b).tolist() == [(2**64 - 1) // 3, 0, 0, 2**64 - 1]
    assert binary("minimum", "ui64", a, b).tolist() == [3, 2**63, 10, 0]
    assert unary("stablehlo.convert", "ui64", a, "f64").tolist()[:2] == [2.0**64, 2.0**63]


def test_four_bits() -> None:
    a, b = torch.tensor([7, -8], dtype=torch.int8), torch.tensor([1, -1], dtype=torch.int8)
    assert binary("add", "i4", a, b).tolist() == [-8, 7]


@pytest.mark.parametrize(("op", "expected"), [
    ("shift_left", [-2, 0, 0]), ("shift_right_arithmetic", [-1, 0, -1]), ("shift_right_logical", [127, 0, 0]),
])  # fmt: skip
def test_shifts(op: str, expected: list[int]) -> None:
    a, b = torch.tensor([-1, 1, -1], dtype=torch.int8), torch.tensor([1, 8, 9], dtype=torch.int8)
    assert binary(op, "i8", a, b).tolist() == expected


def test_bits_are_counted() -> None:
    a = torch.tensor([0, 1, -1, 16], dtype=torch.int16)
    assert unary("stablehlo.popcnt", "i16", a).tolist() == [0, 1, 16, 1]
    assert unary("stablehlo.count_leading_zeros", "i16", a).tolist() == [16, 15, 0, 11]


def test_powers_of_integers() -> None:
    a, b = torch.tensor([2, -1, 3, 2]), torch.tensor([10, -3, 0, -1])
    assert binary("power", "i64", a, b).tolist() == [1024, -1, 1, 0]


# --- floats ---


def test_floats_become_integers_within_their_range() -> None:
    a = torch.tensor([1.9, -1.9, 1e20, -1e20, math.nan])
    assert unary("stablehlo.convert", "f32", a, "i32").tolist() == [1, -1, 2**31 - 1, -(2**31), 0]
    assert unary("stablehlo.convert", "f32", a, "ui8").tolist() == [1, 0, 255, 0, 0]


def test_narrow_floats_are_rounded() -> None:
    a = torch.tensor([1.06, 17.0, 1e4, 0.3])
    eight = unary("stablehlo.convert", "f32", a, "f8E4M3FN")
    assert eight.dtype == torch.float8_e4m3fn
    assert eight.float().tolist()[:2] == [1.0, 16.0] and math.isnan(eight.float()[2])
    assert unary("stablehlo.convert", "f32", a, "f4E2M1FN").tolist() == [1.0, 6.0, 6.0, 0.5]


def test_halves_round_both_ways() -> None:
    a = torch.tensor([0.5, 1.5, -2.5])
    assert unary("stablehlo.round_nearest_even", "f32", a).tolist() == [0.0, 2.0, -2.0]
    assert unary("stablehlo.round_nearest_afz", "f32", a).tolist() == [1.0, 2.0, -3.0]


def test_reduce_precision() -> None:
    text = """func.func @main(%a: tensor<3xf32>) -> tensor<3xf32> {
      %0 = stablehlo.reduce_precision %a, format = e5m2 : tensor<3xf32>
      return %0 : tensor<3xf32> }"""
    assert run(text, torch.tensor([1.1, 1e6, 1e-9]))[0].tolist() == [1.0, math.inf, 0.0]


def test_total_order() -> None:
    text = """func.func @main(%a: tensor<3xf32>, %b: tensor<3xf32>) -> tensor<3xi1> {
      %0 = stablehlo.compare LT, %a, %b, TOTALORDER : (tensor<3xf32>, tensor<3xf32>) -> tensor<3xi1>
      return %0 : tensor<3xi1> }"""
    a, b = torch.tensor([-0.0, 1.0, math.inf]), torch.tensor([0.0, 1.0, math.nan])
    assert run(text, a, b)[0].tolist() == [True, False, True]


@pytest.mark.parametrize(("op", "reference"), [
    ("chlo.lgamma", torch.lgamma), ("chlo.digamma", torch.digamma), ("chlo.erf", torch.erf),
    ("stablehlo.cbrt", lambda x: x.double().abs().pow(1 / 3).copysign(x.double()).float()),
    ("stablehlo.logistic", torch.sigmoid), ("chlo.asinh", torch.asinh),
])  # fmt: skip
def test_functions(op: str, reference) -> None:  # noqa: ANN001
    x = torch.tensor([0.3, 1.7, 4.0, 9.5])
    text = f"""func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {{
      %0 = {op} %a : tensor<4xf32> {"-> tensor<4xf32>" if op.startswith("chlo") else ""}
      return %0 : tensor<4xf32> }}"""
    torch.testing.assert_close(run(text, x)[0], reference(x))


def test_bits_as_another_type() -> None:
    text = """func.func @main(%a: tensor<2xf32>) -> (tensor<2xi32>, tensor<2x4xui8>) {
      %0 = stablehlo.bitcast_convert %a : (tensor<2xf32>) -> tensor<2xi32>
      %1 = stablehlo.bitcast_convert %a : (tensor<2xf32>) -> tensor<2x4xui8>
      return %0, %1 : tensor<2xi32>, tensor<2x4xui8> }"""
    whole, parts = run(text, torch.tensor([1.0, -2.0]))
    assert whole.tolist() == [0x3F800000, -0x40000000] and parts[0].tolist() == [0, 0, 0x80, 0x3F]


# --- products, convolutions, windows ---


def test_dot_general_over_several_dimensions() -> None:
    text = """func.func @main(%a: tensor<2x3x4x5xf32>, %b: tensor<5x2x6x3xf32>) -> tensor<2x4x6xf32> {
      %0 = stablehlo.dot_general %a, %b, batching_dims = [0] x [1], contracting_dims = [1, 3] x [3, 0]
        : (tensor<2x3x4x5xf32>, tensor<5x2x6x3xf32>) -> tensor<2x4x6xf32>
      return %0 : tensor<2x4x6xf32> }"""
    a, b = torch.randn(2, 3, 4, 5), torch.randn(5, 2, 6, 3)
    torch.testing.assert_close(run(text, a, b)[0], torch.einsum("bijk,kbni->bjn", a, b))


def test_convolution_with_everything() -> None:
    text = """func.func @main(%x: tensor<2x7x6x4xf32>, %w: tensor<3x2x2x6xf32>) -> tensor<2x7x5x6xf32> {
      %0 = stablehlo.convolution(%x, %w) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f],
        window = {stride = [2, 1], pad = [[2, 1], [-1, 1]], lhs_dilate = [2, 1],
          rhs_dilate = [1, 1], reverse = [true, false]}
        {batch_group_count = 1 : i64, feature_group_count = 2 : i64}
        : (tensor<2x7x6x4xf32>, tensor<3x2x2x6xf32>) -> tensor<2x7x5x6xf32>
      return %0 : tensor<2x7x5x6xf32> }"""
    x, w = torch.randn(2, 7, 6, 4), torch.randn(3, 2, 2, 6)
    spread = torch.zeros(2, 4, 13, 6)
    spread[:, :, ::2] = x.permute(0, 3, 1, 2)
    padded = torch.nn.functional.pad(spread, (-1, 1, 2, 1))
    expected = torch.conv2d(padded, w.permute(3, 2, 0, 1).flip(2), None, (2, 1), groups=2)
    torch.testing.assert_close(run(text, x, w)[0], expected.permute(0, 2, 3, 1), atol=1e-5, rtol=1e-5)


def test_convolution_of_integers_and_batch_groups() -> None:
    text = """func.func @main(%x: tensor<4x2x5xi32>, %w: tensor<6x2x3xi32>) -> tensor<2x6x3xi32> {
      %0 = stablehlo.convolution(%x, %w) dim_numbers = [b, f, 0]x[o, i, 0]->[b, f, 0], window = {}
        {batch_group_count = 2 : i64, feature_group_count = 1 : i64}
        : (tensor<4x2x5xi32>, tensor<6x2x3xi32>) -> tensor<2x6x3xi32>
      return %0 : tensor<2x6x3xi32> }"""
    x, w = torch.randint(-5, 5, (4, 2, 5), dtype=torch.int32), torch.randint(-5, 5, (6, 2, 3), dtype=torch.int32)
    halves = [torch.conv1d(x[2 * g : 2 * g + 2].double(), w[3 * g : 3 * g + 3].double()) for g in (0, 1)]
    assert torch.equal(run(text, x, w)[0], torch.cat(halves, 1).int())


def window(body: str, init: str) -> str:
    return f"""func.func @main(%x: tensor<5x30xf32>) -> tensor<3x9xf32> {{
      %i = stablehlo.constant dense<{init}> : tensor<f32>
      %0 = "stablehlo.reduce_window"(%x, %i) <{{window_dimensions = array<i64: 2, 10>,
        window_strides = array<i64: 2, 3>,
        padding = dense<[[0, 1], [3, 3]]> : tensor<2x2xi64>}}> ({{
        ^bb0(%a: tensor<f32>, %b: tensor<f32>): {body}
        stablehlo.return %r : tensor<f32> }}) : (tensor<5x30xf32>, tensor<f32>) -> tensor<3x9xf32>
      return %0 : tensor<3x9xf32> }}"""


def test_windows_with_known_and_other_bodies() -> None:
    x = torch.rand(5, 30)
    padded = torch.nn.functional.pad(x, (3, 3, 0, 1)).unfold(0, 2, 2).unfold(1, 10, 3).flatten(2)
    total = run(window("%r = stablehlo.add %a, %b : tensor<f32>", "0.0"), x)[0]
    torch.testing.assert_close(total, padded.sum(-1))
    either = "%s = stablehlo.add %a, %b : tensor<f32> %p = stablehlo.multiply %a, %b : tensor<f32>"
    noisy = run(window(f"{either} %r = stablehlo.subtract %s, %p : tensor<f32>", "0.0"), x)[0]
    torch.testing.assert_close(noisy, 1 - (1 - padded).prod(-1))


def test_reduce_of_pairs_keeps_the_first_largest() -> None:
    text = """func.func @main(%x: tensor<3x5xf32>) -> (tensor<3xf32>, tensor<3xi32>) {
      %i = stablehlo.iota dim = 1 : tensor<3x5xi32>
      %low = stablehlo.constant dense<0xFF800000> : tensor<f32>
      %zero = stablehlo.constant dense<0> : tensor<i32>
      %0:2 = stablehlo.reduce(%x init: %low), (%i init: %zero) across dimensions = [1]
        : (tensor<3x5xf32>, tensor<3x5xi32>, tensor<f32>, tensor<i32>) -> (tensor<3xf32>, tensor<3xi32>)
        reducer(%a: tensor<f32>, %c: tensor<f32>) (%b: tensor<i32>, %d: tensor<i32>) {
          %gt = stablehlo.compare GT, %a, %c : (tensor<f32>, tensor<f32>) -> tensor<i1>
          %eq = stablehlo.compare EQ, %a, %c : (tensor<f32>, tensor<f32>) -> tensor<i1>
          %lt = stablehlo.compare LT, %b, %d : (tensor<i32>, tensor<i32>) -> tensor<i1>
          %tie = stablehlo.and %eq, %lt : tensor<i1>
          %first = stablehlo.or %gt, %tie : tensor<i1>
          %v = stablehlo.select %first, %a, %c : tensor<i1>, tensor<f32>
          %w = stablehlo.select %first, %b, %d : tensor<i1>, tensor<i32>
          stablehlo.return %v, %w : tensor<f32>, tensor<i32> }
      return %0#0, %0#1 : tensor<3xf32>, tensor<3xi32> }"""
    x = torch.tensor([[1.0, 3, 3, 2, 0], [5, 5, 5, 5, 5], [0, 1, 2, 3, 4]])
    values, places = run(text, x)
    assert values.tolist() == [3, 5, 4] and places.tolist() == [1, 0, 4]


# --- indexing and sorting ---


def test_gather_moves_starts_inside() -> None:
    text = """func.func @main(%x: tensor<4x5xf32>, %i: tensor<3x2xi32>) -> tensor<3x2x2xf32> {
      %0 = "stablehlo.gather"(%x, %i) <{dimension_numbers = #stablehlo.gather<offset_dims = [1, 2],
        start_index_map = [0, 1], index_vector_dim = 1>, slice_sizes = array<i64: 2, 2>}>
        : (tensor<4x5xf32>, tensor<3x2xi32>) -> tensor<3x2x2xf32>
      return %0 : tensor<3x2x2xf32> }"""
    x = torch.arange(20.0).reshape(4, 5)
    out = run(text, x, torch.tensor([[0, 0], [9, 9], [-3, 2]], dtype=torch.int32))[0]
    assert torch.equal(out, torch.stack([x[0:2, 0:2], x[2:4, 3:5], x[0:2, 2:4]]))


def scatter(body: str) -> str:
    return f"""func.func @main(%x: tensor<5xf32>, %i: tensor<4x1xi64>, %u: tensor<4xf32>) -> tensor<5xf32> {{
      %0 = "stablehlo.scatter"(%x, %i, %u) <{{scatter_dimension_numbers = #stablehlo.scatter<
        inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}}> ({{
        ^bb0(%a: tensor<f32>, %b: tensor<f32>): {body}
        stablehlo.return %r : tensor<f32> }}) : (tensor<5xf32>, tensor<4x1xi64>, tensor<4xf32>) -> tensor<5xf32>
      return %0 : tensor<5xf32> }}"""


def test_scatter_leaves_out_what_is_outside() -> None:
    x, at, u = torch.ones(5), torch.tensor([[0], [7], [0], [-1]]), torch.tensor([2.0, 3, 4, 5])
    assert run(scatter("%r = stablehlo.add %a, %b : tensor<f32>"), x, at, u)[0].tolist() == [7, 1, 1, 1, 1]
    assert run(scatter("%r = stablehlo.maximum %a, %b : tensor<f32>"), x, at, u)[0].tolist() == [4, 1, 1, 1, 1]
    half = "%s = stablehlo.add %a, %b : tensor<f32> %r = stablehlo.multiply %s, %b : tensor<f32>"
    assert run(scatter(half), x, at, u)[0].tolist() == [((1 + 2) * 2 + 4) * 4, 1, 1, 1, 1]


def test_sort_by_any_comparison() -> None:
    text = """func.func @main(%x: tensor<7xf32>, %y: tensor<7xi32>) -> (tensor<7xf32>, tensor<7xi32>) {
      %0:2 = "stablehlo.sort"(%x, %y) <{dimension = 0 : i64, is_stable = true}> ({
        ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<i32>, %d: tensor<i32>):
        %lt = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
        %eq = stablehlo.compare EQ, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
        %gt = stablehlo.compare GT, %c, %d : (tensor<i32>, tensor<i32>) -> tensor<i1>
        %tie = stablehlo.and %eq, %gt : tensor<i1>
        %r = stablehlo.or %lt, %tie : tensor<i1>
        stablehlo.return %r : tensor<i1> }) : (tensor<7xf32>, tensor<7xi32>) -> (tensor<7xf32>, tensor<7xi32>)
      return %0#0, %0#1 : tensor<7xf32>, tensor<7xi32> }"""
    x, y = torch.tensor([2.0, 1, 2, 0, 1, 1, 2]), torch.arange(7, dtype=torch.int32)
    keys, places = run(text, x, y)
    assert keys.tolist() == [0, 1, 1, 1, 2, 2, 2] and places.tolist() == [3, 5, 4, 1, 6, 2, 0]


def test_select_and_scatter_is_the_gradient_of_a_max_pool() -> None:
    text = """func.func @main(%x: tensor<1x6xf32>, %s: tensor<1x3xf32>) -> tensor<1x6xf32> {
      %z = stablehlo.constant dense<0.0> : tensor<f32>
      %0 = "stablehlo.select_and_scatter"(%x, %s, %z) <{window_dimensions = array<i64: 1, 2>,
        window_strides = array<i64: 1, 2>}> ({
        ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %r = stablehlo.compare GE, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %r : tensor<i1> }, {
        ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %r = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %r : tensor<f32> }) : (tensor<1x6xf32>, tensor<1x3xf32>, tensor<f32>) -> tensor<1x6xf32>
      return %0 : tensor<1x6xf32> }"""
    x, ct = torch.randn(1, 6, requires_grad=True), torch.randn(1, 3)
    torch.nn.functional.max_pool1d(x, 2).backward(ct)
    assert torch.equal(run(text, x.detach(), ct)[0], x.grad)


# --- the rest ---


def test_map_of_a_body_with_a_loop_runs_element_by_element() -> None:
    text = """func.func @main(%x: tensor<3xi32>) -> tensor<3xi32> {
      %0 = "stablehlo.map"(%x) <{dimensions = array<i64: 0>}> ({
        ^bb0(%a: tensor<i32>):
        %one = stablehlo.constant dense<1> : tensor<i32>
        %lim = stablehlo.constant dense<100> : tensor<i32>
        %w = stablehlo.while(%c = %a) : tensor<i32>
          cond { %t = stablehlo.compare LT, %c, %lim : (tensor<i32>, tensor<i32>) -> tensor<i1>
                 stablehlo.return %t : tensor<i1> }
          do { %n = stablehlo.add %c, %c : tensor<i32>
               %m = stablehlo.add %n, %one : tensor<i32>
               stablehlo.return %m : tensor<i32> }
        stablehlo.return %w : tensor<i32> }) : (tensor<3xi32>) -> tensor<3xi32>
      return %0 : tensor<3xi32> }"""
    assert run(text, torch.tensor([1, 50, 200], dtype=torch.int32))[0].tolist() == [127, 101, 200]


def test_quantized_numbers() -> None:
    q, r = "!quant.uniform<i8:f32, 0.5:3>", "!quant.uniform<i8:f32:0, {0.5,0.25:1}>"
    text = f"""func.func @main(%x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {{
      %0 = stablehlo.uniform_quantize %x : (tensor<2xf32>) -> tensor<2x{q}>
      %1 = stablehlo.add %0, %0 : tensor<2x{q}>
      %2 = stablehlo.uniform_dequantize %1 : (tensor<2x{q}>) -> tensor<2xf32>
      %3 = stablehlo.uniform_quantize %x : (tensor<2xf32>) -> tensor<2x{r}>
      %4 = stablehlo.uniform_dequantize %3 : (tensor<2x{r}>) -> tensor<2xf32>
      return %2, %4 : tensor<2xf32>, tensor<2xf32> }}"""
    twice, along = run(text, torch.tensor([1.1, 60.0]))
    assert twice.tolist() == [2.0, 62.0] and along.tolist() == [1.0, 31.5]


def test_fourier_and_triangular_systems() -> None:
    text = """func.func @main(%x: tensor<8xf32>, %a: tensor<3x3xf32>, %b: tensor<3x2xf32>)
        -> (tensor<8xf32>, tensor<3x2xf32>) {
      %0 = stablehlo.fft %x, type = RFFT, length = [8] : (tensor<8xf32>) -> tensor<5xcomplex<f32>>
      %1 = stablehlo.fft %0, type = IRFFT, length = [8] : (tensor<5xcomplex<f32>>) -> tensor<8xf32>
      %2 = "stablehlo.triangular_solve"(%a, %b) <{left_side = true, lower = true, unit_diagonal = false,
        transpose_a = #stablehlo<transpose NO_TRANSPOSE>}> : (tensor<3x3xf32>, tensor<3x2xf32>) -> tensor<3x2xf32>
      return %1, %2 : tensor<8xf32>, tensor<3x2xf32> }"""
    x, a, b = torch.randn(8), torch.randn(3, 3) + 3 * torch.eye(3), torch.randn(3, 2)
    same, solved = run(text, x, a, b)
    torch.testing.assert_close(same, x)
    torch.testing.assert_close(a.tril() @ solved, b)


def test_a_transform_of_no_rows() -> None:
    text = """func.func @main(%x: tensor<0x8xf32>) -> tensor<0x5xcomplex<f32>> {
      %0 = stablehlo.fft %x, type = RFFT, length = [8] : (tensor<0x8xf32>) -> tensor<0x5xcomplex<f32>>
      return %0 : tensor<0x5xcomplex<f32>> }"""
    (out,) = run(text, torch.randn(0, 8))
    assert out.shape == (0, 5) and out.dtype == torch.complex64


def test_what_has_no_meaning_is_refused_by_name() -> None:
    text = """func.func @main(%t: tensor<f32>) -> tensor<ui32> {
      %0 = stablehlo.partition_id : tensor<ui32>
      return %0 : tensor<ui32> }"""
    with pytest.raises(NoMeaningError, match="partition_id"):
        run(text, torch.tensor(1.0))
    call = """func.func @main(%t: tensor<f32>) -> tensor<f32> {
      %0 = stablehlo.custom_call @nobody_knows(%t) : (tensor<f32>) -> tensor<f32>
      return %0 : tensor<f32> }"""
    with pytest.raises(NoMeaningError, match="nobody_knows.*register"):
        run(call, torch.tensor(1.0))
