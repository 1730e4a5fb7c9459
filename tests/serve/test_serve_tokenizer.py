"""A tokenizer without transformers reads and writes what that of transformers does, or it is not taken."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tessera.artifact.container import Container, Writer
from tessera.serve.packed import _read_tokenizer, _tokenizer_files
from tessera.serve.tokenizer import Fast, fast, token_bytes
from tessera.util.errors import ArtifactError

FILE = "serve/tokenizer/tokenizer.json"
WORDS = ["Once upon a time", "größer als 1 µm", "the cat sat on the mat ☃", "I 'm fine , isn't it ?"]
PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
TEMPLATES = (
    PLAIN,
    "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'system' %}\n  {{ raise_exception('none') }}"
    "{% endif %}\n"
    "{{ '[' + m['content'] | trim + ']' + eos_token }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if loop.last %}{% break %}{% endif %}"
    "{{ m | tojson }}{% endfor %}{{ ns.n }}{{ messages[0] | tojson(indent=2, sort_keys=true) }}",
    "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}\n{% endgeneration %}{{ x is defined }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}>{{ strftime_now('%Y') }}{% endif %}{{ tools is defined }}"
    "{{ documents is none }}",
    "{{ dict(a=1) | tojson }}{{ messages[1:] | map(attribute='content') | join('|') }}{{ 'é<b>' | tojson }}",
    "{{ ''.__class__ }}{{ messages.append(1) }}",
    "{{ unknown.name }}",
)
CHATS = (
    [{"role": "user", "content": " a < b "}],
    [{"role": "system", "content": "x"}, {"role": "user", "content": "größer ☃"}, {"role": "user", "content": None}],
)


def bytes_of_text(template: str | None = PLAIN) -> PreTrainedTokenizerFast:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(WORDS * 4, vocab_size=320, special_tokens=["<s>", "</s>", "<pad>"])
    inner = trained._tokenizer
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=template,
        truncation_side="left", model_max_length=8,
    )  # fmt: skip


def sentence_pieces() -> PreTrainedTokenizerFast:
    vocabulary = [("<unk>", 0.0), *((f"<0x{i:02X}>", -9.0) for i in range(256))]
    vocabulary += [(f"▁{word}", -4.0) for word in ("the", "cat", "on", "time")]
    vocabulary += [(c, -6.0) for c in "▁abcdehimnostz,?"]
    inner = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fuse = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(fuse)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def word_pieces(tidy: bool) -> PreTrainedTokenizerFast:
    vocabulary = ["[UNK]", "the", "cat", "##s", ",", "?", "'", "m", "i", "n", "t", ".", "it", "is", "##n"]
    inner = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", clean_up_tokenization_spaces=tidy)


def as_fast(tokenizer: PreTrainedTokenizerFast) -> Fast | None:
    return fast(tokenizer, tokenizer.backend_tokenizer.to_str())


@pytest.mark.parametrize("kind", [bytes_of_text, sentence_pieces, lambda: word_pieces(False)])
def test_the_same_tokens_and_texts(kind) -> None:  # noqa: ANN001
    given = kind()
    given.backend_tokenizer.enable_truncation(3)  # of a training, say: a prompt is never cut
    given.backend_tokenizer.enable_padding(length=20)
    found = as_fast(given)
    assert found is not None and len(found) == len(given)
    draws = random.Random(1)
    letters = "the cat 'm,.?<s></s>[UNK]ß☃\n \U0001f642\u0301\x00"
    for _ in range(300):
        text = "".join(draws.choices(letters, k=draws.randrange(20)))
        assert found.encode(text) == given.encode(text)
        tokens = found.encode(text, add_special_tokens=False)
        assert tokens == given.encode(text, add_special_tokens=False)
        tokens += draws.choices(range(len(found)), k=4)
        for skip in (True, False):
            assert found.decode(tokens, skip_special_tokens=skip) == given.decode(tokens, skip_special_tokens=skip)
    assert [found.convert_ids_to_tokens(i) for i in range(330)] == [given.convert_ids_to_tokens(i) for i in range(330)]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_same_chats(template: str) -> None:
    """Also what a template may not do is the same: to reach into Python, to write to messages, to ask of nothing."""
    given = bytes_of_text(template)
    data = given.backend_tokenizer.to_str()
    found = Fast(data, template, given.special_tokens_map)
    for chat in CHATS:
        for asked in (True, False):
            texts = []
            for one in (found, given):
                try:
                    texts.append(one.apply_chat_template(chat, tokenize=False, add_generation_prompt=asked))
                except Exception as error:
                    texts.append(type(error).__name__)
            assert texts[0] == texts[1]
    assert as_fast(given) is not None


def test_others_are_left_to_transformers(tmp_path: Path) -> None:
    class Shouts(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return super()._decode(*args, **kwargs).upper()

    split = bytes_of_text()
    split.split_special_tokens = True
    several = bytes_of_text()
    several.chat_template = {"default": PLAIN, "tool_use": PLAIN}
    loud = Shouts(tokenizer_object=bytes_of_text().backend_tokenizer)
    for other in (split, several, loud, word_pieces(True)):
        assert as_fast(other) is None
    files, about = _tokenizer_files(word_pieces(True))
    assert about is None
    with Writer(path := tmp_path / "slow.tess") as writer:
        for name, data in files.items():
            writer.add(name, [data])
        writer.finish({}, lambda _: bytes(32))
    with Container.open(path) as container:
        read = _read_tokenizer(container, about)
    assert isinstance(read, PreTrainedTokenizerFast) and read.decode([1, 2, 4]) == "the cat,"


def test_it_is_written_again() -> None:
    files, about = _tokenizer_files(bytes_of_text())
    assert about is not None and "<s>" in about["named"].values()
    found = Fast(files[FILE].decode(), about["template"], about["named"])
    again, same = _tokenizer_files(found)
    assert same == about and [*again] == [FILE]


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    with Writer(path := tmp_path / "broken.tess") as writer:
        writer.add(FILE, [b"{}"])
        writer.finish({}, lambda _: bytes(32))
    told = r"tokenizer\.json: expected a tokenizer"
    with Container.open(path) as container, pytest.raises(ArtifactError, match=told):
        _read_tokenizer(container, {"template": None, "named": {}})


def test_transformers_is_not_imported() -> None:
    files, _ = _tokenizer_files(bytes_of_text())
    code = """import sys
from tessera.serve.tokenizer import Fast
found = Fast(sys.stdin.read(), "{{ messages[0].content }}{{ bos_token }}", {"bos_token": "<s>"})
text = found.apply_chat_template([{"role": "user", "content": "the"}])
print(text, found.encode(text)[0], "transformers" in sys.modules, "torch" in sys.modules)"""
    given = files[FILE].decode()
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, text=True, check=True)
    assert done.stdout == "the<s> 0 False False\n"


@pytest.mark.parametrize(
    ("text", "written", "bytes_"),
    [
        ("the", "the", b"the"),
        ("the", "▁the", b" the"),
        (" the", "Ġthe", b" the"),
        ("\ufffd", "<0xE2>", b"\xe2"),
        ("\ufffd", "âĺ", "☃".encode()[:2]),
        ("ö\ufffd", "Ã¶â", "ö".encode() + b"\xe2"),
        ("\ufffd", "\ufffd", "\ufffd".encode()),
        ("x", None, b"x"),
    ],
)
def test_what_a_token_stands_for(text: str, written: str | None, bytes_: bytes) -> None:
    assert token_bytes(text, written) == bytes_
