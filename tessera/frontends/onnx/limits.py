"""What a file may ask for. Whoever made it is not trusted, so nothing in it decides how much is allocated or how deep
we go; these numbers do. `tessera.onnx.load(path, limits=Limits(...))` takes others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    file_bytes: int = 2**31 - 1  # of the model itself; protobuf ends there too
    nodes: int = 1_000_000  # in all graphs and functions of a file
    nesting: int = 16  # graphs inside graphs
    calls: int = 64  # functions that call functions
    rank: int = 64  # dimensions of a tensor
    tensor_bytes: int = 2**29  # of one tensor that a few bytes describe: a filled or sparse one, a range
    unrolled: int = 64  # turns of a loop that are written out into one program
    loop_turns: int = 10_000  # of a loop that the interpreter runs
    programs: int = 32  # kept for one part of a graph, one a set of types or of values; then the interpreter runs
    read_elements: int = 256  # of an input whose values decide a size


LIMITS = Limits()
