"""Where a program stands against its floor: sums, the order of losses, equal layers, and messages without figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn as nn

import tessera
from tessera.inspection import floor as floors
from tessera.inspection import work as works
from tessera.inspection.floor import SHOWN, Floor
from tessera.machines import machine
from tessera.tools import cli
from tessera.tools.profile.losses import floor_of
from tessera.tools.profile.measured import Row
from tessera.util.config import config, override

LAYERS = 3
pytestmark = pytest.mark.usefixtures("fresh")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16) for _ in range(LAYERS))

    def forward(self, x):
        for w in self.weights:
            x = torch.tanh(x @ w)
        return x.exp()


@pytest.fixture(scope="module")
def trained():
    torch._dynamo.reset()
    fast = tessera.jit(Layers(), executors=["aten"])
    profile = tessera.profile(fast, torch.randn(8, 16), steps=2)
    return profile, tessera.explain(fast)


def check_sums(floor: Floor) -> None:
    assert floor.measured is not None and floor.seconds > 0
    total = floor.seconds + sum(loss.seconds for loss in floor.losses) + floor.outside
    assert total == pytest.approx(floor.measured)
    assert floor.ratio == pytest.approx(floor.measured / floor.seconds)
    assert [x.seconds for x in floor.losses] == sorted((x.seconds for x in floor.losses), reverse=True)


# --- rows that are made up ---

MM = Row(
    "f", "forward", 0, ("mm",), "aten", "aten.mm", (("/code/model.py", 7),), "", "", 1, 5e-6, 5e-6, (), 100.0, 200.0,
    2e-6, "compute", 0.4,
)  # fmt: skip
ADD = replace(MM, operator="aten.add", index=1, seconds=9e-6, roofline_seconds=3e-6, limit="memory", bytes=300.0)


def test_losses_are_sorted_and_equal_layers_are_one():
    floor = floor_of([ADD, MM, replace(MM, index=2), replace(MM, index=3, seconds=10e-6)], 40e-6, "a machine")
    mm, add = floor.losses
    assert (mm.count, mm.operators, mm.where) == (3, ("aten.mm",), "/code/model.py:7")
    assert mm.seconds == pytest.approx(14e-6) and add.seconds == pytest.approx(6e-6)
    assert "a library call" in mm.why and "runs at 30% of the arithmetic's speed" in mm.why
    assert "runs at 33% of the memory's speed" in add.why
    assert floor.seconds == pytest.approx(9e-6) and floor.outside == pytest.approx(11e-6)
    check_sums(floor)
    assert str(floor).splitlines()[:2] == [
        "floor: 9 µs on a machine; measured 40 µs, 4.44 times the floor", "  largest losses:",
    ]  # fmt: skip
    assert "    14 µs: 3 × aten.mm (forward) at /code/model.py:7: " in str(floor)
    assert "outside equations: 11 µs" in str(floor)


@pytest.mark.parametrize("other", [{"bytes": 1.0}, {"program": "backward"}, {"lines": ()}, {"executor": "tile"}])
def test_what_is_not_alike_stays_apart(other):
    assert len(floor_of([MM, replace(MM, **other)], 1e-5, "a machine").losses) == 2


def test_why_names_what_limits():
    odd = replace(MM, unaligned=True, executor="tile", kernels=(("a", 1e-6), ("b", 4e-6)))
    view = replace(MM, operator="aten.view", bytes=0.0, flops=0.0, roofline_seconds=0.0, limit="", reached=None)
    view_loss, odd_loss = floor_of([odd, view], 1e-5, "a machine").losses
    assert odd_loss.why == "tile runs it, an unaligned product, 2 kernels, runs at 40% of the arithmetic's speed"
    assert "moves and computes nothing" in view_loss.why


def test_at_most_three_losses_are_told_and_none_below_zero():
    rows = [replace(ADD, operator=f"aten.op{i}", seconds=(i - 1) * 4e-6) for i in range(6)]
    text = str(floor_of(rows, 1e-3, "a machine"))
    assert text.count(" at /code/model.py") == SHOWN and "op5" in text and "op2" not in text
    text = str(floor_of([replace(ADD, seconds=1e-6)], 1e-6, "a machine"))
    assert "largest losses" not in text and "outside" not in text


# --- programs ---


def test_training_is_told_after_a_profile(trained):
    profile, told = trained
    floor = told.floor
    check_sums(floor)
    assert floor == profile.floor and list(floor.programs) == ["forward", "backward"]
    assert floor.measured == profile.step_seconds
    assert floor.seconds == pytest.approx(sum(row.roofline_seconds for row in profile.rows))
    assert sum(loss.count for loss in floor.losses) == len(profile.rows)
    (product,) = (x for x in floor.losses if x.program == "forward" and x.operators[0] in ("aten.mm", "aten.matmul"))
    line = Layers.forward.__code__.co_firstlineno + 2
    assert product.count == LAYERS and product.where.endswith(f"test_floor.py:{line}")
    assert str(told).endswith(str(floor)) and "<pre" in told._repr_html_()
    data = json.loads(json.dumps(told.to_dict()))["floor"]
    assert data["ratio"] == floor.ratio and data["losses"][0]["seconds"] == floor.losses[0].seconds


def test_inference_before_and_after_a_profile():
    fast, x = tessera.jit(Layers(), executors=["aten"]), torch.randn(8, 16)
    told = tessera.explain(fast)
    assert told.floor.note == "nothing is compiled, so there is none to tell"
    assert str(told).endswith(f"floor: {told.floor.note}")
    with torch.no_grad():
        fast(x)
        told = tessera.explain(fast)
        assert told.floor.measured is None and told.floor.ratio is None and list(told.floor.programs) == ["inference"]
        assert told.floor.seconds > 0 and "not measured: call tessera.profile" in str(told)
        tessera.profile(fast, x, steps=1)
    floor = tessera.explain(fast).floor
    check_sums(floor)
    assert list(floor.programs) == ["inference"] and "not measured: call" not in str(floor)


def test_a_training_step_is_told():
    model = nn.Linear(4, 1)
    step = tessera.train_step(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), 0.1))
    tessera.profile(step, torch.randn(8, 4), steps=1)
    floor = tessera.explain(step).floor
    check_sums(floor)
    assert list(floor.programs) == ["step"]


def test_the_floor_is_that_of_the_described_machine(monkeypatch):
    fast = tessera.jit(lambda x: x + 1, executors=["aten"])
    fast(torch.ones(1000))
    monkeypatch.setattr(floors, "main_device", lambda traces: torch.device("cuda"))
    with override(machine="h200"):
        floor = tessera.explain(fast).floor
    h200 = machine("h200")
    assert floor.machine == h200.name and floor.seconds == pytest.approx(8000 / h200.bandwidth)


def test_a_machine_that_nobody_describes_has_no_floor(monkeypatch):
    fast = tessera.jit(lambda x: x + 1, executors=["aten"])
    fast(torch.ones(3))
    monkeypatch.setattr(floors, "main_device", lambda traces: torch.device("mps"))
    assert "floor: no machine is described for a device of type 'mps'" in str(tessera.explain(fast))


def test_products_with_odd_rows_are_unaligned(monkeypatch):
    def product(k: int, dtype: torch.dtype) -> bool:
        a, b = torch.ones(8, k, dtype=dtype), torch.ones(k, 16, dtype=dtype)
        (eqn,) = tessera.trace(lambda a, b: a @ b, a, b).equations
        return works.unaligned(eqn)

    assert not product(13, torch.bfloat16)  # on a CPU
    monkeypatch.setattr(works, "DEVICES", ("cpu",))
    assert product(13, torch.bfloat16) and not product(16, torch.bfloat16) and not product(13, torch.float32)
    (eqn,) = tessera.trace(torch.sin, torch.ones(8, 13, dtype=torch.bfloat16)).equations
    assert not works.unaligned(eqn)


# --- the command line ---

SCRIPT = """
import torch
import tessera

def f(x):
    return torch.tanh(x) * 2

tessera.jit(f)(torch.ones(300))
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "executors", "sdpa,aten")
    (tmp_path / "script.py").write_text(SCRIPT.lstrip())


def test_explain_measures_a_script(script, capsys):
    assert cli.main(["explain", "--floor", "--steps", "1", "--json", "script.py"]) == 0
    told = json.loads(capsys.readouterr().out)["floor"]
    assert told["measured"] > 0 and {x["where"] for x in told["losses"]} == {"script.py:5"}
    assert told["seconds"] == pytest.approx(sum(told["programs"].values()))


def test_explain_without_the_flag_measures_no_time(script, capsys):
    assert cli.main(["explain", "--no-measure", "script.py"]) == 0
    out = capsys.readouterr().out
    assert "floor: " in out and "not measured: call tessera.profile" in out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("grad", [True, False])
def test_on_a_gpu(grad):
    fast, x = tessera.jit(Layers().cuda()), torch.randn(256, 16, device="cuda")
    with torch.set_grad_enabled(grad):
        tessera.profile(fast, x, steps=3)
    floor = tessera.explain(fast).floor
    check_sums(floor)
    assert list(floor.programs) == (["forward", "backward"] if grad else ["inference"])
    assert floor.ratio is not None and floor.ratio > 1 and floor.losses[0].seconds > 0
    assert "largest losses" in str(floor) and "test_floor.py:" in str(floor)
