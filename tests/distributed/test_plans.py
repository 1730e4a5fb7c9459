"""Every plan trains as one process on the whole batch does, in float64 to 1e-11, and sends the bytes it should."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from models import GPT, Llama, Pictures, picture_batches, picture_loss, token_batches, token_loss
from steps import Step, make_step, run_ranks, run_whole

from tessera.distributed.plan import Layout, Plan, lay_out
from tessera.ir.dist import bytes_sent
from tessera.ir.mesh import Mesh
from tessera.ir.verify import verify
from tessera.transforms.shard.partition import Sharded, shard

STEPS = 5
MODELS = {
    "gpt": (GPT, token_loss, token_batches),
    "llama": (Llama, token_loss, token_batches),
    "pictures": (Pictures, picture_loss, picture_batches),
}


@cache
def step_of(model: str, optimizer: str, clip: float | None) -> tuple[Step, list, tuple]:
    make, loss, batches = MODELS[model]
    torch.manual_seed(0)
    given = batches(STEPS)
    step = make_step(make().double(), loss, given[0], optimizer, clip)
    return step, given, run_whole(step, given)


def sharded(step: Step, mesh: Mesh, plan: object) -> tuple[Layout, Sharded]:
    layout = lay_out(Plan.of(plan, mesh), step.forward, step.params, step.batch)  # type: ignore[arg-type]
    placements = {**layout.inputs, **layout.results}
    for name, v in step.params.items():
        placements[v] = layout.weights[name]
        placements[step.grads[name]] = layout.grads[name]
        placements.update(dict.fromkeys(step.states.get(name, ()), layout.states[name]))
    return layout, shard(step.trace, mesh, placements, step.params.values(), layout.plan.stays)


def check(model: str, mesh: Mesh, plan: object, optimizer: str = "adam", clip: float | None = None) -> Sharded:
    step, batches, (losses, held) = step_of(model, optimizer, clip)
    _, program = sharded(step, mesh, plan)
    verify(program.trace)
    mine, parts = run_ranks(step, program.trace, batches)
    for got, want in zip((*mine, *parts), (*losses, *held), strict=True):
        got, want = got.double(), want.double()
        assert (got - want).norm() <= 1e-11 * want.norm() + 1e-15
    return program


ALONE = ("ddp", "zero1", "zero2", "zero3", "tensor", "sequence")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("plan", ALONE)
def test_alone(model: str, plan: str) -> None:
    if model == "pictures" and plan in ("tensor", "sequence"):
        pytest.skip("convolutions are not cut by columns")
    check(model, Mesh.of(dp=2), plan)


PAIRS = (
    ({"rep": 2, "dp": 2}, {"rep": "hsdp", "dp": "zero3"}),
    ({"dp": 2, "tp": 2}, {"dp": "ddp", "tp": "tensor"}),
    ({"dp": 2, "tp": 2}, {"dp": "zero1", "tp": "sequence"}),
    ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tensor"}),
    ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "sequence"}),
    ({"dp": 4, "tp": 4}, {"dp": "zero3", "tp": "sequence"}),
    ({"rep": 2, "dp": 2, "tp": 2}, {"rep": "hsdp", "dp": "zero3", "tp": "sequence"}),
)


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize(("axes", "plan"), PAIRS, ids=lambda x: "-".join(map(str, x.values())))
def test_together(model: str, axes: dict, plan: dict) -> None:
    check(model, Mesh.of(axes), plan)


@pytest.mark.parametrize("plan", ["ddp", "zero3", "sequence"])
def test_clipped_with_sgd(plan: str) -> None:
    """The norm is that of all gradients of the whole batch."""
    check("gpt", Mesh.of(dp=2), plan, "sgd", clip=0.5)


def sent(program: Sharded, axis: str) -> float:
    return sum(bytes_sent(e) for e in program.trace.equations if axis in e.args)


def bytes_of(step: Step) -> int:
    return sum(v.nbytes() for v in step.params.values())


@pytest.mark.parametrize(("plan", "times"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2)])
def test_bytes_of_data_parallel_plans(plan: str, times: int) -> None:
    """Weights that were gathered are kept here, so zero3 sends twice as much."""
    step, _, _ = step_of("llama", "adam", None)
    _, program = sharded(step, Mesh.of(dp=2), plan)
    scalars = [e for e in program.trace.equations if "dp" in e.args and e.op.name == "all_reduce" and not e.out.shape]
    loss = sum(map(bytes_sent, scalars))
    assert sent(program, "dp") - loss == times * bytes_of(step) / 2


ACTIVATION = 4 * 8 * 16 * 8  # bytes of a batch of 4 x 8 tokens of width 16 in float64


def by_name(program: Sharded, axis: str, size: int) -> dict[str, float]:
    """Bytes of collectives on activations of this size, by what they do."""
    sums: dict[str, float] = {}
    for e in program.trace.equations:
        if axis in e.args and bytes_sent(e) and max(e.out.nbytes(), e.args[0].nbytes()) == size:
            sums[e.op.name] = sums.get(e.op.name, 0.0) + bytes_sent(e)
    return sums


def test_bytes_of_tensor_parallel_blocks() -> None:
    """Four sums of an activation a block. Beside the two blocks there are one more for the table of words and one for
    the gradient that comes back from the head, which are cut as well."""
    step, _, _ = step_of("llama", "adam", None)
    _, program = sharded(step, Mesh.of(tp=2), "tensor")
    assert by_name(program, "tp", ACTIVATION) == {"all_reduce": (4 * 2 + 2) * 2 * ACTIVATION / 2}


def test_bytes_of_sequence_parallel_blocks() -> None:
    """Each of the four sums is scattered, and gathered where a weight is cut by columns or a gradient comes back."""
    step, _, _ = step_of("llama", "adam", None)
    _, program = sharded(step, Mesh.of(tp=2), "sequence")
    half = (4 * 2 + 2) * ACTIVATION / 2
    assert by_name(program, "tp", ACTIVATION) == {"reduce_scatter": half, "all_gather": half}
