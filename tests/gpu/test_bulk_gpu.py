"""Kernels with bulk copies on a CUDA device: the short launch gives what PyTorch gives, wherever matrices lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import tessera
from tessera.executors import products, tile
from tessera.tile.dialect.build import KernelBuilder, bf16, f32
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.schedules.schedule import Schedule

pytest.importorskip("triton")
from tessera.tile.targets.triton import descriptors  # noqa: E402
from tessera.tile.targets.triton.launch import Launcher  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
    ),
]

SCHEDULE = Schedule(
    (("i", 64), ("j", 64), ("r", 64)), warps=4, stages=2, loop=True, persistent=True, extra=(("bulk", True),)
)


def product() -> KernelOp:
    """relu(x @ w.T + b) of bf16, whose rows, columns and depth are symbols."""
    k = KernelBuilder("product", ["m", "n", "p"])
    i, j, r = k.axis("i", "m"), k.axis("j", "n"), k.axis("r", "p", reduce=True)
    M, N, P = (k.symbol(s) for s in "mnp")
    bx, bw, bb, by = (k.buffer(bf16) for _ in range(4))
    sums = k.contract(k.load(bx, i * P + r), k.load(bw, j * P + r), "r")
    k.store(
        k.cast(k.apply("maximum", k.apply("add", sums, k.cast(k.load(bb, j), f32)), k.constant(0.0, f32)), bf16),
        by,
        i * N + j,
    )
    return k.finish()


def agree(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)


def launched(launcher: Launcher, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> None:
    """The short way, which has to be known, and nothing before it has left anything in `y`."""
    y.fill_(-7)
    device, sizes = y.device.index, (len(x), len(w), x.shape[1])
    assert launcher.at(device, [t.data_ptr() for t in (x, w, b, y)], sizes)
    agree(y, (x.float() @ w.float().t() + b.float()).relu())


@pytest.mark.parametrize("most", [2, 4096])
def test_one_memory_for_matrices_of_many_sizes(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(descriptors, "MOST", most)
    torch.manual_seed(0)
    launcher = Launcher(product(), SCHEDULE)
    memory = [torch.empty(1 << 20, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    chosen = [(256, 192, 128), (128, 384, 128), (320, 64, 256), (256, 192, 128), (72, 200, 136), (128, 384, 128)]
    for turn in range(3):
        for m, n, p in chosen:
            start = 64 * turn
            shapes = ((m, p), (n, p), (n,), (m, n))
            x, w, b, y = (t[start : start + torch.Size(s).numel()].view(s) for t, s in zip(memory, shapes, strict=True))
            for given in (x, w, b):
                given.normal_()
            if turn == 0:
                launcher([x, w, b, y], (m, n, p))
            launched(launcher, x, w, b, y)
            launched(launcher, x, w, b, y)


def test_memory_that_is_freed_and_used_again() -> None:
    torch.manual_seed(0)
    launcher = Launcher(product(), SCHEDULE)
    seen = set()
    for turn in range(20):
        m, n, p = ((256, 192, 128), (192, 256, 128), (384, 128, 128))[turn % 3]
        x, w, b = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((m, p), (n, p), (n,)))
        y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        if turn < 3:
            launcher([x, w, b, y], (m, n, p))
        launched(launcher, x, w, b, y)
        seen.add(x.data_ptr())
        del x, w, b, y
        if turn % 5 == 4:
            torch.cuda.empty_cache()
    assert len(seen) < 20


def test_an_address_that_is_not_aligned() -> None:
    launcher = Launcher(product(), SCHEDULE)
    memory = torch.randn(256 * 128 + 8, device="cuda", dtype=torch.bfloat16)
    w, b = torch.randn(192, 128, device="cuda", dtype=torch.bfloat16), torch.zeros(192, device="cuda").bfloat16()
    y = torch.empty(256, 192, device="cuda", dtype=torch.bfloat16)
    for start in (0, 1, 8, 1, 0, 4):
        x = memory[start : start + 256 * 128].view(256, 128)
        y.fill_(-7)
        launcher([x, w, b, y], (256, 192, 128))
        agree(y, (x.float() @ w.float().t()).relu())


def test_another_stream_and_a_graph() -> None:
    launcher = Launcher(product(), SCHEDULE)
    x, w = torch.randn(256, 128, device="cuda").bfloat16(), torch.randn(192, 128, device="cuda").bfloat16()
    b, y = torch.randn(192, device="cuda").bfloat16(), torch.empty(256, 192, device="cuda").bfloat16()
    launcher([x, w, b, y], (256, 192, 128))
    with torch.cuda.stream(torch.cuda.Stream()):
        launched(launcher, x, w, b, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert launcher.at(0, [t.data_ptr() for t in (x, w, b, y)], (256, 192, 128))
    x.normal_()
    graph.replay()
    agree(y, (x.float() @ w.float().t() + b.float()).relu())


CASES: dict[str, tuple[Callable, list[list[tuple[int, ...]]]]] = {
    "epilogue": (
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        [[(m, 1024), (1024, 1024), (1024,)] for m in (2048, 1024, 4096)],
    ),
    "residual": (
        lambda x, w, r: F.linear(x, w) + r,
        [[(m, 512), (1024, 512), (m, 1024)] for m in (2048, 1024)],
    ),
    "batched": (lambda x, w: torch.bmm(x, w).relu(), [[(n, 512, 256), (n, 256, 512)] for n in (8, 4)]),
    "transposed": (lambda x, w: torch.mm(x.t(), w) * 2, [[(n, 2048), (n, 2048)] for n in (512, 1024)]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_programs_with_bulk_copies(monkeypatch: pytest.MonkeyPatch, name: str, dynamic: bool) -> None:
    """Fused whether or not they pay; sizes change, memory is freed, and every call is held against PyTorch."""
    for knob in ("LOSS", "BESIDE_LOSS", "ACROSS_LOSS", "STORING"):
        monkeypatch.setattr(products, knob, 0.0)
    monkeypatch.setattr(products, "MOST_MOVED", 9)
    torch._dynamo.reset()
    torch.manual_seed(0)
    fn, several = CASES[name]
    with tile.own_kernels() as made:
        fast = tessera.jit(fn, executors=["tile", "aten"], dynamic=dynamic, strict=True)
        for turn in range(4):
            for shapes in several:
                given = [torch.randn(s, device="cuda", dtype=torch.bfloat16) / 8 for s in shapes]
                want = fn(*(t.float() for t in given))
                for _ in range(2):
                    agree(fast(*given), want)
                if turn == 2:
                    torch.cuda.empty_cache()
        launchers = [k.compiled for k in made.values() if k is not None and isinstance(k.compiled, Launcher)]
    assert any(launcher._bulks and launcher._direct for launcher in launchers)
