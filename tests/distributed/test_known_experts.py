"""Blocks of Hugging Face's models whose experts are found: trained on ranks that have some, as in one process."""

from __future__ import annotations

import pytest
import torch
from models import VOCABULARY, token_batches
from steps import compiled_step, program_of, train_ranks, train_whole

from tessera.distributed.known_experts import known_experts
from tessera.ir.dist import exchange_of

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 0, "q_lora_rank": None,
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "use_cache": False,
}  # fmt: skip


def loss_of(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def model_of(name: str) -> torch.nn.Module:
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"transformers has no {name}")
    config = getattr(transformers, f"{name}Config")(**SIZES | ({"head_dim": 4} if "Deepseek" in name else {}))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    if not any(hasattr(m, "gate_up_proj") for m in model.modules()):
        pytest.skip("this transformers holds experts one by one")
    model.config._experts_implementation = "eager"
    return model


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
def test_experts_are_found(name: str) -> None:
    model, (ids, _) = model_of(name), token_batches(1)[0]
    want = model(input_ids=ids).logits
    held = [m for m in model.modules() if hasattr(m, "gate_up_proj")]
    with known_experts(model):
        assert all("forward" in vars(m) for m in held if isinstance(m.gate_up_proj, torch.nn.Parameter))
        got = model(input_ids=ids).logits
    assert not any("forward" in vars(m) for m in held)
    torch.testing.assert_close(got, want)


def test_ranks_that_have_some() -> None:
    """A router computes in float32, so that much is equal."""
    model, batches = model_of("Mixtral"), token_batches(2)
    step, compilation = compiled_step(model, loss_of, batches[0], {"ep": 2}, "experts", "adam", None)
    mine = train_ranks(model, step, compilation, batches)
    want = train_whole(model, loss_of, batches, "adam", None)
    for got, x in [*zip(mine.losses, want.losses, strict=True), *((mine.held[n], x) for n, x in want.held.items())]:
        assert (got.double() - x.double()).norm() <= 1e-5 * x.double().norm() + 1e-8
    exchanges = [way[0] for e in program_of(compilation).equations if (way := exchange_of(e)) is not None]
    assert exchanges.count("rows") == 4
