"""A mixture of experts, whose routing is running sums down columns and reads and writes at indices.

What a GPU would run is looked at on traces of fake tensors. Numbers are those of the CPU's kernels, which gather here
as a GPU's do: otherwise PyTorch keeps gathers on a CPU, because it checks their indices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from on_h200 import propose
from test_from_trace import check, rand
from test_products import cuda_trace, regions

import tessera
from tessera.executors import tile
from tessera.executors.regions import body_of
from tessera.ir.trace import Trace
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.from_trace.lower.rule import RULES
from tessera.tile.from_trace.region import lower
from tessera.tools.networks import MoE

I64 = torch.int64


def places(classes: torch.Tensor) -> torch.Tensor:
    """The place of every row in the queue of its class."""
    chosen = F.one_hot(classes.flatten(), 8)
    return (chosen.cumsum(0) * chosen).sum(-1) - 1


def kernel_of(trace: Trace) -> KernelOp:
    """The kernel of the first region."""
    return lower(body_of(trace, tile.regions(trace)[0], "running")).kernel


def experts_backward(g: torch.Tensor, down: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple:
    """Gradients inside gated experts: of the gate and of what it lets through, and what the weights' gradient reads."""
    hidden = torch.bmm(g, down.transpose(1, 2))
    return F.silu(gate) * up, hidden * F.silu(gate), torch.ops.aten.silu_backward(hidden * up, gate)


def test_gradients_inside_experts_run_after_the_product() -> None:
    """Two blocks read and three written beside the sums do not fit in registers: the kernel would spill and wait."""
    trace = cuda_trace(experts_backward, (8, 1280, 4096), (8, 14336, 4096), (8, 1280, 14336), (8, 1280, 14336))
    assert [sorted(region) for region in regions(trace)] == [["mul", "mul", "mul", "silu", "silu", "silu_backward"]]
    assert "more than the product" in tile.reasons(trace)["bmm"]


# --- running sums down columns ------------------------------------------------------------------------------


def test_places_in_queues_are_two_kernels() -> None:
    trace = cuda_trace(places, (4096, 2), dtype=I64)
    first, second = regions(trace)
    assert {"eq", "cumsum", "mul"} <= set(first) and second == ["sum", "sub"]
    schedule = propose(kernel_of(trace), {})[0]
    assert schedule.block("i0") == 1 and schedule.block("r") == 8192 and not schedule.loop


@pytest.mark.parametrize(
    ("fn", "shape", "dtype", "whole"),
    [
        (lambda x: x.cumsum(0), (8192, 8), I64, True),
        (lambda x: x.cumsum(1), (2, 4096, 512), torch.bfloat16, True),
        (lambda x: x.cumprod(0), (4096, 4096), torch.float32, True),
        (lambda x: x.cumsum(-1), (8192, 4096), torch.float32, False),
        (lambda x: x.cumsum(0), (64, 4096), torch.float32, False),
    ],
    ids=["few columns", "middle", "many columns", "rows", "few rows"],
)
def test_which_running_sums_are_kernels_of_their_own(
    fn: Callable, shape: tuple, dtype: torch.dtype, whole: bool
) -> None:
    assert bool(regions(cuda_trace(fn, shape, dtype=dtype))) is whole


@pytest.mark.parametrize("shape", [(8192, 8), (100_000, 3), (4096, 4096)], ids=["few", "long", "many"])
@pytest.mark.parametrize("dtype", [I64, torch.bfloat16], ids=["i64", "bf16"])
def test_schedules_of_running_sums_fit_hopper(shape: tuple[int, int], dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from tessera.tile.targets.triton.resources import compile_only

    trace = cuda_trace(lambda x: x.cumsum(0) * 2, shape, dtype=dtype)
    kernel = kernel_of(trace)
    best = propose(kernel, {})[0]
    programs = shape[1] // best.block("i0")
    assert best.block("r") * best.block("i0") >= 4096 and programs >= min(shape[1], 128)
    made = compile_only(kernel, best)
    assert made.spills == 0 and made.registers * made.warps * 32 <= 65536


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_running_sums_along_any_dimension(dim: int) -> None:
    check(lambda x: (x * 2).cumsum(dim) - x, rand(6, 5, 7))
    check(lambda x: (x.transpose(0, 1) > 0).long().cumsum(dim) * 3, rand(6, 5, 7))


def test_running_sums_of_a_dynamic_number_of_rows() -> None:
    check(lambda x: x.exp().cumsum(0) * 2, rand(7, 6), dynamic=(0,), others=((rand(90, 6),),))


# --- parts of what is larger, at indices --------------------------------------------------------------------


def test_rows_are_read_from_what_is_joined() -> None:
    """No copy with one row more is made to read from."""

    def made(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.index_select(torch.cat((x, x.new_zeros(1, 4096))), 0, index.long()) * 2

    trace = cuda_trace(made, (10240, 4096), (8192,))
    (found,) = regions(trace)
    assert found == ["new_zeros", "cat", "_to_copy", "index_select", "mul"]


def test_rows_are_copied_into_queues_by_one_kernel() -> None:
    def queues(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(10241, 4096).index_copy(0, index.long(), x.repeat_interleave(2, 0))

    trace = cuda_trace(queues, (4096, 4096), (8192,))
    names = [eqn.op._opname for eqn in trace.equations]  # type: ignore[union-attr]
    inside = {name for region in regions(trace) for name in region}
    assert names.count("index_copy") == 1 and {"new_zeros", "clone", "index_select", "where"} <= inside


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rule in RULES.items():
        if rule.raises is not None:
            monkeypatch.setitem(RULES, name, replace(rule, raises=None))


@pytest.mark.usefixtures("gathers")
@pytest.mark.parametrize(
    ("dtype", "near"),
    [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)],
    ids=["f64", "f32", "bf16"],
)
def test_gradients_of_router_and_experts(dtype: torch.dtype, near: float) -> None:
    model, x, targets = _block(dtype, "cpu")
    with tile.own_kernels():
        _check_agrees(model, x, targets, near, "index_select")


def _block(dtype: torch.dtype, device: str) -> tuple[MoE, torch.Tensor, torch.Tensor]:
    """Numbers of few bits, so that all dtypes send a token to the same experts (scores are f32 in all of them); some
    tokens find no room."""
    torch.manual_seed(0)
    model = MoE(64, 96, 4, slack=0.9)
    for p in model.parameters():
        p.data = (p.data * 32).round() / 32
    x, targets = ((torch.randn(2, 16, 64) * 8).round() / 8 for _ in range(2))
    return model.to(device, dtype), x.to(device, dtype), targets.to(device, dtype)


def _check_agrees(model: MoE, x: torch.Tensor, targets: torch.Tensor, near: float, shown: str) -> None:
    results = []
    fast = tessera.jit(model, executors=["tile", "aten"], strict=True)
    for call, on in ((fast, model), (model, model)):
        given = x.clone().requires_grad_()
        loss = call(given, targets)
        results.append([loss, *torch.autograd.grad(loss, [given, *on.parameters()])])
    for name, got, want in zip(("loss", "x", *dict(model.named_parameters())), *results, strict=True):
        error = (got.double() - want.double()).norm() / want.double().norm()
        assert error <= near, (name, error.item())
    assert shown in str(tessera.explain(fast))


# --- on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [I64, torch.int32, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8192, 8), (100_000, 3), (300, 700), (4096, 1024), (3, 500, 40)], ids=str)
def test_running_sums_on_the_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch._dynamo.reset()  # or the later cases run eagerly
    x = torch.randint(-4, 5, shape, device="cuda").to(dtype)
    fast = tessera.jit(lambda x: x.cumsum(-2) * 2, executors=["tile", "aten"], strict=True)
    exact = x.double().cumsum(-2) * 2
    got = fast(x)
    assert got.dtype == (x.cumsum(-2)).dtype
    if dtype == torch.bfloat16:
        assert torch.allclose(got.double(), exact, rtol=2**-7, atol=1)
    else:
        assert torch.equal(got.double(), exact)


@pytest.mark.gpu
def test_places_on_the_gpu() -> None:
    classes = torch.randint(8, (4096, 2), device="cuda")
    assert torch.equal(tessera.jit(places, executors=["tile", "aten"], strict=True)(classes), places(classes))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=["f32", "bf16"])
def test_gradients_on_the_gpu(dtype: torch.dtype, near: float) -> None:
    _check_agrees(*_block(dtype, "cuda"), near, "cumsum")
