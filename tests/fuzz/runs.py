"""Runs a program in some way, and says how two runs differ."""

from __future__ import annotations

import linecache
import warnings
from dataclasses import dataclass

import torch
import torch._dynamo

from .observe import ALL, EXACT, Observer, Sight, difference
from .prelude import NAMES
from .switches import reset_switches, switches
from .ways import Way


@dataclass
class Ran:
    sights: list[Sight]
    error: BaseException | None
    complaints: list[str]  # what Tessera asks its users to report
    left: dict[str, object]  # switches of PyTorch that stand otherwise than before


def run(text: str, way: Way) -> Ran:
    torch._dynamo.reset()
    torch.manual_seed(0)  # of programs that draw and set none
    observer = Observer()
    scope = NAMES | {"compiled": way[0], "see": observer.see, "T": way[1]}
    error = None
    before = switches()
    linecache.cache["<program>"] = (len(text), None, text.splitlines(keepends=True), "<program>")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(compile(text, "<program>", "exec"), scope)
            scope["scenario"]()  # type: ignore[operator]
        except Exception as raised:  # whatever it is, the other run must do the same
            error = raised
    left = {name: now for name, now in switches().items() if now != before[name]}
    reset_switches()
    complaints = [str(w.message) for w in caught if "Please report" in str(w.message)]
    return Ran(observer.sights, error, complaints, left)


def compared(eager: Ran, other: Ran, text: str, kind: str) -> str:
    grain = 0.05 if "bf16" in text else 1e-4 if "f32" in text or "torch.ones(" in text else 1e-8
    if reason := difference(eager.sights, other.sights, grain, EXACT.get(kind, ALL)):
        return reason
    if eager.error is None and other.error is not None:
        return f"raised {type(other.error).__name__}: {first_line(other.error)}"
    if eager.error is not None and other.error is None:
        return f"expected {type(eager.error).__name__}: {first_line(eager.error)}; nothing was raised"
    if len(eager.sights) != len(other.sights):
        late = len(other.sights) - len(eager.sights)
        return f"expected {eager.error!r}, got {other.error!r} {late} sights later"
    if eager.left != other.left:
        return f"left: expected {eager.left}, got {other.left}"
    if other.complaints:
        return f"gave up: {other.complaints[0]}"
    return ""


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
