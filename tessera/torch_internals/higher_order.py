"""Operators over graphs: loops, hooks, regions and Triton kernels, as they stand in a program or in Dynamo's graphs."""

from __future__ import annotations

from tessera.torch_internals.lookup import owner_of, symbol

# Importing the package registers `torch.ops.higher_order`.
torch_scan = symbol("torch._higher_order_ops.scan", "tessera.scan outside of programs")
torch_while_loop = symbol("torch._higher_order_ops.while_loop", "tessera.while_loop outside of programs")
# Replaced there while a function is traced.
LOOPS = owner_of("torch._higher_order_ops.scan", "loops in functions that are traced")
# The name of this module is also that of an operator in its package.
REGION = (
    owner_of("torch._higher_order_ops.invoke_subgraph.invoke_subgraph_placeholder", "nested_compile_region"),
    "invoke_subgraph_placeholder",
)
# Before 2.13 Dynamo ends its graph at a hook.
register_hook = symbol(
    "torch._higher_order_ops.register_hook.register_hook_op", "hooks inside graphs", since=(2, 13), otherwise=None
)
triton_kernel_wrapper_mutation = symbol(
    "torch._higher_order_ops.triton_kernel_wrap.triton_kernel_wrapper_mutation",
    "Triton kernels that a program launches",
)
get_mutated_tensors = symbol(
    "torch._higher_order_ops.triton_kernel_wrap.get_mutated_tensors", "Triton kernels that a program launches"
)
flex_attention = symbol("torch._higher_order_ops.flex_attention.flex_attention", "flex_attention in programs")
# A mode in which `x[i]` with a tensor of no dimensions is an index, which vmap can batch.
TensorIndices = symbol(
    "torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex", "indices in a score_mod of flex_attention"
)
# What functional programs hold in the place of an operator that writes: a call on copies, which gives these too.
_FUNCTIONALIZED = "torch._higher_order_ops.auto_functionalize.auto_functionalized"
CALLS_ON_COPIES = {
    symbol(f"{_FUNCTIONALIZED}{version}", "exported programs with operators that write"): symbol(
        f"{_FUNCTIONALIZED}{version}_dense", "exported programs with operators that write"
    )
    for version in ("", "_v2")
}
