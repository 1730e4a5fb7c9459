"""`tessera bench kernels`: what must move, what is right, and that one failure does not end a run. On CPU tensors."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from programs import trace_of
from rich.console import Console

from tessera.tile.dialect.build import KernelBuilder, f32
from tessera.tile.schedules.schedule import Schedule
from tessera.tools import cli
from tessera.tools.bench import kernel_cpu, kernel_cuda, kernel_tune
from tessera.tools.bench.kernel_cases import BY_NAME, CASES, Case, mistake, results_of
from tessera.tools.bench.kernel_report import OURS, Measured, duration, listed, missed_targets, table
from tessera.tools.bench.probe import CONTESTANTS

TINY = {"rotary": (1, 2, 4, 8), "gqa_decode": (1, 2, 12, 8), "dropout_add": (64, 256), "max_pool": (2, 4, 8, 6)}
TINY |= {f"linear_{name}": (8, 16, 32) for name in ("gelu", "silu", "residual", "swiglu")}


def tiny(case: Case) -> tuple[int, ...]:
    return TINY.get(case.name, (6, 16))


# --- bytes ---


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("pointwise", 3 * 96, 5 * 96),  # a, b -> y; dy, a, b -> da, db
        ("softmax", 2 * 96, 3 * 96),  # x -> y; dy, y -> dx
        ("layer_norm", 2 * 96 + 2 * 16, 3 * 96 + 3 * 16),  # x, w, b -> y; dy, x, w -> dx, dw, db
        ("rms_norm", 2 * 96 + 16, 3 * 96 + 2 * 16),
        ("add_rms_norm", 4 * 96 + 16, 4 * 96 + 2 * 16),  # x, r, w -> h, y; dh, dy, h, w -> dx, dw
        ("gelu", 2 * 96, 3 * 96),
        ("silu_mul", 3 * 96, 5 * 96),
        ("row_sum", 96 + 6, None),
        ("column_sum", 96 + 16, None),
        ("transpose", 2 * 96, None),
        ("dropout_add", 3 * 64 * 256, 2 * 64 * 256),
        ("max_pool", 384 + 96, 384 + 96),  # a quarter as many windows
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_bytes_that_must_move(name: str, forward: int, backward: int | None, dtype: torch.dtype) -> None:
    case = BY_NAME[name]
    inputs = case.make(tiny(case), dtype, "cpu")
    results = results_of(case.function(*inputs))
    assert case.forward_bytes(inputs, results) == forward * dtype.itemsize
    assert (case.back is None) == (backward is None)
    if backward is not None:
        assert case.backward_bytes(inputs, results) == backward * dtype.itemsize


def test_bytes_of_cross_entropy_count_the_targets_as_they_are() -> None:
    case = BY_NAME["cross_entropy"]
    inputs = case.make((6, 16), torch.bfloat16, "cpu")
    results = results_of(case.function(*inputs))
    assert case.forward_bytes(inputs, results) == 96 * 2 + 6 * 8 + 2
    assert case.backward_bytes(inputs, results) == 2 * 96 * 2 + 6 * 8 + 2


# --- right and wrong ---


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_eager_makes_no_mistake_and_others_do(case: Case, dtype: torch.dtype) -> None:
    inputs = case.make(tiny(case), dtype, "cpu")

    def worse(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(y * 1.25 for y in results_of(case.function(*given)))

    for backward in (False, True) if case.back else (False,):
        assert mistake(case, case.function, inputs, backward) == ""
        assert mistake(case, worse, inputs, backward) != ""


def test_a_dropout_that_drops_too_much_is_seen() -> None:
    case = BY_NAME["dropout_add"]
    inputs = case.make((64, 256), torch.float32, "cpu")

    def half(x: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.rand_like(x) < 0.5, 0.0, x / 0.75) + rest

    assert "dropped" in mistake(case, half, inputs, False)


# --- the run on a device ---


def options(**more: object) -> kernel_cuda.Options:
    sizes = {case.name: (tiny(case),) for case in CASES}
    return kernel_cuda.Options(device="cpu", rounds=2, sizes=sizes, who=("eager", OURS), **more)  # type: ignore[arg-type]


def test_a_run_measures_every_case_both_ways() -> None:
    found = kernel_cuda.run(options(only=("softmax", "row_sum", "linear_gelu")), lambda _: None)
    assert [(r.case, r.direction, r.dtype) for r in found] == [
        ("softmax", "forward", "bf16"), ("softmax", "backward", "bf16"),
        ("softmax", "forward", "f32"), ("softmax", "backward", "f32"),
        ("row_sum", "forward", "bf16"), ("row_sum", "forward", "f32"),
        ("linear_gelu", "forward", "bf16"),
    ]  # fmt: skip
    for row in found:
        assert not row.errors and set(row.seconds) == {"eager", OURS} and row.bytes > 0
        assert (row.ratio("eager") or 0) > 0 and (row.fraction() or 0) > 0
    assert found[-1].flops == 2 * 8 * 16 * 32 and found[-1].matmul > 0


def test_one_failure_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: object) -> object:
        def fail(*_: object) -> object:
            raise RuntimeError("no such kernel")

        return fail

    def lying(function):  # noqa: ANN001, ANN202
        return lambda *given: function(*given) + 1

    monkeypatch.setitem(CONTESTANTS, OURS, broken)
    row, after = kernel_cuda.run(options(only=("row_sum",)), lambda _: None)
    assert row.errors == {OURS: "RuntimeError: no such kernel"} == after.errors and row.seconds.keys() == {"eager"}
    assert row.ratio("eager") is None and row.fraction() is None
    monkeypatch.setitem(CONTESTANTS, OURS, lying)
    row, _ = kernel_cuda.run(options(only=("row_sum",)), lambda _: None)
    assert row.errors[OURS].startswith("wrong: result 0") and OURS not in row.seconds


def test_after_the_deadline_nothing_is_started() -> None:
    found = kernel_cuda.run(options(deadline=0.0), lambda _: None)
    assert len(found) > 40 and all(row.errors == {"not run": "0 seconds were over"} for row in found)


def test_a_quick_run_is_small() -> None:
    quick, full = (list(kernel_cuda.Options(quick=q).cases()) for q in (True, False))
    assert {case.name for case, _, _ in quick} == {case.name for case, _, _ in full} == set(BY_NAME)
    assert len(quick) == len(CASES) and {dtype for _, dtype, _ in quick} == {"bf16"}
    assert {size[-1] for case, _, size in full if case.name == "softmax"} == {512, 2048, 8192, 32768, 65536}


# --- on the CPU ---


@pytest.mark.parametrize("train", [False, True])
def test_a_child_measures_functions_and_models(train: bool) -> None:
    row = Measured(**kernel_cpu.measure("softmax", train, ["eager", OURS], 2))  # type: ignore[arg-type]
    assert not row.errors and set(row.seconds) == {"eager", OURS} == set(row.first)
    assert row.ratio("eager") == row.ratios["eager"] > 0


def test_a_child_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("expected something\nlast words")

    monkeypatch.setattr(kernel_cpu, "in_fresh_process", fail)
    rows = kernel_cpu.run(kernel_cpu.Options(("softmax",), threads=(2,)), lambda _: None)
    assert [(row.direction, row.threads, row.errors) for row in rows] == [
        (way, 2, {"child": "last words"}) for way in ("forward", "both")
    ]


def test_a_run_covers_what_is_promised_and_stops_at_its_deadline() -> None:
    jobs = list(kernel_cpu.Options().jobs())
    promised = ("pointwise", "softmax", "layer_norm", "rms_norm", "cross_entropy", "mlp", "gpt", "gpt512")
    assert {(name, train, n) for name in promised for train in (False, True) for n in (1, 2)} <= set(jobs)
    found = kernel_cpu.run(kernel_cpu.Options(("gpt",), deadline=-1.0), lambda _: None)
    assert len(found) == 4 and all("deadline" in row.errors["all"] for row in found)


@pytest.mark.parametrize("name", ["chain_4", "chain_16"])
def test_chains_are_as_long_as_they_say(name: str) -> None:
    traced = trace_of(kernel_cpu.CASES[name].function, torch.randn(2, 3), torch.randn(2, 3))
    assert len(traced.equations) == int(name.split("_")[1])


def test_what_is_slower_than_promised_is_told() -> None:
    def row(ratio: float, first: float, threads: int = 1) -> Measured:
        seconds, took = {"inductor": 1.0, OURS: ratio}, {"inductor": 9.0, OURS: 9.0 * first}
        return Measured("softmax", "both", "4x4", "f32", "cpu", threads, seconds, first=took)

    assert missed_targets([row(0.5, 0.1), row(0.99, 0.3, threads=2)]) == []
    told = missed_targets([row(1.01, 0.1), row(0.95, 0.4, threads=2)])
    assert [line.split(":")[0] for line in told] == [
        "slower than inductor",
        "the geometric mean is 0.980, more than 0.9",
        "the first call takes more than a third of inductor's",
    ]
    assert "threads 1" in told[0] and "threads 2" in told[2]


def test_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:  # noqa: ANN001
    def measured(module: str, task: str, *, threads: int, name: str, train: bool, who: list, rounds: int) -> dict:
        row = Measured(name, "both" if train else "forward", "4x4", "f32", "cpu", threads)
        row.seconds = {"eager": 2e-3, "inductor": 1e-3, OURS: 5e-4}
        row.first = {"inductor": 10.0, OURS: 1.0}
        return vars(row)

    monkeypatch.setattr(kernel_cpu, "in_fresh_process", measured)
    path = tmp_path / "kernels.json"
    only = ["--only", "softmax", "mlp", "--device", "cpu", "--threads", "1", "2"]
    assert cli.main(["bench", "kernels", *only, "--check", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["rows"]
    assert [(r["case"], r["direction"], r["threads"]) for r in found] == [
        (name, way, threads) for name in ("softmax", "mlp") for way in ("forward", "both") for threads in (1, 2)
    ]
    assert (found[0]["to_eager"], found[0]["to_inductor"], found[0]["first_to_inductor"]) == (0.25, 0.5, 0.1)
    told = capsys.readouterr().out
    assert "softmax" in told and "first call to inductor: 0.10 in the geometric mean" in told
    assert cli.main(["bench", "kernels", "--only", "compile"]) == 2
    assert "choose from" in capsys.readouterr().err


# --- the report ---


def test_report_compares_with_the_copy_and_with_the_product() -> None:
    row = Measured("softmax", "forward", "8x8", "bf16", "cuda", bytes=4000, copy=4e12, first={OURS: 1.0})
    row.seconds = {"eager": 2e-9, OURS: 1.25e-9}
    assert row.fraction() == pytest.approx(0.8) and row.fraction("eager") == pytest.approx(0.5)
    assert row.ratio("eager") == pytest.approx(0.625) and row.ratio("inductor") is None
    product = Measured("linear_gelu", "forward", "8x8x8", "bf16", "cuda", bytes=1, copy=4e12, flops=7e8, matmul=7e14)
    product.seconds, product.errors = {OURS: 2e-6}, {"inductor": "RuntimeError: [no] compiler"}
    assert product.fraction() == pytest.approx(0.5)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table([row, product], "title"))
    shown = console.export_text()
    assert "80%" in shown and "inductor: RuntimeError: [no] compiler" in shown
    assert listed([row])[0]["of_roofline"] == {"eager": pytest.approx(0.5), OURS: pytest.approx(0.8)}
    assert [duration(s) for s in (None, 2.0, 2e-3, 2e-6, 2e-9)] == ["", "2 s", "2 ms", "2 µs", "0.002 µs"]


# --- schedules ---


def test_search_for_schedules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every kernel of a training step is searched, from its proposals on, and the best comes first."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    options = kernel_cuda.Options(("rms_norm",), True, device="cpu", rounds=3, sizes={"rms_norm": ((64, 128),)})
    found = kernel_tune.run(options, lambda text: None)
    assert found and {row.case for row in found} == {"rms_norm"}
    for row in found:
        times = [seconds for seconds, _ in row.found]
        assert times == sorted(times) and times[0] <= row.first
    shown = io.StringIO()
    Console(file=shown, width=200).print(kernel_tune.table(found))
    assert "rms_norm" in shown.getvalue() and "warps=" in shown.getvalue()
    assert json.dumps(kernel_tune.listed(found))


def test_neighbours_differ_in_one_thing() -> None:
    k = KernelBuilder("sums")
    i, r = k.axis("i", 64), k.axis("r", 128, reduce=True)
    k.store(k.reduce("sum", k.load(k.buffer(f32), i * 128 + r), "r"), k.buffer(f32), i)
    schedule = Schedule((("i", 2), ("r", 128)), warps=4)
    near = list(kernel_tune.neighbours(k.finish(), schedule))
    assert schedule not in near and all(dict(s.blocks)["r"] == 128 for s in near)
    assert {s.warps for s in near} == {2, 4, 8} and {dict(s.blocks)["i"] for s in near} == {1, 2, 4}
