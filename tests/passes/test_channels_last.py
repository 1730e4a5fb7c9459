"""Images channels last between convolutions: same values, gradients and layouts outside, no copies inside."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tessera
from tessera.ir.trace import Trace
from tessera.passes.patterns import channels_last as passes

EXECUTORS = ["tile", "aten"]


@pytest.fixture(autouse=True)
def here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a GPU and float32 a dtype of its matrix units."""
    monkeypatch.setitem(passes.GAINS, "cpu", lambda eqn, backward: True)
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.deep = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.one(x)))
        gate = y.mean((2, 3), keepdim=True).sigmoid()
        return x + self.deep(y) * gate


class Net(nn.Module):
    """Pools, a join, a resize, and a view at the end; the features are a result as well."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.block = nn.Conv2d(3, width, 3, stride=2, padding=1), Block(width)
        self.last, self.head = nn.Conv2d(2 * width, width, 1), nn.Linear(width * 4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.max_pool2d(self.first(x).relu(), 2)
        x = torch.cat([x, F.interpolate(F.avg_pool2d(self.block(x), 2), scale_factor=2.0)], 1)
        features = self.last(x)
        return features, self.head(F.adaptive_avg_pool2d(features, 2).flatten(1))


def run(model: nn.Module, fn: object, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    features, out = fn(x)  # type: ignore[operator]
    ((features * features).sum() + out.square().sum()).backward()
    return [features, out, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]  # type: ignore[list-item]


def clones(trace: Trace) -> int:
    return sum(eqn.opname == "clone" for eqn in trace.equations)


def check(eager: nn.Module, x: Tensor) -> object:
    ours = copy.deepcopy(eager)
    fast = tessera.jit(ours, executors=EXECUTORS, strict=True)
    for got, want in zip(run(ours, fast, x), run(eager, eager, x), strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    return fast


def stage(fast: object) -> Trace | None:
    return next((s.trace for s in tessera.stages(fast) if s.name.endswith("channels_last")), None)


def test_training() -> None:
    torch.manual_seed(0)
    trace = stage(check(Net(), torch.randn(2, 3, 32, 32)))
    assert trace is not None
    convolutions = [eqn for eqn in trace.equations if eqn.opname in passes.CONVOLUTIONS]
    assert len(convolutions) == 4
    assert all(passes._lies_so(v.tensor) for eqn in convolutions for v in eqn.inputs() if v.ndim == 4)


def test_few_copies() -> None:
    """The first images, weights that are larger than a point, and what leaves."""
    torch.manual_seed(0)
    model = Net().eval()
    x = torch.randn(2, 3, 32, 32)
    fast = tessera.jit(model, executors=EXECUTORS, strict=True)
    with torch.no_grad():
        for got, want in zip(fast(x), model(x), strict=True):
            assert got.stride() == want.stride()
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    trace = stage(fast)
    assert trace is not None and clones(trace) == 4  # x, two weights, the features


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_users_laid_out_so_is_left_alone(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    check(Net().to(memory_format=layout), torch.randn(2, 3, 32, 32).to(memory_format=layout))


def test_dropout_draws_the_same() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            for layer in self.layers:
                x = F.dropout(layer(x), 0.5)
            return x, x.sum((2, 3))

    torch.manual_seed(0)
    eager, x = Dropped(), torch.randn(2, 4, 8, 8)
    fast = tessera.jit(copy.deepcopy(eager), executors=EXECUTORS, strict=True)
    torch.manual_seed(1)
    want = eager(x)
    torch.manual_seed(1)
    torch.testing.assert_close(fast(x), want, rtol=1e-4, atol=1e-4)


class Pooling(nn.Module):
    """Group norms around average pools between convolutions of single pixels."""

    def __init__(self, groups: int, width: int = 8, affine: bool = True) -> None:
        super().__init__()
        self.first, self.inner = nn.Conv2d(3, width, 1), nn.Conv2d(width, 2 * width, 1)
        self.outer, self.last = nn.Conv2d(2 * width, width, 1), nn.Conv2d(width, 4, 1)
        self.before, self.after = (nn.GroupNorm(groups, width, affine=affine) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        y = self.before(x)
        x = x + 0.5 * (F.avg_pool2d(y, 3, 1, 1, count_include_pad=False) - y)
        x = x + self.outer(F.gelu(self.inner(self.after(x))))
        return self.last(x), x.mean((2, 3))


@pytest.mark.parametrize(("groups", "affine"), [(1, True), (2, True), (1, False)])
def test_group_norms_and_average_pools_take_images_as_they_lie(
    groups: int, affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "WITH_KERNELS", ["cpu"])
    monkeypatch.setattr(passes, "LINE", 16)
    torch.manual_seed(0)
    eager, x = Pooling(groups, affine=affine), torch.randn(2, 3, 9, 7)
    trace = stage(check(eager, x))
    assert trace is not None
    names = [eqn.opname for eqn in trace.equations]
    assert not any("group_norm" in name for name in names)
    pools = [eqn for eqn in trace.equations if eqn.opname.startswith("avg_pool2d")]
    assert [eqn.opname for eqn in pools] == ["avg_pool2d", "avg_pool2d_backward"]
    assert all(passes._lies_so(v.tensor) for eqn in pools for v in (*eqn.inputs(), eqn.out))
    wide, ours = copy.deepcopy(eager).double(), copy.deepcopy(eager)
    fast = tessera.jit(ours, executors=EXECUTORS, strict=True)
    for got, want in zip(run(ours, fast, x), run(wide, wide, x.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_narrow_groups_and_large_windows_keep_their_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "WITH_KERNELS", ["cpu"])
    torch.manual_seed(0)
    trace = stage(check(Pooling(groups=2), torch.randn(2, 3, 9, 7)))  # of four channels, 16 bytes
    assert trace is not None and sum("group_norm" in eqn.opname for eqn in trace.equations) == 4

    class Large(Pooling):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = F.avg_pool2d(self.outer(self.inner(self.after(self.before(self.first(x))))), 6, 1)
            return self.last(x), x.mean((2, 3))

    trace = stage(check(Large(1), torch.randn(2, 3, 9, 7)))
    assert trace is not None
    (pool,) = [eqn for eqn in trace.equations if eqn.opname == "avg_pool2d"]
    assert pool.inputs()[0].tensor.is_row_major


class Mirror(nn.Module):
    """Down by convolutions, up by transposed ones."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 4, 2, 1), nn.SiLU(), nn.Conv2d(width, 2 * width, 4, 2, 1))
        self.up = nn.Sequential(
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.down(x)
        return self.up(inner.relu()), inner


def test_transposed_convolutions_keep_the_layout() -> None:
    torch.manual_seed(0)
    trace = stage(check(Mirror(), torch.randn(2, 3, 16, 16)))
    assert trace is not None
    images = {v for eqn in trace.equations if eqn.opname == "conv_transpose2d" for v in eqn.inputs()[:1]}
    assert images and not any(eqn.opname == "clone" and images & set(eqn.results()) for eqn in trace.equations)


def test_one_convolution_stays() -> None:
    fast = tessera.jit(nn.Conv2d(3, 8, 3), executors=EXECUTORS, strict=True)
    fast(torch.randn(1, 3, 8, 8))
    assert stage(fast) is None


def on_cpu(model: nn.Module, x: Tensor) -> Trace | None:
    fast = tessera.jit(model, executors=EXECUTORS, strict=True)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    return stage(fast)


def stack(groups: int = 1) -> nn.Module:
    return nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=False) for _ in range(3))).eval()


def test_a_cpu_gains_where_nothing_is_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(passes.GAINS, "cpu", passes._by_onednn)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    torch.manual_seed(0)
    x = torch.randn(1, 8, 12, 12)
    with torch.no_grad():
        assert on_cpu(stack(), x) is not None
        assert on_cpu(stack(groups=8), x) is not None
        assert on_cpu(stack(groups=2), x) is None  # every group would be copied out
        assert on_cpu(stack().double(), x.double()) is None
    assert on_cpu(stack(), x) is None  # gradients


def test_a_cpu_without_onednn_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(passes.GAINS, "cpu", passes._by_onednn)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with torch.no_grad():
        assert on_cpu(stack(), torch.randn(1, 8, 12, 12)) is None
