"""Small language models of transformers that a mesh of two can split, and what they are asked."""

from __future__ import annotations

import torch
import transformers
from generation import random_model

PROMPT = torch.tensor([[5, 9, 33, 2, 17], [40, 3, 3, 60, 8]])
GREEDY = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
GROWING = {"max_new_tokens": 4, "do_sample": False}  # a cache that grows with every token
BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GPT2 = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "qwen3": lambda: transformers.Qwen3Config(**BASE, head_dim=8),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "mixtral": lambda: transformers.MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2),
}


def language_model(name: str) -> transformers.PreTrainedModel:
    return random_model(CONFIGS[name](), 0.2)
