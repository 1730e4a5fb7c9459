"""One entry of an artifact: a model and example arguments, compiled for every target.

In: a module, function or exported program with the arguments it is called with. Out: a `Built`: programs as tables, one
that any machine runs by PyTorch's operators (`portable`) and one for each target, and what a reader checks arguments
by. Programs are those of inference: nothing is differentiated, whoever exports.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.export import Dim, ExportedProgram

from tessera.artifact.keep import KeptRegions, TargetKernels
from tessera.artifact.move import on_device
from tessera.artifact.structure import structure_of
from tessera.artifact.weights import Shelf
from tessera.frontends.arguments import Leaf, SizeLeaf, TensorLeaf, ValueLeaf
from tessera.frontends.export import capture_export
from tessera.ir.formula import Formula, formula_data
from tessera.ir.printer import print_trace
from tessera.ir.serial import VERSION, Writer
from tessera.ir.strides import copied
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.pipeline.compilation import Compilation
from tessera.pipeline.options import Options
from tessera.store.layout import write_layout
from tessera.torch_internals import pytree
from tessera.torch_internals.shapes import ShapeEnv
from tessera.util.config import config, override
from tessera.util.errors import CaptureError, InputError, OptionError, Unserial

PORTABLE = "portable"
PLAIN, WITH_KERNELS = ("aten",), ("sdpa", "tile", "aten")


@dataclass
class Built:
    about: dict[str, object]  # what the manifest says of the entry
    programs: dict[str, dict] = field(default_factory=dict)  # target -> tables and what joins them
    texts: dict[str, str] = field(default_factory=dict)  # for people


class Entry:
    """A program, captured once and compiled for one target after the other."""

    def __init__(self, name: str, program: ExportedProgram, names: tuple[str, ...], shelf: Shelf) -> None:
        self.name, self.shelf = name, shelf
        with torch.no_grad():
            self.exported = capture_export(program, name)
        types = [v.type for v in self.exported.captured.trace.inputs]
        kinds = {t.device.type for t in types if isinstance(t, TensorType)}
        self.device = "cuda" if "cuda" in kinds else "cpu"
        held = [spec for spec in program.graph_signature.input_specs if _target(spec)]
        self.held = [shelf.put(_target(spec), x) for spec, x in zip(held, self.exported.held, strict=True)]
        # What is the model's and not this program's alone, and may lie beside the file.
        self.shared = {n for n, spec in zip(self.held, held, strict=True) if spec.kind.name in ("PARAMETER", "BUFFER")}
        about = {
            "in": structure_of(self.exported.in_spec),
            "out": structure_of(self.exported.out_spec),
            "parameters": list(names),
            "inputs": list(map(_row, self.exported.leaves)),
            "sizes": {symbol: list(bounds) for symbol, bounds in self.exported.ranges.items()},
            "names": {s: n for s, n in self.exported.size_names.items() if s in self.exported.ranges},
            "held": self.held,
        }
        self.built = Built(about)

    def compile(self, target: str, kernels: TargetKernels | None, machine: str = "") -> None:
        """Programs of the target `portable` have no kernels. `machine`: whose figures choose schedules."""
        executors = PLAIN if kernels is None else WITH_KERNELS
        captured = self.exported.captured
        if kernels is not None and kernels.kind != self.device:
            captured = on_device(captured, self.device, torch.device("cuda:0" if kernels.kind == "cuda" else "cpu"))
        env = self.exported.captured.mode.shape_env
        guards = _facts(env)
        with torch.no_grad(), override(program_cache=False, dump="", verify=False, machine=machine or config.machine):
            compilation = Compilation(self.name, captured, _no_eager, Options.of(executors, None, None))
        if _facts(env) != guards:
            raise CaptureError(f"{self.name}: compiling it found out something about its sizes: {_facts(env)}")
        (program,) = compilation.account.programs
        bound = {s: where for s, where in program.trace.symbols.items() if s != where[0].name}
        trace = program.trace.with_(symbols=bound)
        held = [x for t in _traces(trace) for x in t.constants.values()]
        claimed = KeptRegions(executors, kernels)
        writer = Writer(held=held, claimed=claimed, runtime=True)
        ends = compilation.executable.ends
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


def exported_program(
    model: Callable | ExportedProgram, args: tuple, kwargs: dict, dynamic: object
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """The model as PyTorch exports it, and the names of its positional arguments."""
    if isinstance(model, ExportedProgram):
        if args or kwargs or dynamic:
            raise OptionError("an exported program brings its arguments and sizes: expected none beside it")
        return model, ()
    module = model if isinstance(model, torch.nn.Module) else _Function(model)
    names = _names(model, len(args))
    if not isinstance(args, tuple):
        raise OptionError(f"expected a tuple of arguments, got {type(args).__name__}")
    args, kwargs = _apart(args, kwargs, module)
    shapes = _dynamic_shapes(dynamic, names, args, kwargs)
    try:
        with torch.no_grad():
            return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False), names
    except Exception as error:
        raise CaptureError(f"torch.export does not capture {_name_of(model)}: {error}") from error


def _apart(args: tuple, kwargs: dict, module: torch.nn.Module) -> tuple[tuple, dict]:
    """The arguments with no tensor among them twice: PyTorch's export would take the one for the other ever after."""
    seen = {id(x) for x in (*module.parameters(), *module.buffers())}

    def once(x: torch.Tensor) -> torch.Tensor:
        if id(x) in seen:
            x = copied(x.detach(), x.stride())
        seen.add(id(x))
        kept.append(x)  # an id is a tensor's as long as it lives
        return x

    kept: list[torch.Tensor] = []
    return pytree.tree_map_only(torch.Tensor, once, (args, kwargs))


class _Function(torch.nn.Module):
    def __init__(self, fn: Callable) -> None:
        super().__init__()
        self.fn = fn
        self.forward = fn  # type: ignore[method-assign]


def _name_of(model: object) -> str:
    return getattr(model, "__name__", type(model).__name__)


def _names(model: Callable, count: int) -> tuple[str, ...]:
    fn = model.forward if isinstance(model, torch.nn.Module) else model
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        names = [p.name for p in inspect.signature(fn).parameters.values() if p.kind in kinds]
    except (TypeError, ValueError):
        names = []
    return tuple(names[:count]) if len(names) >= count else tuple(f"arg{i}" for i in range(count))


def _dynamic_shapes(dynamic: object, names: tuple[str, ...], args: tuple, kwargs: dict) -> object:
    """`{"x": {0: "batch", 1: ("length", 1, 512)}}` as PyTorch wants it: a size of one name is one size."""
    if dynamic is None:
        return None
    if not isinstance(dynamic, Mapping):
        raise OptionError(f"dynamic: expected arguments and their sizes, as {{'x': {{0: 'batch'}}}}, got {dynamic!r}")
    given = (*names, *kwargs)
    if unknown := [name for name in dynamic if name not in given]:
        raise OptionError(f"dynamic: expected one of {', '.join(given)}, got {unknown[0]!r}")
    dims: dict[str, object] = {}

    def dim(size: object) -> object:
        if isinstance(size, str):
            return dims.setdefault(size, Dim(size))
        if isinstance(size, tuple) and len(size) == 3:
            name, low, high = size
            return dims.setdefault(name, Dim(name, min=low, max=high))
        return size

    def spec(x: object) -> object:
        if isinstance(x, Mapping) and all(isinstance(k, int) for k in x):
            return {k: dim(size) for k, size in x.items()}
        if isinstance(x, Mapping):
            return {k: spec(v) for k, v in x.items()}
        return type(x)(map(spec, x)) if isinstance(x, (list, tuple)) else x

    return {name: spec(dynamic[name]) if name in dynamic else None for name in given}


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


def _target(spec: object) -> str:
    """The name of a parameter, buffer or constant; empty for an argument."""
    return "" if spec.kind.name == "USER_INPUT" else spec.target or spec.arg.name  # type: ignore[attr-defined]


def _traces(trace: Trace) -> list[Trace]:
    return [trace, *(inner for body in trace.inner() for inner in _traces(body))]  # type: ignore[arg-type]


def _facts(env: ShapeEnv | None) -> str:
    return "" if env is None else f"{[str(g.expr) for g in env.guards]} {env.replacements}"


def _no_eager(*_: object) -> tuple:
    raise InputError("an artifact runs no eager program")
