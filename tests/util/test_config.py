"""Flags: unknown ones are refused wherever they are set; `log` says as much as it is asked to."""

from __future__ import annotations

import inspect

import pytest
import torch

import tessera
from tessera.util.config import CHOICES
from tessera.util.errors import OptionError


def test_unknown_flags_are_refused() -> None:
    with pytest.raises(OptionError, match="unknown option 'strickt'; the options are strict, dump"):
        tessera.config.strickt = True  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match="fused_random: expected one of auto, on, off, got 'maybe'"):
        tessera.config.fused_random = "maybe"
    with pytest.raises(OptionError, match="unknown option"), tessera.override(nothing=1):
        pass
    with pytest.raises(OptionError, match="log: expected int, got 'much'"):
        tessera.config.log = "much"  # type: ignore[assignment]
    assert tessera.config.fused_random == "auto" and tessera.config.log == 0


@pytest.mark.parametrize("flag", CHOICES)
def test_values_that_a_flag_does_not_have_are_refused(flag: str) -> None:
    told = f"{flag}: expected one of {', '.join(CHOICES[flag])}, got 'maybe'"
    with pytest.raises(OptionError, match=told), tessera.override(**{flag: "maybe"}):
        pass
    if flag in inspect.signature(tessera.jit).parameters:
        with pytest.raises(OptionError, match=told):
            tessera.jit(torch.sin, **{flag: "maybe"})


@pytest.mark.parametrize("level", range(4))
def test_log_ladder(level: int, capsys: pytest.CaptureFixture[str]) -> None:
    fast = tessera.jit(lambda x: x.sin() + 1, frontend="functional")
    with tessera.override(log=level):
        fast(torch.randn(3))
    said = capsys.readouterr().err
    assert ("s to compile" in said, "captured: 2 equations" in said, "aten.sin(" in said) == (
        level >= 1,
        level >= 2,
        level >= 3,
    )
