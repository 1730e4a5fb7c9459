"""Random operators inside kernels on a CUDA device: the operator's own bits, repeated by seeds, new at every replay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tessera
from tessera.ops.uniform import BITS, uniform
from tessera.util.config import override

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TILE = ["tile", "aten"]


@pytest.fixture(autouse=True)
def strict():  # noqa: ANN201
    torch._dynamo.reset()
    with override(strict=True):
        yield


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("shape", [(1000,), (513, 1027), (3, 64, 128)], ids=str)
def test_kernels_give_the_operators_bits(dtype: torch.dtype, shape: tuple) -> None:
    seed = torch.tensor([2**40 + 17, 0], device="cuda")
    fast = tessera.jit(lambda seed: uniform(seed, list(shape), dtype=dtype) * 1, executors=TILE)
    want = uniform(seed.cpu(), list(shape), dtype=dtype)
    assert torch.equal(fast(seed).cpu(), want) and torch.equal(uniform(seed, list(shape), dtype=dtype).cpu(), want)


def drop_add(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.25) + r


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_in_the_kernel_forward_and_backward(dtype: torch.dtype) -> None:
    fast = tessera.jit(drop_add, executors=TILE)
    x = torch.randn(512, 1000, device="cuda", dtype=dtype, requires_grad=True)
    r = torch.zeros(512, 1000, device="cuda", dtype=dtype)
    torch.manual_seed(3)
    y = fast(x, r)
    y.backward(torch.ones_like(y))
    kept = y.detach() != 0
    assert torch.equal(x.grad != 0, kept) and abs(kept.float().mean() - 0.75) < 0.01
    torch.testing.assert_close(y.detach()[kept], x.detach()[kept] / 0.75)
    claims = [str(s.trace) for s in tessera.stages(fast) if s.name.endswith("claim")]
    assert len(claims) == 2 and all("region_0" in c and "dropout(" not in c for c in claims)
    torch.manual_seed(3)
    assert torch.equal(fast(x, r), y) and not torch.equal(fast(x, r), y)


def test_a_graph_draws_anew_at_every_replay() -> None:
    fast = tessera.jit(lambda x: F.dropout(x, 0.5) * 2, executors=TILE)
    x = torch.ones(256, 256, device="cuda")
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                fast(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fast(x)
    torch.manual_seed(11)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(y.clone())
    assert 0.45 < (seen[0] == seen[1]).float().mean() < 0.55
    torch.manual_seed(11)
    graph.replay()
    assert torch.equal(y, seen[0])


def test_off_leaves_the_draws_to_pytorch() -> None:
    x, r = torch.randn(64, 128, device="cuda"), torch.randn(64, 128, device="cuda")
    with override(fused_random="off"):
        fast = tessera.jit(drop_add, executors=TILE)
        torch.manual_seed(2)
        y = fast(x, r)
    torch.manual_seed(2)
    torch.testing.assert_close(y, drop_add(x, r))


@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like], ids=["rand", "randn"])
def test_distributions(draw) -> None:  # noqa: ANN001
    fast = tessera.jit(lambda x: draw(x) + x, executors=TILE)
    y = fast(torch.zeros(1024, 1024, device="cuda")).double()
    mean, variance = (0.5, 1 / 12) if draw is torch.rand_like else (0.0, 1.0)
    assert abs(y.mean() - mean) < 5e-3 and abs(y.var() - variance) < 1e-2
