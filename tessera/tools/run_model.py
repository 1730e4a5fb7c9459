"""`tessera run model.onnx --random --compare ort`: a model from a file, run and compared with another answer.

In: a file and inputs, random ones or arrays of an `.npz` file. Out: the worst element of each output beside what ONNX
Runtime, onnx's reference evaluator, our own interpreter or another file gives; where they differ, the first node whose
results do.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from tessera.artifact.loaded import load as load_artifact
from tessera.artifact.write import export
from tessera.exporters.onnx.compare import Difference, compare
from tessera.exporters.onnx.runtimes import ORT, REFERENCE, runtime
from tessera.frontends.onnx.elements import DTYPES
from tessera.frontends.onnx.interpreter import Interpreter
from tessera.frontends.onnx.proto import onnx
from tessera.onnx.arrays import to_numpy, to_torch
from tessera.onnx.module import OnnxModule, load
from tessera.tools.first_difference import of_programs, portable
from tessera.tools.run_options import EAGER, parsed, sizes
from tessera.util.errors import OptionError

OTHERS = f"{ORT}, {REFERENCE}, {EAGER}, or another .onnx or .tess file"
Tensors = dict[str, torch.Tensor]


class ModelRun:
    """An ONNX file, its inputs, and what we compute of them."""

    def __init__(self, path: str, given: Namespace) -> None:
        self.path, self.seed, self.net = path, given.seed, load(path).eval()
        if given.inputs:
            arrays = np.load(given.inputs, allow_pickle=False)
            self.inputs: Tensors = {name: to_torch(arrays[name]) for name in self.net.input_names}  # type: ignore[misc]
        elif given.random:
            self.inputs = random_inputs(self.net, sizes(given.size), given.seed)
        else:
            raise OptionError(f"{path}: expected --random, or --inputs arrays.npz")
        self.outputs = self.results(self.net)

    def results(self, call: Callable) -> Tensors:
        with torch.no_grad():
            out = call(*self.inputs.values())
        return dict(zip(self.net.output_names, out if isinstance(out, (tuple, list)) else (out,), strict=True))

    def against(self, other: str) -> list[Difference]:
        """Our outputs beside another answer."""
        theirs = self.answer(other)
        return [compare(name, x, theirs[name]) for name, x in self.outputs.items()]

    def answer(self, other: str) -> Tensors:
        if other in (ORT, REFERENCE):
            return dict(zip(self.net.output_names, self.elsewhere(other, self.path), strict=True))
        if other == EAGER:
            return self.results(load(self.path, compile=False))
        if Path(other).suffix not in (".onnx", ".tess"):
            raise OptionError(f"--compare: expected {OTHERS}, got {other!r}")
        return self.results(load(other) if other.endswith(".onnx") else load_artifact(other))

    def elsewhere(self, kind: str, model: str | bytes) -> list[torch.Tensor]:
        feeds = {name: to_numpy(x) for name, x in self.inputs.items()}
        return [to_torch(x) for x in runtime(kind, model)(feeds)]  # type: ignore[misc,arg-type]

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
        args = tuple(self.inputs.values())
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.tess")
            export(self.net, args, path, targets=())
            mine, theirs = (next(iter(portable(p).entries.values())) for p in (path, other))
            return of_programs(mine, theirs, args, {}, self.seed)

    def interpreted(self, net: OnnxModule) -> dict[str, object]:
        """What every node gives, by name."""
        graph = net.__tessera_onnx__
        given: dict[str, object] = dict(zip(net.input_names, self.inputs.values(), strict=True))
        return graph.values(Interpreter(graph.model, graph.limits, graph.device(self.inputs)), given)

    def inside(self, kind: str) -> Mapping[str, object]:
        """The same by another runtime."""
        model = onnx.load(self.path)
        names = [o for node in model.graph.node for o in node.output if o]
        known = {o.name for o in model.graph.output}
        model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(n) for n in names if n not in known)
        order = [o.name for o in model.graph.output]
        return dict(zip(order, self.elsewhere(kind, model.SerializeToString()), strict=True))


def random_inputs(net: OnnxModule, asked: dict[str, int], seed: int = 0) -> Tensors:
    """Tensors of the types that the file says; sizes that it names differ from each other."""
    generator = torch.Generator().manual_seed(seed)
    graph = net.__tessera_onnx__
    chosen = dict(asked)

    def size(n: int | str | None) -> int:
        if isinstance(n, int):
            return n
        return chosen.setdefault(n or "?", 2 + len(chosen))

    inputs: Tensors = {}
    for name in net.input_names:
        info = graph.infos[name]
        dtype = DTYPES.get(info.element)
        if info.kind != "tensor" or dtype is None or info.shape is None:
            raise OptionError(
                f"the input {name!r}: nothing is known that random numbers could be made of; give --inputs"
            )
        shape = [size(n) for n in info.shape]
        if dtype.is_floating_point or dtype.is_complex:
            tensor = torch.randn(shape, generator=generator).to(dtype)
        else:
            tensor = torch.randint(0, 2, shape, generator=generator).to(dtype)
        inputs[name] = tensor
    return inputs


def told(run: ModelRun, other: str | None) -> dict[str, object]:
    """What is to be said of a run, for people or programs."""
    facts: dict[str, object] = {"outputs": {name: list(x.shape) for name, x in run.outputs.items()}}
    if other:
        differences = run.against(other)
        wrong = any(d.problem for d in differences)
        facts |= {"agrees": not wrong, "differences": [str(d) for d in differences]}
        if wrong:
            facts["first"] = run.first_difference(other)
    return facts


def run_model(path: str, arguments: list[str]) -> tuple[dict[str, object], int]:
    """The facts, and the exit code: 1 where answers differ."""
    given = parsed(".onnx", arguments, OTHERS)
    facts = told(ModelRun(path, given), given.compare)
    return facts, 1 if facts.get("agrees") is False else 0
