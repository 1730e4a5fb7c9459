"""Looking into programs on a CUDA device: measured memory, numerics checks, reproducers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tessera
from tessera.inspection.examples import example
from tessera.ops.op import registry
from tessera.tools.models import Block, GPTConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def test_memory_is_measured_by_the_allocator():
    fast = tessera.jit(lambda x, w: (x @ w).relu().sum(), strict=True)
    fast(torch.randn(512, 1024, device="cuda"), torch.randn(1024, 1024, device="cuda", requires_grad=True))
    before = torch.cuda.memory_allocated()
    (graph,) = tessera.explain(fast, measure=True).graphs
    for program in graph.memory:
        assert program.measured is not None, program.note
        # the allocator rounds up to 512 bytes, and cuBLAS may take a workspace
        assert program.predicted.peak <= program.measured.peak <= program.predicted.peak + 64 * 2**20
    assert torch.cuda.memory_allocated() <= before + 64 * 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("executors", [("sdpa", "aten"), ("sdpa", "tile", "aten")])
def test_a_block_is_right(dtype, executors):
    block = Block(GPTConfig(width=128, heads=4)).to("cuda", dtype)
    x = torch.randn(2, 64, 128, device="cuda", dtype=dtype, requires_grad=True)
    report = tessera.check(tessera.jit(block, executors=executors), x)
    assert report.ok, str(report)


def test_dropout_draws_the_same_numbers_and_the_generator_is_put_back():
    x = torch.randn(256, 256, device="cuda", requires_grad=True)
    state = torch.cuda.get_rng_state()
    fast = tessera.jit(lambda x: F.dropout(x.sin(), 0.5) * 2, executors=["tile", "aten"])
    report = tessera.check(fast, x)
    assert report.ok, str(report)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_a_wrong_rule_is_named_and_reproduced(monkeypatch, tmp_path):
    monkeypatch.setattr(registry()["aten.sin"], "vjp", lambda ct, y, x: (ct * y,))
    report = tessera.check(lambda x: (x.sin() * x).sum(), torch.randn(64, 64, device="cuda", requires_grad=True))
    assert report.faults[0].operator == "aten.sin"
    path = tessera.reproduce(report, str(tmp_path / "repro.py"))
    with open(path) as file:
        assert "'cuda" in file.read()


def test_examples_are_the_same_on_every_device():
    assert torch.equal(example((4, 4), device="cuda").cpu(), example((4, 4)))
