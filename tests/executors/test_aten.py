"""`bind`: the fast form of an operator computes exactly what the overload computes."""

# ruff: noqa: E501  (a table of calls, one operator after the other)
from __future__ import annotations

import pytest
import torch
from programs import same_bits

from tessera.executors.aten import bind
from tessera.ir.binding import FUNCTIONS, METHODS, NN_FUNCTIONS
from tessera.ir.equation import Special

aten = torch.ops.aten
torch.manual_seed(0)
A, B, P = torch.randn(4, 4), torch.randn(4, 4), torch.rand(4, 4) + 0.5
N, M = torch.arange(16).reshape(4, 4), torch.arange(16).reshape(4, 4) % 5 + 1
MASK = A > 0
ROW = torch.tensor([0, 2])
C = torch.randn(2, 4, 8, 8)
W = torch.randn(3, 4, 3, 3)
Q = torch.randn(1, 2, 4, 8)

UNARY = [
    "neg",
    "exp",
    "exp2",
    "log",
    "log2",
    "log10",
    "log1p",
    "expm1",
    "sqrt",
    "rsqrt",
    "sigmoid",
    "tanh",
    "relu",
    "sin",
    "cos",
    "tan",
    "abs",
    "sign",
    "sgn",
    "reciprocal",
    "square",
    "erf",
    "erfc",
    "floor",
    "ceil",
    "trunc",
    "round",
    "isnan",
    "isinf",
    "isfinite",
    "logical_not",
    "nan_to_num",
    "softplus",
    "sinh",
    "cosh",
    "asin",
    "acos",
    "atan",
    "clone",
    "detach",
    "t",
    "any",
    "all",
    "prod",
    "sum",
    "mean",
    "argmax",
    "argmin",
    "gelu",
    "silu",
]
BINARY = [
    "add",
    "sub",
    "mul",
    "div",
    "pow",
    "maximum",
    "minimum",
    "atan2",
    "fmod",
    "remainder",
    "eq",
    "ne",
    "lt",
    "gt",
    "le",
    "ge",
    "logical_and",
    "logical_or",
    "logical_xor",
]

# overload -> calls, as a trace spells them
CALLS = {
    **{f"{name}.default": [(P,), (A,)] for name in UNARY},
    **{f"{name}.Tensor": [(P, B), (N, M), (N, P), (A, B[0])] for name in BINARY[:4]},
    **{f"{name}.Scalar": [(P, 2), (P, 2.5), (N, 2)] for name in ("add", "sub", "mul", "div", "eq", "lt", "rsub", "ge")},
    "add.Tensor ": [((A, B), {"alpha": 2}), (A, 2), (N, 2.5)],
    "rsub.Scalar": [(A, 1), (A, 1, 2)],
    "div.Tensor_mode": [((A, B), {"rounding_mode": "floor"})],
    "pow.Tensor_Scalar": [(A, 2), (P, 0.5)], "pow.Tensor_Tensor": [(P, B)], "pow.Scalar": [(2, A)],
    "maximum.default": [(A, B)], "minimum.default": [(A, B)], "atan2.default": [(A, B)], "fmod.Tensor": [(A, P)],
    "remainder.Scalar": [(A, 3)], "eq.Tensor": [(N, M)], "logical_and.default": [(MASK, MASK)],
    "bitwise_and.Tensor": [(N, M)], "bitwise_or.Scalar": [(N, 3)], "bitwise_not.default": [(N,)], "bitwise_xor.Tensor": [(N, M)],
    "where.self": [(MASK, A, B)], "where.ScalarOther": [(MASK, A, 2.0)], "where.ScalarSelf": [(MASK, 1.5, B)],
    "fmod.Scalar": [(A, 3)], "ne.Tensor": [(N, M)], "gt.Tensor": [(A, B)], "le.Tensor": [(A, B)], "gt.Scalar": [(A, 0)],
    "le.Scalar": [(A, 0)], "ne.Scalar": [(N, 3)], "logical_or.default": [(MASK, N)], "logical_xor.default": [(MASK, N)],
    "lerp.Scalar": [(A, B, 0.3)], "lerp.Tensor": [(A, B, P)],
    "addcmul.default": [(A, B, P), ((A, B, P), {"value": 2})], "addcdiv.default": [(A, B, P)],
    "clamp.default": [(A, None, 0.5), (A, -0.5), (A, -0.5, 0.5)], "clamp.Tensor": [(A, B, P)],
    "clamp_min.default": [(A, 0)], "clamp_max.default": [(A, 0)],
    "masked_fill.Scalar": [(A, MASK, -1.0)], "masked_fill.Tensor": [(A, MASK, torch.tensor(3.0))],
    "round.decimals": [((A,), {"decimals": 1})],
    "sum.dim_IntList": [(A, [1]), (A, [0, 1], True), (N, None), ((N, [1]), {"dtype": torch.float32})],
    "mean.dim": [(A, [1], True), (A, None)], "amax.default": [(A, [1]), (A,)], "amin.default": [(A, [0], True)],
    "argmax.default": [(A, 1), (A, None, True)], "any.dim": [(MASK, 1)], "all.dim": [(MASK, 0, True)],
    "prod.dim_int": [(A, 1)], "logsumexp.default": [(A, [1])], "cumsum.default": [(A, 1)], "cumprod.default": [(A, 0)],
    "reshape.default": [(A, [2, -1])], "permute.default": [(C, [0, 2, 3, 1])], "transpose.int": [(A, 0, 1)],
    "unsqueeze.default": [(A, -1)], "squeeze.default": [(A[None],)], "squeeze.dim": [(A[None], 0)],
    "squeeze.dims": [(A[None], [0])], "select.int": [(A, 0, -1)], "cat.default": [([A, B],), ([A, B], 1)],
    "stack.default": [([A, B], 1)], "split.Tensor": [(A, 3), (A, 2, 1)], "split_with_sizes.default": [(A, [1, 3])],
    "chunk.default": [(A, 2, 1)], "unbind.int": [(A,), (A, 1)], "clone.default": [((A.t(),), {"memory_format": torch.contiguous_format})],
    "flatten.using_ints": [(C, 1), (C,)], "movedim.int": [(C, 0, 2)], "movedim.intlist": [(C, [0, 1], [2, 3])],
    "narrow.default": [(A, 0, 1, 2)], "tril.default": [(A,), (A, -1)], "triu.default": [(A, 1)], "flip.default": [(A, [0])],
    "roll.default": [(A, [1], [0]), (A, [1])], "gather.default": [(A, 1, M - 1 - (M == 5).long())], "index_select.default": [(A, 0, ROW)],
    "scatter.value": [(A, 1, ROW[None], 2.0)], "scatter.src": [(A, 1, ROW[None], B)], "scatter_add.default": [(A, 1, ROW[None], B)],
    "index_add.default": [(A, 0, ROW, B[:2]), ((A, 0, ROW, B[:2]), {"alpha": 2})], "slice_scatter.default": [(A, B[:2], 0, 0, 2)],
    "select_scatter.default": [(A, B[0], 0, 1)],
    "matmul.default": [(A, B)], "mm.default": [(A, B)], "bmm.default": [(A[None], B[None])],
    "addmm.default": [(A[0], A, B), ((A[0], A, B), {"beta": 0.5, "alpha": 2})], "baddbmm.default": [(A[None], A[None], B[None])],
    "layer_norm.default": [(A, [4], A[0], B[0]), (A, [4])], "native_layer_norm.default": [(A, [4], None, None, 1e-5)],
    "rms_norm.default": [(A, [4], A[0], 1e-6), (A, [4])], "group_norm.default": [(C, 2)],
    "softmax.int": [(A, -1), (A, 0, torch.float64)], "log_softmax.int": [(A, -1)], "_softmax.default": [(A, -1, False)],
    "_log_softmax.default": [(A, 1, False)], "_softmax_backward_data.default": [(A, B.softmax(-1), -1, torch.float32)],
    "_log_softmax_backward_data.default": [(A, B.log_softmax(-1), -1, torch.float32)],
    "embedding.default": [(A, ROW), (A, ROW, 1)], "dropout.default": [(A, 0.5, True), (A, 0.5, False)],
    "native_dropout.default": [(A, 0.5, True)], "conv1d.default": [(C[:, :, 0], W[:, :, 0])], "conv2d.default": [(C, W), (C, W, None, [1, 1], [1, 1])],
    "convolution.default": [(C, W, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)],
    "batch_norm.default": [(C, None, None, torch.zeros(4), torch.ones(4), False, 0.1, 1e-5, False)],
    "linear.default": [(A, B), (A, B, A[0])], "gelu.default": [((A,), {"approximate": "tanh"})],
    "scaled_dot_product_attention.default": [(Q, Q, Q), (Q, Q, Q, None, 0.0, True), ((Q, Q, Q), {"scale": 0.3})],
    "cross_entropy_loss.default": [(A, torch.tensor([0, 1, 2, 3])), (A, torch.tensor([0, 1, 2, 3]), None, 2, 1, 0.1)],
    "mse_loss.default": [(A, B), (A, B, 2)],
    "view.default": [(A, [2, 8])], "view.dtype": [(A, torch.int32)], "expand.default": [(A, [2, 4, 4])],
    "contiguous.default": [(A.t(),)], "repeat.default": [(A, [2, 1])], "view_as.default": [(A, B)], "expand_as.default": [(A[0], B)],
    # in place, on copies
    "copy_.default": [(A, B), (A, N)], "add_.Tensor": [((A, B), {"alpha": 2}), (A, 2)], "add_.Scalar": [(A, 2)],
    "sub_.Tensor": [(A, B)], "mul_.Tensor": [(A, B), (A, 2.0)], "div_.Tensor": [(A, B)],
    **{f"{n}_.default": [(P,)] for n in ["neg", "exp", "sqrt", "rsqrt", "sigmoid", "tanh", "relu", "abs", "log", "sin", "cos", "reciprocal", "zero"]},
    "clamp_.default": [(A, None, 0.5)], "clamp_min_.default": [(A, 0.1)], "masked_fill_.Scalar": [(A, MASK, 1.0)],
    "fill_.Scalar": [(A, 2)], "fill_.Tensor": [(A, torch.tensor(2.0))], "index_add_.default": [(A, 0, ROW, B[:2])],
    "index_copy_.default": [(A, 0, ROW, B[:2])], "scatter_.value": [(A, 1, ROW[None], 2.0)], "scatter_.src": [(A, 1, ROW[None], B)],
    "scatter_add_.default": [(A, 1, ROW[None], B)], "pow_.Scalar": [(A, 2)], "addcmul_.default": [(A, B, P)],
    "addcdiv_.default": [(A, B, P)], "lerp_.Scalar": [(A, B, 0.3)],
}  # fmt: skip


def overload(name):
    packet, _, which = name.strip().partition(".")
    found = getattr(aten, packet, None)
    return getattr(found, which) if found is not None and which in found.overloads() else None


KNOWN = {name: calls for name, calls in CALLS.items() if overload(name) is not None}


def copy(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, tree)


@pytest.mark.parametrize("name", KNOWN)
def test_fast_form_is_the_overload(name):
    op = overload(name)
    for call in CALLS[name]:
        args, kwargs = call if len(call) == 2 and isinstance(call[1], dict) else (call, {})
        results = []
        for fn in (op, bind(op)):
            given = copy(args) if op._opname.endswith("_") else args
            torch.manual_seed(3)
            out = fn(*given, **kwargs)
            results.append([out] if isinstance(out, torch.Tensor) else list(out))
        assert len(results[0]) == len(results[1])
        for expected, got in zip(*results, strict=True):
            assert same_bits(expected, got) and expected.stride() == got.stride()


def test_every_listed_operator_is_tried():
    tried = {name.partition(".")[0] for name in KNOWN}
    untried = (FUNCTIONS | NN_FUNCTIONS | METHODS) - tried
    assert not untried, sorted(untried)


def test_factories_and_others_stay_themselves():
    for op in (aten.zeros.default, aten.arange.default, aten.full.default):
        assert bind(op) in (op, op._op)
    special = Special("mine", lambda x: x)
    assert bind(special) is special.fn
