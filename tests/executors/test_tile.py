"""The tile executor: programs whose regions run as kernels give what eager PyTorch gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from programs import copies, on_cuda, random_program, trace_of
from tile_reference import Reference

import tessera
from tessera.executors import tile
from tessera.executors.claim import claim
from tessera.ir.equation import Special
from tessera.ir.interp import run
from tessera.ir.trace import Trace
from tessera.ir.verify import verify
from tessera.just_in_time.compiled import compiled_state
from tessera.tile.from_trace.kernel import TileKernel
from tessera.tile.targets import target_for
from tessera.transforms.vjp import vjp
from tessera.util.config import override

TARGETS = ["reference", "cpu"]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):  # noqa: ANN201
    """Kernels by the interpreter, and by this machine's own target where it is there."""
    found = Reference() if request.param == "reference" else _machine()
    monkeypatch.setattr(tile, "target_for", lambda device: found)
    monkeypatch.setattr(tile, "_launchers", {})
    monkeypatch.setattr(tile, "_checked", {})
    return found


def _machine():  # noqa: ANN202
    try:
        found = target_for("cpu")
    except (ImportError, AttributeError):
        found = None
    if found is None:
        pytest.skip("no target for the CPU")
    return found


def claimed(fn: Callable, *args: torch.Tensor, dynamic: tuple[int, ...] = ()) -> tuple[Trace, Trace]:
    trace = trace_of(fn, *args, dynamic=dynamic)
    after, _ = claim(tile.decompose(trace), ["tile", "aten"])
    return trace, verify(after)


def kernels(trace: Trace) -> int:
    return sum(isinstance(eqn.op, Special) and eqn.op.namespace == "tile" for eqn in trace.equations)


def check(fn: Callable, *args: torch.Tensor, count: int | None = None, tol: float = 1e-4) -> Trace:
    before, after = claimed(fn, *args)
    if count is not None:
        assert kernels(after) == count
    for expected, got in zip(run(before, *copies(args)), run(after, *copies(args)), strict=True):
        assert expected.dtype == got.dtype and expected.stride() == got.stride()
        torch.testing.assert_close(got, expected, rtol=tol, atol=tol, equal_nan=True)
    return after


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check_training(fn: Callable, *args: torch.Tensor) -> None:
    """The program of a function's value and gradients."""
    trace = trace_of(fn, *args)
    joint = vjp(trace, [v for v in trace.inputs if v.tensor.is_float]).trace
    after, _ = claim(tile.decompose(joint), ["tile", "aten"])
    assert kernels(verify(after)) >= 1
    given = [*args, *(torch.randn(v.shape) for v in joint.inputs[len(args) :])]
    for expected, got in zip(run(joint, *given), run(after, *given), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_pointwise_and_norms(target) -> None:  # noqa: ANN001
    x, y, w = rand(6, 40), rand(6, 40), rand(40)
    check(lambda x, y: (x + y).relu() * 2 - y.exp(), x, y, count=1)
    check(lambda x, y, w: F.gelu(F.layer_norm(x + y, (40,), w)), x, y, w, count=1)
    check(lambda x, w: F.rms_norm(x, (40,), w, 1e-6) + 1, x, w, count=1)
    check(lambda x: F.softmax(x * 0.3, -1), x, count=1)
    check(lambda x: F.log_softmax(x, 0) + x, x)
    check(lambda x, y: F.mse_loss(x, y), x, y, count=1)


def test_linear_layers_over_few_rows(target) -> None:  # noqa: ANN001
    x, w, b, y = rand(2, 8, 32), rand(48, 32), rand(48), rand(2, 8, 48)
    if reason := target.no_product(16, 48, 32):
        pytest.skip(reason)
    for fn in (F.linear, lambda x, w, b: F.gelu(F.linear(x, w, b)), lambda x, w, b: F.linear(x, w) * b):
        check(fn, x, w, b, count=1)
    check(lambda x, w, b, y: F.layer_norm(F.linear(x, w, b) + y, (48,)), x, w, b, y, count=2)
    check(lambda x, w, b: F.linear(F.linear(x.sigmoid() + 1, w, b).sin() * 0.1, w.t().contiguous()), x, w, b, count=3)
    check(lambda x, w: F.linear(x, w.t()), x, w[:32].contiguous(), count=0)  # contiguous across the depth
    check(lambda x, w, b: F.linear(x[:, :1], w, b).relu() + 1, x, w, b, count=1)  # too few rows: the bias alone


def test_gradients_of_linear_layers_over_few_rows(target) -> None:  # noqa: ANN001
    check_training(lambda x, w, b: F.gelu(F.linear(x, w, b)), rand(16, 32), rand(48, 32), rand(48))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes(target, dtype: torch.dtype) -> None:  # noqa: ANN001
    x, y = rand(6, 40, dtype=dtype), rand(40, dtype=dtype)
    check(lambda x, y: F.silu(x) * y + 1, x, y, count=1, tol=3e-2)
    check(lambda x, y: F.layer_norm(x * 2, (40,), y), x, y, count=1, tol=5e-2)
    check(lambda x, y: (x * y).sum(0), x, y, tol=1e-1)


def test_integers(target) -> None:  # noqa: ANN001
    a, b = torch.arange(-20, 20), torch.arange(1, 41)
    check(lambda a, b: ((a // b) * 3 - a % b, (a > b) & (b != 7), (a << 1) ^ b), a, b)
    check(lambda a: (a * 2).to(torch.int32).sum() + (a > 3).sum(), a)


def test_training_of_norms_and_losses(target) -> None:  # noqa: ANN001
    x, w, b = rand(12, 40), rand(40), rand(1, 40)[0]
    labels = torch.arange(12) % 40
    check_training(lambda x, w, b: F.gelu(F.layer_norm(x, (40,), w, b)), x, w, b)
    check_training(lambda x, w: F.silu(x) * F.rms_norm(x, (40,), w, 1e-6), x, w)
    check_training(lambda x, t: F.cross_entropy(x, t), x, labels)
    check_training(lambda x: F.softmax(x, -1) * x, x)
    check_training(lambda x, w: F.group_norm(x.view(12, 8, 5), 4) * w[:5], x, w)
    check_training(lambda x, w: F.linear(F.dropout(F.gelu(x + w), 0.0), w[None]), x, w)


def test_rotary_attention_inputs(target) -> None:  # noqa: ANN001
    def rotary(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q = qkv[..., :64].view(2, 8, 4, 16).transpose(1, 2)
        return q * cos + torch.cat([-q[..., 8:], q[..., :8]], -1) * sin

    check(rotary, rand(2, 8, 192), rand(8, 16), rand(8, 16).cos(), count=1)


def test_scans_transposes_and_gathers(target) -> None:  # noqa: ANN001
    check(lambda x: (x * 2).cumsum(-1) + 1, rand(6, 40))
    check(lambda x: (x + 1).t().contiguous() * 2, rand(6, 40), count=1)
    check(lambda x, i: F.embedding(i, x) * 2 + 1, rand(6, 40), torch.tensor([[1, 5], [0, 3]]), count=1)


def test_a_number_reduced_along_its_only_dimension(target) -> None:  # noqa: ANN001
    x = rand()
    check(lambda x: ((x * 2).sum(0) + 1, (x * 2).amax(-1, keepdim=True) * 3, (x * 2).softmax(0) + 1), x)
    check(lambda x: ((x * 2).argmax(0) + 1, (x * 2).cumsum(0) + 1, (x > 0).any(0) & (x > 1), (x * 2).mean(-1) * 3), x)


def test_indices_are_checked_by_pytorch(target) -> None:  # noqa: ANN001
    _, after = claimed(lambda x, i: F.embedding(i, x) * 2 + 1, rand(6, 4), torch.tensor([1, 5]))
    with pytest.raises(IndexError):
        run(after, rand(6, 4), torch.tensor([1, 6]))


@pytest.mark.parametrize("seed", range(30))
def test_random_programs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "target_for", lambda device, target=Reference(): target)  # noqa: B008
    program, args = random_program(seed)
    trace = trace_of(program, *args)
    after, _ = claim(tile.decompose(trace), ["tile", "aten"])
    verify(after)
    left, right = copies(args), copies(args)
    torch.manual_seed(0)
    expected = run(trace, *left)
    torch.manual_seed(0)
    got = run(after, *right)
    for e, g in zip([*expected, *left], [*got, *right], strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_symbolic_sizes(target) -> None:  # noqa: ANN001
    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.softmax(F.layer_norm(x + 1, (16,), w).view(-1, 4, 4), -1).transpose(0, 1).contiguous()

    before, after = claimed(block, rand(6, 16), rand(16), dynamic=(0,))
    assert kernels(after) >= 1
    for n in (2, 6, 13):
        torch.testing.assert_close(
            run(after, rand(n, 16), rand(16))[0], run(before, rand(n, 16), rand(16))[0], rtol=1e-4, atol=1e-5
        )


def test_layers_that_are_alike_share_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Reference()
    monkeypatch.setattr(tile, "target_for", lambda device: target)
    monkeypatch.setattr(tile, "_launchers", {})

    def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = F.linear(F.gelu(x) * 2 + 1, w)
        return x

    check(layers, rand(8, 8), rand(8, 8), count=5)
    assert target.compiled == 1


def test_without_a_target_everything_stays_with_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "target_for", lambda device: None)
    trace = trace_of(lambda x: F.softmax(x * 2 + 1, -1), rand(4, 4))
    assert tile.decompose(trace) is trace and tile.regions(trace) == []
    assert "no target" in tile.reasons(trace)["mul"]
    assert tile.compile_region(trace) is None


def test_sizes_that_only_other_values_tell(target) -> None:  # noqa: ANN001
    """After a convolution a size is computed from one that no tensor of the region has."""
    torch._dynamo.reset()

    def halved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (F.conv2d(x, w, stride=2, padding=1).relu() * 2 + 1).sigmoid().sum(-1)

    w = torch.nn.Parameter(rand(4, 3, 3, 3))
    fast = tessera.jit(halved, executors=["tile", "aten"], strict=True)
    for size in (17, 33, 40, 64):
        x = rand(2, 3, size, size + 5)
        got, want = fast(x, w), halved(x, w)
        torch.testing.assert_close(got, want)
        mine, eagers = (torch.autograd.grad(y.square().sum(), w)[0] for y in (got, want))
        torch.testing.assert_close(mine, eagers, rtol=1e-3, atol=1e-3)
    symbolic = compiled_state(fast).compilations()[-1]
    assert symbolic.account.programs[0].trace.symbols and any(c.executor == "tile" for c in symbolic.account.claims)


def test_symbolic_strides_of_what_may_be_empty(target) -> None:  # noqa: ANN001
    """PyTorch steps over max(1, n // 2) elements where a row may have none."""
    torch._dynamo.reset()

    def windows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v = (x.unfold(0, 2, 2) + 1).repeat_interleave(2, -1)
        return v.reshape(-1) * 2, v.sum(-1).relu() * 3, (x[: x.shape[0] // 4].t().contiguous() * 2).exp()

    fast = tessera.jit(windows, dynamic=True, executors=["tile", "aten"], strict=True)
    for n in (16, 9, 4, 3):
        for got, want in zip(fast(x := rand(n, 6)), windows(x), strict=True):
            torch.testing.assert_close(got, want)


def test_a_region_without_a_kernel_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> object:
        raise NotImplementedError("it needs more registers than there are")

    monkeypatch.setattr(tile, "choose", refuse)
    monkeypatch.setattr(tile, "_launchers", {})
    monkeypatch.setattr(tile, "_refused", {})
    torch._dynamo.reset()
    fast = tessera.jit(lambda x: F.softmax(x * 3 + 1, -1), executors=["tile", "aten"], strict=True)
    torch.testing.assert_close(fast(x := rand(5, 7)), F.softmax(x * 3 + 1, -1))
    assert "it needs more registers than there are" in str(tessera.explain(fast))


def test_programs_call_a_plain_function() -> None:
    """What else is known of a kernel stands beside the function, so that a call costs no more for it."""
    fast = tessera.jit(lambda x: (x * 2).exp() + x, executors=["tile", "aten"], strict=True)
    fast(torch.randn(5, 7))
    (region,) = tessera.stages(fast)["claim"].trace.equations
    kernel = region.op.kernel
    assert isinstance(kernel, TileKernel) and inspect.isfunction(region.op.fn) and kernel.run is region.op.fn
    assert kernel.overwrites == {0: (0,)} and "def launch" in kernel.source and kernel.text
    over = kernel.writing({0: 0})
    x = torch.randn(5, 7)
    want = (x * 2).exp() + x
    assert over(x) == () and over.origin is kernel.origin
    torch.testing.assert_close(x, want)


def test_a_large_reshape_that_copies_is_a_kernel_on_a_gpu() -> None:
    """As heads that are shared are repeated; PyTorch's strided copy takes four times as long."""

    def repeated(x: torch.Tensor) -> torch.Tensor:
        batch, heads, tokens, width = x.shape
        return x.unsqueeze(2).expand(batch, heads, 4, tokens, width).reshape(batch, heads * 4, tokens, width)

    with override(machine="h200"):
        large, small = on_cuda(repeated, (2, 8, 256, 64)), on_cuda(repeated, (1, 2, 4, 8))
        assert [[large.equations[i].opname for i in region] for region in tile.regions(large)] == [["reshape"]]
        assert tile.regions(small) == []
        assert tile.regions(on_cuda(lambda x: x.reshape(-1), (512, 1024))) == []  # nothing is copied
