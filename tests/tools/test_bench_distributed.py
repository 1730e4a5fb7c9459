"""`tessera bench distributed`: a step without tensors, links of boxes and networks, rows of a section."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from tessera.inspection.timeline import LATENCY, timeline
from tessera.ir.dist import bytes_sent, is_collective, on
from tessera.ir.equation import Equation, Value
from tessera.ir.mesh import Mesh
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, contiguous_strides
from tessera.ir.verify import verify
from tessera.machines import machine
from tessera.passes.memory.overlap import overlap
from tessera.tools.bench import distributed
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
    """Ours, PyTorch's and none: the same work and bytes. So small a program is latency; there ours may expose a little
    more than PyTorch's."""
    made = compiled(lambda: Llama(replace(TINY, layers=2)), distributed._loss, {"dp": 64}, plan, 1, 512)
    stages = dict(made.account.stages)
    joined = stages[list(stages)[list(stages).index("step overlap") - 1]]
    theirs = _Graph(joined, machine("h100")).ordered()
    for order in (verify(theirs), verify(overlap(joined))):
        exchanges = [e for e in order.equations if is_collective(e, "begin", "wait")]
        assert len(order.equations) - len(exchanges) // 2 == len(joined.equations)
        assert sum(map(bytes_sent, order.equations)) == sum(map(bytes_sent, joined.equations))
    ours, others, none = compared(joined, machine("h100"))
    assert others is not None and ours.exposed <= 1.02 * others.exposed < none.exposed and ours.peak <= others.peak


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


def test_rows_are_held_to_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    def section(say: object) -> list[distributed.Row]:
        return [distributed.Row("a", "good", 1.0, "%", 2.0), distributed.Row("a", "bad", 3.0, "%", 2.0, "why")]

    monkeypatch.setitem(distributed.SECTIONS, "zero3", section)
    outcome = distributed.outcome(Namespace(only=["zero3"]), lambda text: None)
    assert outcome.missed and [row["passed"] for row in outcome.rows] == [True, False]
    assert outcome.rows[1]["note"] == "why"
