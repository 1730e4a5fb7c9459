"""One token of transformers' models: what is found in programs that others wrote, and that the logits are eager's."""

from __future__ import annotations

import copy

import pytest
import torch

import tessera
from tessera.ir.trace import Trace
from tessera.ops.rows import limits

transformers = pytest.importorskip("transformers")

from generation import NAMES, model_of  # noqa: E402

EXECUTORS = ["rows", "tile", "sdpa", "aten"]
LAYERS = 2
# Equations a layer: the linears with norms, gate and residuals, attention with its writes, positions and their write
# back. Gemma normalises also after its linears, GPT-2 has other linears and norms, Mixtral its experts.
MOST = {"llama": 7, "mistral": 7, "qwen3": 7, "gemma3": 9}
LINEARS = {"llama": 4, "mistral": 4, "qwen3": 4, "gemma3": 4, "gpt2": 0, "mixtral": 3}


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were kernels for the CPU: the operators' meaning runs in their place."""
    monkeypatch.setattr(limits, "runs", lambda device: True)
    torch._dynamo.reset()


def step_of(name: str, batch: int = 1, static: bool = True, tokens: int = 2) -> Trace:
    """The last program of a token after a prompt of five, its logits checked against eager's."""
    model = model_of(name).bfloat16()
    prompt = torch.randint(2, 64, (batch, 5))
    fast = tessera.jit(model, executors=EXECUTORS, strict=True)
    config = model.config
    cache = transformers.StaticCache(config, max_cache_len=16) if static else transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
        other = copy.deepcopy(cache)
        for time in range(5, 5 + tokens):
            token, mask = torch.randint(2, 64, (batch, 1)), torch.ones(batch, time + 1, dtype=torch.int64)
            mask[0, 0] = 0 if batch > 1 else 1  # a sequence that is padded on its left
            both = [
                run(
                    **model.prepare_inputs_for_generation(
                        token, next_sequence_length=1, past_key_values=c, attention_mask=mask, use_cache=True
                    )
                )
                for run, c in ((model, cache), (fast, other))
            ]
            torch.testing.assert_close(both[1].logits, both[0].logits, rtol=0.05, atol=0.06)
    for one, two in zip(cache.layers, other.layers, strict=True):
        torch.testing.assert_close(one.keys, two.keys, rtol=0.05, atol=0.06)
        torch.testing.assert_close(one.values, two.values, rtol=0.05, atol=0.06)
    return fast.__tessera__.compilations()[-1].account.programs[-1].trace


def operators(trace: Trace) -> list[str]:
    return [str(eqn.op).removesuffix(".default") for eqn in trace.equations]


@pytest.mark.parametrize("name", NAMES)
def test_a_token(name: str) -> None:
    step = step_of(name)
    found = operators(step)
    assert found.count("rows.cached_attention") == LAYERS
    assert found.count("rows.rows_linear") == LINEARS[name] * LAYERS + 1
    assert not {"aten.scaled_dot_product_attention", "aten.index_copy_", "aten.linear"} & set(found)
    caches = {v.shape for v in step.inputs if v.name.endswith(("_keys", "_values"))}
    assert not [v for eqn in step.equations for v in eqn.results() if getattr(v.type, "shape", None) in caches]
    own = [eqn for eqn in step.equations if ".layers.0" in str(eqn.source.module) or "layers_0_cum" in str(eqn.args)]
    assert name not in MOST or 4 < len(own) <= MOST[name]
    if name in ("qwen3", "gemma3"):  # heads are normalised inside
        attend = next(eqn for eqn in step.equations if "cached_attention" in str(eqn.op))
        shift = 1.0 if name == "gemma3" else 0.0
        assert attend.args[8] is not None and attend.args[10] == attend.args[15] == shift


def test_several_sequences() -> None:
    found = operators(step_of("qwen3", batch=3))
    assert found.count("rows.rows_linear") == 4 * LAYERS + 1
    assert found.count("rows.cached_attention") == LAYERS


def test_a_growing_cache() -> None:
    step = step_of("llama", static=False, tokens=3)
    assert any("+ 1" in str(v.type) for eqn in step.equations for v in eqn.results())  # lengths are symbols
    assert operators(step).count("rows.decode_attention") == LAYERS
