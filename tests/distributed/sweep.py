"""Every operator of PyTorch's own table, cut along every dimension of every tensor argument.

In: names of operators. Out: for each what became of its samples: run on the parts of 2 and 3 ranks, uneven ones too,
the joined results must be those of the whole, and so must gradients, where cotangents are cut too.
`python tests/distributed/sweep.py results|gradients [first [last]]` tries them all.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from tessera.distributed import in_step
from tessera.frontends.functional.trace import trace_function
from tessera.ir import interp
from tessera.ir.dist import is_collective
from tessera.ir.equation import Value
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.transforms.shard.partition import shard
from tessera.transforms.vjp import vjp
from tessera.util.errors import TesseraError
from tessera.util.names import names

SAMPLES = 4  # of an operator
UNDEFINED = names("empty empty_like new_empty new_empty_strided empty_permuted")  # what they hold is chance
SENDS = ("all_gather", "reduce_scatter", "all_to_all", "permute")  # a sum or maximum at the end is not counted


def samples(info: object, dtype: torch.dtype) -> Iterator[tuple[Trace, list]]:
    """Calls of an operator as traces with their tensors."""
    taken = 0
    for sample in info.sample_inputs("cpu", dtype):
        if taken == SAMPLES:
            return
        flat, spec = torch.utils._pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]

        def call(*tensors: torch.Tensor, flat: list = flat, places: list = places, spec: object = spec) -> object:
            filled = list(flat)
            for i, x in zip(places, tensors, strict=True):
                filled[i] = x
            first, args, kwargs = torch.utils._pytree.tree_unflatten(filled, spec)
            return info.op(first, *args, **kwargs)

        tensors = [flat[i].detach() for i in places]
        if not any(x.ndim and x.numel() for x in tensors) or any(x.layout != torch.strided for x in tensors):
            continue
        try:
            trace = trace_function(call, [x.clone() for x in tensors]).trace
        except Exception:  # what cannot be captured alone (data decides its shape) has no program to cut
            continue
        if trace.mutations or any(has_effect(e) or e.opname in UNDEFINED for e in trace.equations):
            continue
        if not all(isinstance(v, Value) and _dense(v) for v in trace.outputs):
            continue
        taken += 1
        yield trace, tensors


def with_gradients(trace: Trace, tensors: list) -> tuple[Trace, list] | None:
    """The call and the gradients of its arguments, by cotangents of its results, which are arguments too."""
    wrt = [v for v in trace.inputs if v.is_differentiable]
    try:
        joint = vjp(trace, wrt)
    except TesseraError:  # it has no derivative
        return None
    together = joint.trace.with_(outputs=tuple(v for v in joint.trace.outputs if isinstance(v, Value)))
    if not joint.pulled or not all(_dense(v) for v in together.outputs):
        return None
    draw = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(v.shape, dtype=v.tensor.dtype, generator=draw) for v in joint.pulled]
    return together, [*tensors, *cotangents]


def _dense(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.layout == torch.strided


def attempt(trace: Trace, tensors: list, argument: int, dim: int, ranks: int) -> str:
    """ "free", "moved" (collectives between), "wrong: …" or "refused: …"."""
    mesh = Mesh.of(x=ranks)
    v = trace.inputs[argument]
    placement = Placement.whole(mesh, v.shape).with_split(dim, ("x",))
    try:
        local = shard(trace, mesh, {v: placement}).trace
        parts = in_step.run(
            local, [in_step.cut(x, w.tensor.placement) for x, w in zip(tensors, local.inputs, strict=True)]
        )
        got = [in_step.join(p, w.tensor.placement, exact=False) for p, w in zip(parts, local.outputs, strict=True)]
    except Exception as error:
        return f"refused: {type(error).__name__}: {str(error)[:200]}"
    want = interp.run(trace, *[x.clone() for x in tensors])
    for a, b in zip(got, want, strict=True):
        if not torch.allclose(a, b.resolve_conj().resolve_neg(), rtol=1e-8, atol=1e-10, equal_nan=True):
            return f"wrong: {(a - b).abs().max() if a.dtype != torch.bool else 'bool'}"
    return "moved" if any(is_collective(e, *SENDS) for e in local.equations) else "free"


def tried(info: object, gradients: bool = False) -> Counter:
    counts: Counter = Counter()
    cases: Iterable = samples(info, torch.float64)
    if gradients:
        cases = filter(None, (with_gradients(*case) for case in cases))
    for trace, tensors in cases:
        for argument, x in enumerate(tensors):
            for dim in range(x.ndim):
                for ranks in (2, 3):
                    if x.shape[dim] >= 1:
                        counts[attempt(trace, tensors, argument, dim, ranks)] += 1
    return counts


def operators() -> list:
    """Those that compute in float64. Importing them takes seconds, which nobody pays who only collects tests."""
    table = importlib.import_module("tessera.torch_internals.samples").operators
    return [info for info in table if torch.float64 in info.dtypes]


def named(names: list[str]) -> list:
    return [info for info in operators() if info.name in names]


if __name__ == "__main__":
    total: Counter = Counter()
    first, last = map(int, sys.argv[2:4]) if len(sys.argv) > 3 else (0, None)
    for info in operators()[first:last]:
        counts = tried(info, sys.argv[1] == "gradients")
        for outcome, count in counts.items():
            total[outcome.split(":")[0]] += count
            if outcome.startswith(("wrong", "refused")):
                print(f"{info.name} {info.variant_test_name}: {count} x {outcome}", flush=True)
    print(dict(total))
