"""A Hugging Face model generates through Tessera, with a static cache. Run it: `python examples/generate.py`.

The model is a small Llama with random weights, made from a config, so nothing is downloaded: what it writes means
nothing, and is compared with eager token by token. For a model of your own, replace `make_model`.
"""

from __future__ import annotations

import sys
import time

import torch

import tessera

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    sys.exit("this example needs the package transformers; try: pip install transformers")


# %% A model of random weights
def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).eval()


def generate(model: LlamaForCausalLM, prompt: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Sixteen tokens, greedily, and the seconds it took."""
    start = time.perf_counter()
    tokens = model.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0, cache_implementation="static")
    return tokens, time.perf_counter() - start


# %% Eager, compiled for the first time, compiled
model = make_model()
prompt = torch.randint(512, (1, 12))
eager, eager_seconds = generate(model, prompt)

fast = tessera.jit(model)
first, first_seconds = generate(fast, prompt)
again, again_seconds = generate(fast, prompt)
assert torch.equal(first, eager) and torch.equal(again, eager)
print(f"16 tokens: eager {eager_seconds:.2f} s, compiled {again_seconds:.2f} s (the first time {first_seconds:.2f} s)")

# %% Two programs were made: one reads the prompt, one a token; each writes the cache in place
stages = tessera.stages(fast)
print("programs:", ", ".join(stages.graphs()))
step = str(stages["reinplace"]).splitlines()
print("\n".join(line.split("  #")[0] for line in step if "layers_0" in line and "index_copy_" in line))
