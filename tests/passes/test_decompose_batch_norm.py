"""Batch norm in parts: what eager computes, in training and evaluation, forward, backward and running statistics.

On a CPU training is left to the library; here it is taken apart nevertheless, so that kernels of ours run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from programs import trace_of
from torch import Tensor, nn

import tessera
from tessera.passes.decompose import batch_norm as decompose_batch_norm
from tessera.passes.decompose.apply import decompose


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decompose_batch_norm, "LIBRARY", ())


class Net(nn.Module):
    """A norm between two maps, with what often follows one."""

    def __init__(self, norm: nn.Module, residual: bool = False) -> None:
        super().__init__()
        self.norm, self.residual = norm, residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x * 1.5)
        return F.relu(y + x if self.residual else y)


def assert_close(got: Tensor | None, want: Tensor | None, like: Tensor) -> None:
    """As near as numbers of the data's dtype let them be."""
    loose = {"rtol": 3e-2, "atol": 3e-2} if like.dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(got, want, **loose)


def check(make: Callable[[], nn.Module], *inputs: Tensor, steps: int = 3, train: bool = True) -> nn.Module:
    """Steps of training of two equal models, one compiled; all that they give, hold and learn is compared."""
    torch._dynamo.reset()  # after many compilations of one function Dynamo would leave it to eager
    torch.manual_seed(0)
    eager = make().train(train)
    own = copy.deepcopy(eager)
    fast = tessera.jit(own, executors=["tile", "aten"])
    for step in range(steps):
        x, y = ((inputs[step % len(inputs)].clone().requires_grad_()) for _ in range(2))
        want, got = eager(x), fast(y)
        assert got.stride() == want.stride()
        assert_close(got, want, x)
        weight = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).view(want.shape)
        (want * weight).sum().backward()
        (got * weight).sum().backward()
        assert_close(y.grad, x.grad, x)
    for (name, a), b in zip(eager.named_parameters(), own.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert_close(b.grad, a.grad, inputs[0])
    for a, b in zip(eager.buffers(), own.buffers(), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    return own


def rand(*shape: int, dtype: torch.dtype = torch.float32, last: bool = False) -> Tensor:
    x = torch.randn(shape, dtype=dtype) + 0.5
    return x.to(memory_format=torch.channels_last) if last else x


def small(momentum: float | None = 0.1, **more: object) -> nn.Module:
    norm = nn.BatchNorm2d(6, momentum=momentum, **more)  # type: ignore[arg-type]
    for p in norm.parameters():
        nn.init.uniform_(p, 0.5, 1.5)
    return norm


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("residual", [False, True])
def test_training(last: bool, residual: bool) -> None:
    check(lambda: Net(small(), residual), rand(4, 6, 5, 7, last=last), rand(4, 6, 5, 7, last=last))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.BatchNorm1d(6), (8, 6)),
        (lambda: nn.BatchNorm1d(6), (8, 6, 5)),
        (lambda: nn.BatchNorm3d(6), (2, 6, 3, 4, 5)),
        (lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True), (3, 6, 5, 7)),
        (lambda: small(affine=False), (4, 6, 5, 7)),
        (lambda: small(track_running_stats=False), (4, 6, 5, 7)),
        (lambda: small(momentum=0.5, eps=0.1), (4, 6, 5, 7)),
        (lambda: small().requires_grad_(False), (4, 6, 5, 7)),
    ],
    ids=["1d", "1d long", "3d", "instance", "no affine", "no statistics", "momentum", "frozen"],
)
def test_kinds(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    check(lambda: Net(make()), rand(*shape))


def test_cumulative_average() -> None:
    check(lambda: Net(small(momentum=None)), rand(4, 6, 5, 7), rand(4, 6, 5, 7))


def test_half_precision_with_wide_parameters() -> None:
    # Eighths, whose products with 1.5 are exact: a kernel does not round them on the way, eager does.
    check(lambda: Net(small(), True), (rand(8, 6, 5, 7, dtype=torch.bfloat16, last=True) * 8).round() / 8)


def test_one_layer_used_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = small()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(F.relu(self.norm(x))) * 2

    check(Twice, rand(4, 6, 5, 7))


def test_evaluation_after_training_and_with_gradients() -> None:
    own = check(lambda: Net(small()), rand(4, 6, 5, 7))
    plain = copy.deepcopy(own).eval()
    x = rand(4, 6, 5, 7)
    torch.testing.assert_close(tessera.jit(own.eval(), executors=["tile", "aten"])(x), plain(x))
    check(lambda: Net(small()), rand(4, 6, 5, 7), train=False)


def test_a_large_mean_costs_no_digits() -> None:
    x = torch.randn(64, 6, 8, 8) + 3000
    norm = nn.BatchNorm2d(6)
    wide = copy.deepcopy(norm).double()
    got, want = tessera.jit(norm, executors=["tile", "aten"])(x), wide(x.double())
    torch.testing.assert_close(got, want.float(), rtol=0, atol=2e-3)  # of numbers that have four digits left
    torch.testing.assert_close(norm.running_var, wide.running_var.float(), rtol=1e-5, atol=0)


def test_symbolic_sizes() -> None:
    norm, own = small(), small()
    own.load_state_dict(norm.state_dict())
    fast = tessera.jit(own, executors=["tile", "aten"], dynamic=True)
    for n in (4, 7, 5):
        x = rand(n, 6, 5, 3)
        torch.testing.assert_close(fast(x), norm(x))
    torch.testing.assert_close(own.running_var, norm.running_var)


@pytest.mark.parametrize("name", ["native_batch_norm", "_native_batch_norm_legit.no_stats"])
def test_native_operators(name: str) -> None:
    parts = name.split(".")
    op = getattr(getattr(torch.ops.aten, parts[0]), (parts[1:] or ["default"])[0])
    none = (None, None) if len(parts) == 1 else ()
    x, w = rand(4, 6, 5), rand(6)
    trace = trace_of(lambda x, w: op(x, w, w, *none, True, 0.1, 1e-5), x, w)
    written = decompose(trace, lambda eqn: eqn.op._opname not in ("native_batch_norm", "_native_batch_norm_legit"))  # type: ignore[union-attr]
    assert "aten.var_mean" in str(written) and f"aten.{parts[0]}(" not in str(written)


def test_left_to_the_library_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    trace = trace_of(lambda x, m, v: F.batch_norm(x, m, v, training=True), rand(4, 6, 5), rand(6), rand(6))
    assert "_native_batch_norm_legit_functional" in str(decompose(trace, lambda eqn: "norm" not in eqn.op._opname))  # type: ignore[union-attr]
