"""Programs over few rows: what is found, what stays, and that the results are the model's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tessera
from tessera.ops.rows import limits
from tessera.tools.llama import Cache, Llama, LlamaConfig

CONFIG = LlamaConfig(layers=2, width=256, heads=8, kv_heads=2, hidden=512, vocab=128)
EXECUTORS = ["rows", "tile", "sdpa", "aten"]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were kernels for the CPU: the operators' meaning runs in their place."""
    monkeypatch.setattr(limits, "runs", lambda device: True)
    torch._dynamo.reset()
    torch.manual_seed(0)


def operators(fast: object, stage: str) -> list[str]:
    found = [s.trace for s in tessera.stages(fast) if s.name == stage]
    return [str(eqn.op).removesuffix(".default") for eqn in found[0].equations]


@pytest.mark.parametrize("batch", [1, 4])
def test_a_step_of_generation(batch: int) -> None:
    model = Llama(CONFIG).bfloat16()
    caches = [Cache.empty(CONFIG, batch, 32, model.head.weight) for _ in range(2)]
    fast = tessera.jit(model.decode, executors=EXECUTORS, strict=True)
    with torch.no_grad():
        for time in range(4):
            token, at = torch.randint(CONFIG.vocab, (batch, 1)), torch.tensor([time])
            wanted, found = model.decode(token, at, caches[0]), fast(token, at, caches[1])
            torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
    for one, two in zip(caches[0].keys + caches[0].values, caches[1].keys + caches[1].values, strict=True):
        torch.testing.assert_close(one, two, rtol=0.05, atol=0.05)
        assert (two[:, :, 4:] == 0).all()
    final = operators(fast, "cached_attention")
    assert final.count("rows.rows_linear") == 4 * CONFIG.layers + 1
    assert final.count("rows.cached_attention") == CONFIG.layers  # in place: no copy of a cache
    assert operators(fast, "reinplace").count("tessera.cache_write") == 2 * CONFIG.layers
    assert not {"tessera.cache_write", "rows.cache_write", "rows.decode_attention"} & set(final)
    assert not {"aten.linear", "aten.index_copy", "aten.scaled_dot_product_attention", "aten.copy_"} & set(final)


def test_claims_say_who_runs_it() -> None:
    model = Llama(CONFIG).bfloat16()
    ours = {"tessera.rows_linear", "tessera.cache_write", "tessera.decode_attention"}
    for executors in (EXECUTORS, EXECUTORS[1:]):
        fast = tessera.jit(model.decode, executors=executors, strict=True)
        with torch.no_grad():
            fast(torch.tensor([[3]]), torch.tensor([0]), Cache.empty(CONFIG, 1, 16, model.head.weight))
        (graph,) = fast.__tessera__.compilations()
        of_rows = {op for claim in graph.account.claims if claim.executor == "rows" for op in claim.operators}
        others = {op for claim in graph.account.claims if claim.executor != "rows" for op in claim.operators}
        assert of_rows == (ours if executors is EXECUTORS else set())
        assert not others & {*ours, "tessera.functional"}
        assert [s.name for s in tessera.stages(fast)].count("decode") == (executors is EXECUTORS)


def test_many_rows_stay_with_the_library() -> None:
    model = Llama(CONFIG).bfloat16()
    fast = tessera.jit(model, executors=EXECUTORS, strict=True)
    with torch.no_grad():
        fast(torch.randint(CONFIG.vocab, (2, 32)))
    assert "decode" not in [s.name for s in tessera.stages(fast)]


class Odd(nn.Module):
    """Layers whose neighbours are wanted elsewhere, or are not what they seem."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(128, eps=1e-5)
        self.one, self.two, self.three = nn.Linear(128, 64), nn.Linear(128, 64, bias=False), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.norm(x)
        gate = F.silu(self.one(h))
        return h, gate * self.three(h) + gate, self.two(h) + 2 * x[..., :64], F.gelu(self.two(x), approximate="tanh")


def test_what_others_want_stays() -> None:
    model = Odd().bfloat16()
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    fast = tessera.jit(model, executors=EXECUTORS, strict=True)
    with torch.no_grad():
        for found, wanted in zip(fast(x), model(x), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
    assert "aten.rms_norm" in operators(fast, "decode")


class Repeated(nn.Module):
    """Keys and values repeated for the heads that share them, and a mask of its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = (t[:, :, None].expand(-1, -1, 4, -1, -1).reshape(2, 8, 40, 32) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_repeated_heads_are_not_made(dtype: torch.dtype) -> None:
    q = torch.randn(2, 8, 1, 32, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 40, 32, dtype=torch.bfloat16) for _ in range(2))
    mask = torch.rand(2, 1, 1, 40) > 0.3 if dtype == torch.bool else torch.randn(2, 1, 1, 40, dtype=dtype)
    fast = tessera.jit(Repeated(), executors=EXECUTORS, strict=True)
    torch.testing.assert_close(fast(q, k, v, mask), Repeated()(q, k, v, mask), rtol=0.05, atol=0.02)
    assert operators(fast, "decode") == ["tessera.decode_attention"]


@pytest.mark.parametrize(("kind", "tolerance"), [("int8", 0.02), ("fp8", 0.06), ("int4", 0.2)])
def test_weights_in_fewer_bits(kind: str, tolerance: float) -> None:
    model = Llama(CONFIG).bfloat16()
    small = copy.deepcopy(model)
    told = tessera.quantize(small, kind, skip=["head"])
    assert len(told.errors) == 7 * CONFIG.layers and max(told.errors.values()) < tolerance
    assert told.bytes_after < told.bytes_before * (0.6 if kind != "int4" else 0.35)
    assert told.left == {"head": "asked for"} and kind in str(told)
    caches = [Cache.empty(CONFIG, 1, 16, model.head.weight) for _ in range(2)]
    fast = tessera.jit(small.decode, executors=EXECUTORS, strict=True)
    token, at = torch.randint(CONFIG.vocab, (1, 1)), torch.tensor([0])
    with torch.no_grad():
        found, wanted = fast(token, at, caches[0]), small.decode(token, at, caches[1])
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
    assert "tessera.quantized_linear" not in operators(fast, "decode")


def test_layers_that_cannot_be_stored_in_fewer_bits() -> None:
    model = nn.Sequential(nn.Linear(100, 8), nn.Linear(8, 8))
    assert "no multiple of 128" in tessera.quantize(model, "int4").left["0"]
    with pytest.raises(Exception, match="expected a kind among int8, int4, fp8, got 'int2'"):
        tessera.quantize(model, "int2")
    with pytest.raises(Exception, match="no linear layer is called 'tail'; there are 0, 1"):
        tessera.quantize(model, "fp8", skip=["tail"])
