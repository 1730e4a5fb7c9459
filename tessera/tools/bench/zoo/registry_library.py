"""The zoo's models of transformers: each with a configuration that fills a large GPU, and a tiny one."""

from __future__ import annotations

from typing import Any

from tessera.tools.bench.zoo.models_library import library
from tessera.tools.bench.zoo.network import Network

NO_CACHE = {"use_cache": False}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64, **ENDS}  # fmt: skip
ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
           "vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip
BATCHED = {"experts_implementation": "batched_mm"}  # the grouped product has no float64, which tiny sizes are held to
SPEECH = {"layerdrop": 0.0, "apply_spec_augment": False, "pad_token_id": 0}
WHISPER = {**ENDS, "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}


Config = dict[str, Any]


def decoder(name: str, model: str, full: Config, tiny: Config, batch: int, time: int, **more: Any) -> Network:
    """A language model: all its tokens are predicted from those before."""
    given = {"model": model, "inputs": "text", "fixed": NO_CACHE}
    return Network(name, more.pop("family", "decoder"), library,
                   {**given, "config": {**full, **ENDS}, "batch": batch, "time": time},
                   {**given, "config": {**DECODER, **tiny}, "batch": 2, "time": 16}, **more)  # fmt: skip


def vision(
    name: str, model: str, full: dict[str, Any], tiny: dict[str, Any], batch: int, inputs: str = "images", **more: Any
) -> Network:
    given = {"model": model, "inputs": inputs}
    side, small = more.pop("side", 224), more.pop("small_side", 32)
    return Network(name, more.pop("family", "vision"), library,
                   {**given, "config": {"num_labels": 1000, **full}, "batch": batch, "side": side},
                   {**given, "config": {"num_labels": 3, **tiny}, "batch": 2, "side": small}, **more)  # fmt: skip


DECODERS = (
    decoder("llama", "LlamaForCausalLM",
            {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096},
            {}, 4, 2048, infer=True),
    decoder("gpt2", "GPT2LMHeadModel",
            {"n_embd": 1024, "n_layer": 12, "n_head": 16, "n_positions": 1024, "vocab_size": 50257},
            {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, 8, 1024),
    decoder("qwen3", "Qwen3ForCausalLM",
            {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 4096},
            {"head_dim": 8}, 4, 2048, infer=True),
    decoder("gemma3", "Gemma3ForCausalLM",
            {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 12, "num_attention_heads": 4,
             "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
             "max_position_embeddings": 4096},
            {"head_dim": 8, "sliding_window": 8}, 2, 2048),
    decoder("mixtral", "MixtralForCausalLM",
            {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4, "num_attention_heads": 16,
             "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
             "max_position_embeddings": 4096},
            {"num_local_experts": 4, "num_experts_per_tok": 2, **BATCHED}, 4, 2048, family="experts", rounds=False),
    decoder("qwen3-moe", "Qwen3MoeForCausalLM",
            {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16,
             "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
             "moe_intermediate_size": 768, "vocab_size": 32000, "max_position_embeddings": 4096},
            {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **BATCHED},
            4, 2048, family="experts", rounds=False),
    decoder("mamba", "MambaForCausalLM",
            {"hidden_size": 1024, "state_size": 16, "num_hidden_layers": 2, "vocab_size": 32000},
            {"state_size": 8}, 32, 128, family="state space"),
    decoder("mamba2", "Mamba2ForCausalLM",
            {"hidden_size": 1024, "state_size": 64, "num_hidden_layers": 4, "num_heads": 32, "head_dim": 64,
             "n_groups": 1, "chunk_size": 64, "vocab_size": 32000},
            {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}, 2, 2048,
            family="state space"),
)  # fmt: skip
ENCODERS = (
    Network("bert", "encoder", library,
            {"model": "BertForMaskedLM", "inputs": "padded_text", "batch": 16, "time": 512,
             "config": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                        "num_attention_heads": 16, "vocab_size": 30522}},
            {"model": "BertForMaskedLM", "inputs": "padded_text", "batch": 2, "time": 16, "config": ENCODER},
            infer=True),
    Network("modernbert", "encoder", library,
            {"model": "ModernBertForMaskedLM", "inputs": "padded_text", "batch": 1, "time": 8192,
             "config": {"num_hidden_layers": 10, "reference_compile": False}},
            {"model": "ModernBertForMaskedLM", "inputs": "padded_text", "batch": 2, "time": 24,
             "config": {**ENCODER, **ENDS, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8,
                        "reference_compile": False}}),
    Network("t5", "encoder-decoder", library,
            {"model": "T5ForConditionalGeneration", "inputs": "translation", "fixed": NO_CACHE, "batch": 16,
             "time": 512, "target": 128,
             "config": {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12,
                        "feed_forward_proj": "gated-gelu", "vocab_size": 32128, "decoder_start_token_id": 0}},
            {"model": "T5ForConditionalGeneration", "inputs": "translation", "fixed": NO_CACHE, "batch": 2,
             "time": 16, "target": 8,
             "config": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128,
                        "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}}),
    Network("bart", "encoder-decoder", library,
            {"model": "BartForConditionalGeneration", "inputs": "translation", "fixed": NO_CACHE, "batch": 32,
             "time": 512, "target": 128,
             "config": {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072,
                        "decoder_ffn_dim": 3072, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
                        "vocab_size": 50265, "dropout": 0.0}},
            {"model": "BartForConditionalGeneration", "inputs": "translation", "fixed": NO_CACHE, "batch": 2,
             "time": 16, "target": 8,
             "config": {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64,
                        "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
                        "vocab_size": 128, "max_position_embeddings": 64, "dropout": 0.0}}),
    Network("whisper", "speech", library,
            {"model": "WhisperForConditionalGeneration", "inputs": "spectrum", "fixed": NO_CACHE, "batch": 16,
             "length": 3000, "target": 128,
             "config": {**WHISPER, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6,
                        "encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072,
                        "decoder_ffn_dim": 3072}},
            {"model": "WhisperForConditionalGeneration", "inputs": "spectrum", "fixed": NO_CACHE, "batch": 2,
             "length": 40, "target": 8,
             "config": {**WHISPER, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 16,
                        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
                        "decoder_ffn_dim": 64, "vocab_size": 128, "max_source_positions": 20,
                        "max_target_positions": 32}}),
    Network("wav2vec2", "speech", library,
            {"model": "Wav2Vec2ForCTC", "inputs": "sound", "batch": 16, "length": 160000, "target": 60,
             "config": SPEECH},
            {"model": "Wav2Vec2ForCTC", "inputs": "sound", "batch": 2, "length": 1600, "target": 5,
             "config": {**SPEECH, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                        "num_attention_heads": 4, "conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2),
                        "conv_kernel": (10, 3, 3), "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16,
                        "num_conv_pos_embedding_groups": 2}}),
)  # fmt: skip
VISION = (
    vision("vit", "ViTForImageClassification", {},
           {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 32, "patch_size": 8}, 128, infer=True),
    vision("swin", "SwinForImageClassification", {"drop_path_rate": 0.0},
           {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2),
            "window_size": 4, "drop_path_rate": 0.0}, 64),
    vision("convnext", "ConvNextForImageClassification", {"layer_scale_init_value": 0.5},
           {"hidden_sizes": (16, 32), "depths": (1, 1), "num_stages": 2, "layer_scale_init_value": 0.5}, 64),
    vision("resnet50", "ResNetForImageClassification", {},
           {"embedding_size": 8, "hidden_sizes": (16, 32), "depths": (1, 1)}, 128, infer=True),
    vision("efficientnet", "EfficientNetForImageClassification",
           {"image_size": 224, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
           {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320}, 128),
    vision("levit", "LevitForImageClassification", {},
           {"image_size": 64, "hidden_sizes": (16, 32, 32), "num_attention_heads": (2, 2, 4), "depths": (1, 1, 1),
            "key_dim": (8, 8, 8)}, 256, small_side=64),
    vision("poolformer", "PoolFormerForImageClassification", {"layer_scale_init_value": 0.5},
           {"hidden_sizes": (8, 16), "depths": (1, 1), "num_encoder_blocks": 2, "patch_sizes": (7, 3),
            "strides": (4, 2), "padding": (2, 1), "layer_scale_init_value": 0.5}, 128),
    vision("segformer", "SegformerForSemanticSegmentation", {"num_labels": 150, "drop_path_rate": 0.0},
           {"hidden_sizes": (8, 16), "depths": (1, 1), "num_encoder_blocks": 2, "sr_ratios": (2, 1),
            "patch_sizes": (7, 3), "strides": (4, 2), "num_attention_heads": (1, 2), "mlp_ratios": (2, 2),
            "decoder_hidden_size": 16, "drop_path_rate": 0.0}, 16, inputs="segments", family="segmentation", side=512),
)  # fmt: skip
