"""The public functions: what a user imports from `tessera`."""

from __future__ import annotations

from tessera.distributed.checkpoint import load_state, save_state
from tessera.distributed.groups import mesh
from tessera.distributed.sharding import shard
from tessera.executors.kernels import register_kernel
from tessera.executors.register import register_executor, register_operator
from tessera.func.api import (
    checkpoint,
    cond,
    custom_vjp,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    scan,
    value_and_grad,
    vjp,
    vmap,
    while_loop,
)
from tessera.inspection import check, edit, explain, reproduce, stages, trace
from tessera.ir.trace import Trace
from tessera.just_in_time.api import backend as _backend
from tessera.just_in_time.api import jit
from tessera.ops.experts import experts
from tessera.runtime.buckets import Buckets
from tessera.torch_internals.corrections import correct_dynamo
from tessera.training import train_step
from tessera.transforms.fp8_recipe import FP8
from tessera.transforms.quantize import quantize
from tessera.util.config import config, override

__all__ = [  # noqa: F822
    "FP8", "Buckets", "Trace", "backend", "check", "checkpoint", "cond", "config", "custom_vjp", "edit", "experts",
    "explain", "grad", "grad_and_value", "hessian", "jacfwd", "jacrev", "jit", "jvp", "linearize", "load_state", "mesh",
    "override", "quantize", "register_executor", "register_kernel", "register_operator", "reproduce", "save_state",
    "scan", "shard", "stages", "trace", "train_step", "value_and_grad", "vjp", "vmap", "while_loop",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """`backend`, for `torch.compile`, which names it before it traces: by then Dynamo must have all of its guards."""
    if name != "backend":
        raise AttributeError(f"module 'tessera.api' has no attribute {name!r}")
    correct_dynamo()
    return _backend
