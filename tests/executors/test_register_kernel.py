"""Kernels of the user's as operators: tile programs on the CPU, Triton kernels under its interpreter."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from interpreted import run_interpreted

import tessera
from tessera.executors.kernels import register_kernel
from tessera.tile.dialect.bounds import reach
from tessera.tile.dialect.build import KernelBuilder, f32
from tessera.tile.dialect.index import name as axis_name
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.schedules.schedule import Schedule
from tessera.util.config import override
from tessera.util.errors import InputError, OptionError, RuleError

counter = itertools.count()
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def strict():  # noqa: ANN201
    torch._dynamo.reset()
    with override(strict=True, verify=True):
        yield


def fresh() -> str:
    return f"tessera_tests::kernel_{next(counter)}"


def scaled_sum(factor: float = 2.0) -> KernelOp:
    """out[i] = x[i] + factor * y[i], for n elements."""
    k = KernelBuilder("scaled_sum", ["n"])
    i = k.axis("i", "n")
    x, y, out = k.buffer(f32), k.buffer(f32), k.buffer(f32)
    k.store(k.apply("add", k.load(x, i), k.apply("mul", k.load(y, i), k.constant(factor, f32))), out, i)
    return k.finish()


def row_sum() -> KernelOp:
    """total[i] = the sum of row i of an n by m matrix, and square[i, j] = its square."""
    k = KernelBuilder("row_sum", ["n", "m"])
    i, r = k.axis("i", "n"), k.axis("r", "m", reduce=True)
    x, total, square = k.buffer(f32), k.buffer(f32), k.buffer(f32)
    at = i * axis_name("m") + r
    loaded = k.load(x, at)
    k.store(k.reduce("sum", loaded, "r"), total, i)
    k.store(k.apply("mul", loaded, loaded), square, at)
    return k.finish()


GIVEN = {"n": lambda x: x.numel()}


def sum_operator(kernel: object = None, **options: object):  # noqa: ANN201
    options = {"outputs": {"out": "x"}, "given": GIVEN, "names": ("x", "y", "out")} | options
    return register_kernel(fresh(), kernel if kernel is not None else scaled_sum(), **options)  # type: ignore[arg-type]


X, Y = torch.randn(6, 5), torch.randn(6, 5)


@pytest.mark.parametrize("form", ["kernel", "text", "file"])
def test_a_tile_program(form: str, tmp_path: Path) -> None:
    text = str(scaled_sum())
    (tmp_path / "scaled_sum.mlir").write_text(text)
    op = sum_operator({"kernel": scaled_sum(), "text": text, "file": tmp_path / "scaled_sum.mlir"}[form])
    torch.testing.assert_close(op(X, Y), X + 2 * Y)
    torch.testing.assert_close(op(X.t(), Y.t()), (X + 2 * Y).t())  # offsets count contiguous elements
    assert op(X[:0], Y[:0]).shape == (0, 5)


def test_names_and_schedule_may_be_left_out() -> None:
    op = register_kernel(fresh(), scaled_sum(), outputs={"out0": "x0"}, given={"n": lambda x0: x0.numel()})
    torch.testing.assert_close(op(X, Y), X + 2 * Y)
    assert [a.name for a in op._schema.arguments] == ["x0", "x1"]
    torch.testing.assert_close(sum_operator(schedule=Schedule((("i", 8),)))(X, Y), X + 2 * Y)


def test_several_results_and_sizes_by_functions() -> None:
    op = register_kernel(
        fresh(),
        row_sum(),
        names=("x", "total", "square"),
        outputs={"total": lambda x: (x.shape[0],), "square": "x"},
        given={"n": lambda x: x.shape[0], "m": lambda x: x.shape[1]},
    )
    total, square = op(X)
    torch.testing.assert_close(total, X.sum(1))
    torch.testing.assert_close(square, X * X)
    fast = tessera.jit(lambda x: op(x * 2)[0].exp() + op(x)[1].sum(1))
    torch.testing.assert_close(fast(X), (2 * X).sum(1).exp() + (X * X).sum(1))
    name = op._schema.name.replace("::", "_")
    assert str(tessera.stages(fast)[-1].trace).count(f"{name}.") == 2  # called without the dispatcher


def vjp(ct: torch.Tensor, out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple:
    return ct, 2 * ct


def test_jit_grad_vmap_and_compile() -> None:
    op = sum_operator(vjp=vjp)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (op(x, y) ** 2).sum()

    want = tuple(2 * g * (X + 2 * Y) for g in (1, 2))
    for got, w in zip(tessera.grad(loss, argnums=(0, 1))(X, Y), want, strict=True):
        torch.testing.assert_close(got, w)
    for compiler in (tessera.jit, lambda f: torch.compile(f, backend="tessera"), lambda f: f):
        x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
        compiler(loss)(x, y).backward()
        torch.testing.assert_close(x.grad, want[0])
        torch.testing.assert_close(y.grad, want[1])
    torch.testing.assert_close(tessera.vmap(op, in_dims=(0, None))(X, Y[0]), X + 2 * Y[0])
    torch.testing.assert_close(tessera.vmap(tessera.grad(loss))(X, Y), want[0])


def test_sizes_may_be_symbolic() -> None:
    op = sum_operator(vjp=vjp)
    fast = tessera.jit(lambda x, y: op(x, y).tanh(), dynamic=True, executors=["tile", "aten"])
    for n in (4, 9, 33):
        x, y = torch.randn(n, 7, requires_grad=True), torch.randn(n, 7)
        got = fast(x, y)
        torch.testing.assert_close(got, (x + 2 * y).tanh())
        got.sum().backward()
        torch.testing.assert_close(x.grad, 1 - (x + 2 * y).detach().tanh() ** 2)


def test_many_examples_want_a_rule() -> None:
    op = sum_operator()
    with pytest.raises(RuleError, match="once for each of 300 examples; register it with batch="):
        tessera.vmap(op)(torch.randn(300, 4), torch.randn(300, 4))
    whole = sum_operator(batch=lambda size, on, x, y: x + 2 * y)
    torch.testing.assert_close(tessera.vmap(whole)(*(z := torch.randn(2, 300, 4))), z[0] + 2 * z[1])


# --- what is wrong is named ---


def test_dtype_and_reach_are_checked() -> None:
    op = sum_operator()
    with pytest.raises(InputError, match="y: expected torch.float32, as the program has it, got torch.float64"):
        op(X, Y.double())
    with pytest.raises(InputError, match=r"reaches elements 0 to 29 of y, which has 25 \(shape \[5, 5\]\)"):
        op(X, Y[:5])
    with pytest.raises(RuntimeError, match="missing value for argument 'y'"):
        op(X)


WRONG = {
    "unknown output": ({"outputs": {"result": "x"}}, r"outputs= names \['result'\]; the kernel has \['x', 'y',"),
    "unknown given": ({"given": {"k": 1}}, r"given= names \['k'\]"),
    "not all outputs": ({"outputs": {}}, r"the program writes \['out'\]; outputs= names \[\]"),
    "like nothing": ({"outputs": {"out": "z"}}, r"out should be like 'z'; tensors are \['x', 'y'\]"),
    "asks for nothing": ({"given": {"n": lambda w: 1}}, r"given\['n'\] asks for \['w'\]"),
    "a grid": ({"grid": (1,)}, "a tile program has its own grid"),
    "names": ({"names": ("x",)}, r"expected names= for the 3 buffers of the program, got \['x'\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_registration_is_checked(case: str) -> None:
    options, message = WRONG[case]
    with pytest.raises(OptionError, match=message):
        sum_operator(**options)


def test_results_start_empty() -> None:
    k = KernelBuilder("increment")
    i = k.axis("i", 4)
    x = k.buffer(f32)
    k.store(k.apply("add", k.load(x, i), k.constant(1.0, f32)), x, i)
    with pytest.raises(OptionError, match="reads x, which it writes"):
        register_kernel(fresh(), k.finish(), names=("x",), outputs={"x": lambda: (4,)})


def test_sums_start_from_zero() -> None:
    k = KernelBuilder("total", ["n"])
    i = k.axis("i", "n")
    x, out = k.buffer(f32), k.buffer(f32)
    k.store(k.load(x, i), out, i * 0, mode="add")
    op = register_kernel(fresh(), k.finish(), names=("x", "out"), outputs={"out": lambda: (1,)}, given=GIVEN)
    for _ in range(2):
        torch.testing.assert_close(op(X), X.sum()[None])


def test_reach() -> None:
    k = KernelBuilder("reach", ["n"])
    i, j = k.axis("i", "n"), k.axis("j", 3)
    a, b, c = k.buffer(f32), k.buffer(f32), k.buffer(f32)
    k.store(k.load(a, i * 4 - j + 2), b, i * axis_name("n") + j)
    k.store(k.load(a, i), c, i // 2 + i % 2)
    assert reach(k.finish(), {"n": 5}) == {0: (0, 18), 1: (0, 22)}
    k = KernelBuilder("nothing", ["n"])
    k.store(k.constant(1.0, f32), k.buffer(f32), k.axis("i", "n"))
    assert reach(k.finish(), {"n": 0}) == {}


# --- Triton ---


def test_the_example_runs(tmp_path: Path) -> None:
    """Its Triton kernel in Triton's interpreter, in a process of its own: that is decided when Triton is imported."""
    pytest.importorskip("triton")
    example = str(ROOT / "examples" / "custom_kernel.py")
    run = f"runpy.run_path({example!r}, run_name='__main__')"
    (tmp_path / "strictly.py").write_text(f"import runpy, tessera\nwith tessera.override(strict=True):\n    {run}\n")
    printed = run_interpreted(tmp_path / "strictly.py", TESSERA_CACHE=str(tmp_path))
    assert "torch.ops.example.scaled_add(swish, y, 0.5)" in printed and "both kernels agree" in printed


def scaled(x, y, out, factor, n, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201, F821
    """Never run here: what is wrong is told before."""


def triton_operator(**more: object):  # noqa: ANN201
    triton = pytest.importorskip("triton")
    options = {
        "outputs": {"out": "x"},
        "given": {"n": lambda x: x.numel(), "BLOCK": 16},
        "scalars": {"factor": float},
        "grid": lambda n, BLOCK: (triton.cdiv(n, BLOCK),),
    } | more
    return register_kernel(fresh(), triton.jit(scaled), **options)  # type: ignore[arg-type]


TRITON_WRONG = {
    "constant": ({"given": {"n": 3}}, "BLOCK is a compile-time constant; give it, as in given={'BLOCK': 1024}"),
    "no grid": ({"grid": None}, "expected grid="),
    "scalars": ({"scalars": {"k": int}}, r"scalars= names \['k'\]"),
    "no outputs": ({"outputs": {}}, "expected outputs="),
    "grid": ({"grid": lambda m: (m,)}, r"grid asks for \['m'\]"),
}


@pytest.mark.parametrize("case", TRITON_WRONG)
def test_triton_registration_is_checked(case: str) -> None:
    options, message = TRITON_WRONG[case]
    with pytest.raises(OptionError, match=message):
        triton_operator(**options)


def test_what_is_no_kernel_is_refused() -> None:
    with pytest.raises(OptionError, match="expected a kernel made by @triton.jit, or a tile program"):
        register_kernel(fresh(), 3, outputs={})


def test_triton_on_the_cpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    op = triton_operator()
    assert [str(a.type) for a in op._schema.arguments] == ["Tensor", "Tensor", "float"]
    with pytest.raises(InputError, match="runs on a GPU, its tensors are on the cpu; .* TRITON_INTERPRET=1"):
        op(X, Y, 2.0)


def test_a_tuner_chooses_its_parameters() -> None:
    triton = pytest.importorskip("triton")
    tuned = triton.autotune([triton.Config({"BLOCK": n}) for n in (16, 32)], key=["n"])(triton.jit(scaled))
    options = {"outputs": {"out": "x"}, "given": {"n": lambda x: x.numel()}, "scalars": {"factor": float}}
    op = register_kernel(fresh(), tuned, grid=lambda n, BLOCK: (triton.cdiv(n, BLOCK),), **options)
    assert [a.name for a in op._schema.arguments] == ["x", "y", "factor"]
