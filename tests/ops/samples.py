"""The table of samples: a few small calls of every declared operator, from which all its rules are tested.

`TABLE[name]` lists the samples of the declaration of that name. Floating-point tensors are what rules
differentiate; they are float64 except where a sample is about dtypes. Values stay away from points where a
derivative jumps, except where a sample is about such a point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload

from tessera.ir.schema import resolve

inf, nan = float("inf"), float("nan")
_draw = torch.Generator().manual_seed(7)


@dataclass(frozen=True)
class Sample:
    op: OpOverload
    args: tuple
    kwargs: dict = field(default_factory=dict)
    edge: bool = False  # at a point where the derivative jumps: only the first gradient is compared
    eager: Callable | None = None  # what to compare with, where PyTorch's operator has no derivative itself


TABLE: dict[str, list[Sample]] = {}


def call(*args: object, **kwargs: object) -> tuple[tuple, dict]:
    return args, kwargs


def add(names: str, *calls: tuple[tuple, dict], edge: bool = False, eager: Callable | None = None) -> None:
    """Give every operator of `names` these calls. A packet's overload follows from the arguments."""
    for name in names.split():
        packet_name, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, packet_name)
        samples = TABLE.setdefault(f"aten.{name}", [])
        for args, kwargs in calls:
            op = getattr(packet, overload) if overload else resolve(packet, args, kwargs)
            assert op is not None, (name, args, kwargs)
            samples.append(Sample(op, args, kwargs, edge, eager))


def f(*shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    return torch.rand(shape, generator=_draw, dtype=torch.float64) * (high - low) + low


def pos(*shape: int) -> torch.Tensor:
    return f(*shape, low=0.2, high=2.0)


def unit(*shape: int) -> torch.Tensor:
    return f(*shape, low=0.1, high=0.9)


def ints(*shape: int, low: int = 0, high: int = 5) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_draw)


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_draw) > 0.5


def of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def spaced(*shape: int) -> torch.Tensor:
    """All different, so that extremes and orders are clear."""
    count = torch.Size(shape).numel()
    return (torch.randperm(count, generator=_draw).double() - count / 2).reshape(shape) / 3


# --- pointwise, one operand -----------------------------------------------------------------------

add(
    "sin cos tan sinh cosh asinh atan exp exp2 expm1 erf erfc sigmoid tanh silu mish gelu softplus elu celu"
    " leaky_relu hardtanh hardswish hardsigmoid hardshrink softshrink relu neg abs frac sinc deg2rad rad2deg"
    " i0 special_i0e special_erfcx sign sgn floor ceil trunc round nan_to_num signbit isnan isinf isfinite"
    " isposinf isneginf logical_not",
    call(f(2, 3)), call(f()), call(f(0, 3)),
)  # fmt: skip
add("log log2 log10 log1p sqrt rsqrt reciprocal lgamma digamma special_entr", call(pos(2, 3)), call(pos()))
add("asin acos atanh erfinv", call(f(2, 3, low=-0.9, high=0.9)), call(f(low=-0.9, high=0.9)))
add("acosh", call(f(2, 3, low=1.2, high=3.0)))
add("special_ndtri", call(unit(2, 3)))
add("logit", call(unit(2, 3)), call(of(0.05, 0.5, 0.97), 0.1))
add("polygamma", call(1, pos(2, 3)), call(2, pos()))
add("gelu", call(f(2, 3), approximate="tanh"))
add("softplus", call(f(2, 3), 2.0, 1.0))
add("elu", call(f(2, 3), 0.7, 1.2, 0.5))
add("celu", call(f(2, 3), 0.7))
add("leaky_relu", call(f(2, 3), 0.2))
add("hardtanh", call(f(2, 3), -0.3, 0.6))
add("hardtanh", call(of(-1.0, 0.0, 1.0)), edge=True)
add("hardshrink softshrink", call(f(2, 3), 0.3))
add("threshold", call(f(2, 3), 0.1, 20.0), call(f(), -9.0, 1.0))
add("round", call(f(2, 3), decimals=1))
add("nan_to_num", call(of(nan, inf, -inf, 1.0)), call(of(nan, 2.0), 0.5, 3.0, -3.0), edge=True)
add("relu abs sgn sign", call(of(0.0, -0.0, nan, 2.0, -1.0)), edge=True)
add("sinc special_i0e", call(of(0.0, 1.0, -0.5)), edge=True)
add("sqrt", call(of(0.0, 1.0)), edge=True)
add("bitwise_not", call(ints(2, 3)), call(mask(3)))

# --- pointwise, two operands ----------------------------------------------------------------------

add(
    "add sub mul atan2 maximum minimum fmax fmin logaddexp logaddexp2 hypot copysign",
    call(f(2, 3), f(2, 3)), call(f(2, 3), f(3)), call(f(3, 1), f(1, 4)), call(f(), f(2)),
    call(f(2, 1, 3), f(4, 1)),
)  # fmt: skip
add("atan2", call(of(0.0, 1.0, 0.0), of(0.0, 0.0, 2.0)), edge=True)
add("add", call(f(2, 3), 2.5), call(f(2, 3), f(3), alpha=3), call(f(2), 1.5, 2), call(f(2, 3), ints(3)))
add("sub rsub", call(f(2, 3), 2.5), call(f(2, 3), f(3), alpha=3), call(f(2), 1.5, 2), call(f(2), f(2)))
add("mul", call(f(2, 3), 2.5), call(f(2, 3), ints(3)), call(f(2, 3), mask(3)), call(f(2, 3).float(), f()))
add("div", call(f(2, 3), pos(3)), call(f(2, 3), 3.0), call(f(), pos(2)))
add("div", *(call(f(2, 3), pos(3), rounding_mode=m) for m in (None, "floor", "trunc")))
add("div", call(f(2, 3), 0.7, rounding_mode="floor"))
add("fmod", call(f(2, 3), pos(3)), call(f(2, 3), 0.7))
add("remainder.Tensor", call(f(2, 3), pos(3)))
add("remainder.Scalar", call(f(2, 3), 0.7))
add("copysign", call(f(2, 3), -1.0))
add("copysign", call(of(0.0, 1.0), of(1.0, -1.0)), edge=True)
add("maximum minimum fmax fmin", call(of(1.0, 2.0), of(1.0, 3.0)), call(of(nan, 1.0), of(1.0, nan)), edge=True)
add("pow.Tensor_Scalar", *(call(pos(2, 3), e) for e in (0, 1, 2, 3, 0.5, -1.5)), call(of(0.0, -1.0), 2))
add("pow.Tensor_Tensor", call(pos(2, 3), f(3)), call(pos(), f(2)))
add("pow.Tensor_Tensor", call(of(0.0, 0.0, 2.0), of(0.0, 2.0, 0.0)), edge=True)
add("pow.Scalar", call(2.0, f(2, 3)), call(1, f()))
add("pow.Scalar", call(0.0, of(0.0, 1.0, 2.0)), edge=True)
add("xlogy.Tensor", call(f(2, 3), pos(3)))
add("xlogy.Tensor", call(of(0.0, 0.0, 1.0), of(0.0, 1.0, 2.0)), edge=True)
add("eq ne lt le gt ge", call(f(2, 3), f(3)), call(f(2, 3), 0.5), call(ints(3), ints(2, 3)), call(f(), f(2)))
add("logical_and logical_or logical_xor", call(mask(2, 3), mask(3)), call(f(2), mask(2)))
add(
    "bitwise_and bitwise_or bitwise_xor",
    call(ints(2, 3), ints(3)),
    call(mask(2, 3), mask(3)),
    call(ints(3), 3),
)
add("bitwise_left_shift bitwise_right_shift", call(ints(2, 3), ints(3)), call(ints(3), 2))
add("bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift", call(3, ints(2, 3)))
add("gcd lcm", call(ints(2, 3, low=1), ints(3, low=1)))

# --- choosing, three operands ---------------------------------------------------------------------

add("clamp", call(f(2, 3), -0.5, 0.5), call(f(2, 3), None, 0.5), call(f(2, 3), -0.5))
add("clamp", call(f(2, 3), f(3, high=0.0), f(2, 1, low=0.0)), call(f(2, 3), None, f(3)))
add("clamp", call(of(-1.0, 0.0, 1.0, nan), -1.0, 1.0), edge=True)
add("clamp", call(f(2, 3), of(1.0, 0.0, -1.0), of(-1.0, 0.0, 1.0)), edge=True)
add("clamp_min clamp_max", call(f(2, 3), 0.1), call(f(2, 3), f(3)))
add("clamp_min clamp_max", call(of(0.5, nan), 0.5), edge=True)
add("where.self", call(mask(2, 3), f(2, 3), f(3)), call(mask(3), f(2, 1), f()), call(mask(), f(2), f(2)))
add("where.ScalarOther", call(mask(2, 3), f(3), 2.0))
add("where.ScalarSelf", call(mask(2, 3), 2.0, f(3)))
add("where.Scalar", call(mask(2, 3), 2.0, 1.0))
add("masked_fill", call(f(2, 3), mask(3), 1.5), call(f(2, 3), mask(2, 3), f()), call(f(3), mask(2, 3), inf))
add("lerp", call(f(2, 3), f(3), 0.3), call(f(2, 3), f(2, 3), f(3)), call(f(2, 3), f(2, 3), 0.8))
add("addcmul addcdiv", call(f(2, 3), f(3), pos(2, 1)), call(f(3), f(2, 3), pos(3), value=0.5))

# --- the backward kernels of activations ------------------------------------------------------------

add("sigmoid_backward tanh_backward", call(f(2, 3), unit(2, 3)), call(f(), unit()))
add("threshold_backward", call(f(2, 3), f(2, 3), 0.2))
add("leaky_relu_backward", call(f(2, 3), f(2, 3), 0.2, False))
add("hardtanh_backward", call(f(2, 3), f(2, 3), -0.5, 0.5))
add(
    "silu_backward mish_backward gelu_backward hardswish_backward hardsigmoid_backward",
    call(f(2, 3), f(2, 3)),
)
add("hardshrink_backward softshrink_backward", call(f(2, 3), f(2, 3), 0.3))
add("logit_backward", call(f(2, 3), unit(2, 3)))
add("softplus_backward", call(f(2, 3), f(2, 3), 1.0, 20.0))
add("elu_backward", call(f(2, 3), 1.0, 1.0, 1.0, False, f(2, 3)))

# --- reductions -------------------------------------------------------------------------------------

_DIMS = (call(f(2, 3), [1]), call(f(2, 3, 2), [0, -1]), call(f(2, 3), [-2], True), call(f(2, 3), [0, 1]))
add(
    "sum.dim_IntList mean.dim nansum amax amin logsumexp.default",
    *_DIMS,
    call(f(), [0]),
    call(f(), [-1], True),
)
add(
    "sum.dim_IntList mean.dim nansum",
    call(f(2, 3), None),
    call(f(2, 3), None, True),
    call(f(2, 3).float(), [1]),
)
add("sum.dim_IntList mean.dim", call(f(2, 3).float(), [1], dtype=torch.float64), call(f(2, 0), [1]))
add("sum.dim_IntList", call(f(2, 3), []), call(ints(2, 3), [1]), call(f(2, 0), [0]))
add("amax amin", call(f(2, 3)), call(of(1.0, 2.0, 2.0, 1.0), [0]), call(spaced(2, 3), [], True))
add("nansum", call(of(nan, 1.0, 2.0)), call(of(nan, 1.0, 2.0), [0], True))
add(
    "sum.default mean.default prod.default max.default min.default",
    call(f(2, 3)),
    call(f()),
    call(f(2, 1, 3)),
)
add("sum.default mean.default", call(f(2, 3).float(), dtype=torch.float64))
add("max.default min.default", call(of(1.0, 2.0, 2.0, 1.0)))
add("max.default min.default", call(of(1.0, nan, nan)), edge=True)
add("prod.dim_int", call(pos(2, 3), 1), call(pos(2, 3), -2, True), call(pos(), 0))
add("any.default all.default count_nonzero.default", call(mask(2, 3)), call(mask()), call(f(2, 3)))
add("count_nonzero.default", call(mask(2, 3), 1))
add("any.dim all.dim", call(mask(2, 3), 1), call(mask(2, 3), -2, True), call(mask(), 0))
add(
    "any.dims all.dims",
    call(mask(2, 3), [0, 1]),
    call(mask(2, 3), [-1], True),
    call(mask(2, 3)),
    call(mask(2), []),
)
add("count_nonzero.dim_IntList", call(mask(2, 3), [1]), call(mask(2, 3), [0, 1]))
add("argmax argmin", call(spaced(2, 3)), call(spaced(2, 3), 1), call(spaced(2, 3), -2, True), call(f()))
add("argmax argmin", call(spaced(2, 3), None, True))
add(
    "var.correction std.correction var_mean.correction std_mean.correction",
    call(f(2, 3)), call(f(2, 3), [1]), call(f(2, 3), [0, -1], correction=0, keepdim=True),
    call(f(), correction=0), call(f(4, 2), [0], correction=2.5),
)  # fmt: skip
add("std.correction", call(of(1.0, 1.0, 1.0)), call(f(1, 3), [0]))
add(
    "linalg_vector_norm.default",
    call(f(2, 3)), call(f(2, 3), 2, [1]), call(f(2, 3), 1, [0], True), call(of(0.0, 0.0)), call(f(), 2),
    call(f(2, 3), 3, [1]), call(f(2, 3), inf, [-1]), call(f(2, 3).float(), 2, [1], dtype=torch.float64),
)  # fmt: skip

_PICK = (call(spaced(2, 3), 1), call(spaced(2, 3), -2, True), call(f(), 0))
add("max.dim min.dim median.dim nanmedian.dim mode.default", *_PICK)
add("kthvalue.default", call(spaced(2, 3), 2), call(spaced(3, 2), 1, 0, True))
add("sort.default", call(spaced(2, 3)), call(spaced(2, 3), 0, True), call(f()))
add("sort.stable", call(spaced(2, 3), stable=True), call(spaced(2, 3), stable=True, dim=0, descending=True))
add("topk.default", call(spaced(2, 4), 2), call(spaced(3, 2), 2, 0, False))
add("cummax.default cummin.default", call(spaced(2, 4), 1), call(spaced(3, 2), -2), call(f(), 0))
add(
    "cumsum.default",
    call(f(2, 3), 1),
    call(f(2, 3), -2),
    call(f(), 0),
    call(f(2, 3).float(), 0, dtype=torch.float64),
)
add("cumprod.default logcumsumexp.default", call(pos(2, 3), 1), call(pos(), 0))

# --- views and movement -----------------------------------------------------------------------------

add(
    "view.default reshape _unsafe_view",
    call(f(2, 6), [3, 4]),
    call(f(2, 3), [-1]),
    call(f(), [1, 1]),
    call(f(1), []),
)
add("reshape", call(f(3, 2).t(), [6]), call(f(0, 3), [3, 0]))
add("flatten.using_ints", call(f(2, 3, 2)), call(f(2, 3, 2), 1, -1), call(f()))
add("unflatten.int", call(f(2, 6), 1, [2, -1]), call(f(4, 2), -2, [2, 2]))
add("transpose.int", call(f(2, 3), 0, 1), call(f(2, 3, 4), -1, 0), call(f(), 0, -1))
add("t", call(f(2, 3)), call(f(3)), call(f()))
add("permute", call(f(2, 3, 4), [2, 0, 1]), call(f(2, 3), [-1, 0]), call(f(), []))
add("movedim.int", call(f(2, 3, 4), 0, -1))
add("movedim.intlist", call(f(2, 3, 4), [0, 2], [-1, 0]))
add("unsqueeze", call(f(2, 3), 1), call(f(2, 3), -1), call(f(), 0), call(f(2), -2))
add("squeeze.default", call(f(1, 3, 1)), call(f(2, 3)), call(f()))
add("squeeze.dim", call(f(1, 3, 1), 0), call(f(1, 3, 1), -1), call(f(2, 3), 0), call(f(), 0))
add("squeeze.dims", call(f(1, 3, 1), [0, 2]), call(f(1, 3, 1), [-1, 1]), call(f(), [0]))
add("expand", call(f(3), [2, 3]), call(f(1, 3), [4, -1]), call(f(2, 1, 3), [5, 2, 4, 3]), call(f(), [2]))
add(
    "repeat",
    call(f(2, 3), [2, 1]),
    call(f(3), [2, 2]),
    call(f(), [3]),
    call(f(2), [0]),
    call(f(2, 3), [1, 1, 1]),
)
add("flip", call(f(2, 3), [1]), call(f(2, 3), [0, -1]), call(f(2, 3), []))
add("roll", call(f(2, 3), [1], [1]), call(f(2, 3), [1, -1], [0, 1]), call(f(2, 3), [2]))
add("tril triu", call(f(3, 3)), call(f(2, 3, 4), 1), call(f(2, 3), -1))
add(
    "slice.Tensor",
    call(f(5, 3), 0, 1, 4),
    call(f(5, 3), -1, None, -1),
    call(f(5, 3), 0, 0, 5, 2),
    call(f(3), 0, 7),
)
add("select.int", call(f(2, 3), 0, 1), call(f(2, 3), -1, -2), call(f(3), 0, 0))
add("narrow.default", call(f(5, 3), 0, 1, 2), call(f(2, 5), -1, -3, 2))
add("diagonal.default", call(f(3, 3)), call(f(2, 3, 4), 1, -2, -1), call(f(3, 2), -1))
add("diag_embed", call(f(3)), call(f(2, 3), 1), call(f(2, 3), 0, 0, -1))
add("unfold", call(f(5), 0, 2, 1), call(f(2, 5), -1, 3, 2), call(f(), 0, 1, 1))
add("split.Tensor unsafe_split.Tensor", call(f(5, 2), 2), call(f(2, 6), 3, -1))
add(
    "split_with_sizes.default unsafe_split_with_sizes.default",
    call(f(5, 2), [1, 4]),
    call(f(2, 4), [1, 0, 3], -1),
)
add("chunk.default", call(f(5, 2), 3), call(f(2, 6), 2, -1))
add("unbind.int", call(f(2, 3)), call(f(2, 3), -1), call(f(3)))
add("cat", call([f(2, 3), f(1, 3)]), call([f(2, 1), f(2, 2), f(2, 1)], -1), call([f(0), f(2, 2)]))
add("cat", call([f(2).float(), f(3)]))
add("stack", call([f(2, 3), f(2, 3)]), call([f(2), f(2)], -1), call([f(), f(), f()]))
add("slice_backward", call(f(3, 2), [5, 2], 0, 1, 4, 1), call(f(2, 3), [2, 6], -1, 0, 6, 2))
add("select_backward", call(f(3), [2, 3], 0, 1), call(f(2), [2, 3], -1, -1))
add("diagonal_backward", call(f(3), [3, 3], 0, 0, 1), call(f(2, 3), [2, 3, 4], 1, -2, -1))
add("slice_scatter.default", call(f(5, 3), f(2, 3), 0, 1, 3), call(f(2, 5), f(2, 2), -1, 0, None, 3))
add("as_strided.default", call(f(12), [2, 3], [4, 1]), call(f(9), [4, 3], [2, 1]))


def _strided_scatter(x: torch.Tensor, part: torch.Tensor, size: list[int], stride: list[int]) -> torch.Tensor:
    """PyTorch's own derivative of the operator is that of another."""
    out = x.clone()
    out.as_strided(size, stride).copy_(part)
    return out


add("as_strided_scatter.default", call(f(12), f(2, 3), [2, 3], [4, 1]), eager=_strided_scatter)
add("select_scatter.default", call(f(2, 3), f(3), 0, 1), call(f(2, 3), f(2), -1, -1))
add("diagonal_scatter.default", call(f(3, 3), f(3)), call(f(2, 3, 4), f(2, 3), 1, -2, -1))
add("constant_pad_nd", call(f(2, 3), [1, 2]), call(f(2, 3), [1, 0, 0, 2], 3.5), call(f(2, 4), [-1, 1]))

# --- copies, constructors ----------------------------------------------------------------------------

add("alias lift_fresh_copy contiguous.default clone detach", call(f(2, 3)), call(f(3, 2).t()), call(f()))
add("clone", call(f(3, 2).t(), memory_format=torch.contiguous_format))
add(
    "_to_copy",
    call(f(2, 3), dtype=torch.float32),
    call(f(2, 3), dtype=torch.int64),
    call(f(2, 3)),
    call(ints(2)),
)
add(
    "copy",
    call(f(2, 3), f(2, 3)), call(f(2, 3), f(3)), call(f(2, 3).float(), f()),
    eager=lambda x, src: x.clone().copy_(src),
)  # fmt: skip
add("fill.Scalar", call(f(2, 3), 2.0), call(f(), 1.0))
add("fill.Tensor", call(f(2, 3), f()))
add("zero", call(f(2, 3)))
add("zeros_like ones_like empty_like", call(f(2, 3)), call(f(3), dtype=torch.int64))
add("full_like", call(f(2, 3), 2.5))
add("new_zeros new_ones new_empty", call(f(2, 3), [4]), call(f(2), []))
add("new_full", call(f(2, 3), [2, 2], 1.5))

# --- indexing ----------------------------------------------------------------------------------------

_INDEX = (
    call(f(4, 3), [ints(5, high=4)]), call(f(4, 3), [None, ints(2, 2, high=3)]), call(f(2, 3), [mask(2, 3)]),
    call(f(3, 4, 3), [ints(2, high=3), None, ints(2, high=3)]),
    call(f(3, 3), [ints(2, 1, high=3), ints(3, high=3)]),
)  # fmt: skip
add("index.Tensor", *_INDEX)
add("_unsafe_index.Tensor", *_INDEX[:2])
_put = torch.tensor([2, 0])
add(
    "index_put.default",
    call(f(4, 3), [_put], f(2, 3)),
    call(f(4, 3), [_put], f(3)),
    call(f(4, 3), [_put], f()),
)
add(
    "index_put.default",
    call(f(4, 3), [torch.tensor([1, 1])], f(2, 3), True),
    call(f(2, 3), [mask(2, 3)], f()),
)
add(
    "_unsafe_index_put.default",
    call(f(4, 3), [_put], f(2, 3)),
    call(f(4), [torch.tensor([1, 1])], f(2), True),
)
add(
    "gather",
    call(f(3, 4), 1, ints(3, 2, high=4)),
    call(f(3, 4), -2, ints(2, 4, high=3)),
    call(f(), 0, ints(high=1)),
)
_at = torch.tensor([[0, 2], [1, 0]])
add("scatter.src", call(f(3, 2), 0, _at, f(2, 2)), call(f(3), 0, _put, f(2)))
add("scatter.value", call(f(3, 2), 0, _at, 2.0), call(f(), 0, ints(high=1), 2.0))
add("scatter_add", call(f(3, 2), 0, _at, f(2, 2)), call(f(2, 3), -1, ints(2, 5, high=3), f(2, 5)))
add(
    "index_select",
    call(f(3, 4), 1, ints(5, high=4)),
    call(f(3, 4), -2, ints(2, high=3)),
    call(f(), 0, ints(1, high=1)),
)
add("index_add", call(f(3, 4), 0, torch.tensor([1, 1]), f(2, 4)), call(f(2, 3), -1, _put, f(2, 2), alpha=2))
add("index_copy", call(f(3, 4), 0, _put, f(2, 4)), call(f(2, 3), -1, _put, f(2, 2)))
add("index_fill.int_Scalar", call(f(3, 4), 0, _put, 2.0), call(f(2, 3), -1, torch.tensor([-1]), 1.0))
add("index_fill.int_Scalar", call(f(), 0, ints(1, high=1), 2.0))
add("index_fill.int_Tensor", call(f(3, 4), 0, torch.tensor([1, 1]), f()), call(f(2, 3), -1, _put, f()))
add("masked_select", call(f(2, 3), mask(2, 3)), call(f(3), mask(2, 3)), call(f(2, 3), mask(3)))
add("take", call(f(2, 3), ints(2, 2, high=6)))
add("nonzero", call(mask(2, 3)))
add("searchsorted", call(of(0.0, 1.0, 2.0), f(2, 3)), call(of(0.0, 1.0, 2.0), 0.5))
add("bucketize", call(f(2, 3), of(0.0, 1.0)), call(0.5, of(0.0, 1.0)))
add("isin", call(ints(2, 3), ints(2)), call(ints(2, 3), 2), call(2, ints(3)))
add("one_hot", call(torch.tensor([0, 2, 1]), 3))
add("bincount", call(ints(6)))
add("histc", call(f(6), 4, -2, 2))

# --- random: shapes and zero gradients, not values ----------------------------------------------------

add("rand_like randn_like", call(f(2, 3)))
add("randint_like", call(f(2, 3), 4))
add("rand randn", call([2, 3]))
add("randint", call(4, [2, 3]))
add("randperm", call(4))
add("multinomial", call(pos(4), 2))
add("bernoulli", call(unit(2, 3)), call(f(2, 3), 0.3))
add("normal", call(f(2, 3), 0.5), call(f(2, 3), pos(3)), call(0.5, pos(3)))
add("poisson", call(pos(2, 3)))
add("binomial", call(pos(3) * 5, unit(3)))
add("exponential uniform cauchy log_normal", call(f(2, 3)))
add("geometric", call(f(2, 3), 0.4))
