"""Requests at random moments, some left, cancelled, late or malformed: all end once, and nothing stays."""

from __future__ import annotations

import pytest
from families import model, token_bytes
from steady import in_process

from tessera.serve.engine import Engine


@pytest.mark.parametrize("ahead", [0, 1])
def test_everything_ends_once_and_nothing_is_left(ahead: int) -> None:
    engine = Engine(
        model("llama"), block_size=4, budget=48, memory=240 * token_bytes("llama"), most_running=32,
        speculate=0 if ahead else 2, compiled=False, check=True,
    )  # fmt: skip
    engine._ahead = ahead
    ends, more = in_process(engine, 500)
    assert min(ends["whole: whole"], ends["cancelled: cancelled"], ends["malformed: refused"]) > 10, ends
    # So early in a process's life memory still grows by itself; `steady.py` as a script asks for less than 10 MB.
    assert more["memory"] < 40e6 and more["threads"] <= 0 and more["files"] <= 0, more
