"""Operators as objects: their names and schemas, what PyTorch can do with one, and the callables behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tessera.torch_internals.lookup import symbol

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
else:
    OpOverload = symbol("torch._ops.OpOverload", "equations, whose operators it is the class of")
    OpOverloadPacket = symbol("torch._ops.OpOverloadPacket", "operators that are named without an overload")
    HigherOrderOperator = symbol("torch._ops.HigherOrderOperator", "operators over graphs, as torch.cond")

# Of an overload: `linear`, `default`, and the schema as PyTorch has parsed it.
op_name: Callable[[OpOverload], str] = attrgetter("_opname")
overload_name: Callable[[OpOverload], str] = attrgetter("_overloadname")
op_schema: Callable[[OpOverload], Any] = attrgetter("_schema")


def aten_name(op: object) -> str:
    """`linear` of `aten.linear.default`; empty for what is no operator of PyTorch's."""
    return getattr(op, "_opname", "")


def raw_callable(op: Callable) -> Callable:
    """The C function that an overload calls in the end; anything else as it is."""
    return getattr(op, "_op", op)


def can_decompose(op: OpOverload) -> bool:
    """PyTorch can write the operator as others: a composite kernel, or a decomposition in Python."""
    return op._can_decompose()


@contextmanager
def made_of(parts: Mapping[OpOverload, Callable]) -> Iterator[None]:
    """While inside, PyTorch takes composite operators for what is given here."""
    before = {op: dict(op.py_kernels) for op in parts}
    try:
        for op, fn in parts.items():
            op.py_kernels[_COMPOSITE] = fn
            op._dispatch_cache.clear()
        yield
    finally:
        for op, kernels in before.items():
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


_COMPOSITE = symbol("torch._C.DispatchKey.CompositeImplicitAutograd", "recurrent layers of any length")
has_kernel: Callable[[str, str], bool] = symbol(
    "torch._C._dispatch_has_kernel_for_dispatch_key", "telling composite operators from others"
)
# By a name as `aten::add.Tensor`: whether it computes with tensors. TorchScript's own, as `aten::save`, are elsewhere.
is_dispatched: Callable[[str], bool] = symbol("torch._C._dispatch_has_kernel", "refusing operators that a file names")
all_operator_names: Callable[[], list[str]] = symbol("torch._C._dispatch_get_all_op_names", "`tessera op`")
decomposition_table: dict[OpOverload, Callable] = symbol(
    "torch._decomp.decomposition_table", "taking operators apart that have no rule"
)
# By their names, with namespace.
custom_operators: Mapping[str, object] = symbol(
    "torch._library.custom_ops.OPDEFS", "writes of operators made by torch.library.custom_op"
)
variable_functions = symbol("torch._C._VariableFunctions", "calls of operators as cheap as eager's")
reinterpret_tensor: Callable[..., Tensor] = symbol(
    "torch._C._dynamo.guards._reinterpret_tensor", "views of views in programs, without the dispatcher"
)
nn_functions = symbol("torch._C._nn", "calls of operators as cheap as eager's")
foreach_add_ = symbol("torch._foreach_add_", "the counters of an optimizer's state")
foreach_copy_ = symbol("torch._foreach_copy_", "the inputs of a CUDA graph, and histories of scales")
scaled_mm = symbol("torch._scaled_mm", "timing products of 8 bits")
fused_sdp_choice = symbol("torch._fused_sdp_choice", "asking which kernel of attention PyTorch would take")
sdp_priority_order: Callable[[], list[int]] = symbol(
    "torch._C._get_sdp_priority_order", "asking which kernel of attention PyTorch would take"
)
suggest_memory_format = symbol("torch._prims_common.suggest_memory_format", "the layout of a batch norm's result")
clone_preserve_strides = symbol(
    "torch._prims_common.clone_preserve_strides", "copies of what a user's Triton kernel writes"
)
