"""Training steps of large models on meshes that do not exist: one rank's program, without any tensor.

In: a model, a mesh, a plan, the rows of a data rank. Out: the final program of a step, with its update. The model's
weights are fake tensors, so sizes are real and nothing else is; executors are PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tessera
from tessera.distributed.capture import capture
from tessera.distributed.plan import DATA, lay_out
from tessera.distributed.sharding import Sharding
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, contiguous_strides
from tessera.pipeline.options import Options
from tessera.torch_internals.fake import FakeTensorMode
from tessera.training.optimizer_state import OptimizerState
from tessera.training.run import Settings
from tessera.training.sharded import ShardedStep
from tessera.training.sharded_program import Recipe, ShardedCompilation
from tessera.util.config import override

AnyLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def program_of(
    make: Callable[[], nn.Module], loss: AnyLoss, axes: Mapping[str, int], plan: object, rows: int, length: int
) -> Trace:
    """The program of a step on one rank of a mesh; a data rank has so many rows of tokens and labels."""
    (program,) = compiled(make, loss, axes, plan, rows, length).programs
    return program.trace


def compiled(
    make: Callable[[], nn.Module], loss: AnyLoss, axes: Mapping[str, int], plan: object, rows: int, length: int
) -> ShardedCompilation:
    """The same with all stages that led to it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode():
            model = make()
    finally:
        torch.set_default_dtype(before)
    try:
        with override(program_cache=False):
            compilation = _compiled(model, loss, tessera.mesh(device="cpu", fake=True, **axes), plan, rows, length)
            assert compilation.programs
            return compilation
    finally:
        dist.destroy_process_group()


def _compiled(
    model: nn.Module, loss: AnyLoss, mesh: object, plan: object, rows: int, length: int
) -> ShardedCompilation:
    sharding = Sharding(mesh, plan, True, False)  # type: ignore[arg-type]
    state = OptimizerState(torch.optim.AdamW(model.parameters()))
    options = Options.of("aten", None, None)
    step = ShardedStep(model, loss, state, Settings(options, {}, 1, False, {}), sharding)
    for axis in sharding.plan.axes(*DATA):
        rows *= sharding.mesh.size(axis)
    shape = (rows, length)
    type_ = TensorType(torch.int64, shape, contiguous_strides(shape), torch.device("cpu"))
    batch = tuple(torch.empty(0, dtype=torch.int64) for _ in range(2))
    forward = capture(model, loss, batch, {}, {0: type_, 1: type_})
    lies = lay_out(sharding.plan, forward.trace, forward.weights, forward.batch)
    trained = [name for name, _ in model.named_parameters()]
    recipe = Recipe(trained, lambda names: step._update(names, forward.weights, ()))
    return ShardedCompilation("step", forward, step._partition(forward, lies), lies, recipe, options)
