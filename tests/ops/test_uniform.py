"""`tessera::uniform`: the same numbers from the operator, the tile interpreter and the targets, and good ones."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from programs import trace_of

from tessera.ops.uniform import BITS, uniform
from tessera.tile.dialect import interp
from tessera.tile.from_trace.launch import launcher
from tessera.tile.from_trace.region import lower
from tessera.tile.targets import missing, named

SEEDS = (0, 42, -1, 2**40 + 3, -(2**63))


def seed_of(n: int) -> torch.Tensor:
    return torch.tensor([n, 0])


def draw(n: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return uniform(seed_of(n), list(shape), dtype=dtype)


# --- the same bits everywhere ---


SHAPES = [(7,), (64, 33), (3, 5, 129)]


@pytest.mark.parametrize("target", ["interpreter", "cpu"])
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_targets_agree_bit_for_bit(target: str, dtype: torch.dtype, shape: tuple) -> None:
    """Triton and cuTile run the kernel `uniform` of tests/tile/kernels.py, which has the same formula."""
    trace = trace_of(lambda seed, x: uniform(seed, list(x.shape), dtype=dtype), seed_of(0), torch.empty(shape))
    lowered = lower(trace)
    found = named("cpu")
    assert found is not None
    kernel = found.compile(lowered.kernel, found.propose(lowered.kernel, {})[0])
    if target == "interpreter":
        kernel = partial(interp.run, lowered.kernel)
    launch = launcher(trace, lowered, kernel)
    for n in SEEDS:
        (got,) = launch(seed_of(n), torch.empty(shape))
        assert torch.equal(got, draw(n, *shape, dtype=dtype))


@pytest.mark.skipif(bool(missing("triton")), reason=missing("triton"))
@pytest.mark.parametrize("shape", [(4096, 8192), (4096, 8191)])
def test_neighbours_share_a_block_on_a_gpu(shape: tuple, tmp_path, monkeypatch) -> None:  # noqa: ANN001
    """A thread that holds eight neighbours computes two blocks of Philox, of fourteen products each, not eight."""
    from tessera.machines import machine
    from tessera.tile.targets.triton.propose import propose
    from tessera.tile.targets.triton.resources import compile_only

    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))

    def dropped(seed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x * (uniform(seed, list(x.shape), dtype=torch.float32) < 0.9)

    kernel = lower(trace_of(dropped, seed_of(0), torch.empty(shape, dtype=torch.bfloat16))).kernel
    schedule = propose(kernel, {}, machine("h200"))[0]
    found = compile_only(kernel, schedule, 90)
    held = schedule.blocks[0][1] // (32 * schedule.warps)
    products = found.ptx.count("mul.wide.u32") + found.ptx.count("mul.hi.u32")
    assert 0 < products <= held // 4 * 14 + 8, (products, held)
    assert "ld.global.v4.b32" in found.ptx and found.spills == 0


@pytest.mark.parametrize("dynamic", [(), (1,)])
def test_sizes_may_be_symbolic(dynamic: tuple) -> None:
    def program(seed: torch.Tensor, x: torch.Tensor) -> tuple:
        whole, column = (uniform(seed, shape, dtype=torch.float32) for shape in (list(x.shape), [x.shape[0], 1]))
        return whole, x * 0 + column

    trace = trace_of(program, seed_of(0), torch.zeros(6, 10), dynamic=dynamic)
    lowered = lower(trace)
    launch = launcher(trace, lowered, lambda tensors, symbols: interp.run(lowered.kernel, tensors, symbols))
    for n in (6, 11) if dynamic else (6,):
        whole, column = launch(seed_of(5), torch.zeros(n, 10))
        assert torch.equal(whole, draw(5, n, 10)) and torch.equal(column, draw(5, n, 1).expand(n, 10))


def test_places_count_row_by_row() -> None:
    assert torch.equal(draw(3, 4, 6, 5).flatten(), draw(3, 120))
    assert torch.equal(draw(3, 1000)[:77], draw(3, 77))
    assert draw(3).shape == () and draw(3, 0, 4).shape == (0, 4)


# --- good numbers ---


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_distribution(dtype: torch.dtype) -> None:
    x = draw(1234, 1 << 18, dtype=dtype).double()
    step = 2.0 ** -BITS[dtype]
    assert 0 <= x.min() < 1e-2 and 1 - step - 1e-2 < x.max() <= 1 - step
    assert abs(x.mean() - (0.5 - step / 2)) < 4 * (1 / 12 / x.numel()) ** 0.5
    assert abs(x.var() - 1 / 12) < 1e-3
    counts = torch.histc(x, 64, 0, 1)
    chi = ((counts - x.numel() / 64) ** 2 / (x.numel() / 64)).sum()
    assert 20 < chi < 120  # 63 degrees of freedom: six standard deviations to either side


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def test_no_correlation() -> None:
    n = 1 << 17
    x, bound = draw(7, n), 5 / n**0.5
    for lag in (1, 2, 3, 4, 8, 32, 1024):
        assert abs(correlation(x[:-lag], x[lag:])) < bound, lag
    for other in (8, 6, 7 + 2**32, 7 - 2**63, -7):
        assert abs(correlation(x, draw(other, n))) < bound, other
    words = x.reshape(-1, 4)
    for a, b in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
        assert abs(correlation(words[:, a], words[:, b])) < 2 * bound


def test_no_draw_comes_twice() -> None:
    """Words of 24 bits collide now and then; blocks of four do not."""
    blocks = torch.cat([draw(s, 1 << 14).reshape(-1, 4) for s in range(8)])
    assert torch.unique(blocks, dim=0).shape == blocks.shape


# --- errors ---


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="expected a seed of int64, got torch.int32"):
        uniform(torch.zeros(2, dtype=torch.int32), [3], dtype=torch.float32)
    with pytest.raises(TypeError, match="expected one of torch.float32, .*, got torch.float64"):
        draw(0, 3, dtype=torch.float64)
