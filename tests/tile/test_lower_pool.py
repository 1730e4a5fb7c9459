"""Max pooling in kernels, forward and backward: random windows on every target, any batch, and what no kernel holds."""

from __future__ import annotations

import json
from pathlib import Path

import pool_cases
import pytest
import torch
from interpreted import run_interpreted
from programs import trace_of

from tessera.ir.interp import run
from tessera.tile.dialect import interp
from tessera.tile.dialect.ops import LoadOp
from tessera.tile.from_trace.launch import launcher
from tessera.tile.from_trace.region import lower, why_not
from tessera.tile.targets import missing

ops = torch.ops.tessera
STEM = ([3, 3], [2, 2], [1, 1], [1, 1])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))


@pytest.mark.parametrize(("mode", "start", "count"), [("interp", 0, 16), ("whole", 100, 6), ("cutile", 200, 6)])
def test_random_windows(mode: str, start: int, count: int) -> None:
    failures = pool_cases.run(mode, range(start, start + count))
    assert not failures, "\n\n".join(failures[:3])


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["interp", "whole", "cutile"])
def test_more_random_windows(mode: str) -> None:
    failures = pool_cases.run(mode, range(1000, 1150))
    assert not failures, "\n\n".join(failures[:3])


@pytest.mark.skipif(bool(missing("triton")), reason=missing("triton"))
@pytest.mark.parametrize(("start", "count"), [(303, 2), pytest.param(305, 10, marks=pytest.mark.sweep)])
def test_random_windows_in_tritons_interpreter(start: int, count: int) -> None:
    failures = json.loads(run_interpreted(pool_cases.__file__, "triton", start, count).splitlines()[-1])
    assert not failures, "\n\n".join(failures[:3])


def stem(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is pooled after the first convolution of a ResNet, the offsets of that, and a gradient."""
    x = torch.randn(2, 64, 16, 16).to(dtype).to(memory_format=torch.channels_last)
    values, offsets = ops.max_pool(x, *STEM, False)
    return x, offsets, torch.randn_like(values)


def test_what_varies_along_channels_alone_is_loaded_once() -> None:
    x, _, _ = stem()

    def fn(x: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.max_pool(torch.relu(x + shift[:, None, None]), *STEM, False)

    kernel = lower(trace_of(fn, x, torch.randn(64))).kernel
    loads = [op for op in kernel.block.ops if isinstance(op, LoadOp)]
    assert sum(op.buffer is kernel.buffers[1] for op in loads) == 1
    masks = [op.mask is not None for op in loads if op.buffer is kernel.buffers[0]]
    assert len(masks) == 9 and sum(masks) == 5  # above and to the left; nothing lies below or to the right


@pytest.mark.skipif(bool(missing("triton")), reason=missing("triton"))
def test_channels_are_read_sixteen_bytes_at_once() -> None:
    from on_h200 import propose

    from tessera.tile.targets.triton.resources import compile_only

    x = torch.empty(32, 64, 112, 112, dtype=torch.bfloat16, memory_format=torch.channels_last)  # only its type counts
    g = torch.empty(32, 64, 56, 56, dtype=torch.bfloat16, memory_format=torch.channels_last)
    offsets = torch.empty_like(g, dtype=torch.int8)
    programs = (
        (lambda x: ops.max_pool(x, *STEM, False), (x,), 9, 80),  # eight channels a thread
        (lambda g, o: ops.max_pool_backward(g, o, list(x.shape), *STEM, True), (g, offsets), 12, 80),  # sixteen
    )
    for fn, args, reads, registers in programs:
        kernel = lower(trace_of(fn, *args)).kernel
        used = compile_only(kernel, propose(kernel, {})[0], 90)
        assert used.ptx.count("ld.global.v4.b32") == reads
        assert used.registers <= registers and not used.spills and used.shared <= 4096, str(used)


def test_a_batch_may_be_of_any_size() -> None:
    x, offsets, g = stem(torch.float32)
    backward = trace_of(
        lambda g, o: ops.max_pool_backward(g, o, [g.shape[0], *x.shape[1:]], *STEM, True), g, offsets, dynamic=(0, 1)
    )
    forward = trace_of(lambda x: ops.max_pool(x, *STEM, False), x, dynamic=(0,))
    for trace, args in ((forward, (x,)), (backward, (g, offsets))):
        lowered = lower(trace)
        launch = launcher(trace, lowered, lambda tensors, symbols, k=lowered.kernel: interp.run(k, tensors, symbols))
        for given in (args, [torch.cat([a, a, a]).to(memory_format=torch.channels_last) for a in args]):
            for a, b in zip(launch(*given), run(trace, *given), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_what_has_no_kernel_says_why() -> None:
    def reason(fn, *args: torch.Tensor) -> str:  # noqa: ANN001
        return why_not(trace_of(fn, *args).equations[0])

    assert "49" in reason(lambda x: ops.max_pool(x, [8, 8], [1, 1], [0, 0], [1, 1], False), torch.randn(1, 2, 9, 9))
    assert "integers" in reason(lambda x: ops.max_pool(x, *STEM, False), torch.arange(32).view(1, 2, 4, 4))
    assert "no elements" in reason(lambda x: ops.max_pool(x, *STEM, False), torch.randn(0, 2, 9, 9))
