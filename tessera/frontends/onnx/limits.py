"""What a file may ask for. Whoever made it is not trusted, so nothing in it decides how much is allocated or how deep
we go; these numbers do. `tessera.onnx.load(path, limits=Limits(...))` takes others."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Limits:
    file_bytes: int = 2**31 - 1  # of the model itself; protobuf ends there too
    nodes: int = 1_000_000  # in all graphs and functions of a file
    nesting: int = 16  # graphs inside graphs
    calls: int = 64  # functions that call functions
    expanded: int = 32  # nodes for each of the file's, where functions stand in the places of their calls
    rank: int = 64  # dimensions of a tensor
    tensor_bytes: int = 2**27  # of one tensor that a few bytes describe: a filled or sparse one, a range, a product
    per_byte: int = 64  # so many bytes of one tensor for each byte of the weights and arguments, where that is more
    unrolled: int = 64  # turns of a loop that are written out into one program
    loop_turns: int = 20_000  # of all loops of a call that the interpreter runs
    programs: int = 32  # kept for one part of a graph, one a set of types or of values; then the interpreter runs
    read_elements: int = 256  # of an input whose values decide a size

    def given(self, count: int) -> Limits:
        """Those of a call whose weights and arguments have so many bytes."""
        most = self.per_byte * count
        return self if most <= self.tensor_bytes else replace(self, tensor_bytes=most)


LIMITS = Limits()
