"""Random programs through the whole tile compiler: eager PyTorch and float64 say what is right.

A share runs always, more run in the sweep, and `run_regions.py MODE START COUNT` runs any number. A failure prints the
seed and the text of the program: `make(seed)` in `regions` gives it again. What no kernel takes is counted, so that the
tests cannot pass by declining.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import regions
import run_regions
import torch
from interpreted import run_interpreted
from run_regions import Report

from tessera.tile.targets import missing, named

HERE = Path(__file__).parent


def batches(start: int, always: int, sweep: int, size: int) -> list:
    """Ranges of seeds: so many programs run always, and so many more in the sweep."""
    firsts = range(start, start + always + sweep, size)
    return [
        pytest.param(
            range(first, first + size),
            id=f"{first}+{size}",
            marks=[pytest.mark.sweep] if first >= start + always else [],
        )
        for first in firsts
    ]


def check_report(report: Report) -> None:
    many = f"{report.programs} programs, {report.woven} of them woven"
    print(f"{many}; {report.kernels} kernels, {report.share:.0%} of the equations in them")
    many = f"{len(report.failures)} of {report.programs} programs failed\n\n"
    assert not report.failures, many + "\n\n".join(report.failures[:3])
    assert report.share > 0.75, f"only {report.share:.0%} of the equations are in kernels"
    assert report.woven >= report.programs // regions.WOVEN, f"only {report.woven} of {report.programs} are woven"
    full = report.programs - report.empty
    assert report.untouched <= 0.15 * full, f"{report.untouched} of {full} programs have no kernel"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))


# --- the programs themselves ---


def test_a_seed_always_gives_the_same_program() -> None:
    for seed in range(20):
        one, two = regions.make(seed), regions.make(seed)
        assert one.text == two.text
        for a, b in zip(one.inputs, two.inputs, strict=True):
            assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a.nan_to_num(), b.nan_to_num())


def test_programs_cover_what_they_should() -> None:
    found = [regions.make(seed) for seed in range(300)]
    families = {name for p in found for name in p.families}
    assert families == {f.__name__ for f in regions.FAMILIES | regions.MOVES} | {"empty", "woven"}
    inputs = [x for p in found for x in p.inputs]
    assert {x.dtype for x in inputs} == set(regions.NAMES)
    assert {x.ndim for x in inputs} >= {0, 1, 2, 3, 4} and any(1 in x.shape for x in inputs)
    assert any(not x.is_contiguous() for x in inputs) and any(0 in x.stride() for x in inputs)
    assert any(not bool(x.isfinite().all()) for x in inputs)


def test_woven_programs_move_data_in_every_way() -> None:
    woven = [*map(regions.make, range(regions.WOVEN - 1, 900, regions.WOVEN))]
    text = "\n".join(p.text for p in woven)
    moves = "cat stack flip roll repeat repeat_interleave interpolate pad unfold diagonal diag_embed tril triu movedim"
    moves += " flatten unflatten reshape narrow chunk split pixel_shuffle pixel_unshuffle slice_scatter select_scatter"
    moves += " slice_backward cumsum diff rot90 tile expand transpose"
    assert not [name for name in moves.split() if f".{name}(" not in text]
    assert all(f"mode='{mode}'" in text for mode in ("reflect", "replicate", "circular"))
    steps = [line.split(" = ")[1] for p in woven for line in p.text.splitlines() if " = " in line]
    joined = sum("torch.cat(" in s or "torch.stack(" in s for s in steps)
    assert all(p.woven for p in woven) and joined > 0.15 * len(steps)


def test_eager_is_right_and_a_wrong_result_is_not() -> None:
    caught = 0
    for seed in range(40):
        program = regions.make(seed)
        for eager, reference in zip(program.function()(*program.inputs), program.reference(), strict=True):
            assert not regions.wrong(eager, eager, reference), str(program)
            if eager.numel() and bool(reference.isfinite().all()):
                worse = ~eager if eager.dtype is torch.bool else eager + 1
                assert regions.wrong(worse, eager, reference)
                caught += 1
    assert caught > 20


# --- through the compiler ---


@pytest.mark.skipif(bool(missing("cpu")), reason=missing("cpu"))
@pytest.mark.parametrize("seeds", batches(0, 20, 2020, 20))
def test_cpu(seeds: range) -> None:
    check_report(run_regions.run("cpu", seeds))


@pytest.mark.skipif(bool(missing("cpu")), reason=missing("cpu"))
@pytest.mark.parametrize("seeds", batches(10_000, 10, 190, 10))
def test_cpu_with_one_kernel_a_program(seeds: range) -> None:
    check_report(run_regions.run("whole", seeds))


@pytest.mark.skipif(bool(missing("cpu")), reason=missing("cpu"))
@pytest.mark.parametrize("seeds", batches(50_000, 10, 190, 10))
def test_cpu_with_sizes_that_change(seeds: range) -> None:
    report = run_regions.run("dynamic", seeds)
    check_report(report)
    assert report.resized > 0.6 * report.programs, f"only {report.resized} of {report.programs} ran at another size"


@pytest.mark.parametrize("seeds", batches(20_000, 20, 300, 20))
def test_interpreter(seeds: range) -> None:
    check_report(run_regions.run("interp", seeds))


@pytest.mark.parametrize("seeds", batches(70_000, 15, 255, 15))
def test_model_of_cutile(seeds: range) -> None:
    check_report(run_regions.run("cutile", seeds))


@pytest.mark.skipif(bool(missing("triton")), reason=missing("triton"))
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(30_000, 30_008), id="30000+8"),
        pytest.param(range(30_008, 30_300), id="30008+292", marks=pytest.mark.sweep),
    ],
)
def test_triton_interpreter(seeds: range) -> None:
    printed = run_interpreted(HERE / "run_regions.py", "triton", seeds.start, len(seeds))
    check_report(Report(**json.loads(printed.splitlines()[-1])))


@pytest.mark.skipif(bool(missing("triton")), reason=missing("triton"))
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(
    ("start", "count"), [pytest.param(40_000, 6, id="6"), pytest.param(41_000, 54, id="54", marks=pytest.mark.sweep)]
)
def test_kernels_compile_for_gpus_that_are_not_here(arch: int, start: int, count: int) -> None:
    from tessera.tile.targets.triton.resources import compile_only

    target = named("triton")
    assert target is not None
    compiled = 0
    for program, kernel in islice(run_regions.kernels(range(start, start + count)), count):
        proposed = target.propose(kernel, {})
        schedule = next((s for s in proposed if s.split == 1), replace(proposed[0], split=1))
        try:
            resources = compile_only(kernel, schedule, arch)
        except Exception as error:
            raise AssertionError(f"{kernel.sym_name.data} does not compile for sm_{arch}\n{program}") from error
        assert resources.registers > 0 and ".target sm_" in resources.ptx
        compiled += 1
    assert compiled == count
