"""Triton kernels that the user's program launches, as TorchDynamo's graphs have them, become `tessera.launch`.

In: the arguments of PyTorch's `triton_kernel_wrapper_mutation`. Out: one equation, and new contents of the tensors that
the kernel writes. Which those are, PyTorch reads off the kernel's own IR; where it cannot, all of them.
"""

from __future__ import annotations

import torch

from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.equation import NO_GRAD
from tessera.ir.record import Recorder, recording
from tessera.ir.types import size_key, type_of
from tessera.ops.launch import LAUNCH
from tessera.torch_internals.dispatch import disable_current_modes
from tessera.torch_internals.higher_order import get_mutated_tensors
from tessera.util.errors import CaptureError


def record_launch(
    node: torch.fx.Node,
    builder: Builder,
    *,
    kernel_idx: int,
    constant_args_idx: int,
    grid: list,
    tma_descriptor_metadata: dict,
    kwargs: dict[str, object],
) -> None:
    recorder = recording()
    assert recorder is not None
    with disable_current_modes():
        named = get_mutated_tensors(kernel_idx, constant_args_idx, kwargs, tma_descriptor_metadata)
    with fake.alone():  # what is looked up here is no part of the program
        tensors = {name: recorder.fake(a) for name, a in kwargs.items() if isinstance(a, torch.Tensor)}
        written = list({id(tensors[name]): name for name in reversed(named)}.values())
        _check(recorder, tensors, written)
    if not written:
        return
    arguments = {**kwargs, **tensors}
    args = (kernel_idx, constant_args_idx, list(grid), dict(tma_descriptor_metadata), arguments, written)
    outs = recorder.special(LAUNCH, args, {}, [type_of(tensors[name]) for name in written])
    builder.tags = recorder.tags() | {NO_GRAD}  # autograd does not see the write: history stays as it was
    with fake.alone():
        for name, out in zip(written, outs, strict=True):
            recorder.write_to(recorder.ref(tensors[name]), recorder.value(out))


def _check(recorder: Recorder, tensors: dict[str, torch.Tensor], written: list[str]) -> None:
    """What a kernel gets must look in memory as it did in the user's program."""
    for name, t in tensors.items():
        if tuple(map(size_key, recorder.value(t).tensor.stride)) != tuple(map(size_key, t.stride())):
            raise CaptureError(f"argument {name} of a Triton kernel has other strides in the trace than in the program")
    for name in written:
        root = recorder.ref(tensors[name]).root
        for other, t in tensors.items():
            if t is not tensors[name] and recorder.ref(t).root is root:
                raise CaptureError(
                    f"arguments {name} and {other} of a Triton kernel share memory, and it writes {name}"
                )
