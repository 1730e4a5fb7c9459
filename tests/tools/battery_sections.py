"""Sections for tests of the battery's pool: cases that pass, differ, fail, hang and crash."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from tessera.tools.battery.case import Case, Part, Section, Skip, Wrong


def right() -> None:
    pass


def wrong() -> None:
    raise Wrong("expected 1, got 2")


def nothing() -> None:
    raise Skip("eager refuses it too")


def failing() -> None:
    raise ValueError("no such thing\nhere")


def hanging() -> None:
    time.sleep(600)


def crashing() -> None:
    os._exit(7)


def broken() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


KINDS = (right, wrong, nothing, failing, hanging, crashing, broken)


def cases(device: str) -> list[Case]:
    return [Case("trial", kind.__name__, limit=5.0 if kind is hanging else 120.0) for kind in KINDS]


def parts(case: str, device: str) -> Iterator[Part]:
    yield "first", right
    yield "second", {kind.__name__: kind for kind in KINDS}[case]
    yield "third", right


SECTIONS = {"trial": Section(cases, parts)}
