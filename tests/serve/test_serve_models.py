"""Which models are served: those whose attention is causal, whatever else they are. Others are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from generation import BASE, SLIDING, random_model
from served import folder

from tessera.serve.engine import Engine
from tessera.serve.huggingface import from_folder, tokenizer_of
from tessera.util.errors import InputError

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
PLAIN = {**BASE, "num_key_value_heads": 2}
SERVED: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    # Layers that hand nothing on to their attention.
    "stablelm": lambda: transformers.StableLmConfig(**PLAIN),
    "nemotron": lambda: transformers.NemotronConfig(**PLAIN),
    # A window of which attention itself hears nothing: only the mask has it.
    "phimoe": lambda: transformers.PhimoeConfig(**PLAIN, sliding_window=8, num_local_experts=2),
    # Text within a model of more than text.
    "gemma3": lambda: transformers.Gemma3Config(
        text_config={**BASE, "head_dim": 32, **SLIDING}, image_token_index=60, boi_token_index=61, eoi_token_index=62,
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 28, "patch_size": 14},
    ),
    # Keys and values of different sizes.
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **PLAIN, **LATENT, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32,
    ),
    # Logits of all rows, whichever are asked for.
    "whisper": lambda: transformers.WhisperConfig(
        vocab_size=64, d_model=64, decoder_layers=2, encoder_layers=2, decoder_attention_heads=2,
        encoder_attention_heads=2, decoder_ffn_dim=64, encoder_ffn_dim=64, max_target_positions=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=None, suppress_tokens=None, begin_suppress_tokens=None, decoder_start_token_id=2,
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**PLAIN, **EXPERTS, shared_expert_intermediate_size=32),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=64, hidden_size=64, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=64,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    ),
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[], transformers.PreTrainedConfig], str]] = {
    "falcon": (lambda: transformers.FalconConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2,
                                                 num_attention_heads=2), "2 layers of attention"),
    "bloom": (lambda: transformers.BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=2), "2 layers"),
    "gptj": (lambda: transformers.GPTJConfig(vocab_size=64, n_embd=64, n_layer=2, n_head=2, rotary_dim=8), "2 layers"),
    "mpt": (lambda: transformers.MptConfig(vocab_size=64, d_model=64, n_layers=2, n_heads=2), "2 layers"),
    "mamba": (lambda: transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2), "2 layers"),
    "gpt_oss": (lambda: transformers.GptOssConfig(**{**PLAIN, **EXPERTS}, head_dim=32), "s_aux"),
    "llama4": (lambda: transformers.Llama4TextConfig(**PLAIN, head_dim=32, attention_chunk_size=16,
                                                     intermediate_size_mlp=64, num_local_experts=2), "mask"),
    # Its config says fewer heads of keys than its layers make: transformers itself cannot compute it.
    "minicpm3": (lambda: transformers.MiniCPM3Config(**{**PLAIN, **LATENT, "num_key_value_heads": 1}), "call fails"),
    "doge": (lambda: transformers.DogeConfig(**PLAIN), "a mask of its own"),
    "bart": (lambda: transformers.BartConfig(vocab_size=64, d_model=64, decoder_layers=2, decoder_attention_heads=2,
                                             decoder_ffn_dim=64, encoder_layers=2), "expected"),
    "xmod": (lambda: transformers.XmodConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1,
                                             num_attention_heads=2, intermediate_size=64), "set_default_language"),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_a_model_answers_as_generate_does(name: str) -> None:
    model = random_model(SERVED[name](), 0.15)
    engine = Engine(model, memory="2MB", block_size=4, budget=24, compiled=False, check=True)
    prompts = [[(i * 7 + n) % 50 + 3 for i in range(n)] for n in (1, 9, 20, 33)]
    for prompt, answer in zip(prompts, engine.generate(prompts, max_tokens=8, temperature=0, logprobs=0), strict=True):
        text = torch.tensor([[*prompt, *answer.tokens]])
        with torch.no_grad():
            rows = model(input_ids=text, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        assert answer.tokens == rows.argmax(-1).tolist()
        told = torch.tensor([one.value for one in answer.logprobs])
        torch.testing.assert_close(told, rows.log_softmax(-1).amax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_not_served_is_refused_in_one_line(name: str) -> None:
    config, told = REFUSED[name]
    model = random_model(config(), 0.1)
    with pytest.raises(InputError, match=told) as raised:
        Engine(model, memory="2MB", compiled=False)
    assert "\n" not in str(raised.value) and type(model).__name__ in str(raised.value)


# --- folders ---


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("models") / "good")


def _config(**changed: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))

    return change


def _file(name: str, text: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(text)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_file("config.json", '{"model_type": '), "JSONDecodeError"),
        (_file("config.json", "[]"), "model_type"),
        (_config(model_type="nonsense"), "nonsense"),
        (_config(model_type="t5"), "AutoModelForCausalLM"),
        (_config(auto_map={"AutoModelForCausalLM": "x.Y"}), "auto_map"),
        (_config(dtype="float99"), "float99"),
        (_config(num_attention_heads=3), "not a multiple"),
        (_config(num_hidden_layers=3), "model.layers.2.*9 are missing"),  # and not drawn at random
        (_config(intermediate_size=32), r"expected the shape \[32, 32\].*got \[\d+, \d+\]"),
        (_file("model.safetensors", "x" * 100), "SafetensorError"),
        (_file("tokenizer.json", "{}"), "its tokenizer"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_read_is_one_line(
    good: Path, tmp_path: Path, change: Callable[[Path], object], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = shutil.copytree(good, tmp_path / "model")
    change(path)
    with pytest.raises(InputError, match=told) as raised:
        from_folder(path)
        tokenizer_of(path)
    assert "\n" not in str(raised.value) and str(path) in str(raised.value) and len(str(raised.value)) < 600
    assert capfd.readouterr() == ("", "")
