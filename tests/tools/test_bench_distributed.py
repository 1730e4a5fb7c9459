"""`tessera bench distributed`: a step without tensors, links of boxes and networks, rows of a section."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from tessera.inspection.timeline import LATENCY, Clock, timeline
from tessera.ir.builder import Builder, emit
from tessera.ir.dist import bytes_copied, bytes_sent, is_collective, on
from tessera.ir.equation import Equation, Value
from tessera.ir.mesh import Mesh
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, contiguous_strides
from tessera.ir.verify import verify
from tessera.machines import machine
from tessera.machines.here import with_figures
from tessera.passes.memory.alias import roots
from tessera.passes.memory.overlap import overlap, paired
from tessera.tools.bench import distributed, one_rank
from tessera.tools.bench.distributed_steps import compiled, program_of
from tessera.tools.bench.overlap import _Graph, compared
from tessera.tools.llama import Llama, LlamaConfig

TINY = LlamaConfig(layers=1, width=1024, heads=16, kv_heads=8, hidden=2048, vocab=4096)


def test_a_step_of_a_model_without_memory() -> None:
    """It gathers, multiplies in pieces and updates; no tensor of its size is made."""
    plan = {"dp": "zero3", "tp": "async-tp"}
    program = program_of(lambda: Llama(TINY), distributed._loss, {"dp": 4, "tp": 8}, plan, 1, 512)
    names = {e.args[1] for e in program.equations if is_collective(e, "begin")}
    assert {"all_gather", "reduce_scatter", "permute"} <= names and program.mutations
    told = timeline(program, machine("h100"), fused=True)
    assert 0 < told.waiting < told.seconds and told.waiting == pytest.approx(sum(told.by_name.values()))
    assert told.computing < timeline(program, machine("h100")).computing


@pytest.mark.parametrize("plan", ["zero3", "zero2"])
def test_orders_of_the_same_equations(plan: str) -> None:
    """Ours, PyTorch's and none: the same work and bytes. Ours holds at most a few exchanged values more than none."""
    made = compiled(lambda: Llama(replace(TINY, layers=2)), distributed._loss, {"dp": 64}, plan, 1, 512)
    stages = dict(made.account.stages)
    joined = stages[list(stages)[list(stages).index("step overlap") - 1]]
    theirs = _Graph(joined, machine("h100")).ordered()
    for order in (verify(theirs), verify(overlap(joined))):
        exchanges = [e for e in order.equations if is_collective(e, "begin", "wait")]
        assert len(order.equations) - len(exchanges) // 2 == len(joined.equations)
        assert sum(map(bytes_sent, order.equations)) == sum(map(bytes_sent, joined.equations))
    ours, others, none = compared(joined, machine("h100"))
    assert others is not None and ours.exposed <= others.exposed < none.exposed
    gathered = max(e.out.nbytes() for e in joined.equations if is_collective(e, "all_gather"))
    assert ours.peak <= none.peak + 3 * gathered


def exchange(axes: dict[str, int], name: str, *args: object) -> tuple[float, float]:
    """Seconds and bytes of one exchange of 64 MiB."""
    mesh, shape = Mesh.of(axes), (1 << 25,)
    type_ = TensorType(torch.bfloat16, shape, contiguous_strides(shape), torch.device("cpu"))
    x, y = Value("x", type_), Value("y", type_)
    eqn = Equation(getattr(on(mesh), name), (x, *args), {}, (y,))
    return timeline(Trace("one", (x,), (eqn,), (y,)), machine("h100")).seconds, bytes_sent(eqn)


def test_links_inside_of_a_box_and_between_boxes() -> None:
    h100 = machine("h100")
    fast, slow = h100["link.nvlink"], h100["link.network"]
    for axes, axis, rate in (
        ({"dp": 4, "tp": 8}, "tp", fast),  # neighbours fill a box
        ({"dp": 4, "tp": 8}, "dp", slow),  # one of each box
        ({"dp": 64}, "dp", min(fast, 8 * slow)),  # whole boxes, over all their links
    ):
        seconds, sent = exchange(axes, "all_gather", 0, axis)
        assert seconds == pytest.approx(sent / rate + LATENCY)
    seconds, sent = exchange({"ep": 16}, "all_to_all", 0, 0, "ep")
    assert seconds == pytest.approx(sent * 8 / 15 / slow + LATENCY)


@pytest.mark.parametrize("case", one_rank.CASES, ids=lambda case: case.name)
def test_a_rank_takes_the_memory_that_is_foreseen(case: one_rank.Case) -> None:
    """To the byte, but for what kernels allocate for themselves; a stage of a pipeline with its microbatches too."""
    machine_here = with_figures(machine("h200"), {"sustained.bfloat16": 1e9}, "made up")
    told = one_rank.measured(case, one_rank.TINY, 64, machine_here, torch.device("cpu"))
    foreseen, seen = told.bytes
    assert 0.98 * seen <= foreseen <= seen
    assert min(told.seconds) > 0


def test_work_is_that_of_the_products_and_attention() -> None:
    """A step of a final program, whoever claimed what: six operations for a weight and a token, and attention's."""
    case, config, length = one_rank.CASES[0], one_rank.TINY, 64
    rates = {name: 1e9 for name in ("matrix.bfloat16", "sustained.bfloat16", "attention.forward", "attention.backward")}
    fast = with_figures(machine("h200"), {**rates, "bandwidth": 1e18, "flops.float32": 1e18}, "made up")
    with one_rank.rank_of(case, config, length, torch.device("cpu")) as (step, _):
        (program,) = step.programs.values()
        seconds, _ = one_rank.foreseen(program.compilation, fast)
    tokens, attended = case.rows * length, 2 * case.rows * config.heads * length * length * config.head
    weights = config.layers * (4 * config.width**2 + 3 * config.width * config.hidden) + config.width * config.vocab
    assert seconds == pytest.approx((6 * weights * tokens + 3.5 * config.layers * attended) / 1e9, rel=0.01)


def test_work_of_a_stage_adds_gradients_of_microbatches() -> None:
    """Between its programs: of every microbatch but the first, two operands and a result."""
    case = one_rank.CASES[-1]
    slow = with_figures(machine("h200"), {"bandwidth": 1e9, "sustained.bfloat16": 1e12}, "made up")
    with one_rank.rank_of(case, one_rank.TINY, 64, torch.device("cpu")) as (step, _):
        (program,) = step.programs.values()
        of = program.compilation
        seconds, needed = one_rank.foreseen(of, slow)
    alone = Clock(slow)
    for part in of.executable.parts.values():
        for _ in range(case.microbatches):
            alone.run_all(part.trace)
    alone.run_all(of.update.trace)
    added = 3 * (case.microbatches - 1) * needed.weights / slow.bandwidth  # all of them are trained
    assert seconds - alone.device == pytest.approx(added, rel=1e-6)


def test_every_exchange_over_a_group_of_one() -> None:
    told = one_rank.exchanges("cpu", "gloo")
    assert len(told) == 21 and all(told.values())


@pytest.mark.parametrize(
    ("name", "args", "begins", "ends"),
    [
        ("all_gather", (0, "dp"), 0, 0),
        ("all_gather", (1, "dp"), 0, 4),  # chunks are joined
        ("reduce_scatter", (0, "dp"), 0, 0),
        ("reduce_scatter", (1, "dp"), 2, 0),  # the operand is cut into chunks first
        ("all_reduce", ("dp",), 2, 0),
        ("all_to_all", (0, 1, "dp"), 0, 2),
    ],
)
def test_what_a_rank_copies_for_an_exchange(name: str, args: tuple, begins: int, ends: int) -> None:
    """In multiples of the operand; where a wait copies nothing, its result is the memory that was begun."""
    builder, mesh = Builder("one"), Mesh.of(dp=2)
    x = builder.input("x", TensorType(torch.float32, (4, 4), (4, 1), torch.device("cpu")))
    with builder:
        y = emit(getattr(on(mesh), name), x, *args)
    begin, wait = paired(builder, builder.equations[0])
    trace = builder.finish([y]).with_(equations=(begin, wait))
    assert (bytes_copied(begin), bytes_copied(wait)) == (begins * x.nbytes(), ends * x.nbytes())
    shares = roots(trace)
    assert shares[begin.out] == {begin.out} and shares[y] == ({y} if ends else {begin.out})


def test_rows_are_held_to_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    def section(say: object) -> list[distributed.Row]:
        return [distributed.Row("a", "good", 1.0, "%", 2.0), distributed.Row("a", "bad", 3.0, "%", 2.0, "why")]

    monkeypatch.setitem(distributed.SECTIONS, "zero3", section)
    outcome = distributed.outcome(Namespace(only=["zero3"]), lambda text: None)
    assert outcome.missed and [row["passed"] for row in outcome.rows] == [True, False]
    assert outcome.rows[1]["note"] == "why"
