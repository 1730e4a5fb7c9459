"""Operators give what ONNX's own cases expect, interpreted and compiled."""

from __future__ import annotations

import functools
import importlib
import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("onnx")

import onnx
import onnx.backend.test.case.node as suite
from onnx.backend.test.runner import Runner

from tessera import onnx as tessera_onnx
from tessera.onnx.arrays import to_numpy, to_torch

# Files of the suite that ONNX ships, one or a few of each family.
FILES = [
    "add",
    "sub",
    "mul",
    "div",
    "mod",
    "pow",
    "bitshift",
    "max",
    "clip",
    "where",
    "isinf",
    "cast",
    "bitcast",
    "softmax",
    "gelu",
    "selu",
    "prelu",
    "hardmax",
    "shrink",
    "reducesum",
    "reducemax",
    "reducel2",
    "reduce_log_sum_exp",
    "argmax",
    "cumsum",
    "topk",
    "reshape",
    "slice",
    "split",
    "tile",
    "pad",
    "depthtospace",
    "trilu",
    "center_crop_pad",
    "transpose",
    "reversesequence",
    "gather",
    "gathernd",
    "scatterelements",
    "scatternd",
    "onehot",
    "nonzero",
    "unique",
    "compress",
    "constantofshape",
    "rangeop",
    "eyelike",
    "hannwindow",
    "melweightmatrix",
    "matmul",
    "gemm",
    "einsum",
    "det",
    "matmulinteger",
    "qlinearmatmul",
    "conv",
    "convtranspose",
    "convinteger",
    "qlinearconv",
    "deformconv",
    "col2im",
    "maxunpool",
    "globalaveragepool",
    "batch_normalization",
    "layernormalization",
    "groupnormalization",
    "lrn",
    "attention",
    "rotaryembedding",
    "linear_attention",
    "quantizelinear",
    "dequantizelinear",
    "dynamicquantizelinear",
    "rnn",
    "gru",
    "lstm",
    "if_",
    "loop",
    "scan",
    "sequenceinsert",
    "sequence_map",
    "splittosequence",
    "optionalhaselement",
    "string_concat",
    "string_split",
    "stringnormalizer",
    "tfidfvectorizer",
    "resize",
    "gridsample",
    "affinegrid",
    "roialign",
    "nonmaxsuppression",
    "dft",
    "stft",
    "negativeloglikelihoodloss",
    "softmax_cross_entropy_loss",
    "ai_onnx_ml.label_encoder",
    "ai_onnx_ml.tree_ensemble",
    "ai_onnx_ml.binarizer",
    "adam",
    "momentum",
]
# NumPy's comparison of a sequence that holds a number alone.
NOT_COMPARED = {"test_loop16_seq_none"}
ROUNDING = 1e-6  # of sums that cancel in float32: every library has its own
COMPILED = """
    add add_bcast
    div div_uint64
    clip clip_default_int8_min
    softmax softmax_axis_1
    reducel2 reduce_l2_keep_dims_random
    reshape reshape_negative_dim
    slice slice_neg_steps
    pad constant_pad
    gather gather_1
    scatternd scatternd_multiply
    gemm gemm_all_attributes
    einsum einsum_batch_matmul
    conv conv_with_strides_padding
    convtranspose convtranspose_pads
    layernormalization layer_normalization_4d_axis1
    attention attention_4d_causal
    dequantizelinear dequantizelinear_axis
    lstm lstm_with_peepholes
    scan scan9_sum
    resize resize_upsample_scales_linear
    gridsample gridsample_bilinear
    ai_onnx_ml.tree_ensemble ai_onnx_ml_tree_ensemble_single_tree
    adam adam
""".strip().splitlines()


@functools.cache
def cases_of(file: str) -> list:
    """A file of the suite adds its cases to one list when it is imported."""
    before = len(suite._NodeTestCases)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(f"{suite.__name__}.{file}")
        except ModuleNotFoundError:
            pytest.skip(f"this onnx has no cases in {file}")
    return suite._NodeTestCases[before:]


def check(case, compiles: bool) -> None:
    net = tessera_onnx.load(case.model, compile=compiles)
    for inputs, expected in case.data_sets:
        with torch.no_grad():
            out = net(*(to_torch(_array(x)) for x in inputs))
        got = [to_numpy(x) for x in (out if len(net.output_names) != 1 else (out,))]
        Runner.assert_similar_outputs([_array(x) for x in expected], got, case.rtol, max(case.atol, ROUNDING))


def _array(x: object) -> object:
    if isinstance(x, onnx.TensorProto):
        return onnx.numpy_helper.to_array(x)
    return np.asarray(x) if isinstance(x, np.generic) else x


@pytest.mark.parametrize("file", FILES)
def test_interpreted(file: str) -> None:
    chosen = [c for c in cases_of(file) if "_expanded" not in c.name and c.name not in NOT_COMPARED]
    assert chosen
    for case in chosen:
        check(case, compiles=False)


@pytest.mark.parametrize(("file", "name"), [line.split() for line in COMPILED])
def test_compiled(file: str, name: str) -> None:
    case = next(c for c in cases_of(file) if c.name == f"test_{name}")
    check(case, compiles=True)
