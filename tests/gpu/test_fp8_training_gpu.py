"""Training in 8 bits on a GPU that has them: values, every way to scale, CUDA graphs, and a model that learns."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tessera
from tessera.just_in_time.compiled import compiled_state
from tessera.tools.models import GPT, GPTConfig

CAN = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CAN, reason="needs a CUDA device with numbers of 8 bits")]
WAYS = [{}, {"history": "delayed"}, {"scaling": "row"}]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.mark.parametrize("options", WAYS, ids=["tensor", "delayed", "row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, width, height", [(48, 64, 32), (2048, 1024, 4096)])
def test_a_layer_follows_16_bits(options, dtype, rows, width, height):
    model = nn.Sequential(nn.Linear(width, height)).to("cuda", dtype)
    fast = tessera.jit(model, strict=True, precision=tessera.FP8(skip=(), smallest=16, **options))
    x = torch.randn(rows, width, device="cuda", dtype=dtype, requires_grad=True)
    g = torch.randn(rows, height, device="cuda", dtype=dtype)

    def gradients(call):
        y = call(x)
        return y, *torch.autograd.grad(y, (x, model[0].weight, model[0].bias), g)

    for _ in range(2):  # delayed scales are known the second time
        found = gradients(fast)
    for a, b in zip(found, gradients(model), strict=True):
        assert a.dtype is dtype and a.isfinite().all() and (a - b).float().norm() < 0.1 * b.float().norm()
    assert len(compiled_state(fast).compilations()[-1].account.fp8.multiplied) == 1


def test_rounding_is_the_librarys():
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), device="cuda").to(torch.int32)
    x = torch.cat([bits.view(torch.float32), torch.randn(1 << 18, device="cuda") * 1e4])

    def f(x):
        return (x * 1.0 + 0.0).to(torch.float8_e5m2)

    with torch.no_grad():
        fast = tessera.jit(f, strict=True, executors=["tile", "aten"])
        found = fast(x)
    torch.testing.assert_close(found.float(), f(x).float(), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("options", WAYS, ids=["tensor", "delayed", "row"])
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_gpt_learns_as_in_16_bits(options, cuda_graph):
    config = GPTConfig(layers=3, width=256, heads=4, context=64)
    with torch.device("cuda"):
        start = GPT(config).to(torch.bfloat16)
        text = torch.randint(config.vocab, (8, config.context + 1))

    def losses(precision):
        torch._dynamo.reset()
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = tessera.train_step(model, None, optimizer, strict=True, precision=precision, cuda_graph=cuda_graph)
        found = [step(text[:, :-1], text[:, 1:]).clone() for _ in range(30)]
        return torch.stack(found).float(), step

    wanted, _ = losses(None)
    found, step = losses(tessera.FP8(smallest=16, **options))
    assert found[-1] < 0.8 * found[0]
    torch.testing.assert_close(found, wanted, rtol=0.03, atol=0.02)
    report = str(tessera.explain(step))
    assert "multiplied in 8 bits" in report and "last layer" in report
