"""`tessera run model.tess --random --compare eager`: an artifact's function, run and compared with another answer.

In: a file and inputs, random ones or arrays of an `.npz` file. Out: the worst element of each result, and of each
argument that is written, beside what the file's own program gives operator by operator (`eager`) or what another
artifact gives; where they differ, the first kernel or operator whose results do.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import torch

from tessera.artifact.loaded import Entry, Loaded, load
from tessera.artifact.structure import unflatten
from tessera.exporters.onnx.compare import Difference
from tessera.frontends.arguments import Number, SizeLeaf, TensorLeaf
from tessera.tools.first_difference import of_kernels, of_programs, portable
from tessera.tools.results import Results, differences, told
from tessera.tools.run_options import EAGER, arrays, parsed, sizes
from tessera.torch_internals import pytree
from tessera.util.errors import OptionError

OTHERS = f"{EAGER}, or another .tess file"


class ArtifactRun:
    """A function of a file, its arguments, and what it gives."""

    def __init__(self, path: str, given: Namespace) -> None:
        self.path, self.seed = path, given.seed
        self.entry = entry_of(load(path), given.entry)
        if given.inputs:
            self.leaves = _read(self.entry, given.inputs)
        elif given.random:
            self.leaves = random_leaves(self.entry, sizes(given.size), given.seed)
        else:
            raise OptionError(f"{path}: expected --random, or --inputs arrays.npz")
        self.outputs = self.results(self.entry)

    def results(self, entry: Entry, seed: int | None = None) -> Results:
        """What a function gives of these arguments, and what it leaves in those that it writes. Every call has copies,
        and draws the same random numbers unless told."""
        leaves = [x.clone() if isinstance(x, torch.Tensor) else x for x in self.leaves]
        args, kwargs = self.arguments(leaves)
        torch.manual_seed(self.seed if seed is None else seed)
        with torch.no_grad():
            out = entry(*args, **kwargs)
        flat = pytree.tree_leaves(out)
        given = {"output" if len(flat) == 1 else f"output.{i}": x for i, x in enumerate(flat)}
        written = zip(self.entry.arguments.leaves.leaves, leaves, strict=True)
        return given | {f"{leaf.name}, written": x for leaf, x in written if getattr(leaf, "written", False)}

    def arguments(self, leaves: list[object]) -> tuple[tuple, dict]:
        return unflatten(iter(leaves), self.entry.arguments.structure)  # type: ignore[return-value]

    def against(self, other: str) -> list[Difference]:
        if other != EAGER and Path(other).suffix != ".tess":
            raise OptionError(f"--compare: expected {OTHERS}, got {other!r}")
        theirs = self.results(self.beside(portable(self.path) if other == EAGER else load(other)))
        # A file that is loaded anew: one that was called may have state.
        return differences(self.outputs, theirs, lambda: self.results(self.beside(load(self.path)), self.seed + 1))

    def beside(self, file: Loaded) -> Entry:
        """The function of another file that is compared with this one."""
        return entry_of(file, self.entry.name if len(file.entries) > 1 else None)

    def first_difference(self, other: str) -> str:
        """Where the two first differ."""
        call = self.arguments(self.leaves)
        if other == EAGER:
            return of_kernels(self.entry, *call, self.seed)
        mine, theirs = (self.beside(portable(path)) for path in (self.path, other))
        return of_programs((mine, *call), (theirs, *call), self.seed)


def entry_of(file: Loaded, name: str | None) -> Entry:
    if name is None and len(file.entries) == 1:
        return next(iter(file.entries.values()))
    if name is None or name not in file.entries:
        raise OptionError(f"{file.path}: expected --entry {', '.join(file.entries)}, got {name}")
    return file.entries[name]


def _read(entry: Entry, path: str) -> list[object]:
    """Arrays by the names of arguments; those that are no tensors are as the file says."""
    leaves = entry.arguments.leaves.leaves
    given = arrays(path, [leaf.name for leaf in leaves if not hasattr(leaf, "value")])
    values: list[object] = []
    for leaf in leaves:
        match leaf:
            case TensorLeaf():
                values.append(torch.from_numpy(given[leaf.name]).to(leaf.device, leaf.dtype))
            case SizeLeaf():
                values.append(int(given[leaf.name]))
            case _:
                values.append(leaf.value)
    return values


def random_leaves(entry: Entry, asked: Mapping[str, int], seed: int = 0) -> list[object]:
    """Arguments of the types that the file says; sizes that it names differ from each other where they may."""
    arguments = entry.arguments.leaves
    if unknown := set(asked) - set(arguments.ranges):
        raise OptionError(f"--size: expected {', '.join(arguments.ranges) or 'none'}, got {sorted(unknown)[0]!r}")
    chosen = dict(asked)
    for i, (name, (low, high)) in enumerate(arguments.ranges.items()):
        wanted = max(2 + i, low)
        chosen.setdefault(name, wanted if high is None else min(wanted, high))
    generator = torch.Generator().manual_seed(seed)

    def size(n: Number) -> int:
        return n if isinstance(n, int) else n.value(chosen)

    def tensor(leaf: TensorLeaf) -> torch.Tensor:
        shape, stride = ([size(n) for n in part] for part in (leaf.shape, leaf.stride))
        if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
            data = torch.randn(shape, generator=generator).to(leaf.dtype)
        else:
            data = torch.randint(0, 2, shape, generator=generator).to(leaf.dtype)
        return torch.empty_strided(shape, stride, dtype=leaf.dtype, device=leaf.device).copy_(data)

    leaves: list[object] = []
    for leaf in arguments.leaves:
        match leaf:
            case TensorLeaf():
                leaves.append(tensor(leaf))
            case SizeLeaf():
                leaves.append(size(leaf.size))
            case _:
                leaves.append(leaf.value)
    return leaves


def run_model(path: str, arguments: list[str]) -> tuple[dict[str, object], int]:
    """The facts, and the exit code: 1 where answers differ."""
    given = parsed(".tess", arguments, OTHERS)
    run = ArtifactRun(path, given)
    shapes = {name: told(x) for name, x in run.outputs.items()}
    facts: dict[str, object] = {"outputs": shapes, "ran": run.entry.way.what}
    if given.compare:
        differences = run.against(given.compare)
        agrees = not any(d.problem for d in differences)
        facts |= {"agrees": agrees, "differences": [str(d) for d in differences]}
        if not agrees:
            facts["first"] = run.first_difference(given.compare)
    return facts, 1 if facts.get("agrees") is False else 0
