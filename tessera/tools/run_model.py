"""`tessera run model.onnx --random --compare ort`: a model from a file, run and compared with another answer.

In: a file and inputs, random ones or arrays of an `.npz` file. Out: the worst element of each output beside what ONNX
Runtime, onnx's reference evaluator, our own interpreter or another file gives; where they differ, the first node whose
results do.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tessera.artifact.loaded import Entry
from tessera.artifact.loaded import load as load_artifact
from tessera.artifact.structure import unflatten
from tessera.artifact.write import export
from tessera.exporters.onnx.compare import Difference, compare
from tessera.exporters.onnx.errors import ExportError
from tessera.exporters.onnx.runtimes import ORT, REFERENCE, runtime
from tessera.frontends.arguments import Leaf, SizeLeaf, ValueLeaf
from tessera.frontends.export_sizes import MULTIPLE
from tessera.frontends.onnx.elements import DTYPES, Narrow
from tessera.frontends.onnx.interpreter import Interpreter
from tessera.frontends.onnx.proto import onnx
from tessera.onnx.arrays import to_numpy, to_torch
from tessera.onnx.module import OnnxModule, load
from tessera.tools.first_difference import of_programs, portable
from tessera.tools.results import Results, differences, flat, told
from tessera.tools.run_artifact import entry_of
from tessera.tools.run_options import EAGER, arrays, parsed, sizes
from tessera.torch_internals import pytree
from tessera.util.errors import OptionError

OTHERS = f"{ORT}, {REFERENCE}, {EAGER}, or another .onnx or .tess file"
Tensors = dict[str, torch.Tensor]


class ModelRun:
    """An ONNX file, its inputs, and what we compute of them."""

    def __init__(self, path: str, given: Namespace) -> None:
        self.path, self.seed, self.net = path, given.seed, load(path).eval()
        if given.inputs:
            self.inputs = {name: to_torch(x) for name, x in arrays(given.inputs, self.net.input_names).items()}
        elif given.random:
            self.inputs = dict(random_inputs(self.net, sizes(given.size), given.seed))
        else:
            raise OptionError(f"{path}: expected --random, or --inputs arrays.npz")
        self.outputs = self.results(self.net)

    def results(self, net: OnnxModule, seed: int | None = None) -> Results:
        """What a file's graph gives of the inputs. Every call draws the same random numbers unless told."""
        torch.manual_seed(self.seed if seed is None else seed)
        with torch.no_grad():
            out = net(*self.inputs_of(net.input_names))
        return _named(net.output_names, out if len(net.output_names) != 1 else (out,))  # type: ignore[arg-type]

    def inputs_of(self, names: Sequence[str]) -> list[object]:
        """Our inputs as another model takes them: by its names, or in its order where it has other names."""
        if len(names) != len(self.inputs):
            raise OptionError(f"--compare: expected the inputs {', '.join(self.inputs)}, got {', '.join(names)}")
        ours = self.inputs if set(names) == set(self.inputs) else dict(zip(names, self.inputs.values(), strict=True))
        return [ours[name] for name in names]

    def against(self, other: str) -> list[Difference]:
        """Our outputs beside another answer, by its names, or in its order where it has other names."""
        theirs = self.answer(other)
        if theirs.keys() != self.outputs.keys() and len(theirs) == len(self.outputs):
            theirs = dict(zip(self.outputs, theirs.values(), strict=True))
        return differences(self.outputs, theirs, lambda: self.results(self.net, self.seed + 1))

    def answer(self, other: str) -> Results:
        if other in (ORT, REFERENCE):
            return _named(self.net.output_names, self.elsewhere(other, self.path))
        if other == EAGER:
            return self.results(load(self.path, compile=False))
        if other.endswith(".onnx"):
            return self.results(load(other))
        if other.endswith(".tess"):
            return self.of_artifact(entry_of(load_artifact(other), None))
        raise OptionError(f"--compare: expected {OTHERS}, got {other!r}")

    def of_artifact(self, entry: Entry) -> Results:
        args, kwargs = self.arguments(entry)
        torch.manual_seed(self.seed)
        with torch.no_grad():
            return flat("output", [x for x in pytree.tree_leaves(entry(*args, **kwargs)) if x is not None])

    def arguments(self, entry: Entry) -> tuple[tuple, dict]:
        """The inputs in an artifact's structure; what is no tensor there is as that file says."""
        leaves = entry.arguments.leaves.leaves
        taken = [leaf.name for leaf in leaves if not isinstance(leaf, ValueLeaf)]
        given = dict(zip(taken, self.inputs_of(taken), strict=True))
        values = [leaf.value if isinstance(leaf, ValueLeaf) else _as_leaf(leaf, given[leaf.name]) for leaf in leaves]
        return unflatten(iter(values), entry.arguments.structure)  # type: ignore[return-value]

    def elsewhere(self, kind: str, model: str | bytes) -> list[object]:
        feeds = {name: to_numpy(x) for name, x in self.inputs.items()}
        try:
            return [to_torch(x) for x in runtime(kind, model)(feeds)]  # type: ignore[arg-type]
        except ExportError:
            raise
        except Exception as error:
            raise OptionError(f"{kind} does not run {self.path}: {error}") from error

    def first_difference(self, other: str) -> str:
        """The first node whose results differ from another's of that name, by our interpreter. An artifact has
        operators instead: those that this file would become."""
        if other.endswith(".tess"):
            return self.first_operator(other)
        mine = self.interpreted(self.net)
        if other in (ORT, REFERENCE):
            theirs = self.inside(other)
        else:  # of our own interpreter, where that is the other
            theirs = mine if other == EAGER else self.interpreted(load(other))
        for node in self.net.__tessera_onnx__.model.graph.nodes:
            for name in node.outputs:
                x, y = mine.get(name), theirs.get(name)
                if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
                    difference = compare(name, x, y)
                    if difference.problem:
                        return f"{node}: {difference}"
        return "no node by itself: the interpreter agrees with it, the compiled program does not"

    def first_operator(self, other: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.tess")
            export(self.net, tuple(self.inputs.values()), path, targets=())
            mine, theirs = (entry_of(portable(p), None) for p in (path, other))
            calls = [(entry, *self.arguments(entry)) for entry in (mine, theirs)]
            return of_programs(*calls, self.seed)

    def interpreted(self, net: OnnxModule) -> dict[str, object]:
        """What every node gives, by name."""
        graph = net.__tessera_onnx__
        given = dict(zip(net.input_names, self.inputs_of(net.input_names), strict=True))
        return graph.values(Interpreter(graph.model, graph.limits, graph.device(self.inputs)), given)

    def inside(self, kind: str) -> Mapping[str, object]:
        """The same by another runtime."""
        model = onnx.load(self.path)
        names = [o for node in model.graph.node for o in node.output if o]
        known = {o.name for o in model.graph.output}
        model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(n) for n in names if n not in known)
        order = [o.name for o in model.graph.output]
        return dict(zip(order, self.elsewhere(kind, model.SerializeToString()), strict=True))


def _named(names: Sequence[str], values: Sequence[object]) -> Results:
    """Results under one name each, those of lists and dicts too."""
    return {key: _carried(x) for name, value in zip(names, values, strict=True) for key, x in flat(name, value).items()}


def _carried(x: object) -> object:
    """Elements of 2, 4 or 6 bits as the dtype that holds them."""
    return x.data if isinstance(x, Narrow) else x


def _as_leaf(leaf: Leaf, x: object) -> object:
    return int(x) if isinstance(leaf, SizeLeaf) else x  # type: ignore[call-overload]


def random_inputs(net: OnnxModule, asked: Mapping[str, int], seed: int = 0) -> Tensors:
    """Tensors of the types that the file says; sizes that it names differ from each other."""
    graph, generator = net.__tessera_onnx__, torch.Generator().manual_seed(seed)
    chosen, inputs = _Sizes(asked), {}
    for name in net.input_names:
        info = graph.infos[name]
        dtype = DTYPES.get(info.element)
        if info.kind != "tensor" or dtype is None or info.shape is None:
            raise OptionError(
                f"the input {name!r}: nothing is known that random numbers could be made of; give --inputs"
            )
        inputs[name] = _random(chosen.shape(info.shape), dtype, generator, name)
    if unknown := asked.keys() - chosen.named:
        raise OptionError(f"--size: expected {', '.join(sorted(chosen.named)) or 'none'}, got {sorted(unknown)[0]!r}")
    return inputs


class _Sizes:
    """What sizes of a file are taken as: those asked for, and others that differ from each other."""

    def __init__(self, asked: Mapping[str, int]) -> None:
        self.chosen, self.named = dict(asked), set[str]()

    def shape(self, shape: Sequence[int | str | None]) -> list[int]:
        return [n if isinstance(n, int) else self.size(n or "?") for n in shape]

    def size(self, name: str) -> int:
        multiple = MULTIPLE.fullmatch(name)
        if multiple is not None:
            return int(multiple[1]) * self.size(multiple[2])
        self.named.update({name} - {"?"})
        return self.chosen.setdefault(name, 2 + len(self.chosen))


def _random(shape: list[int], dtype: torch.dtype, generator: torch.Generator, name: str) -> torch.Tensor:
    try:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, generator=generator).to(dtype)
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    except RuntimeError as error:  # there is no such memory
        raise OptionError(f"the input {name!r} of {shape}: {str(error).splitlines()[0]}") from error


def facts_of(run: ModelRun, other: str | None) -> dict[str, object]:
    """What is to be said of a run, for people or programs."""
    facts: dict[str, object] = {"outputs": {name: told(x) for name, x in run.outputs.items()}}
    if other:
        found = run.against(other)
        wrong = any(d.problem for d in found)
        facts |= {"agrees": not wrong, "differences": [str(d) for d in found]}
        if wrong:
            facts["first"] = run.first_difference(other)
    return facts


def run_model(path: str, arguments: list[str]) -> tuple[dict[str, object], int]:
    """The facts, and the exit code: 1 where answers differ."""
    given = parsed(".onnx", arguments, OTHERS)
    facts = facts_of(ModelRun(path, given), given.compare)
    return facts, 1 if facts.get("agrees") is False else 0
