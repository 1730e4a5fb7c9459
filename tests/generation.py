"""Small models of transformers with random weights, for tests of generation."""

from __future__ import annotations

import pytest
import torch
import transformers

BASE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "mistral": lambda: transformers.MistralConfig(**BASE, sliding_window=None),
    "qwen3": lambda: transformers.Qwen3Config(**BASE, head_dim=32),
    "gemma3": lambda: transformers.Gemma3TextConfig(**BASE, head_dim=32, **SLIDING),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=None, pad_token_id=0
    ),
    "mixtral": lambda: transformers.MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2),
}


# Names for a test's parameter; a model that is put together as another one is tried in the sweep.
NAMES = [pytest.param(name, marks=[pytest.mark.sweep] * (name in ("mistral", "qwen3"))) for name in CONFIGS]


def random_model(config: transformers.PreTrainedConfig, std: float) -> transformers.PreTrainedModel:
    """Weights large enough that tokens differ from one another clearly."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=std) if weight.ndim > 1 else weight.add_(torch.randn_like(weight) * 0.1)
    return model


def model_of(name: str) -> transformers.PreTrainedModel:
    return random_model(CONFIGS[name](), 0.1)
