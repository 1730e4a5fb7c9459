"""Pieces of text: whole characters, nothing of a stop text, and together the whole answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenizers import decoders

from tessera.serve.text import Text


def by_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def pieces(text: str, stops: Sequence[str] = ()) -> tuple[list[str], Text]:
    told = Text(by_bytes, stops)
    return [*(told.push(byte) for byte in text.encode()), told.finish()], told


def test_characters_are_never_broken() -> None:
    text = "naïve 🦊 — 字"
    listed, _ = pieces(text)
    assert "".join(listed) == text and not any("\ufffd" in piece for piece in listed)


def test_bytes_that_are_no_character_come_at_the_end() -> None:
    told = Text(by_bytes)
    assert told.push(0xF0) == "" and told.finish() == "\ufffd"


FALLBACK = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def spelt(text: str) -> list[str]:
    """Tokens of a vocabulary of few letters: all others are bytes."""
    return [t for c in text for t in (["▁" if c == " " else c] if c in "a " else [f"<0x{b:02X}>" for b in c.encode()])]


@pytest.mark.parametrize(
    "text", ["🙂" * 9, "ß" * 20, "a ☃🙂 ßa字字字字 a🦊🦊", " ☃ ☃", "e\u0301🙂\u200d🙂" * 3, "🙂☃ß" * 5]
)
def test_characters_of_single_bytes_come_whole(text: str) -> None:
    """A decoder over bytes takes a run of them for broken, all of it, if it begins within a character."""
    told = Text(FALLBACK.decode)  # type: ignore[arg-type]
    listed = [*(told.push(token) for token in spelt(f" {text}")), told.finish()]  # type: ignore[arg-type]
    assert "".join(listed) == text and not any("\ufffd" in piece for piece in listed)


def test_what_was_told_stays_though_a_byte_after_it_is_wrong() -> None:
    told = Text(FALLBACK.decode)  # type: ignore[arg-type]
    tokens = [*spelt("a☃"), "<0xFF>", "a", "a"]
    assert "".join(told.push(token) for token in tokens) + told.finish() == "a☃\ufffdaa"  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", ["STOP", "S", "P\n", "🦊"])
def test_a_stop_text_ends_before_itself(stop: str) -> None:
    listed, told = pieces(f"one SToP STO two {stop}{stop} three", [stop, "never"])
    whole = f"one SToP STO two {stop}{stop} three"
    assert "".join(listed) == whole[: whole.index(stop)] and told.stopped == stop


def test_what_may_become_a_stop_text_is_held_back() -> None:
    told = Text(by_bytes, ["abcd"])
    assert [told.push(byte) for byte in b"xabcabc"] == ["x", "", "", "", "abc", "", ""]
    assert told.finish() == "abc"


def test_the_first_of_several_stop_texts_counts() -> None:
    listed, told = pieces("..xyz..", ["yz", "xyz", "zz"])
    assert ("".join(listed), told.stopped) == ("..", "xyz")
