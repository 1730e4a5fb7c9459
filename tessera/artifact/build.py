"""One entry of an artifact: a model and example arguments, compiled for every target.

In: a module, function or exported program with the arguments it is called with. Out: a `Built`: programs as tables, one
that any machine runs by PyTorch's operators (`portable`) and one for each target, and what a reader checks arguments
by. Programs are those of inference: nothing is differentiated, whoever exports.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from tessera.artifact.foreign import with_own_operators
from tessera.artifact.keep import KeptRegions, TargetKernels
from tessera.artifact.move import on_device
from tessera.artifact.source import Source
from tessera.artifact.structure import structure_of
from tessera.artifact.weights import Shelf
from tessera.frontends.arguments import Leaf, SizeLeaf, TensorLeaf, ValueLeaf
from tessera.ir.formula import Formula, formula_data
from tessera.ir.printer import print_trace
from tessera.ir.serial import VERSION, Writer
from tessera.ir.types import TensorType
from tessera.pipeline.compilation import Compilation
from tessera.pipeline.options import Options
from tessera.store.layout import write_layout
from tessera.torch_internals.shapes import ShapeEnv, asking_for_one
from tessera.util.config import config, override
from tessera.util.errors import CaptureError, InputError, OptionError, Unserial

PORTABLE = "portable"
PLAIN, WITH_KERNELS = ("aten",), ("sdpa", "tile", "aten")
FEW_ROWS = ("rows",)  # its kernels are no binaries: whoever reads such a program needs Triton


@dataclass
class Built:
    about: dict[str, object]  # what the manifest says of the entry
    programs: dict[str, dict] = field(default_factory=dict)  # target -> tables and what joins them
    texts: dict[str, str] = field(default_factory=dict)  # for people


class Entry:
    """A program, captured once and compiled for one target after the other."""

    def __init__(self, name: str, source: Source, shelf: Shelf) -> None:
        self.name, self.shelf, self.exported = name, shelf, source.exported
        types = [v.type for v in self.exported.captured.trace.inputs]
        kinds = {t.device.type for t in types if isinstance(t, TensorType)}
        self.device = "cuda" if "cuda" in kinds else "cpu"
        self.held = [shelf.put(held, x) for held, x in zip(source.names, self.exported.held, strict=True)]
        # What is the model's and not this program's alone, and may lie beside the file.
        self.shared = {n for n, own in zip(self.held, source.shared, strict=True) if own}
        about = {
            "in": structure_of(self.exported.in_spec),
            "out": structure_of(self.exported.out_spec),
            "parameters": list(source.parameters),
            "inputs": list(map(_row, self.exported.leaves)),
            "sizes": {symbol: list(bounds) for symbol, bounds in self.exported.ranges.items()},
            "names": {s: n for s, n in self.exported.size_names.items() if s in self.exported.ranges},
            "held": self.held,
        }
        self.built = Built(about)

    def compile(self, target: str, kernels: TargetKernels | None, machine: str = "", few: bool = False) -> None:
        """Programs of the target `portable` have no kernels. `machine`: whose figures choose schedules. `few`: linear
        layers over few rows are operators of their own."""
        executors = PLAIN if kernels is None else (*FEW_ROWS * few, *WITH_KERNELS)
        captured = with_own_operators(self.exported.captured)
        if kernels is not None and kernels.kind != self.device:
            captured = on_device(captured, self.device, torch.device("cuda:0" if kernels.kind == "cuda" else "cpu"))
        env = self.exported.captured.mode.shape_env
        guards = _facts(env)
        settings = override(program_cache=False, dump="", verify=False, machine=machine or config.machine)
        with torch.no_grad(), settings, asking_for_one():
            compilation = Compilation(self.name, captured, _no_eager, Options.of(executors, None, None))
        if _facts(env) != guards:
            raise CaptureError(f"{self.name}: compiling it found out something about its sizes: {_facts(env)}")
        (program,) = compilation.account.programs
        bound = {s: where for s, where in program.trace.symbols.items() if s != where[0].name}
        trace = program.trace.with_(symbols=bound)
        held = [x for block in trace.nested() for x in block.constants.values()]
        claimed = KeptRegions(executors, kernels)
        writer = Writer(held=held, claimed=claimed, runtime=True)
        ends = compilation.executable.ends
        self.check_written(ends.written)
        try:
            number, layout = writer.trace(trace), write_layout(ends.layout, writer)
        except Unserial as reason:
            raise CaptureError(f"{self.name}: an artifact cannot hold {reason}") from reason
        self.built.programs[target] = {
            "version": VERSION,
            "program": number,
            "layout": layout,
            "written": list(ends.written),
            "kernels": claimed.kernels,
            "constants": [self.shelf.put(f"{self.name}.constant", x) for x in held],
            "tables": writer.tables(),
        }
        self.built.texts[target] = print_trace(program.trace, sizes=self.exported.size_names)

    def check_written(self, written: Collection[int]) -> None:
        """What is written shares no memory with another tensor of the model: whoever reads that would miss it."""
        for name in (self.held[i] for i in written if i < len(self.held)):
            if other := self.shelf.meets(name):
                raise OptionError(
                    f"{self.name} writes {name}, which lies in the same memory as {other}: an artifact keeps every "
                    "tensor by itself; make one of them a tensor of its own, or make it of the other in `forward`"
                )


def _row(leaf: Leaf) -> dict:
    """What an argument has to be, as the manifest says it."""
    match leaf:
        case TensorLeaf(layout=torch.strided):
            sizes = {"shape": list(map(formula_data, leaf.shape)), "stride": list(map(formula_data, leaf.stride))}
            kind = {"dtype": str(leaf.dtype).removeprefix("torch."), "device": str(leaf.device)}
            return {"name": leaf.name, **kind, "written": leaf.written, **sizes}
        case SizeLeaf(name, Formula(str(symbol))):
            return {"name": name, "symbol": symbol}
        case ValueLeaf(name, value) if value is None or type(value) in (bool, int, float, str):
            return {"name": name, "value": value}
    raise InputError(f"{leaf.name}: an artifact has no form for the argument {leaf}")


def _facts(env: ShapeEnv | None) -> str:
    return "" if env is None else f"{[str(g.expr) for g in env.guards]} {env.replacements}"


def _no_eager(*_: object) -> tuple:
    raise InputError("an artifact runs no eager program")
