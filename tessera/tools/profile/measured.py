"""What is measured: a `Row` for each equation of a final program, a `Span` for whatever took time in one step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Something that took time in the step that is shown."""

    name: str
    track: str  # "step", "program", "host", or a stream of the GPU
    start: float  # since the step began
    seconds: float
    row: int | None = None  # the equation it belongs to


@dataclass(frozen=True)
class Row:
    """One equation of a final program; a region that one kernel runs is one equation."""

    graph: str
    program: str  # "inference", "forward" or "backward"
    index: int  # position in the program
    results: tuple[str, ...]
    executor: str
    operator: str  # "aten.mm", or the operators of a region joined by " + "
    lines: tuple[tuple[str, int], ...]  # the user's (file, line), most mentioned first
    module: str
    note: str
    calls: int  # a step
    seconds: float
    host_seconds: float
    kernels: tuple[tuple[str, float], ...]  # names and seconds of what ran on a GPU
    bytes: float
    flops: float
    roofline_seconds: float
    limit: str  # "memory", "compute", or "" where nothing is moved or computed
    reached: float | None  # roofline over time
    unaligned: bool = False  # a product that a library has only slow kernels for

    @property
    def where(self) -> str:
        return f"{self.lines[0][0].rsplit('/', 1)[-1]}:{self.lines[0][1]}" if self.lines else ""
