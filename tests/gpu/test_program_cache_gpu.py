"""Programs from the cache on a GPU: they give what compiled ones give, kernels are compiled ahead, steps replayed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cached import check_loaded, trained
from torch import nn

import tessera
from tessera.just_in_time.compiled import compiled_state
from tessera.tile.targets.triton import ahead
from tessera.tools.models import GPT, GPTConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    with tessera.override(program_cache=True, verify=False):  # with verify, every program is compiled
        yield


class Convolutions(nn.Module):
    """What a ResNet is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.inner, self.second = nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(self.stem(x)))
        x = F.relu(x + self.second(self.inner(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


def gpt(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    tokens = torch.randint(512, (4, 129), device="cuda")
    model = GPT(GPTConfig(layers=2, width=256, heads=4, context=128, vocab=512)).cuda().to(dtype)
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Libraries add some gradients up in an order of their own."""
    return torch.allclose(a, b, rtol=2e-2, atol=2e-3)


def test_a_small_gpt(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = gpt()
    begun: list[torch.device] = []
    begin = ahead.begin
    monkeypatch.setattr(ahead, "begin", lambda device, work: (begun.append(device), begin(device, work))[1])
    check_loaded(lambda: (begun.clear(), trained(model, args))[1], same=close)  # type: ignore[arg-type]
    assert begun  # of the second run, whose program came from the cache
    found = trained(model, args)[0]
    torch.testing.assert_close(found, copy.deepcopy(model)(*args), rtol=2e-2, atol=2e-2)


def test_a_small_resnet() -> None:
    torch.manual_seed(0)
    model = Convolutions().cuda().to(memory_format=torch.channels_last)
    args = (
        torch.randn(16, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last),
        torch.arange(16).cuda() % 10,
    )
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        check_loaded(lambda: trained(model, args), same=close)  # type: ignore[arg-type]
        out, *_ = trained(model, args)
        torch.testing.assert_close(out, copy.deepcopy(model)(*args), rtol=1e-3, atol=1e-3)


def test_inference_as_a_graph() -> None:
    model, (tokens, _) = gpt()
    model.eval()

    def run() -> list:
        fast = tessera.jit(lambda t: model(t), strict=True, cuda_graph=True)
        with torch.no_grad():
            outs = [fast(tokens) for _ in range(5)]
        return [*(o if isinstance(o, torch.Tensor) else o[0] for o in outs), fast]

    _, loaded = check_loaded(run)
    assert "no CUDA graph" not in str(compiled_state(loaded).compilations()[0].executable.cuda_graph)  # type: ignore[union-attr]


def test_a_whole_step() -> None:
    def run() -> list:
        model, args = gpt(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = tessera.train_step(model, None, optimizer, clip_norm=1.0, strict=True)
        return [*(step(*args) for _ in range(5)), *model.parameters(), step]

    check_loaded(run, same=close)  # type: ignore[arg-type]
