"""The paged operators beside plain attention over the whole sequence; and what is refused of models and folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from families import expected, model
from generation import BASE
from torch import Tensor

from tessera.serve.engine import Engine
from tessera.serve.huggingface import HuggingFace, from_folder
from tessera.serve.operators import paged_attention, paged_write
from tessera.serve.sampling import Sampling
from tessera.util.errors import InputError

SIZE, HEADS, KV, HEAD = 4, 4, 2, 8


def plainly(q: Tensor, k: Tensor, v: Tensor, first: int, window: int, softcap: float) -> Tensor:
    """Attention of the tokens from `first` on, written out: [tokens, heads, head]."""
    k, v = (x.repeat_interleave(HEADS // KV, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at, seen = torch.arange(first, len(k))[:, None], torch.arange(len(k))
    hidden = (seen > at) | (seen <= at - window if window else torch.zeros(1, dtype=torch.bool))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (0, 2.0), (3, 2.0), (100, 0.0)])
def test_attention_over_pages(window: int, softcap: float, single: bool) -> None:
    """A prompt from its start, a chunk of one, a single token and a sequence of nobody, in one flat row."""
    torch.manual_seed(0)
    spans = [(0, 7), (6, 13), (9, 10), (0, 0)]
    tables = torch.tensor([[3, 5, 0, 0], [9, 1, 7, 2], [4, 8, 6, 0], [0, 0, 0, 0]])
    keys, values = (torch.full((10, SIZE, KV, HEAD), float("nan")) for _ in range(2))
    texts = [[torch.randn(end, heads, HEAD) for heads in (HEADS, KV, KV)] for _, end in spans]
    for table, (_, k, v) in zip(tables, texts, strict=True):
        slots = torch.tensor([int(table[p // SIZE]) * SIZE + p % SIZE for p in range(len(k))], dtype=torch.int64)
        paged_write(keys, k, slots)
        paged_write(values, v, slots)
    flat = torch.cat([q[first:] for (q, _, _), (first, _) in zip(texts, spans, strict=True)])
    positions = torch.cat([torch.arange(*span) for span in spans])
    starts = torch.tensor([0, *(end - first for first, end in spans)]).cumsum(0)
    ours = paged_attention(flat, keys, values, tables, starts, positions, 0.3, window, softcap, single)
    pairs = zip(texts, spans, strict=True)
    theirs = torch.cat([plainly(q[first:], k, v, first, window, softcap) for (q, k, v), (first, _) in pairs])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_operators_are_declared_rightly() -> None:
    pool, new, slots = torch.zeros(3, SIZE, KV, HEAD), torch.randn(2, KV, HEAD), torch.tensor([5, 6])
    torch.library.opcheck(torch.ops.tessera.paged_write.default, (pool, new, slots), test_utils=CHECKS)
    args = (torch.randn(2, HEADS, HEAD), pool, pool, torch.tensor([[1, 2]]), torch.tensor([0, 2]), torch.arange(2))
    torch.library.opcheck(torch.ops.tessera.paged_attention.default, (*args, 0.3, 0, 0.0, False), test_utils=CHECKS)


CHECKS = ("test_schema", "test_faketensor")


def saved(folder: Path) -> Path:
    model("llama").save_pretrained(folder)
    return folder


def test_a_folder_is_served(tmp_path: Path) -> None:
    served = Engine(saved(tmp_path), memory=2**20, compiled=False)
    assert served.generate([(4, 5, 6)], max_tokens=8, temperature=0)[0].tokens == expected("llama", (4, 5, 6))[:8]


def test_a_bare_config_gets_random_weights(tmp_path: Path) -> None:
    transformers.LlamaConfig(**BASE, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"\*\.safetensors"):
        from_folder(tmp_path)
    served = Engine(tmp_path, memory=2**20, compiled=False, random_weights=True)
    assert len(served.generate([(4, 5)], Sampling(max_tokens=3))[0].tokens) == 3


def test_code_from_a_folder_is_never_run(tmp_path: Path) -> None:
    config = json.loads((saved(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    with pytest.raises(InputError, match="never run"):
        from_folder(tmp_path)
    with pytest.raises(InputError, match="config.json"):
        from_folder(tmp_path / "nowhere")


def test_attention_that_is_not_computed_is_refused() -> None:
    sinks = transformers.GptOssConfig(**{**BASE, "num_hidden_layers": 1, "head_dim": 32, "num_local_experts": 2})
    with pytest.raises(InputError, match="s_aux"):
        HuggingFace(transformers.AutoModelForCausalLM.from_config(sinks))
    bloom = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(InputError, match="expected 1 layers of attention .*, got 0 calls"):
        HuggingFace(transformers.AutoModelForCausalLM.from_config(bloom))
    angles = transformers.LlamaConfig(
        **BASE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    with pytest.raises(InputError, match="dynamic"):
        HuggingFace(transformers.AutoModelForCausalLM.from_config(angles))
    with pytest.raises(InputError, match="got Linear"):
        Engine(torch.nn.Linear(2, 2))


def test_a_model_that_computes_otherwise_step_by_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine compares logits with the model's own before it serves: here positions are lost on the way."""
    forward = HuggingFace.paged_forward
    monkeypatch.setattr(HuggingFace, "paged_forward", lambda self, t, p, *rest: forward(self, t, p * 0, *rest))
    with pytest.raises(InputError, match="LlamaForCausalLM: .* logits"):
        Engine(model("llama"), memory=2**20, compiled=False)
