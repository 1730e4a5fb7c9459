"""The callable of a PyTorch operator that costs the host least.

In: an operator of a trace. Out: what runs it. An operator overload called from Python converts its arguments through
the generic boxed path; the functions and methods that PyTorch generates for eager code (`torch._C._VariableFunctions`,
`torch._C._nn`, `Tensor`) parse them faster and reach the same kernel. Only operators whose parsed form means exactly
the overload are listed here. Factories are not: `torch.zeros` looks at the default device, `aten.zeros` does not.
"""

from __future__ import annotations

from collections.abc import Callable

from tessera.ir.schema import schema_of
from tessera.torch_internals.autograd import TensorBase
from tessera.torch_internals.operators import (
    OpOverload,
    nn_functions,
    op_name,
    op_schema,
    raw_callable,
    variable_functions,
)
from tessera.util.names import names

# Where eager PyTorch keeps the fast form of an operator, by its short name.
FUNCTIONS = names(
    """
    add sub mul div neg exp exp2 log log2 log10 log1p expm1 sqrt rsqrt sigmoid tanh relu sin cos tan abs
    sign sgn reciprocal square pow where maximum minimum erf erfc floor ceil trunc round isnan isinf
    isfinite logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not
    bitwise_xor eq ne lt gt le ge rsub lerp addcmul addcdiv clamp clamp_min clamp_max nan_to_num atan2
    fmod remainder softplus sinh cosh asin acos atan masked_fill sum mean amax amin argmax argmin any
    all prod logsumexp cumsum cumprod reshape permute transpose t unsqueeze squeeze select cat stack
    split split_with_sizes chunk unbind clone detach flatten movedim narrow tril triu flip roll gather
    index_select scatter scatter_add index_add slice_scatter select_scatter matmul mm bmm addmm baddbmm
    layer_norm native_layer_norm rms_norm group_norm softmax log_softmax _softmax _log_softmax embedding
    dropout native_dropout conv1d conv2d convolution batch_norm _softmax_backward_data
    _log_softmax_backward_data
    """
)
# The losses are not here: `torch._C._nn.mse_loss` has another default reduction than the operator.
NN_FUNCTIONS = names("linear gelu silu scaled_dot_product_attention")
METHODS = names(
    """
    view expand contiguous repeat view_as expand_as copy_ add_ sub_ mul_ div_ neg_ exp_ sqrt_ rsqrt_
    sigmoid_ tanh_ relu_ abs_ clamp_ clamp_min_ masked_fill_ fill_ zero_ index_add_ index_copy_ scatter_
    scatter_add_ pow_ log_ sin_ cos_ reciprocal_ addcmul_ addcdiv_ lerp_
    """
)


def quick(op: OpOverload) -> Callable:
    """The fastest callable that means exactly this operator, for arguments as a trace spells them."""
    return _fast_form(op) or raw_callable(op)


def _fast_form(op: OpOverload) -> Callable | None:
    name = op_name(op)
    if op.namespace != "aten" or schema_of(op).is_out or "Dimname" in str(op_schema(op)):
        return None
    if name in FUNCTIONS:
        return getattr(variable_functions, name, None)  # type: ignore[attr-defined]
    if name in NN_FUNCTIONS:
        return getattr(nn_functions, name, None)  # type: ignore[attr-defined]
    if name in METHODS:
        return getattr(TensorBase, name, None)
    return None
