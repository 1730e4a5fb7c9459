"""Many steps on a real device: losses follow eager's, and memory does not grow."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tessera
from tessera.tools.llama import Llama, LlamaConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CONFIG = LlamaConfig(2, 256, 8, 2, 512, 1000)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def model_and_tokens(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    with torch.device("cuda"):
        model = Llama(CONFIG).to(dtype)
    return model, torch.randint(CONFIG.vocab, (4, 129), device="cuda")


def stepper(model: nn.Module, how: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A training step: eager's, a compiled model's with eager's optimizer, or one compiled program."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if how == "train_step":
        return tessera.train_step(model, None, optimizer, strict=True)  # type: ignore[return-value]
    fast = tessera.jit(model, strict=True) if how == "jit" else model

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = fast(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize("how", ["jit", "train_step"])
def test_fifty_losses_follow_eager(how: str) -> None:
    """As near to a model in float32 as eager in bf16 is, over the whole curve."""
    model, tokens = model_and_tokens(torch.bfloat16)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    runs = {
        "exact": (copy.deepcopy(model).float(), "eager"),
        "eager": (copy.deepcopy(model), "eager"),
        "ours": (model, how),
    }
    steps = {name: stepper(m, kind) for name, (m, kind) in runs.items()}
    curves = {name: torch.stack([step(x, y).float().clone() for _ in range(50)]) for name, step in steps.items()}
    assert curves["exact"][-1] < 0.8 * curves["exact"][0]
    usual, ours = ((curves[name] - curves["exact"]).abs().max().item() for name in ("eager", "ours"))
    assert ours <= 2 * usual + 0.02, (ours, usual)


@pytest.mark.parametrize("how", ["jit", "train_step"])
def test_two_hundred_steps_leak_nothing(how: str) -> None:
    model, tokens = model_and_tokens(torch.bfloat16)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    step = stepper(model, how)
    for _ in range(20):
        step(x, y)
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(200):
        step(x, y)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= allocated + 4096 and torch.cuda.memory_reserved() <= reserved
