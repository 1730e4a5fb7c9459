"""Many regions of one form in one launch: which are, what they compute, on the CPU and by Triton's kernels."""

from __future__ import annotations

import json

import pytest
import torch
from interpreted import run_interpreted

import tessera
from tessera.tile.dialect.interp import run as interpret
from tessera.tile.from_trace.batch import SYMBOL, flat_kernel, form
from tessera.tile.targets import named

SHAPES = [(3, 5), (64,), (1000,), (4, 8, 16), (1,), (2048, 3)]


def update(p, g, m, rate):
    m = m * 0.9 + g * 0.1
    return p - m * rate, m


def body(shape=(4, 8), dtype=torch.float32):
    xs = [torch.randn(shape).to(dtype) for _ in range(3)]
    return tessera.trace(lambda *a: list(update(*a)), *xs, torch.tensor(0.5))


def test_what_has_one_form():
    assert form(body((4, 8))) == form(body((16, 2, 2)))
    assert form(body((4, 8))) != form(body((4, 7)))  # whole vectors or not
    assert form(body((4, 8))) != form(body((4, 8), torch.float64))
    assert form(tessera.trace(lambda x: [x.sum(0) + 1], torch.randn(4, 4))) is None
    assert form(tessera.trace(lambda x, y: [(x + y) * 2], torch.randn(4, 4), torch.randn(4))) is None
    assert form(tessera.trace(lambda x, y: [(x + y) * 2], torch.randn(4, 4), torch.randn(4, 4).t())) is None


def test_the_flat_kernel_serves_every_length():
    lowered = flat_kernel(body(), "update")
    assert [s.data for s in lowered.kernel.symbol_names] == [SYMBOL]
    for n in (1, 7, 300):
        xs = [torch.randn(n) for _ in range(3)]
        rate = torch.tensor(0.5)
        out = [torch.empty(n) for _ in range(2)]
        given = dict(zip(["x0", "x1", "x2", "x3"], (*xs, rate), strict=True))
        buffers = [given[v.name] for v in lowered.inputs]
        interpret(lowered.kernel, [*buffers, *out], [n])
        torch.testing.assert_close(out, list(update(*xs, rate)))


def test_counters_are_segments_of_one_element():
    counter, other = (tessera.trace(lambda n: [n + 1], torch.tensor(k)) for k in (3, 5))
    assert form(counter) == form(other) is not None
    lowered = flat_kernel(counter, "count")
    n, out = torch.tensor(7), torch.tensor(0)
    interpret(lowered.kernel, [n, out], (1,))
    assert out == 8


def many(rate, *tensors):
    out = []
    for k in range(0, len(tensors), 3):
        out += update(*tensors[k : k + 3], rate)
    return out


def inputs(device="cpu", dtype=torch.float32):
    return [torch.randn(s, device=device).to(dtype) for s in SHAPES for _ in range(3)]


def test_one_launch_on_the_cpu():
    fast = tessera.jit(many, executors=["tile", "aten"], strict=True)
    xs, rate = inputs(), torch.tensor(0.25)
    torch.testing.assert_close(fast(rate, *xs), many(rate, *xs))
    together = [c for c in tessera.explain(fast).graphs[0].executors if "in one launch" in c]
    assert len(together) == 2  # whole vectors, and the others


def step(rate, *tensors):
    """The same, in place."""
    for k in range(0, len(tensors), 3):
        p, m = update(*tensors[k : k + 3], rate)
        tensors[k].copy_(p)
        tensors[k + 2].copy_(m)


def test_regions_write_mutated_inputs_where_they_stand():
    fast = tessera.jit(step, executors=["tile", "aten"], strict=True)
    xs, rate = inputs(), torch.tensor(0.25)
    theirs = [x.clone() for x in xs]
    for _ in range(2):
        fast(rate, *xs)
        step(rate, *theirs)
    torch.testing.assert_close(xs, theirs)
    assert "copy_" not in str(tessera.stages(fast)[-1].trace)


def test_an_old_value_that_is_read_later_is_kept():
    def swap(a, b):
        x, y = (b * 2 + 1).exp(), (a * 3 - 1).exp()
        a.copy_(x)
        b.copy_(y)
        return a + b

    fast = tessera.jit(swap, executors=["tile", "aten"], strict=True)
    mine = [torch.randn(64) for _ in range(2)]
    theirs = [x.clone() for x in mine]
    torch.testing.assert_close(fast(*mine), swap(*theirs))
    torch.testing.assert_close(mine, theirs)


def launcher():
    target = named("triton")
    if target is None:
        pytest.skip("needs triton")
    kernel = flat_kernel(body(), "update").kernel
    return target.batch(kernel, target.propose(kernel, {SYMBOL: 1 << 20})[0])


def rows_of(xs, rate):
    rows, lengths = [], []
    order = {"x0": 0, "x1": 1, "x2": 2}
    names = [v.name for v in flat_kernel(body(), "update").inputs]
    for k in range(0, len(xs), 3):
        given = [rate if n == "x3" else xs[k + order[n]] for n in names]
        rows.append([*given, torch.empty_like(xs[k]), torch.empty_like(xs[k])])
        lengths.append(xs[k].numel())
    return rows, lengths


def check(rows, lengths, xs, rate):
    made = launcher()
    want = many(rate, *xs)
    for run in (made, restored(made, max(lengths))):
        run(rows, lengths)
        torch.testing.assert_close([t for row in rows for t in row[-2:]], want)
        for row in rows:
            row[-1].zero_()
            row[-2].zero_()


def restored(made, longest):
    """As another process would find it on disk; it lowers and emits nothing."""

    def never():
        raise AssertionError("the tile kernel is not needed")

    target = named("triton")
    return target.load_batch(json.loads(json.dumps(target.save_batch(made, longest))), never)


def test_triton_text_compiles_for_a_gpu():
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tessera.tile.targets.triton.launch import load_module

    made = launcher()
    function = getattr(load_module(made.source, made.name), made.name)
    if not hasattr(function, "cache_key"):
        pytest.skip("kernels are interpreted here")
    source = ASTSource(function, {"table": "*i64", "places": "*i32"}, {}, {(0,): [["tt.divisibility", 16]]})
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": made.schedule.warps})
    ptx = binary.asm["ptx"]
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx  # 16 bytes at once, as with pointers of its own


def test_triton_in_the_interpreter(tmp_path):
    """This file as a script of its own."""
    pytest.importorskip("triton")
    run_interpreted(__file__, TESSERA_CACHE=str(tmp_path))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_triton_on_a_gpu():
    for shapes in (SHAPES, [(1024,), (4096, 33), (16,)]):
        xs = [torch.randn(s, device="cuda") for s in shapes for _ in range(3)]
        rate = torch.tensor(0.25, device="cuda")
        check(*rows_of(xs, rate), xs, rate)


if __name__ == "__main__":
    xs, rate = inputs(), torch.tensor(0.25)
    check(*rows_of(xs, rate), xs, rate)
