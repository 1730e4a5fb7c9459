"""Random operators inside kernels: same mask forward and backward, repeated by a seed, distributed as PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from programs import trace_of
from torch.utils.checkpoint import checkpoint

import tessera
from tessera.executors.tile import COMPILER
from tessera.ops.uniform import uniform
from tessera.util.config import override
from tessera.util.errors import OptionError

TILE = ["tile", "aten"]


@pytest.fixture(autouse=True)
def on():  # noqa: ANN201
    torch._dynamo.reset()  # sizes seen by one test do not become symbolic in the next
    with override(fused_random="on", strict=True, verify=True):
        yield


def texts(fast) -> str:  # noqa: ANN001
    return "\n".join(str(stage.trace) for stage in tessera.stages(fast))


def final(fast) -> str:  # noqa: ANN001
    return "\n".join(str(s.trace) for s in tessera.stages(fast) if s.name.endswith("claim"))


def drop_add(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.3) + r


def test_one_kernel_holds_dropout_and_its_neighbour() -> None:
    fast = tessera.jit(drop_add, executors=TILE)
    x, r = torch.ones(200, 300), torch.zeros(200, 300)
    y = fast(x, r)
    kept = y != 0
    assert abs(kept.float().mean() - 0.7) < 0.01
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / 0.7))
    assert final(fast).count("region_") == 1 and "dropout" not in final(fast)


def test_seeds_repeat_and_calls_differ() -> None:
    fast = tessera.jit(drop_add, executors=TILE)
    x, r = torch.randn(50, 60), torch.randn(50, 60)
    torch.manual_seed(5)
    first, second = fast(x, r), fast(x, r)
    torch.manual_seed(5)
    assert torch.equal(fast(x, r), first) and torch.equal(fast(x, r), second)
    assert not torch.equal(first, second)


def test_backward_draws_the_same_mask_and_saves_only_the_seed() -> None:
    fast = tessera.jit(drop_add, executors=TILE)
    x, r = torch.randn(64, 129, requires_grad=True), torch.zeros(64, 129)
    for _ in range(2):
        x.grad = None
        y = fast(x, r)
        g = torch.randn_like(y)
        y.backward(g)
        kept = y.detach() != 0
        assert torch.equal(x.grad != 0, kept)
        torch.testing.assert_close(x.grad, torch.where(kept, g / 0.7, 0.0))
    saved = next(str(s.trace) for s in tessera.stages(fast) if s.name == "forward").splitlines()[-1]
    assert saved.strip() == "return (add, seeds)"


def test_every_dropout_draws_its_own() -> None:
    fast = tessera.jit(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)), executors=TILE)
    a, b = fast(torch.ones(100, 100))
    assert 0.4 < ((a != 0) == (b != 0)).float().mean() < 0.6
    assert texts(fast).count("[2, 2], dtype=torch.int64") and final(fast).count("aten.randint") == 1


def test_the_program_runs_as_printed() -> None:
    """ATen alone gives the bits that the kernels give."""
    fast = tessera.jit(drop_add, executors=TILE)
    x, r = torch.randn(33, 65), torch.randn(33, 65)
    torch.manual_seed(1)
    fused = fast(x, r)
    program = next(s.trace for s in tessera.stages(fast) if s.name == "inference dce")
    torch.manual_seed(1)
    (plain,) = tessera.ir.interp.run(program, x, r)
    assert torch.equal(fused - r != 0, plain - r != 0)
    torch.testing.assert_close(fused, plain)
    scope: dict = {}
    from tessera.ir.printer import print_module

    exec(print_module(program), scope)
    torch.manual_seed(1)
    assert torch.equal(scope[program.name](x, r)[0], plain)


def test_a_checkpoint_keeps_the_mask() -> None:
    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(x @ w), 0.4)

    fast = tessera.jit(lambda x, w: checkpoint(block, x, w, use_reentrant=False) * 2, executors=TILE)
    x, w = torch.randn(64, 32, requires_grad=True), torch.randn(32, 48)
    y = fast(x, w)
    y.sum().backward()
    mask = (y.detach() != 0) * (2 / 0.6)
    want = (mask * (1 - torch.tanh(x.detach() @ w) ** 2)) @ w.T
    torch.testing.assert_close(x.grad, want, rtol=1e-4, atol=1e-4)


def test_sizes_may_change() -> None:
    fast = tessera.jit(drop_add, executors=TILE, dynamic=True)
    for n in (40, 56, 72):
        y = fast(torch.ones(n, 100), torch.zeros(n, 100))
        assert abs((y != 0).float().mean() - 0.7) < 0.05 and y.shape == (n, 100)


def test_layouts_are_kept() -> None:
    fast = tessera.jit(lambda x: F.dropout(x, 0.5) * 2, executors=TILE)
    x = torch.randn(30, 40, requires_grad=True)
    y = fast(x.t())
    assert y.stride() == x.t().stride()
    y.sum().backward()
    assert torch.equal((y != 0).t(), x.grad != 0)


def test_images_with_channels_last() -> None:
    """Drawn in the order of memory, so that the mask lies as its tensor does."""

    def both(x: torch.Tensor) -> tuple:
        y, mask = torch.native_dropout(x, 0.5, True)
        return y * 2, mask, torch.rand_like(x)

    fast = tessera.jit(both, executors=TILE)
    x = torch.ones(4, 8, 6, 10).to(memory_format=torch.channels_last)
    for got in fast(x):
        assert got.stride() == x.stride()
    assert "aten.native_dropout" not in final(fast) and "aten.rand_like" not in final(fast)
    y, mask, _ = fast(x)
    assert torch.equal(y != 0, mask) and 0.4 < mask.float().mean() < 0.6


N = 1 << 16
MOMENTS = {  # function, mean, variance
    "rand_like": (lambda x: torch.rand_like(x) * 1.0, 0.5, 1 / 12),
    "rand": (lambda x: torch.rand(x.shape) + x * 0, 0.5, 1 / 12),
    "alone": (lambda x: torch.rand_like(x), 0.5, 1 / 12),
    "uniform": (lambda x: torch.empty_like(x).uniform_(-1, 3) + x * 0, 1.0, 16 / 12),
    "bernoulli_p": (lambda x: torch.bernoulli(x, p=0.2) * 1.0, 0.2, 0.16),
    "bernoulli": (lambda x: torch.bernoulli(torch.sigmoid(x)) * 1.0, 0.5, 0.25),
    "randn_like": (lambda x: torch.randn_like(x) * 1.0, 0.0, 1.0),
    "normal": (lambda x: torch.normal(2.0, 3.0, x.shape) + x * 0, 2.0, 9.0),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_distributions(name: str) -> None:
    fn, mean, variance = MOMENTS[name]
    fast = tessera.jit(fn, executors=TILE)
    y = fast(torch.zeros(256, N // 256)).double()
    assert "tessera.uniform" in texts(fast) and "region_" in final(fast) and "uniform" not in final(fast)
    assert abs(y.mean() - mean) < 5 * (variance / N) ** 0.5 and abs(y.var() - variance) < 0.03 * variance


def test_normal_has_the_tails_it_should() -> None:
    y = tessera.jit(lambda x: torch.randn_like(x) * 1.0, executors=TILE)(torch.zeros(512, 512))
    for bound, share in ((1.0, 0.3173), (2.0, 0.0455), (3.0, 0.0027)):
        assert abs((y.abs() > bound).float().mean() - share) < 0.1 * share + 0.001
    assert torch.isfinite(y).all() and y.abs().max() < 6.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    y = tessera.jit(lambda x: (F.dropout(x, 0.25) + 0, torch.rand_like(x) * 1), executors=TILE)
    kept, drawn = y(torch.ones(128, 256, dtype=dtype))
    assert abs((kept != 0).float().mean() - 0.75) < 0.02 and kept.dtype == drawn.dtype == dtype
    assert drawn.max() < 1 and abs(drawn.float().mean() - 0.5) < 0.01


def test_what_is_left_to_pytorch() -> None:
    generator = torch.Generator().manual_seed(1)
    fast = tessera.jit(
        lambda x: torch.bernoulli(x, p=0.5, generator=None) + torch.rand_like(x.double()), executors=TILE
    )
    fast(torch.zeros(8, 8))
    assert "aten.rand_like" in final(fast)  # 53 bits are more than a word
    assert F.dropout(torch.ones(3), 0.0).eq(1).all()
    everything = tessera.jit(lambda x: F.dropout(x, 1.0) * 2, executors=TILE)(torch.ones(8, 8, requires_grad=True))
    assert everything.eq(0).all()
    assert torch.rand(2, generator=generator).shape == (2,)


@pytest.mark.parametrize("flag", ["auto", "off"])
def test_on_the_cpu_the_bits_are_eagers_unless_asked(flag: str) -> None:
    x, r = torch.randn(50, 60), torch.randn(50, 60)
    with override(fused_random=flag):
        fast = tessera.jit(drop_add, executors=TILE)
        torch.manual_seed(3)
        y = fast(x, r)
    torch.manual_seed(3)
    torch.testing.assert_close(y, drop_add(x, r))


def test_without_a_fusion_executor_nothing_changes() -> None:
    x, r = torch.randn(50, 60), torch.randn(50, 60)
    fast = tessera.jit(drop_add, executors=["aten"])
    torch.manual_seed(3)
    y = fast(x, r)
    torch.manual_seed(3)
    assert torch.equal(y, drop_add(x, r))


def test_the_flag_is_checked() -> None:
    with pytest.raises(OptionError, match="fused_random: expected one of auto, on, off, got 'some"):
        override(fused_random="sometimes").__enter__()


def test_products_do_not_draw() -> None:
    def program(seed: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a @ b) * (uniform(seed, [a.shape[0], b.shape[1]], dtype=torch.float32) < 0.9)

    def without(seed: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a @ b) * 2

    given = torch.zeros(2, dtype=torch.int64), torch.randn(256, 64).bfloat16(), torch.randn(64, 256).bfloat16()
    assert COMPILER.check(trace_of(program, *given))[1] == "random numbers are computed after a product, not beside it"
    assert COMPILER.check(trace_of(without, *given))[1] == ""


def test_what_a_gpu_trains_with() -> None:
    """`native_dropout`, which CUDA's forward keeps its mask by, and its backward."""

    def both(x: torch.Tensor, g: torch.Tensor) -> tuple:
        y, mask = torch.native_dropout(x, 0.3, True)
        return y + 1, mask, torch.ops.aten.native_dropout_backward(g, mask, 1 / 0.7)

    fast = tessera.jit(both, executors=TILE)
    x, g = torch.randn(90, 70), torch.randn(90, 70)
    y, mask, back = fast(x, g)
    torch.testing.assert_close(y, x * mask / 0.7 + 1)
    torch.testing.assert_close(back, g * mask / 0.7)
    assert mask.dtype is torch.bool and "aten.native_dropout" not in final(fast)
