"""A part of a graph, recorded.

In: the part and a value for each of its inputs. Out: a `Captured` program over the tensors among them, and what says
how its results, and values that are no tensors of it, make up the part's outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

import tessera.frontends.onnx.operators.all  # noqa: F401  (declares them)
from tessera.frontends.captured import Captured, capture
from tessera.frontends.functional.trace import watching
from tessera.frontends.onnx.elements import Narrow
from tessera.frontends.onnx.importer import Importer
from tessera.frontends.onnx.interpreter import Scope
from tessera.frontends.onnx.segments import Part
from tessera.frontends.onnx.sizes import Sizes
from tessera.frontends.onnx.structure import Model
from tessera.frontends.onnx.symbols import symbolic_fake
from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ops.op import keep_whole
from tessera.torch_internals import pytree
from tessera.torch_internals.fake import FakeTensor, FakeTensorMode
from tessera.torch_internals.shapes import ShapeEnv, lines_by_folder

pytree.register_pytree_node(Narrow, lambda x: ([x.data], x.code), lambda data, code: Narrow(next(iter(data)), code))


@dataclass(frozen=True)
class Recorded:
    captured: Captured
    given: tuple[str, ...]  # the inputs whose leaves are counted
    places: tuple[int, ...]  # of the input leaves that are inputs of the program
    lifted: tuple[torch.Tensor, ...]  # constants, which are its last inputs
    spec: pytree.TreeSpec  # of the outputs
    leaves: tuple[object, ...]  # of the outputs; a `Result` stands for one of the program
    fakes: tuple[torch.Tensor, ...]
    mode: FakeTensorMode

    def pack(self, results: Sequence[object]) -> dict[str, object]:
        leaves = [results[x.place] if isinstance(x, Result) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def flat(self, outputs: Mapping[str, object]) -> tuple[object, ...]:
        """What the program gives, of all outputs."""
        listed = zip(self.leaves, pytree.tree_leaves(outputs), strict=True)
        results = {leaf.place: x for leaf, x in listed if isinstance(leaf, Result)}
        return tuple(results[i] for i in range(len(results)))


@dataclass(frozen=True)
class Result:
    place: int


def record_part(
    model: Model,
    part: Part,
    values: Mapping[str, object],
    constants: Mapping[str, object],
    importer: Importer,
    dynamic: Mapping[str, frozenset[int]] | None,
    name: str,
    env: ShapeEnv | None = None,
) -> Recorded:
    """Record a part on values of its inputs. `constants` are those that are known; `dynamic` says which dimensions of
    which inputs are symbols (of `env`, if given), or is None where all are numbers."""
    given = {n: v for n, v in values.items() if n not in constants}
    leaves, spec = pytree.tree_flatten(given)
    owners = [n for n, v in given.items() for _ in pytree.tree_leaves(v)]
    places = tuple(i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor))
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env or ShapeEnv()) if dynamic else fake.default_mode()
    builder = Builder(name, mode)
    out: dict[str, object] = {}

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        full = list(leaves)
        for place, x in zip(places, tensors, strict=True):
            full[place] = x
        scope = Scope(model.opsets, graph=model.graph)
        scope.values.update(constants)
        scope.values.update(pytree.tree_unflatten(full, spec))
        for node in part.nodes:
            importer.run_node(node, scope)
        kept = {n: _kept(scope[n], importer) for n in part.outputs}
        flat, out["spec"] = pytree.tree_flatten(kept)
        results = [x for x in flat if isinstance(x, FakeTensor)]
        unique = list(dict.fromkeys(results))
        order = {id(x): i for i, x in enumerate(unique)}
        out["leaves"] = tuple(Result(order[id(x)]) if isinstance(x, FakeTensor) else x for x in flat)
        return unique

    def fake_of(i: int) -> torch.Tensor:
        x: torch.Tensor = leaves[i]  # type: ignore[assignment]
        own = x.detach().requires_grad_(x.requires_grad) if x.is_floating_point() or x.is_complex() else x.detach()
        dims = (dynamic or {}).get(owners[i], frozenset())
        return symbolic_fake(own, mode, dims) if dims else mode.from_tensor(own, static_shapes=True)

    with lines_by_folder():
        fakes = [fake_of(i) for i in places]
    with watching(builder), lines_by_folder():
        captured = capture(run, list(fakes), [owners[i] for i in places], keep_whole, builder, locate=False, close=True)
    lifted = tuple(captured.trace.constants.values())
    trace = captured.trace.with_(inputs=(*captured.trace.inputs, *captured.trace.constants), constants={})
    grads = tuple(leaves[i].requires_grad for i in places) + tuple(t.requires_grad for t in lifted)  # type: ignore[attr-defined]
    captured = replace(captured, trace=trace, requires_grad=grads)
    return Recorded(captured, tuple(given), places, lifted, out["spec"], out["leaves"], tuple(fakes), mode)  # type: ignore[arg-type]


def _kept(x: object, importer: Importer) -> object:
    """A value as another part, or the caller, takes it."""
    return x.tensor(importer.device) if isinstance(x, Sizes) else x
