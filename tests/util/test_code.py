"""Code of generated programs comes from the disk where it was compiled before, and is what the text says."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import CodeType

import pytest
import torch

import tessera
from tessera.just_in_time.compiled import compiled_state
from tessera.tools.models import GPT, GPTConfig
from tessera.util import code, disk
from tessera.util.code import code_of


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))


def text_of(answer: int) -> str:
    """Long text with a function in a function, whose last line fails."""
    lines = "".join(f"    x = x + {i}\n" for i in range(2000))
    return f"def f(x):\n{lines}    def g(y):\n        return y / 0\n    return {answer} if x < 0 else g(x)\n"


def run(text: str, filename: str, x: int) -> int:
    scope: dict = {}
    exec(code_of(text, filename), scope)
    return scope["f"](x)


def kept() -> int:
    return sum(1 for _ in disk.entries(code.KIND))


def test_long_text_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with tessera.override(program_cache=True):
        assert run(text_of(7), "<one>", -(10**9)) == 7 and kept() == 1
        monkeypatch.setattr(code, "compile", lambda *_: pytest.fail("compiled again"), raising=False)
        assert run(text_of(7), "<two>", -(10**9)) == 7
        with pytest.raises(ZeroDivisionError) as caught:
            run(text_of(7), "<three>", 1)
    assert [f.filename for f in traceback.extract_tb(caught.tb)][-2:] == ["<three>", "<three>"]


def test_other_text_is_other_code() -> None:
    with tessera.override(program_cache=True):
        assert [run(text_of(n), "<text>", -(10**9)) for n in (7, 8, 7)] == [7, 8, 7]
        assert kept() == 2


def test_damaged_code_is_compiled_again() -> None:
    with tessera.override(program_cache=True):
        run(text_of(7), "<text>", -(10**9))
        (entry,) = disk.entries(code.KIND)
        data = bytearray(entry.path.read_bytes())
        data[-20] ^= 1
        entry.path.write_bytes(data)
        assert run(text_of(7), "<text>", -(10**9)) == 7


def test_nothing_is_kept_of_short_text_or_without_the_cache() -> None:
    with tessera.override(program_cache=True):
        assert eval(code_of("1 + 1\n" * 1, "<text>")) is None
    with tessera.override(program_cache=False):
        run(text_of(7), "<text>", -(10**9))
    assert kept() == 0


def test_a_program_from_the_disk_is_the_text_that_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a second process finds its code."""
    torch.manual_seed(0)
    model, tokens = GPT(GPTConfig(12, 32, 2, 16, 64)), torch.randint(64, (2, 17))

    def trained() -> bool:
        torch._dynamo.reset()
        fast = tessera.jit(model)
        fast(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
        (compilation,) = compiled_state(fast).compilations()
        return compilation.from_cache

    def compiled(text: str, filename: str, mode: str) -> CodeType:
        assert len(text) < code.LONG, "compiled again"
        return compile(text, filename, mode)

    with tessera.override(program_cache=True):
        assert not trained() and kept() == 2
        monkeypatch.setattr(code, "compile", compiled, raising=False)
        assert trained()
