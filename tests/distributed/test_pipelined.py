"""Pipelines: schedules are the known ones, refuse to wait for ever, and compute what accumulation does, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from models import GPT, Llama, token_batches, token_loss
from torch.func import functional_call

from tessera.distributed import in_step
from tessera.distributed.pipelined import together, workers
from tessera.distributed.plan import Plan, lay_out
from tessera.frontends.functional.trace import trace_function
from tessera.ir import interp
from tessera.ir.mesh import Mesh
from tessera.passes.clean.canonicalise import canonicalise
from tessera.passes.clean.cse import cse
from tessera.passes.clean.dce import dce
from tessera.pipeline.parts import in_order_of_use
from tessera.transforms.pipelined.cut import Part, cut
from tessera.transforms.pipelined.named_schedules import WORDS, schedule
from tessera.transforms.pipelined.orders import Expect, Send, Take, orders, prove
from tessera.transforms.pipelined.schedule import Schedule
from tessera.transforms.shard.joint import Partition, shard_joint
from tessera.transforms.vjp import Joint, vjp
from tessera.util.errors import OptionError


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 8), (8, 16)])
def test_bubbles_are_those_of_theory(ranks: int, microbatches: int) -> None:
    made = {word: schedule(word, ranks, microbatches) for word in WORDS}
    want = (ranks - 1) / (microbatches + ranks - 1)
    assert made["gpipe"].bubble() == pytest.approx(want) == made["1f1b"].bubble()
    assert made["interleaved"].bubble() == pytest.approx((ranks - 1) / (2 * microbatches + ranks - 1))
    assert made["zero-bubble"].idle() <= made["1f1b"].idle() / 3
    assert max(made["zero-bubble"].held()) <= max(made["1f1b"].held()) <= ranks <= max(made["gpipe"].held())
    assert made["dualpipe"].idle() == ranks - 1 == made["1f1b"].idle() * 2 / 6  # of stages that are half as long
    assert max(made["dualpipe"].held()) <= 2 * max(made["1f1b"].held())


@pytest.mark.parametrize("word", WORDS)
def test_tables_are_read_again(word: str) -> None:
    made = schedule(word, 4, 8)
    assert Schedule.parse(str(made)) == made


TABLE = """
rank 0  F0 F1 .  .  B0 =  B1 =
rank 1  .  F0 B0 =  F1 B1 =
"""


def test_a_table_that_a_person_wrote() -> None:
    made = Schedule.parse(TABLE)
    assert (made.stages, made.microbatches, made.home) == (2, 2, {0: 0, 1: 1})


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("F0 F1", "B0 F1", "got B0 twice"),
        ("F1 B1 =\n", "F1 .\n", "expected B1 of stage 1, got none"),
        (
            "F0 B0 =  F1", "B0 F0 F1",
            "wait for each other for ever: rank 0 at B0 for B0 of rank 1; rank 1 at B0 for F0 of rank 1",
        ),
        ("rank 1", "rank 2", "expected the row of rank 1"),
        ("F1 .", "G1 .", "got 'G1'"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be(before: str, after: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Schedule.parse(TABLE.replace(before, after, 1))


def test_fewer_microbatches_than_stages() -> None:
    with pytest.raises(OptionError, match="ranks would do nothing for 60% of the time"):
        schedule("1f1b", 4, 2)


# --- what ranks send and receive ------------------------------------------------------------------


@pytest.mark.parametrize("word", WORDS)
def test_both_ranks_post_their_messages_in_one_order(word: str) -> None:
    """Queues without names serve, then; and everything that is sent is taken before it is read."""
    joint, _, _ = joint_of("gpt")
    table = schedule(word, 2, 4)
    one, two = orders(table, cut(joint, table.stages))
    posts = [[step.message for step in row if isinstance(step, (Send, Expect))] for row in (one, two)]
    assert posts[0] == posts[1] and len(posts[0]) == len(set(posts[0]))
    for row in (one, two):
        taken = [step.message for step in row if isinstance(step, Take)]
        assert sorted(map(str, taken)) == sorted(str(s.message) for s in row if isinstance(s, Expect))


def test_an_order_that_would_wait_for_ever() -> None:
    """Each takes before it sends."""
    joint, _, _ = joint_of("llama")
    table = schedule("1f1b", 2, 2)
    rows = orders(table, cut(joint, 2))
    first = [sorted(row, key=lambda step: not isinstance(step, (Take, Expect))) for row in rows]
    with pytest.raises(
        OptionError, match=r"wait for each other for ever: rank 0 for B0 from stage 1 to 0; rank 1 for F0"
    ):
        prove(first, table)
    with pytest.raises(OptionError, match="expected both ends of every message, got one of F0 from stage 0 to 1"):
        prove([[s for s in row if isinstance(s, Send)] for row in rows], table)


# --- programs -------------------------------------------------------------------------------------

MICROBATCHES, ROWS = 4, 2


@cache
def joint_of(name: str) -> tuple[Joint, dict[str, torch.Tensor], list]:
    """A loss over a microbatch, differentiated; its weights; microbatches."""
    torch.manual_seed(0)
    model = {"gpt": GPT, "llama": Llama}[name](4).double()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    batches = token_batches(MICROBATCHES, ROWS)

    def loss(*args: torch.Tensor) -> torch.Tensor:
        own = dict(zip(weights, args[: len(weights)], strict=True))
        return token_loss(lambda *inputs: functional_call(model, own, inputs), *args[len(weights) :])

    trace = dce(cse(canonicalise(trace_function(loss, [*weights.values(), *batches[0]]).trace)))
    joint = vjp(trace, list(trace.inputs[: len(weights)]))
    return in_order_of_use(cse(canonicalise(joint.trace, differentiable=False)), joint), weights, batches


def accumulated(joint: Joint, given: list, batches: list, seed: object, execute, add) -> tuple[list, list]:
    losses, sums = [], None
    for batch in batches:
        loss, *grads = execute(joint.trace, [*given, *batch, seed])
        losses.append(loss)
        sums = grads if sums is None else [add(a, b) for a, b in zip(sums, grads, strict=True)]
    return losses, sums


def piped(joint: Joint, table: Schedule, given: list, batches: list, seed: object, execute, add) -> tuple[list, list]:
    inputs, outputs = joint.trace.inputs, joint.trace.outputs
    stages = cut(joint, table.stages)
    weights = dict(zip(inputs, given, strict=False)) | {inputs[-1]: seed}
    fed = [dict(zip(inputs[len(given) :], batch, strict=False)) for batch in batches]

    def run(part: Part, args: list) -> Sequence:
        program = stages.programs[part]
        return execute(program, args) if program.equations else ()

    ranks = workers(stages, table, run, add, outputs[1:])
    results, sums = together(ranks, weights, fed)
    return [r[outputs[0]] for r in results], [sums[v] for v in outputs[1:]]


def whole_run(trace, args: list) -> list:
    return interp.run(trace, *args)


@pytest.mark.parametrize(("name", "word"), [*(("gpt", word) for word in WORDS), ("llama", "interleaved")])
def test_a_pipeline_is_accumulation_bit_for_bit(name: str, word: str) -> None:
    joint, weights, batches = joint_of(name)
    common = [*weights.values()], batches, torch.tensor(1 / MICROBATCHES, dtype=torch.float64), whole_run, torch.add
    losses, sums = piped(joint, schedule(word, 2, MICROBATCHES), *common)
    want, grads = accumulated(joint, *common)
    assert all(map(torch.equal, losses, want)) and all(map(torch.equal, sums, grads))


def test_a_pipeline_beside_other_axes() -> None:
    """One rank's program of two other axes is cut as any other."""
    joint, weights, batches = joint_of("llama")
    mesh = Mesh.of(dp=2, tp=2)
    named = dict(zip(weights, joint.trace.inputs, strict=False))
    batch = joint.trace.inputs[len(weights) : -1]
    lies = lay_out(Plan.of({"dp": "zero3", "tp": "sequence"}, mesh), joint.trace, named, batch)
    inputs = {**lies.inputs, **lies.results, **{v: lies.weights[n] for n, v in named.items()}}
    grads = {v: lies.grads[n] for n, v in named.items()}
    partition = Partition(mesh, inputs, [None], 1, grads, named.values(), lies.plan.stays)
    local, _ = shard_joint(joint, partition)
    local = in_order_of_use(local.trace, local)
    places = [v.type.placement for v in local.trace.inputs]

    def parts(xs: list, start: int = 0) -> list:
        return [in_step.cut(x, p) for x, p in zip(xs, places[start:], strict=False)]

    def add(a: list, b: list) -> list:
        return list(map(torch.add, a, b))

    seed = in_step.cut(torch.tensor(1 / MICROBATCHES, dtype=torch.float64), places[-1])
    common = parts([*weights.values()]), [parts(b, len(weights)) for b in batches], seed, in_step.run, add
    got, want = piped(local, schedule("1f1b", 2, MICROBATCHES), *common), accumulated(local, *common)
    for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert all(map(torch.equal, a, b))


def test_what_crosses_is_an_activation() -> None:
    """Each way, a boundary and a microbatch; the Llama has no tied weights."""
    joint, _, _ = joint_of("llama")
    stages = cut(joint, 4)
    size = ROWS * 8 * 16 * 8
    between = {key: sum(v.nbytes() for v in values) for key, values in stages.sends.items()}
    assert between == {("F", s, s + 1): size for s in range(3)} | {("B", s + 1, s): size for s in range(3)}
    assert max(stages.costs) < 1.6 * sum(stages.costs) / 4


def test_more_stages_than_work() -> None:
    trace = trace_function(lambda x: torch.sin(x).sum(), (torch.randn(3),)).trace
    with pytest.raises(OptionError, match="expected at most 2 stages"):
        cut(vjp(trace, list(trace.inputs)), 3, weights=())
