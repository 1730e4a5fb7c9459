"""The simulator against PyTorch, against the stepper, and against listings that are wrong."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tessera
from tessera.machines.find import spatial_machine
from tessera.machines.spatial.read import vary
from tessera.spatial.listing import load, parse, print_listing, save
from tessera.spatial.simulator import KINDS, Violation, judge, simulate
from tessera.spatial.simulator.stepper import step
from tessera.tools import cli
from tessera.util.errors import InputError, OptionError

sys.path.insert(0, str(Path(__file__).parent))

from listings import CASES, cache, listing, mlp_on_one, over_chips, toy  # noqa: E402
from mutate import KINDS as MUTATIONS  # noqa: E402
from mutate import campaign, mapped, right  # noqa: E402


@pytest.mark.parametrize("name", CASES)
def test_a_listing_gives_what_pytorch_gives_in_the_same_time_twice(name):
    case = CASES[name]()
    ran = simulate(case.program, *case.inputs)
    stepped, cycles = step(case.program, *case.inputs)
    assert right(case, ran.outputs)
    assert all(torch.equal(a, b) for a, b in zip(ran.outputs, stepped, strict=True))
    assert ran.cycles == cycles == case.program.listing.end


def test_state_goes_from_run_to_run():
    case = cache()
    first = simulate(case.program, *case.inputs)
    assert right(case, first.outputs)
    assert all(torch.equal(first.state[name], value) for name, value in case.state.items())
    again = simulate(case.program, *case.inputs, state=first.state)
    assert again.outputs[1].item() == 2
    fresh = simulate(case.program, *case.inputs)
    assert fresh.outputs[1].item() == 1, "a run leaves the program as it was"
    assert torch.equal(step(case.program, *case.inputs)[0][0], first.outputs[0])


@pytest.mark.parametrize("seed", range(4))
def test_jitter_changes_nothing(seed):
    for case in (over_chips(), CASES["ring"]()):
        assert right(case, simulate(case.program, *case.inputs, jitter=seed).outputs)


def test_the_report_counts():
    case = mlp_on_one()
    report = tessera.simulate(case.program, *case.inputs).report
    assert report.cycles == 548 and report.seconds == pytest.approx(548e-9)
    assert report.macs == {"float32": 16 * 32 * 32 + 16 * 32 * 16}
    assert report.busy["0,0 matrix"] == 256 + 128
    assert report.bytes["host"] == 2048 + 1024
    # x twice and w1 once; a and b; h once and w2 once; y
    assert report.bytes["sram read"] == 2 * 2048 + 4096 + 2048 + 128 + 2048 + 2048 + 1024
    assert report.energy["mac float32"] == pytest.approx(4.6 * 24576)
    assert report.data()["utilisation"]["0,0 matrix"] == pytest.approx(384 / 548)


# What SCALE-Sim 3.0.0 reported for (M, N, K); its report shows the last index, one less than the cycles.
SCALE_SIM = {
    (16, 16, "weight"): {(1, 1, 1): 46, (17, 17, 17): 251, (16, 64, 32): 495, (5, 40, 23): 305, (33, 9, 65): 394},
    (16, 16, "input"): {(1, 1, 1): 46, (17, 17, 17): 251, (16, 64, 32): 219, (5, 40, 23): 171, (33, 9, 65): 824},
    (16, 16, "output"): {(1, 1, 1): 30, (17, 17, 17): 187, (16, 64, 32): 247, (5, 40, 23): 158, (33, 9, 65): 284},
    (4, 8, "weight"): {(1, 1, 1): 14, (17, 17, 17): 464, (16, 64, 32): 1919, (5, 40, 23): 569, (33, 9, 65): 1597},
    (4, 8, "input"): {(1, 1, 1): 14, (17, 17, 17): 464, (16, 64, 32): 1247, (5, 40, 23): 323, (33, 9, 65): 1954},
    (4, 8, "output"): {(1, 1, 1): 10, (17, 17, 17): 404, (16, 64, 32): 1343, (5, 40, 23): 329, (33, 9, 65): 1349},
}


@pytest.mark.parametrize("array", SCALE_SIM, ids=str)
def test_products_take_the_cycles_that_scale_sim_counts(array):
    rows, columns, stationary = array
    machine = toy(
        matrix__rows=rows,
        matrix__columns=columns,
        matrix__stationary=stationary,
        sram__width="4 KiB",
        host__width="64 KiB",
    )
    for (m, n, k), last in SCALE_SIM[array].items():
        x, w = torch.randint(-9, 9, (m, k), dtype=torch.int8), torch.randint(-9, 9, (k, n), dtype=torch.int8)
        sent = max(1, -(-m * n * 4 // 4096))
        took = -(-m * k // 4096)
        body = f"""\
input   x int8[{m}, {k}]
output  y int32[{m}, {n}]

core 0,0
  sram  w  int8[{k}, {n}]   0x0000 +{k * n}  always = w
  sram  x  int8[{m}, {k}]   0x2000 +{m * k}  0..{took + last + 1}
  sram  y  int32[{m}, {n}]  0x4000 +{m * n * 4}  {took}..{took + last + 1 + sent}
  @0  host  recv x from host.x  {took}  sram.w0
  @{took}  matrix  y = x · w  {last + 1}  sram.r0 sram.w0
  @{took + last + 1}  host  send y to host.y  {sent}  sram.r0
end {took + last + 1 + sent}
"""
        program = listing(machine, body, {"w": w})
        ran = simulate(program, x)
        assert torch.equal(ran.output, x.int() @ w.int())
        if last < 500:
            assert torch.equal(step(program, x)[0][0], ran.output)


def test_some_hundred_mutations():
    seen, faults = campaign(400, seed=1)
    assert not faults
    assert len({kind for kind, verdict, _ in seen if verdict == "refused"}) >= 18
    assert len(MUTATIONS) >= 18
    assert {why for _, verdict, why in seen if verdict == "refused"} <= set(KINDS)


@pytest.mark.sweep
def test_many_mutations():
    assert not campaign(10_000, seed=2, more=mapped())[1]


def test_a_violation_names_the_kind_the_core_the_cycle_and_both_parties():
    case = CASES["int8 on two cores"]()
    text = print_listing(case.program.listing)
    late = parse(text.replace("@10  ", "@11  ").replace("10..68", "11..68"))
    with pytest.raises(Violation) as caught:
        simulate(replace(case.program, listing=late), *case.inputs)
    violation = caught.value
    assert (violation.kind, str(violation.core), violation.cycle) == ("arrival", "0,1", 11)
    assert "expected to receive at cycle 10" in str(violation)
    assert "recv x from 0,0" in violation.parties[0] and "send x[0:8, 16:32] to 0,1" in violation.parties[1]


def test_the_judges_share_listings_and_machines_with_the_compiler_and_nothing_else():
    folder = Path(tessera.__file__).parent / "spatial"
    allowed = ("tessera.spatial.listing", "tessera.spatial.simulator", "tessera.machines", "tessera.util")
    for path in (*(folder / "simulator").glob("*.py"), *(folder / "listing").glob("*.py")):
        modules = [node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        ours = [module for module in modules if module and module.startswith("tessera")]
        assert all(module.startswith(allowed) for module in ours), f"{path.name}: {ours}"


def test_a_listing_is_judged_once(monkeypatch):
    """As long as it is the same one, for the same machine and without jitter."""
    module, judged = sys.modules["tessera.spatial.simulator.judge"], []
    monkeypatch.setattr(module, "judge", lambda of, *rest: judged.append(of) or judge(of, *rest))
    case = mlp_on_one()
    first, second = (simulate(case.program, *case.inputs) for _ in range(2))
    assert len(judged) == 1 and first.output.equal(second.output) and first.report == second.report
    simulate(case.program, *case.inputs, jitter=1)
    simulate(replace(case.program, listing=parse(print_listing(case.program.listing))), *case.inputs)
    assert len(judged) == 3
    wrong = replace(case.program, listing=replace(case.program.listing, end=1))
    for _ in range(2):
        with pytest.raises(Violation, match="expected the program to end at"):
            simulate(wrong, *case.inputs)
    known = len(module._known)
    del case, first, second, wrong, judged[:]
    assert len(module._known) < known, "nothing is kept of a listing that nobody has"


def test_a_program_for_another_machine():
    case = mlp_on_one()
    other = replace(case.program, machine=vary(spatial_machine("toy"), {"chip.grid": [4, 4]}))
    with pytest.raises(Violation, match="machine: .*expected a program for toy"):
        simulate(other, *case.inputs)


def test_inputs_of_another_shape_or_number():
    case = mlp_on_one()
    with pytest.raises(InputError, match=r"expected x to be float32\[16, 32\], got float32\[2, 2\]"):
        simulate(case.program, torch.zeros(2, 2))
    with pytest.raises(InputError, match="expected 1 inputs"):
        simulate(case.program)
    with pytest.raises(InputError, match="expected x to be a tensor, got list"):
        simulate(case.program, [torch.zeros(16, 32)])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="expected what map_onto gives, or a .spatial file; got ReLU"):
        simulate(torch.nn.ReLU(), torch.zeros(16, 32))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="expected jitter to be a whole number"):
        simulate(case.program, torch.zeros(16, 32), jitter="a")  # type: ignore[arg-type]


def test_tensors_without_data_and_state_that_is_none():
    case, kept = mlp_on_one(), cache()
    (x,) = case.inputs
    for given in (x.to("meta"), x.to_sparse()):
        with pytest.raises(InputError, match="expected x to be dense and to hold data"):
            simulate(case.program, given)
    with pytest.raises(InputError, match="keeps no 'cash' between runs; it keeps "):
        simulate(kept.program, *kept.inputs, state={"cash": x})
    for state in (5, dict.fromkeys(simulate(kept.program, *kept.inputs).state, 5)):
        with pytest.raises(InputError, match="expected (the )?state"):
            simulate(kept.program, *kept.inputs, state=state)  # type: ignore[arg-type]


def test_two_cores_that_send_one_output_at_once():
    page = """
core 0,{0}
  sram  a  float32[8]  0x0000 +32  always = c
  @{1}  host  send a to host.y  1  sram.r0
"""
    machine, c = toy(host__cores=[[0, 0], [0, 1]]), torch.ones(8)
    for second, end in ((0, 1), (1, 2)):
        body = f"output  y float32[8]\n{page.format(0, 0)}{page.format(1, second)}end {end}\n"
        program = listing(machine, body, {"c": c})
        for judge_of in (simulate, step):
            if second:
                judge_of(program)
                continue
            with pytest.raises(Violation) as caught:
                judge_of(program)
            assert caught.value.kind == "race" and str(caught.value.core) == "0,1"


def test_an_index_outside_of_its_table():
    case = CASES["gather and scatter"]()
    with pytest.raises(Violation, match="index: cycle 2 on core 0,0: expected indices of 0 to 9; got 10"):
        simulate(case.program, torch.tensor([3, 10, 0, 3]), case.inputs[1])


def test_a_huge_output_is_refused_before_memory_is_taken():
    body = "output  y float32[1000000, 1000000]\n\ncore 0,0\nend 0\n"
    with pytest.raises(Violation, match="output: .*0 of 4000000000000 bytes"):
        judge(listing(toy(), body).listing, toy())


def test_a_file_runs(tmp_path):
    case = mlp_on_one()
    save(case.program, tmp_path / "mlp.spatial")
    again = load(tmp_path / "mlp.spatial")
    assert again.listing == case.program.listing and again.machine == case.program.machine
    assert right(case, tessera.simulate(tmp_path / "mlp.spatial", *case.inputs).outputs)


def test_the_command_line(tmp_path, capsys):
    case = mlp_on_one()
    path, trace = tmp_path / "mlp.spatial", tmp_path / "trace.json"
    save(case.program, path)
    trace.write_text("junk")
    assert cli.main(["simulate", str(path), "--inputs", str(trace)]) == 2
    assert "expected what torch.save wrote" in capsys.readouterr().err
    assert cli.main(["simulate", str(path), "--random", "--json", "--perfetto", str(trace)]) == 0
    assert json.loads(capsys.readouterr().out)["cycles"] == 548
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {(span["ts"], span["dur"]) for span in spans if span["name"] == "a = x · w1"} == {(64, 256)}
    save(replace(case.program, listing=replace(case.program.listing, end=549)), path)
    assert cli.main(["simulate", str(path)]) == 1
    assert "expected the program to end at 548" in capsys.readouterr().err
    assert cli.main(["machine", "lpx"]) == 0
    assert "28 of 35 numbers are assumed" in capsys.readouterr().out
