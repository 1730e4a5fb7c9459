"""`tessera.launch`: a Triton kernel that the user's program launches itself, as one opaque equation.

    launch(kernel, constants, grid, descriptors, arguments, written, over=()) -> what the written tensors hold

`kernel` and `constants` are numbers in PyTorch's table of user kernels; `arguments` maps the kernel's parameters to
tensors and numbers, and `written` names those it writes. The kernel writes copies with the same strides, except where
a late pass has found that nobody reads the old contents (`over`). As in eager, autograd does not see what it writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.ir.equation import Special
from tessera.ops.op import declare
from tessera.torch_internals.higher_order import triton_kernel_wrapper_mutation
from tessera.torch_internals.operators import clone_preserve_strides
from tessera.util.errors import RuleError


def _launch(
    kernel: int,
    constants: int,
    grid: list,
    descriptors: dict,
    arguments: dict[str, object],
    written: Sequence[str],
    over: Sequence[str] = (),
) -> list[torch.Tensor]:
    targets: dict[int, torch.Tensor] = {}  # one tensor may stand for several parameters
    for name in written:
        t = arguments[name]
        assert isinstance(t, torch.Tensor)
        targets[id(t)] = t if name in over else clone_preserve_strides(t)
    given = {name: targets.get(id(a), a) for name, a in arguments.items()}
    triton_kernel_wrapper_mutation(
        kernel_idx=kernel,
        constant_args_idx=constants,
        grid=[tuple(g) for g in grid],
        tma_descriptor_metadata=descriptors,
        kwargs=given,
    )
    return [given[name] for name in written]  # type: ignore[misc]


LAUNCH = Special("launch", _launch)


def _refuse(*args: object, **kwargs: object) -> None:
    raise RuleError(
        "vmap: a Triton kernel that the program launches itself has no batching rule; make an operator of it with "
        "tessera.register_kernel, which runs it once an example, or give that a batch= of its own"
    )


declare("tessera.launch", "control", zero=True, batch=_refuse, real=False)
