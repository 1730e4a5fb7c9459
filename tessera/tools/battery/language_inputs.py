"""What small models of transformers are given: inputs by kind, and the sizes that families of configurations share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VOCAB, WIDTH, HIDDEN, LAYERS, HEADS, BATCH, TIME = 128, 32, 64, 2, 4, 2, 16
Inputs = Callable[[], dict[str, Any]]


def tokens(time: int = TIME, seed: int = 0) -> Tensor:
    return torch.randint(5, VOCAB - 5, (BATCH, time), generator=torch.Generator().manual_seed(seed))


def picture(size: int = 32) -> Tensor:
    return torch.randn((BATCH, 3, size, size), generator=torch.Generator().manual_seed(0))


def sound(length: int = 1600) -> Tensor:
    return torch.randn((BATCH, length), generator=torch.Generator().manual_seed(0))


def text() -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": tokens(), "use_cache": False}


def padded_left() -> dict[str, Any]:
    mask = torch.ones((BATCH, TIME), dtype=torch.int64)
    mask[1, :4] = 0
    return {**text(), "attention_mask": mask}


def padded() -> dict[str, Any]:
    mask = torch.ones((BATCH, TIME), dtype=torch.int64)
    mask[1, -4:] = 0
    return {"input_ids": tokens(), "labels": tokens(), "attention_mask": mask}


def translation() -> dict[str, Any]:
    return {**text(), "decoder_input_ids": tokens(8, 1), "labels": tokens(8, 2)}


def image() -> dict[str, Any]:
    return {"pixel_values": picture(), "labels": torch.tensor([0, 1])}


def image_alone() -> dict[str, Any]:
    return {"pixel_values": picture()}


def speech() -> dict[str, Any]:
    labels = torch.randint(1, 20, (BATCH, 5), generator=torch.Generator().manual_seed(3))
    return {"input_values": sound(), "labels": labels}


def spectrum() -> dict[str, Any]:
    features = torch.randn((BATCH, 16, 40), generator=torch.Generator().manual_seed(0))
    return {"input_features": features, "decoder_input_ids": tokens(8, 1), "labels": tokens(8, 2), "use_cache": False}


def image_and_text() -> dict[str, Any]:
    return {"input_ids": tokens(), "pixel_values": picture(), "return_loss": True}


def image_in_text() -> dict[str, Any]:
    ids = torch.cat([torch.full((BATCH, 16), 4), tokens(12)], 1)
    mask = torch.ones_like(ids)
    return {
        "input_ids": ids,
        "pixel_values": picture(),
        "attention_mask": mask,
        "labels": ids.clone(),
        "use_cache": False,
    }


ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
PLACES = {"vocab_size": VOCAB, "max_position_embeddings": 64}
DECODER = {**SIZES, **PLACES, **ENDS, "num_key_value_heads": 2}
ENCODER = {**SIZES, **PLACES, "pad_token_id": 0, "type_vocab_size": 2}
IMAGES = {**SIZES, "image_size": 32, "patch_size": 8, "num_labels": 3}
GPT2 = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, **ENDS}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
CLIP_TEXT = {**SIZES, **ENDS, "vocab_size": VOCAB, "max_position_embeddings": 32, "projection_dim": 16}
CLIP_IMAGE = {**SIZES, "image_size": 32, "patch_size": 8, "projection_dim": 16}
STAGES = {"embedding_size": 16, "hiddenSIZES": [16, 32], "depths": [1, 1], "num_labels": 3}
T5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": HIDDEN, "num_layers": LAYERS, "num_heads": HEADS}
BART = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_ffn_dim": HIDDEN,
    "decoder_ffn_dim": HIDDEN,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "max_position_embeddings": 64,
}
WAV = {
    **SIZES,
    "vocab_size": 32,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "classifier_proj_size": 16,
    "pad_token_id": 0,
}
DEEPSEEK = {
    **DECODER,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
WHISPER = {
    "vocab_size": VOCAB,
    "num_mel_bins": 16,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": HIDDEN,
    "decoder_ffn_dim": HIDDEN,
    "max_source_positions": 20,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
