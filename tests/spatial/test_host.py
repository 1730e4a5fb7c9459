"""Operators that run on the host: named, timed, computed as PyTorch computes them, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import tessera
from tessera.machines.spatial.read import read
from tessera.spatial import interpreter
from tessera.spatial.dialect.text import parse as parse_tiles
from tessera.spatial.dialect.text import to_text
from tessera.spatial.errors import MapError
from tessera.spatial.listing import load, parse
from tessera.spatial.listing.host import OPERATORS
from tessera.spatial.map import map_onto
from tessera.spatial.simulator import Violation, judge, simulate
from tessera.spatial.simulator.stepper import step
from tessera.spatial.watch.waits import Waits
from tessera.torch_internals.operators import OpOverload
from tessera.util.errors import ListingError
from tests.spatial.nets import toy

X = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))


def inverse(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(x)


class Whitened(nn.Module):
    """Factors and an inverse between two products; one operand is read by three operators at the host."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.up(x)
        q, _ = torch.linalg.qr(y)
        near = torch.linalg.inv(y @ y.mT + 3 * torch.eye(6))
        return [near @ q, torch.linalg.det(y), torch.special.bessel_j0(y) + torch.mode(x, -1).values]


@pytest.fixture(scope="module")
def program():
    torch.manual_seed(0)
    return map_onto(Whitened().eval(), X, machine="toy", effort="quick")


def test_both_judges_and_the_interpreter_agree_with_pytorch(program) -> None:
    torch.manual_seed(0)
    want = Whitened().eval()(X)
    ran, (stepped, cycles) = simulate(program, X), step(program.program, X)
    assert ran.cycles == cycles == program.cycles >= program.bound >= program.limit
    tiles = program.mapping.tiles
    placed = interpreter.run(parse_tiles(to_text(tiles), tiles.tensors), program.machine, [X])
    for got, again, tiled, expected in zip(ran.outputs, stepped, placed, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(got, again) and torch.equal(got, tiled)
    assert parse(str(program)) == program.listing


def test_what_the_host_does_is_named_with_bytes_and_cycles(program) -> None:
    host, report = program.machine.host, simulate(program, X).report
    size = 6 * 6 * 4
    assert report.host["aten.linalg_inv_ex.default"] == {
        "calls": 1, "bytes": 2 * size, "cycles": host.latency + -(-2 * size // host.rate),
    }  # fmt: skip
    assert set(report.host) == {
        "aten.linalg_qr.default", "aten.linalg_inv_ex.default", "aten._linalg_det.default", "aten.mode.default",
        "aten.special_bessel_j0.default",
    }  # fmt: skip
    assert "aten.linalg_qr.default: 1 calls" in str(report) and "aten.linalg_qr.default(" in str(program)
    assert sum(name.endswith("_at_host") for name, _ in program.listing.hosted) == 3, "what several read goes once"
    path = [work.step.of.units[0] for work, _ in Waits(judge(program.listing, program.machine)).critical_path()]
    assert "call" in path


def test_a_program_with_calls_is_saved_and_read(program, tmp_path) -> None:
    program.save(tmp_path / "m.spatial")
    assert load(tmp_path / "m.spatial").listing == program.listing
    assert torch.equal(simulate(tmp_path / "m.spatial", X).outputs[0], simulate(program, X).outputs[0])


@pytest.mark.parametrize("cut", [{"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "batches": 2}], ids=str)
def test_over_chips(cut) -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(torch.special.airy_ai(self.layers(x)))

    model, x = Model().eval(), torch.randn(4, 8)
    ran = simulate(map_onto(model, x, machine="lpx", chips=2, cut=cut, effort="quick"), x)
    torch.testing.assert_close(ran.output, model(x), rtol=1e-5, atol=1e-5)
    assert ran.report.host


def test_chains_of_blocks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.special.bessel_j1(self.inner(x))

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(4))).eval(), torch.randn(4, 8)
    ran = simulate(map_onto(model, x, machine="lpx", chips=2, cut={"blocks": 4}), x)
    torch.testing.assert_close(ran.output, model(x), rtol=1e-5, atol=1e-5)
    assert ran.report.host["aten.special_bessel_j1.default"]["calls"] == 4


def test_a_machine_without_such_a_host_refuses() -> None:
    text = toy(1, 1).text
    without = text.partition("[host]")[0] + "[energy]" + text.partition("[energy]")[2]
    silent = "\n".join(line for line in text.splitlines() if not line.startswith("rate"))
    for machine, why in (
        (read("bare", without), "has no host port"),
        (read("mute", silent), "host.latency, host.rate"),
    ):
        with pytest.raises(MapError, match=rf"aten.linalg_inv_ex.default has no form .*{why}.*test_host.py"):
            map_onto(inverse, X, machine=machine)


def _moved(program, by: int):
    """The program whose host computes so many cycles later."""
    pages = []
    for page in program.listing.pages:
        steps = [replace(i, start=i.start + by) if i.units == ("call",) else i for i in page.instructions]
        pages.append(replace(page, instructions=tuple(steps)))
    return replace(program, listing=replace(program.listing, pages=tuple(pages)))


def test_a_call_before_its_operands_are_there_or_after_its_result_is_read() -> None:
    program = map_onto(inverse, X, machine="toy", effort="quick")
    for by in (-1, 1):
        for judged in (lambda p: simulate(p, X), lambda p: step(p.program, X)):
            with pytest.raises(Violation) as told:
                judged(_moved(program, by))
            assert told.value.kind in ("unwritten", "race") and "linalg_inv_ex" in str(told.value)


@pytest.mark.parametrize(
    ("old", "new", "error", "why"),
    [
        ("aten.linalg_inv_ex.default", "aten.system.default", ListingError, "an operator that a host computes"),
        ("aten.linalg_inv_ex.default", "aten.linalg_inv_exx.default", ListingError, "did you mean aten.linalg_inv_ex"),
        ("default(", "default(__import__('os'), ", ListingError, "a tensor, a number, a word"),
        ("aten.linalg_inv_ex.default", "aten._linalg_det.default", Violation, "expected 3 results"),
        ("host    linalg_inv_ex float32[6, 6]", "host    linalg_inv_ex float32[6, 7]", Violation, "as aten.linalg_inv"),
        ("host    linalg_inv_ex float32[6, 6]", "host    linalg_inv_ex float64[6, 6]", Violation, "as aten.linalg_inv"),
        ("default(x_at_host)", "default(x_at_host, upper=true)", Violation, "expected operands that aten.linalg"),
    ],
)
def test_listings_that_say_something_else_cost_one_line(old, new, error, why) -> None:
    program = map_onto(inverse, X, machine="toy", effort="quick")
    text = str(program)
    assert old in text
    with pytest.raises(error, match=why):
        simulate(program.edited(text.replace(old, new)), X)


def test_the_operators_are_pure_and_exist() -> None:
    for name in OPERATORS:
        _, base, overload = name.split(".")
        op = getattr(getattr(torch.ops.aten, base), overload)
        assert isinstance(op, OpOverload) and not op._schema.is_mutable, name


def test_the_library_runs_it_from_its_names() -> None:
    program = tessera.map_onto(lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(6)), X, machine="toy")
    want = torch.linalg.cholesky(X @ X.mT + torch.eye(6))
    torch.testing.assert_close(tessera.simulate(program, X).output, want, rtol=1e-5, atol=1e-5)
