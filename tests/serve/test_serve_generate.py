"""`tessera generate` over a folder with a tokenizer that was trained on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from families import model
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from tessera.serve.engine import Engine
from tessera.serve.sampling import Sampling
from tessera.tools.cli import main
from tessera.tools.generate import SETTINGS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama, and a tokenizer of bytes with a few pairs of them."""
    trained = tokenizers.Tokenizer(BPE())
    trained.pre_tokenizer, trained.decoder = ByteLevel(add_prefix_space=False), Decoder()
    trained.train_from_iterator(
        ["once upon a time there was"], BpeTrainer(vocab_size=280, initial_alphabet=ByteLevel.alphabet())
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=trained).save_pretrained(tmp_path)
    config = model("llama").config.to_dict() | {"vocab_size": 280, "dtype": "float32"}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).save_pretrained(tmp_path)
    return tmp_path


def test_the_text_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [str(folder), "once upon", "--max-tokens", "12", "--temperature", "0", "--no-compile", "--memory", "1MB"]
    assert main(["generate", *asked]) == 0
    text = capsys.readouterr().out
    assert main(["generate", *asked, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    engine = Engine(folder, compiled=False, memory=2**20)
    (answer,) = engine.generate("once upon", max_tokens=12, temperature=0)
    assert text == answer.text + "\n" and facts["text"] == answer.text
    assert facts["tokens"] == answer.tokens and facts["finish"] == "length"
    assert engine.tokenizer is not None
    assert answer.text == engine.tokenizer.decode(answer.tokens, skip_special_tokens=True)


def test_what_is_wrong_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(folder / "nowhere"), "text"]) == 2
    assert "expected a folder with a config.json" in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert main(["generate", str(folder), "text", "--no-compile", "--memory", "1MB"]) == 2
    assert "expected a tokenizer" in capsys.readouterr().err


def test_what_is_not_said_is_as_in_python() -> None:
    """But for the length of the answer: a person at a shell wants more than a few words."""
    told = {name: default for name, (_, default) in SETTINGS.items() if name != "max_tokens"}
    assert told == {name: getattr(Sampling(), name) for name in told}
