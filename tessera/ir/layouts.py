"""Where tensors lie: copies with other strides, and operators whose results lie as the kernel that is chosen has it.

PyTorch promises nothing about the strides of what the listed operators give: a library picks a kernel by the machine,
its version and the arguments, and the kernel picks the order of dimensions. Of operators that users define only the
user knows. A trace says strides all the same, since a type has them. So nobody may rely on them:
`passes/memory/lay_out.py` restores them where somebody reads them, and `runtime/contracts.py`, which compares all other
results with their types, leaves these alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from tessera.ir.builder import Builder, aten
from tessera.ir.equation import Equation, Special, Value
from tessera.ir.types import Size, TensorType, known, row_major, settled, size_hint, size_key
from tessera.torch_internals.operators import OpOverload, op_name, op_schema, overload_name
from tessera.util.names import names

UNPROMISED = names(
    """
    scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math
    _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_fused_attention_overrideable_backward
    convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution_backward
    cudnn_convolution cudnn_convolution_transpose mkldnn_convolution
    _cudnn_rnn _cudnn_rnn_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward
    cudnn_batch_norm cudnn_batch_norm_backward
    native_layer_norm_backward native_batch_norm native_batch_norm_backward _native_batch_norm_legit batch_norm_backward
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _batch_norm_with_update_functional
    _softmax_backward_data _log_softmax_backward_data pow.Scalar ldexp
    log_sigmoid_forward glu_backward binary_cross_entropy_backward hardswish_backward hardtanh_backward
    multilabel_margin_loss_backward max_unpool2d max_unpool3d index_fill normal xlogy.Tensor channel_shuffle
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward logit_backward native_dropout_backward
    nll_loss2d_forward
    reflection_pad2d reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward
    replication_pad2d replication_pad2d_backward replication_pad3d replication_pad3d_backward
    upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa upsample_linear1d_backward upsample_bilinear2d_backward
    upsample_trilinear3d_backward upsample_bicubic2d_backward upsample_nearest1d_backward upsample_nearest2d_backward
    upsample_nearest3d_backward _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
    _upsample_nearest_exact3d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward
    _fused_rms_norm _fused_rms_norm_backward diagonal_scatter select_scatter slice_scatter special_xlog1py _unique
    softshrink_backward hardshrink_backward _fft_c2c _fft_r2c _fft_c2r
    _efficient_attention_forward _efficient_attention_backward
    """
)


def may_be_random_state(x: torch.Tensor) -> bool:
    """The random state that a library's kernel notes for its backward. It is on the host, or on the device while a CUDA
    graph is captured, whatever its type says."""
    return not x.ndim and x.dtype in (torch.int64, torch.uint64)


def unpromised(eqn: Equation) -> bool:
    """Are the strides of this equation's results up to the kernel?"""
    op = eqn.op.of if isinstance(eqn.op, Special) else eqn.op
    return isinstance(op, OpOverload) and is_unpromised(op)


@functools.cache
def is_unpromised(op: OpOverload) -> bool:
    """Are the strides of this operator's results up to the kernel?"""
    if op.namespace == "tessera":
        return False
    if op.namespace in ("aten", "prims"):
        return op_name(op) in UNPROMISED or f"{op_name(op)}.{overload_name(op)}" in UNPROMISED
    return not any(a.alias_info is not None for a in op_schema(op).arguments)  # what it is given back lies as it did


def laid_as(builder: Builder, v: Value, tensor: torch.Tensor) -> Value:
    """`v` with its dimensions in memory in the order of `tensor`'s: results of PyTorch follow that of an argument. Of
    symbolic strides that might be in any order nothing is asked."""
    shape, stride = tuple(map(known, tensor.shape)), tuple(map(known, tensor.stride()))
    long = [d for d in range(tensor.ndim) if size_key(shape[d]) != 1]
    if all(size_key(v.tensor.stride[d]) == size_key(stride[d]) for d in long):
        return v
    order = sorted(range(tensor.ndim), key=lambda d: (size_hint(stride[d]), size_hint(shape[d])), reverse=True)
    if not row_major([shape[d] for d in order], [stride[d] for d in order]):  # it has gaps; no result has those
        theirs, ours = ([steps[d] for d in order if d in long] for steps in (stride, v.tensor.stride))
        if 0 in map(size_key, stride) or not _descends(theirs) or _descends(ours):
            return v
    with builder:
        rows = aten.clone(aten.permute(v, order), memory_format=torch.contiguous_format)
        return aten.permute(rows, [order.index(d) for d in range(tensor.ndim)])


def _descends(steps: Sequence[Size]) -> bool:
    """Each is at least the next, whatever symbols stand for."""
    return all(settled(a >= b) for a, b in itertools.pairwise(steps))


def can_view(source: TensorType, result: TensorType) -> bool:
    """Whether the elements of a tensor of the one type, in their order, are a tensor of the other without a copy."""
    shape, stride = ([size_hint(s) for s in sizes] for sizes in (source.shape, source.stride))
    wanted = [size_hint(s) for s in result.shape]
    if source.dtype != result.dtype or source.device != result.device:
        return False
    if 0 in shape:
        return True
    if shape == wanted:
        lies = zip(shape, stride, map(size_hint, result.stride), strict=True)
        return all(a == b for size, a, b in lies if size != 1)
    runs: list[tuple[int, int]] = []  # dimensions that lie in memory as one: how many elements, and how far apart
    for size, step in zip(shape, stride, strict=True):
        if size != 1 and runs and runs[-1][1] == size * step:
            runs[-1] = runs[-1][0] * size, step
        elif size != 1:
            runs.append((size, step))
    sizes = iter(n for n in wanted if n != 1)
    for count, _ in runs:
        part = 1
        while part < count:
            part *= next(sizes)
        if part != count:  # a new dimension would go from one run into the next
            return False
    return True
