"""Models of transformers with few and random weights, made from their configurations: nothing is downloaded.

A case is a model; its parts are evaluation and training, in float32 and, on a GPU, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from tessera.tools.battery.case import Case, Missing, Part, Skip
from tessera.tools.battery.language_inputs import (
    BART,
    CLIP_IMAGE,
    CLIP_TEXT,
    DECODER,
    DEEPSEEK,
    ENCODER,
    ENDS,
    EXPERTS,
    GPT2,
    HEADS,
    HIDDEN,
    IMAGES,
    LAYERS,
    PLACES,
    SIZES,
    STAGES,
    T5,
    VOCAB,
    WAV,
    WHISPER,
    WIDTH,
    Inputs,
    image,
    image_alone,
    image_and_text,
    image_in_text,
    padded,
    padded_left,
    spectrum,
    speech,
    text,
    translation,
)
from tessera.tools.battery.models import model_parts

# name -> the model's class, what its configuration is given, the inputs
MODELS: dict[str, tuple[str, dict[str, Any], Inputs]] = {
    "llama": ("LlamaForCausalLM", DECODER, text),
    "mistral": ("MistralForCausalLM", {**DECODER, "sliding_window": 8}, text),
    "qwen2": ("Qwen2ForCausalLM", DECODER, padded_left),
    "qwen3": ("Qwen3ForCausalLM", {**DECODER, "head_dim": 8}, text),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**DECODER, **EXPERTS, "head_dim": 8, "moe_intermediate_size": 32}, text),
    "gemma": ("GemmaForCausalLM", {**DECODER, "head_dim": 8}, text),
    "gemma2": ("Gemma2ForCausalLM", {**DECODER, "head_dim": 8, "sliding_window": 8}, text),
    "gemma3": ("Gemma3ForCausalLM", {**DECODER, "head_dim": 8, "sliding_window": 8}, text),
    "phi": ("PhiForCausalLM", DECODER, text),
    "phi3": ("Phi3ForCausalLM", DECODER, text),
    "gpt2": ("GPT2LMHeadModel", GPT2, text),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            **ENDS,
            **PLACES,
            "hidden_size": WIDTH,
            "num_layers": 2,
            "num_heads": HEADS,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
        },
        text,
    ),
    "gptj": ("GPTJForCausalLM", {**GPT2, "rotary_dim": 4}, text),
    "gpt_neox": ("GPTNeoXForCausalLM", {**SIZES, **PLACES}, text),
    "falcon": (
        "FalconForCausalLM",
        {**ENDS, "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS},
        text,
    ),
    "mixtral": ("MixtralForCausalLM", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}, text),
    "deepseek_v2": ("DeepseekV2ForCausalLM", DEEPSEEK, text),
    "olmo2": ("Olmo2ForCausalLM", DECODER, text),
    "olmoe": ("OlmoeForCausalLM", {**DECODER, **EXPERTS}, text),
    "starcoder2": ("Starcoder2ForCausalLM", {**DECODER, "sliding_window": 8}, text),
    "stablelm": ("StableLmForCausalLM", DECODER, text),
    "cohere": ("CohereForCausalLM", DECODER, text),
    "granite": ("GraniteForCausalLM", DECODER, text),
    "smollm3": ("SmolLM3ForCausalLM", DECODER, text),
    "glm4": ("Glm4ForCausalLM", {**DECODER, "head_dim": 8}, text),
    "opt": (
        "OPTForCausalLM",
        {
            **PLACES,
            "hidden_size": WIDTH,
            "ffn_dim": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "word_embed_proj_dim": WIDTH,
        },
        text,
    ),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS},
        padded_left,
    ),
    "mamba": (
        "MambaForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": WIDTH, "state_size": 8, "num_hidden_layers": LAYERS},
        text,
    ),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        {**DECODER, "lru_width": WIDTH, "attention_window_size": 8, "num_hidden_layers": 3},
        text,
    ),
    "bert": ("BertForMaskedLM", ENCODER, padded),
    "roberta": ("RobertaForMaskedLM", {**ENCODER, "pad_token_id": 1}, padded),
    "distilbert": (
        "DistilBertForMaskedLM",
        {**PLACES, "dim": WIDTH, "hidden_dim": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS},
        padded,
    ),
    "albert": ("AlbertForMaskedLM", {**ENCODER, "embedding_size": 16}, padded),
    "electra": ("ElectraForMaskedLM", {**ENCODER, "embedding_size": 16}, padded),
    "mpnet": ("MPNetForMaskedLM", {**ENCODER, "pad_token_id": 1}, padded),
    "deberta_v2": ("DebertaV2ForMaskedLM", ENCODER, padded),
    "modernbert": (
        "ModernBertForMaskedLM",
        {
            **SIZES,
            **PLACES,
            **ENDS,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 8,
            "reference_compile": False,
        },
        padded,
    ),
    "t5": ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}, translation),
    "bart": ("BartForConditionalGeneration", BART, translation),
    "pegasus": ("PegasusForConditionalGeneration", {**BART, "decoder_start_token_id": 0}, translation),
    "whisper": ("WhisperForConditionalGeneration", WHISPER, spectrum),
    "vit": ("ViTForImageClassification", IMAGES, image),
    "deit": ("DeiTForImageClassification", IMAGES, image),
    "beit": ("BeitForImageClassification", {**IMAGES, "use_relative_position_bias": True}, image),
    "dinov2": ("Dinov2ForImageClassification", IMAGES, image),
    "swin": (
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": 3,
        },
        image,
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "num_labels": 3},
        image,
    ),
    "resnet": ("ResNetForImageClassification", {**STAGES, "layer_type": "basic"}, image),
    "regnet": ("RegNetForImageClassification", {**STAGES, "groups_width": 8}, image),
    "mobilenet_v2": (
        "MobileNetV2ForImageClassification",
        {"depth_multiplier": 0.25, "image_size": 32, "num_labels": 3},
        image,
    ),
    "efficientnet": (
        "EfficientNetForImageClassification",
        {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320, "num_labels": 3},
        image,
    ),
    "yolos": (
        "YolosForObjectDetection",
        {**SIZES, "image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 4, "num_labels": 3},
        image_alone,
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", WAV, speech),
    "hubert": ("HubertForCTC", WAV, speech),
    "clip": (
        "CLIPModel",
        {"text_config": CLIP_TEXT, "vision_config": CLIP_IMAGE, "projection_dim": 16},
        image_and_text,
    ),
    "siglip": (
        "SiglipModel",
        {"text_config": {**CLIP_TEXT, "projection_size": WIDTH}, "vision_config": CLIP_IMAGE},
        image_and_text,
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "vision_config": {"model_type": "clip_vision_model", **CLIP_IMAGE},
            "text_config": {"model_type": "llama", **DECODER},
            "image_token_index": 4,
            "vision_feature_layer": -1,
            "image_seq_length": 16,
        },
        image_in_text,
    ),
}
# Rounding decides between experts of like weight, and where a stage is cut: these are compared in float32 alone.
FULL_PRECISION = ("qwen3_moe", "mixtral", "deepseek_v2", "olmoe")
LONG = (
    "recurrent_gemma",
    "mamba",
    "efficientnet",
    "mobilenet_v2",
    "whisper",
    "wav2vec2",
    "hubert",
    "llava",
    "swin",
    "t5",
)


def cases(device: str) -> list[Case]:
    if find_spec("transformers") is None:
        raise Missing("transformers is not installed")
    return [Case("language", name, 60.0 if name in LONG else 40.0, limit=240.0) for name in MODELS]


def parts(case: str, device: str) -> Iterator[Part]:
    def build() -> tuple[torch.nn.Module, tuple, dict]:
        return model_of(case), (), MODELS[case][2]()

    return model_parts(build, device, half=case not in FULL_PRECISION)


def model_of(name: str) -> torch.nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    class_name, given, _ = MODELS[name]
    if not hasattr(transformers, class_name):
        raise Skip(f"transformers {transformers.__version__} has no {class_name}")
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    return model_class(model_class.config_class(**given))
